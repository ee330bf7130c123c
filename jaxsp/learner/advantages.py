"""Rewards to advantages, on the host in float64 and by explicit group or role, never by reshaping an array."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxsp.trajectory import Group

STD_FLOOR = 1e-3
"""Rewards that spread less than this stay un-normalised: dividing by rounding errors makes huge advantages."""


def minus_mean(rewards: np.ndarray, baseline: float) -> np.ndarray:
    """`A_i = r_i - mean(r)` (DrGRPO, Liu et al. 2025, arXiv 2503.20783; SPICE, arXiv 2510.24684, section 3).

    No division by the standard deviation: it over-weights groups that are almost all right or all wrong. Equal rewards
    give exactly 0, whatever the rounding of their mean, so that `make_batch` can leave them out.
    """
    return np.zeros(len(rewards)) if np.all(rewards == rewards[0]) else rewards - rewards.mean()


def standardised(rewards: np.ndarray, baseline: float) -> np.ndarray:
    """`A_i = (r_i - mean(r)) / std(r)` with the population standard deviation; not divided if `std < STD_FLOOR`.

    Over a group this is GRPO (arXiv 2402.03300, section 4.1), over all of a step's trajectories of a role REINFORCE++
    (Hu 2025, arXiv 2501.03262), apart for each kind of task and role as in Absolute Zero's TRR++ (arXiv 2505.03335).
    """
    centred = minus_mean(rewards, baseline)
    std = rewards.std()
    return centred if std < STD_FLOOR else centred / std


def minus_baseline(rewards: np.ndarray, baseline: float) -> np.ndarray:
    """`A_i = r_i - b` with the moving baseline `b` of the role, before this step moves it.

    Role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv 2506.24119); `moved_baselines` moves it.
    """
    return rewards - baseline


@dataclass(frozen=True)
class Advantage:
    """One entry of `ADVANTAGES`.

    Attributes:
        of_rewards: `(rewards, baseline) -> advantages`, float64 `[N]`, of the finite rewards of one pool.
        pool: whose rewards are taken together: those of a group, or all of a step's with one role and kind of task.
        has_baseline: whether `baseline` is read, and moved by every step.
    """

    of_rewards: Callable[[np.ndarray, float], np.ndarray]
    pool: Literal["group", "role"]
    has_baseline: bool = False


ADVANTAGES = {
    "group_mean": Advantage(minus_mean, "group"),
    "group_std": Advantage(standardised, "group"),
    "reinforce_pp": Advantage(standardised, "role"),
    "role_ema": Advantage(minus_baseline, "role", has_baseline=True),
}
"""By the name in `learner.advantage`."""


def role_key(group: Group) -> str:
    """The name of a group's role and kind of task, under which baselines are kept."""
    return f"{group.role}/{group.kind}" if group.kind else group.role


def group_advantages(
    groups: Sequence[Group], kind: str = "group_mean", baselines: Mapping[str, float] | None = None
) -> list[np.ndarray]:
    """The advantages of every group's trajectories, in order: one float64 `[G]` per group.

    A trajectory whose reward is not finite gets NaN, has no part in any baseline, and is dropped and counted by
    `make_batch`. `baselines` are those of the roles, by `role_key`; a role that is not there has 0. Raises `ValueError`
    when two groups have one id: their trajectories would miss a common baseline.
    """
    group_ids = [group.group_id for group in groups]
    if len(set(group_ids)) != len(group_ids):
        repeated = sorted({group_id for group_id in group_ids if group_ids.count(group_id) > 1})
        raise ValueError(f"group ids must be unique within a step, repeated: {repeated}")
    advantage = ADVANTAGES[kind]
    results = [np.full(len(group.trajectories), np.nan) for group in groups]
    pools: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        pools.setdefault(group.group_id if advantage.pool == "group" else role_key(group), []).append(number)
    for key, numbers in pools.items():
        kept = [np.isfinite(groups[number].rewards) for number in numbers]
        rewards = np.concatenate([groups[number].rewards[own] for number, own in zip(numbers, kept, strict=True)])
        if not len(rewards):
            continue
        made = advantage.of_rewards(rewards, (baselines or {}).get(key, 0.0))
        ends = np.cumsum([own.sum() for own in kept])[:-1]
        for number, own, part in zip(numbers, kept, np.split(made, ends), strict=True):
            results[number][own] = part
    return results


def moved_baselines(groups: Sequence[Group], baselines: Mapping[str, float], decay: float) -> dict[str, float]:
    """`b <- decay b + (1 - decay) mean(r)` for each role in `groups`, from 0; the others as they were.

    SPIRAL moves it with each trajectory in turn. Once a step, by the mean of the step's finite rewards, the result does
    not depend on the order of trajectories, and no trajectory's baseline holds its own reward.
    """
    pools: dict[str, list[np.ndarray]] = {}
    for group in groups:
        pools.setdefault(role_key(group), []).append(group.rewards[np.isfinite(group.rewards)])
    moved = dict(baselines)
    for key, parts in pools.items():
        if len(rewards := np.concatenate(parts)):
            moved[key] = decay * moved.get(key, 0.0) + (1 - decay) * float(rewards.mean())
    return moved
