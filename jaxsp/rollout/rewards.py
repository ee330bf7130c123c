"""Rewards of whoever proposes a task, as functions of the solve rate p of the tries at it. Each stands here once."""

import math
from collections.abc import Callable


def gaussian_variance(p: float, tau: float) -> float:
    """`exp(-(p(1-p) - 1/4)^2 / (2 tau))`: 1 at p = 1/2 (SPICE, arXiv 2510.24684, equations 1 and 5).

    `tau` is a variance (0.01 in the paper) and p(1-p) the population variance of the tries. At p = 0 and 1 the value
    is 0.0439: a trivial or impossible task still pays more than an invalid one.
    """
    return math.exp(-((p * (1 - p) - 0.25) ** 2) / (2 * tau))


def one_minus_abs(p: float, tau: float) -> float:
    """`1 - 2 |p - 1/2|`: 1 at p = 1/2, 0 at 0 and 1 (R-Zero, arXiv 2508.05004)."""
    return 1 - 2 * abs(p - 0.5)


def one_minus_p(p: float, tau: float) -> float:
    """`1 - p`, but 0 at p = 0: hard, yet possible (Absolute Zero, arXiv 2505.03335, equation 4)."""
    return 1 - p if p > 0 else 0.0


def threshold(p: float, tau: float) -> float:
    """1 for 0 < p < 1, else 0 (SPICE's ablation)."""
    return float(0 < p < 1)


def learnability_4p1mp(p: float, tau: float) -> float:
    """`4 p (1 - p)`: the variance of a try, scaled to 1 at p = 1/2."""
    return 4 * p * (1 - p)


SOLVE_RATE_REWARDS: dict[str, Callable[[float, float], float]] = {
    "gaussian_variance": gaussian_variance,
    "one_minus_abs": one_minus_abs,
    "one_minus_p": one_minus_p,
    "threshold": threshold,
    "learnability_4p1mp": learnability_4p1mp,
}
