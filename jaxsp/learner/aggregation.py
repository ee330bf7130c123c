"""What the sum over a trajectory's targets is divided by, on the host, known before the update begins."""

from collections.abc import Callable

import numpy as np

Aggregation = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""`(normalisers, num_targets) -> (weights, lengths)`, float64 of each trajectory of a step.

The loss is the sum over targets of weight times term, divided by the number of the update's trajectories and by the
mean of their lengths. `normalisers` are the constants that a method gives (the role's token limit), `num_targets`
counts a trajectory's targets.
"""


def constant(normalisers: np.ndarray, num_targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mean over trajectories of (sum over its targets / its normaliser)`.

    DrGRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2): division by own lengths favours short right answers and
    long wrong ones.
    """
    longest = normalisers.max(initial=1)
    return longest / normalisers, np.full(len(normalisers), longest)


def sequence_mean(normalisers: np.ndarray, num_targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mean over trajectories of (mean over its targets)` (GRPO, arXiv 2402.03300, equation 3)."""
    return 1 / np.maximum(num_targets, 1), np.ones(len(num_targets))


def token_mean(normalisers: np.ndarray, num_targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`mean over all targets of the update` (DAPO, arXiv 2503.14476, section 3.3).

    Those of trajectories whose advantage is 0 count too, though no row holds them.
    """
    return np.ones(len(num_targets)), num_targets.astype(np.float64)


AGGREGATIONS: dict[str, Aggregation] = {
    "constant": constant,
    "sequence_mean": sequence_mean,
    "token_mean": token_mean,
}
"""Name in `learner.aggregation` to the function."""
