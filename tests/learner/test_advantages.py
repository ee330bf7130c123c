import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxsp.learner.advantages import ADVANTAGES, group_advantages, moved_baselines
from jaxsp.trajectory import Group, Trajectory

GROUPED = [kind for kind, advantage in ADVANTAGES.items() if advantage.pool == "group"]

rewards_of_a_group = st.lists(st.floats(-10, 10), min_size=1, max_size=9)


def groups_of(*rewards: list[float]) -> list[Group]:
    return [
        Group(f"g{index}", "reasoner", tuple(Trajectory("reasoner", (), reward) for reward in group))
        for index, group in enumerate(rewards)
    ]


def test_mean_only_advantages_of_a_worked_example():
    first, second = group_advantages(groups_of([1, 0, 0, 1, 1], [0.2, -0.1]))
    np.testing.assert_allclose(first, [0.4, -0.6, -0.6, 0.4, 0.4], atol=1e-12)
    np.testing.assert_allclose(second, [0.15, -0.15], atol=1e-12)
    assert first.dtype == np.float64


def test_normalised_advantages_of_a_worked_example():
    # mean 0.6, population std sqrt(0.24)
    (advantages,) = group_advantages(groups_of([1, 0, 0, 1, 1]), "group_std")
    np.testing.assert_allclose(advantages, np.array([0.4, -0.6, -0.6, 0.4, 0.4]) / 0.24**0.5, atol=1e-12)


@pytest.mark.parametrize("kind", GROUPED)
@given(groups=st.lists(rewards_of_a_group, max_size=4), shift=st.floats(-5, 5))
def test_advantages_sum_to_zero_and_do_not_see_a_shift_of_ragged_groups(kind, groups, shift):
    plain = group_advantages(groups_of(*groups), kind)
    shifted = group_advantages(groups_of(*[[reward + shift for reward in group] for group in groups]), kind)
    assert [len(advantages) for advantages in plain] == [len(group) for group in groups]
    for group, advantages, others in zip(groups, plain, shifted, strict=True):
        assert abs(advantages.sum()) < 1e-9
        if not 0.9e-3 < np.std(group) < 1.1e-3:  # on the floor, rounding may decide whether a group is normalised
            np.testing.assert_allclose(advantages, others, atol=1e-9)


@pytest.mark.parametrize("kind", GROUPED)
@given(group=rewards_of_a_group, data=st.data())
def test_advantages_follow_the_order_of_their_trajectories(kind, group, data):
    order = data.draw(st.permutations(range(len(group))))
    (plain,) = group_advantages(groups_of(group), kind)
    (permuted,) = group_advantages(groups_of([group[index] for index in order]), kind)
    np.testing.assert_allclose(permuted, plain[list(order)], atol=1e-9)


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("group", [[0.1] * 3, [0.7], [1 / 3] * 7, [-0.1] * 8])
def test_equal_rewards_and_a_group_of_one_give_exactly_zero(kind, group):
    (advantages,) = group_advantages(groups_of(group), kind)
    assert (advantages == 0).all()


def test_a_group_whose_rewards_hardly_differ_is_not_normalised():
    (advantages,) = group_advantages(groups_of([0.5, 0.5 + 1e-8]), "group_std")
    np.testing.assert_allclose(advantages, [-5e-9, 5e-9], atol=1e-15)


@pytest.mark.parametrize("kind", GROUPED)
def test_a_reward_that_is_not_a_number_is_dropped_and_spoils_no_other(kind):
    with_nan, without, nothing, left_alone = group_advantages(
        groups_of([1, float("nan"), 0, 0], [1, 0, 0], [float("nan")], [float("inf"), 3.0]), kind
    )
    assert np.isnan(with_nan).tolist() == [False, True, False, False]
    np.testing.assert_array_equal(with_nan[[0, 2, 3]], without)
    assert np.isnan(nothing).all()
    assert np.isnan(left_alone[0]) and left_alone[1] == 0


def test_two_groups_with_one_id_are_refused():
    group = groups_of([1, 0])[0]
    with pytest.raises(ValueError, match="g0"):
        group_advantages([group, group])


def of_roles(*groups: tuple[str, str, list[float]]) -> list[Group]:
    """Groups of a role and a kind of task each."""
    return [
        Group(str(number), role, tuple(Trajectory(role, (), reward) for reward in rewards), kind)
        for number, (role, kind, rewards) in enumerate(groups)
    ]


def test_reinforce_pp_whitens_all_of_a_role_s_trajectories_together_and_kinds_apart():
    nan = float("nan")
    groups = of_roles(
        ("solver", "induction", [1, 1, nan]), ("proposer", "", [0.5, 0.5]),
        ("solver", "induction", [0, 0, 0]), ("solver", "deduction", [1, -1]),
    )  # fmt: skip
    first, proposer, second, other = group_advantages(groups, "reinforce_pp")
    # induction: mean 2/5, variance 6/25
    np.testing.assert_allclose(first, [0.6 / 0.24**0.5, 0.6 / 0.24**0.5, nan], rtol=1e-12)
    np.testing.assert_allclose(second, [-0.4 / 0.24**0.5] * 3, rtol=1e-12)
    assert (proposer == 0).all()
    np.testing.assert_allclose(other, [1, -1])
    both = np.concatenate([first[:2], second])
    np.testing.assert_allclose([both.mean(), both.std()], [0, 1], atol=1e-12)


def test_a_role_s_moving_baseline_is_read_before_it_moves():
    steps = [
        of_roles(("player_0", "", [1, 0, 1, 1]), ("player_1", "", [-1, 0])),
        of_roles(("player_0", "", [1]), ("player_0", "", [0, float("inf")])),
    ]
    first = group_advantages(steps[0], "role_ema", {})
    np.testing.assert_array_equal(first[0], [1, 0, 1, 1])  # it begins at 0
    baselines = moved_baselines(steps[0], {}, 0.95)
    assert baselines == pytest.approx({"player_0": 0.05 * 0.75, "player_1": -0.05 * 0.5})
    second = group_advantages(steps[1], "role_ema", baselines)
    np.testing.assert_allclose(second[0], [1 - 0.0375])
    np.testing.assert_allclose(second[1], [-0.0375, np.nan])
    moved = moved_baselines(steps[1], baselines, 0.95)
    assert moved == pytest.approx({"player_0": 0.95 * 0.0375 + 0.05 * 0.5, "player_1": -0.025})
    assert baselines["player_0"] == pytest.approx(0.0375), "the one before is left alone"


def test_baselines_of_kinds_of_tasks_are_apart():
    groups = of_roles(("solver", "induction", [1.0]), ("solver", "deduction", [0.0]))
    assert moved_baselines(groups, {}, 0.5) == {"solver/induction": 0.5, "solver/deduction": 0.0}
