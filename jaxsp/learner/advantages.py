"""Rewards of a group to advantages, on the host in float64 and by explicit group, never by reshaping an array."""

from collections.abc import Callable, Sequence

import numpy as np

from jaxsp.trajectory import Group

STD_FLOOR = 1e-3
"""Groups whose rewards spread less than this stay un-normalised: dividing by rounding errors makes huge advantages."""


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """`A_i = r_i - mean(r)` (DrGRPO, Liu et al. 2025, arXiv 2503.20783; SPICE, arXiv 2510.24684, section 3).

    No division by the group's standard deviation: it over-weights groups that are almost all right or all wrong.
    A group of one has advantage 0.
    """
    return rewards - rewards.mean()


def group_std(rewards: np.ndarray) -> np.ndarray:
    """`A_i = (r_i - mean(r)) / std(r)` with the population standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    Groups with `std < STD_FLOOR` are centred only.
    """
    centred = rewards - rewards.mean()
    std = rewards.std()
    return centred if std < STD_FLOOR else centred / std


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"group_mean": group_mean, "group_std": group_std}
"""Name in `learner.advantage` to a function of the finite rewards of one group, float64 `[G]` to float64 `[G]`."""


def group_advantages(groups: Sequence[Group], kind: str = "group_mean") -> list[np.ndarray]:
    """The advantages of every group's trajectories, in order: one float64 `[G]` per group.

    A trajectory whose reward is not finite gets NaN, has no part in its group's baseline, and is dropped and counted by
    `make_batch`. Raises `ValueError` when two groups have one id: their trajectories would miss a common baseline.
    """
    group_ids = [group.group_id for group in groups]
    if len(set(group_ids)) != len(group_ids):
        repeated = sorted({group_id for group_id in group_ids if group_ids.count(group_id) > 1})
        raise ValueError(f"group ids must be unique within a step, repeated: {repeated}")
    return [_advantages(group.rewards, ADVANTAGES[kind]) for group in groups]


def _advantages(rewards: np.ndarray, advantages_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    advantages = np.full(len(rewards), np.nan)
    is_kept = np.isfinite(rewards)
    if not is_kept.any():
        return advantages
    kept = rewards[is_kept]
    # Equal rewards give exactly 0, whatever the rounding of their mean, so that `make_batch` can leave them out.
    advantages[is_kept] = 0.0 if np.all(kept == kept[0]) else advantages_of(kept)
    return advantages
