import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.config import SpiceConfig
from jaxsp.rollout.rewards import SOLVE_RATE_REWARDS

TAU = 0.01
RATES = st.floats(0, 1)


@pytest.mark.parametrize(
    ("num_right", "reward"),
    [(0, 0.0439), (1, 0.3720), (2, 0.8226), (3, 0.9879), (4, 1.0), (5, 0.9879), (6, 0.8226), (7, 0.3720), (8, 0.0439)],
)
def test_the_gaussian_reward_gives_the_table_for_eight_answers(num_right, reward):
    # Worked out from equation 1 of SPICE (arXiv 2510.24684) with its literal 2 * 0.01 in the denominator.
    assert SOLVE_RATE_REWARDS["gaussian_variance"](num_right / 8, TAU) == pytest.approx(reward, abs=5e-5)


def test_an_impossible_or_trivial_task_beats_an_invalid_one_by_0_144():
    for p in (0.0, 1.0):
        reward = SOLVE_RATE_REWARDS["gaussian_variance"](p, TAU)
        assert reward == math.exp(-3.125)
        assert reward - SpiceConfig().invalid_reward == pytest.approx(0.144, abs=5e-4)


def test_tau_is_a_variance_so_the_width_is_its_root():
    p = 0.5 - math.sqrt(0.1)  # where the variance p (1 - p) lies 0.1, which is the root of tau, below 1/4
    assert SOLVE_RATE_REWARDS["gaussian_variance"](p, TAU) == pytest.approx(math.exp(-0.5))
    assert SOLVE_RATE_REWARDS["gaussian_variance"](0.0, 1.0) == pytest.approx(math.exp(-(0.25**2) / 2))


@pytest.mark.parametrize(
    ("name", "at_0", "just_above_0", "at_quarter", "at_half", "at_1"),
    [
        ("gaussian_variance", 0.04394, 0.04394, 0.82258, 1.0, 0.04394),
        ("one_minus_abs", 0.0, 0.0, 0.5, 1.0, 0.0),
        ("one_minus_p", 0.0, 1.0, 0.75, 0.5, 0.0),
        ("threshold", 0.0, 1.0, 1.0, 1.0, 0.0),
        ("learnability_4p1mp", 0.0, 0.0, 0.75, 1.0, 0.0),
    ],
)
def test_rewards_at_the_bounds_are_those_of_their_formulas(name, at_0, just_above_0, at_quarter, at_half, at_1):
    reward = SOLVE_RATE_REWARDS[name]
    values = [reward(p, TAU) for p in (0.0, 1e-9, 0.25, 0.5, 1.0)]
    assert values == pytest.approx([at_0, just_above_0, at_quarter, at_half, at_1], abs=1e-5)


def test_every_reward_of_the_config_is_in_the_table():
    assert set(SOLVE_RATE_REWARDS) == set(SpiceConfig.__annotations__["challenger_reward"].__args__)


@settings(deadline=None)
@given(p=RATES, name=st.sampled_from(sorted(SOLVE_RATE_REWARDS)))
def test_rewards_lie_between_0_and_1(p, name):
    assert 0 <= SOLVE_RATE_REWARDS[name](p, TAU) <= 1


@settings(deadline=None)
@given(
    eighths=st.integers(0, 8),
    name=st.sampled_from(["gaussian_variance", "one_minus_abs", "threshold", "learnability_4p1mp"]),
)
def test_all_but_one_minus_p_pay_alike_for_p_and_1_minus_p(eighths, name):
    assert SOLVE_RATE_REWARDS[name](eighths / 8, TAU) == SOLVE_RATE_REWARDS[name](1 - eighths / 8, TAU)
