import numpy as np
import pytest

from jaxsp.learner.aggregation import AGGREGATIONS
from jaxsp.learner.objectives import OBJECTIVES


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        # Two trajectories of a role limited to 8 tokens, with 1 and 3 targets, and one of a role limited to 2 with 2;
        # their targets' terms are 1, 10 and 100.
        ("constant", (1 / 8 + 30 / 8 + 200 / 2) / 3),
        ("sequence_mean", (1 + 10 + 100) / 3),
        ("token_mean", (1 + 30 + 200) / 6),
    ],
)
def test_aggregations_of_a_hand_computed_example(kind: str, loss: float) -> None:
    num_targets = np.array([1, 3, 2])
    weights, lengths = AGGREGATIONS[kind](np.array([8.0, 8.0, 2.0]), num_targets)
    sums = num_targets * np.array([1.0, 10.0, 100.0])
    np.testing.assert_allclose((weights * sums).sum() / (3 * lengths.mean()), loss, rtol=1e-12)


def test_every_objective_has_an_aggregation_of_the_table() -> None:
    assert {objective.aggregation for objective in OBJECTIVES.values()} == set(AGGREGATIONS)


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_step_of_nothing_and_a_trajectory_without_targets_divide_by_no_zero(kind: str) -> None:
    empty = np.zeros(0)
    weights, lengths = AGGREGATIONS[kind](empty, empty)
    assert len(weights) == len(lengths) == 0
    weights, _ = AGGREGATIONS[kind](np.array([4.0]), np.array([0]))
    assert np.isfinite(weights).all()
