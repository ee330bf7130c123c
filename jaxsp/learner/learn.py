"""From a step's groups to a new state: what each objective does with them, on the host and on the device."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsp.learner.advantages import ADVANTAGES, group_advantages, moved_baselines
from jaxsp.learner.aggregation import AGGREGATIONS
from jaxsp.learner.batch import Batch, BatchStats, make_batch, training_items
from jaxsp.learner.kl import divergences
from jaxsp.learner.overlong import OVERLONG
from jaxsp.learner.state import TrainState
from jaxsp.model.decoder import Params
from jaxsp.trajectory import Group


@dataclass(frozen=True)
class Packing:
    """How trajectories become rows; see `make_batch`."""

    row_tokens: int
    rows_per_microbatch: int
    row_multiple: int = 1


@dataclass(frozen=True, eq=False)
class PolicyGradient:
    """The compiled parts of a policy-gradient step.

    Attributes:
        advantage: a name of `jaxsp.learner.advantages.ADVANTAGES`.
        aggregation: a name of `jaxsp.learner.aggregation.AGGREGATIONS`.
        trajectories_per_update: 0 for one update on everything.
        seed: the run's; with the number of updates so far it decides which update a trajectory is in.
        reference: parameters of the reference policy; None where nothing is compared with it.
        overlong: a name of `jaxsp.learner.overlong.OVERLONG`.
        overlong_buffer: tokens before the limit in which it penalises.
        kl_reward_coef: what a trajectory's reward loses for its divergence from the reference, summed over its targets;
            0 where that is no part of rewards.
        kl_estimator: a name of `jaxsp.learner.kl.KL_ESTIMATORS`, of that divergence.
        ema_decay: of the roles' moving baselines, where the advantage has them.
        baselines: these, by `role_key`: every step moves them, and a checkpoint holds them.
    """

    update: Callable[..., tuple[TrainState, dict[str, Any]]]
    logprobs: Callable[[Params, Batch], Any]
    packing: Packing
    advantage: str
    trajectories_per_update: int
    seed: int
    reference: Params | None = None
    aggregation: str = "constant"
    overlong: str = "keep"
    overlong_buffer: int = 256
    kl_reward_coef: float = 0.0
    kl_estimator: str = "k3"
    ema_decay: float = 0.95
    baselines: dict[str, float] = field(default_factory=dict)


def reinforce(
    parts: PolicyGradient,
    state: TrainState,
    groups: Sequence[Group],
    normaliser: Callable[[Group], int],
    max_tokens: Callable[[Group], int] = lambda group: 1,
) -> tuple[TrainState, dict[str, float]]:
    """The state after a step's updates on `groups`, and the metrics of the updates together.

    `normaliser` gives the constant length of a group, for the aggregations that divide by one, and `max_tokens` its
    token limit, for penalties of what comes near it. All log-probabilities under the old policy are computed before the
    first update. Where every advantage is 0 there is nothing to learn, and the state is returned as it came.
    """
    penalties, is_left_out, overlong_metrics = _overlong(parts, groups, max_tokens)
    groups = _with_penalty(groups, penalties)
    is_in_reward = parts.kl_reward_coef > 0
    # The divergence is known when batches are made: they are, and advantages are written into them afterwards.
    advantages = [_ones(group) for group in groups] if is_in_reward else _advantages(parts, groups)
    advantages = _without(advantages, is_left_out)
    made = _make_batches(parts, int(state["step"]), groups, advantages, normaliser)
    batches = [(batch, stats, length) for batch, stats, length in made if stats.num_rows]
    # With a single update the policy before it is the current one, and the update needs no forward pass for it.
    needs_old = len(batches) > 1 or is_in_reward
    old = [parts.logprobs(state["params"], batch) if needs_old else None for batch, *_ in batches]
    reference = [None if parts.reference is None else parts.logprobs(parts.reference, batch) for batch, *_ in batches]
    penalty_metrics = {}
    if is_in_reward and batches:
        num_trajectories = sum(len(group.trajectories) for group in groups)
        sums = _trajectory_divergences(parts.kl_estimator, batches, old, reference, num_trajectories)
        groups = _with_penalty(groups, parts.kl_reward_coef * sums)
        penalty_metrics = {"learner/kl_penalty_mean": float(parts.kl_reward_coef * sums.mean())}
        flat = np.concatenate(_advantages(parts, groups))
        batches = [(_with_advantages(batch, flat), stats, length) for batch, stats, length in batches]
    rows = []
    for (batch, stats, length), old_logprobs, reference_logprobs in zip(batches, old, reference, strict=True):
        if is_in_reward and not batch.advantages.any():
            continue
        state, metrics = parts.update(state, batch, old_logprobs, reference_logprobs, stats.num_trajectories, length)
        rows.append({name: float(value) for name, value in metrics.items()})
    baselines = {f"learner/baseline_{key}": baseline for key, baseline in parts.baselines.items()}
    metrics = {
        **over_updates(rows),
        **_first_ratio(rows),
        **_packing_metrics([stats for _, stats, _ in made]),
        **penalty_metrics,
    }
    metrics["learner/dropped"] -= int(np.isfinite(_rewards(groups)[is_left_out]).sum())  # logged by another name
    return state, {**metrics, **overlong_metrics, **baselines, "policy/updates": len(rows)}


def _overlong(
    parts: PolicyGradient, groups: Sequence[Group], max_tokens: Callable[[Group], int]
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Of each trajectory the penalty and whether it leaves the loss, and what is logged of these."""
    handle = OVERLONG[parts.overlong]
    handled = [
        handle(trajectory, max_tokens(group), parts.overlong_buffer)
        for group in groups
        for trajectory in group.trajectories
    ]
    penalties = np.array([-change for change, _ in handled], np.float64)
    is_left_out = np.array([is_out for _, is_out in handled], bool)
    metrics = {
        "learner/overlong_penalty_mean": float(penalties.mean()) if handled else 0.0,
        "learner/overlong_left_out_frac": float(is_left_out.mean()) if handled else 0.0,
    }
    return penalties, is_left_out, {} if parts.overlong == "keep" else metrics


def _rewards(groups: Sequence[Group]) -> np.ndarray:
    """Of all trajectories in order, float64."""
    return np.concatenate([np.zeros(0), *(group.rewards for group in groups)])


def _without(advantages: Sequence[np.ndarray], is_left_out: np.ndarray) -> list[np.ndarray]:
    """The advantages with NaN where a trajectory, by its number in the step, is left out."""
    ends = np.cumsum([len(own) for own in advantages])[:-1]
    parts = np.split(is_left_out, ends)
    return [np.where(is_out, np.nan, own) for own, is_out in zip(advantages, parts, strict=False)]


def _advantages(parts: PolicyGradient, groups: Sequence[Group]) -> list[np.ndarray]:
    """The advantages of a step; moves the baselines that they have, after reading them."""
    advantages = group_advantages(groups, parts.advantage, parts.baselines)
    if ADVANTAGES[parts.advantage].has_baseline:
        parts.baselines.update(moved_baselines(groups, parts.baselines, parts.ema_decay))
    return advantages


def _ones(group: Group) -> np.ndarray:
    """Stand-ins for advantages: 1, and NaN where there will be none."""
    return np.where(np.isfinite(group.rewards), 1.0, np.nan)


def _make_batches(
    parts: PolicyGradient,
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    normaliser: Callable[[Group], int],
) -> list[tuple[Batch, BatchStats, float]]:
    """For each of a step's updates its batch, what packing did, and the length that its loss is divided by."""
    items, trajectory_ids = training_items(groups, advantages)
    weights, lengths = trajectory_weights(groups, normaliser, parts.aggregation)
    made = []
    update_of = deal_out(groups, parts.trajectories_per_update, f"{parts.seed}/{step}")
    for update in range(max(update_of, default=-1) + 1):
        chosen = [i for i, trajectory in enumerate(trajectory_ids) if update_of[trajectory] == update]
        counted = sorted({trajectory_ids[i] for i in chosen if not np.isnan(items[i][1])})
        batch, stats = make_batch(
            [items[i] for i in chosen],
            trajectory_ids=[trajectory_ids[i] for i in chosen],
            weights=[float(weights[trajectory_ids[i]]) for i in chosen],
            row_tokens=parts.packing.row_tokens,
            rows_per_microbatch=parts.packing.rows_per_microbatch,
            row_multiple=parts.packing.row_multiple,
            keep_zero=parts.reference is not None,
        )
        made.append((batch, stats, float(lengths[counted].mean()) if counted else 1.0))
    return made


def _trajectory_divergences(
    kind: str,
    batches: Sequence[tuple[Batch, BatchStats, float]],
    old: Sequence[Any],
    reference: Sequence[Any],
    num_trajectories: int,
) -> np.ndarray:
    """Of each trajectory the sum over its targets of the estimate `kind` under the old policy, float64."""
    sums = np.zeros(num_trajectories)
    for (batch, *_), old_logprobs, reference_logprobs in zip(batches, old, reference, strict=True):
        mask = batch.target_mask
        each = np.asarray(divergences(kind, old_logprobs, reference_logprobs, jnp.asarray(mask)), np.float64)
        np.add.at(sums, batch.target_sequence[mask], each[mask])
    return sums


def _with_penalty(groups: Sequence[Group], penalties: np.ndarray) -> list[Group]:
    """The groups with rewards less `penalties`, one for each trajectory in order."""
    left = iter(penalties.tolist())
    return [
        replace(group, trajectories=tuple(replace(one, reward=one.reward - next(left)) for one in group.trajectories))
        for group in groups
    ]


def _with_advantages(batch: Batch, advantages: np.ndarray) -> Batch:
    """The batch with these advantages of a step's trajectories, by number."""
    return replace(
        batch, advantages=np.where(batch.target_mask, advantages[batch.target_sequence], 0.0).astype(np.float32)
    )


def trajectory_weights(
    groups: Sequence[Group], normaliser: Callable[[Group], int], aggregation: str
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and length of each trajectory, float64, as `jaxsp.learner.aggregation.Aggregation` says."""
    normalisers = [normaliser(group) for group in groups for _ in group.trajectories]
    num_targets = [
        sum(int(segment.loss_mask.sum()) for segment in trajectory.segments)
        for group in groups
        for trajectory in group.trajectories
    ]
    return AGGREGATIONS[aggregation](np.array(normalisers, np.float64), np.array(num_targets, np.int64))


def imitate(
    update: Callable[..., tuple[TrainState, dict[str, Any]]],
    packing: Packing,
    state: TrainState,
    groups: Sequence[Group],
) -> tuple[TrainState, dict[str, float]]:
    """The state after one cross-entropy update on every target of `groups`, and its metrics."""
    items, trajectory_ids = training_items(groups, [np.ones(len(group.trajectories)) for group in groups])
    batch, stats = make_batch(
        items,
        trajectory_ids=trajectory_ids,
        row_tokens=packing.row_tokens,
        rows_per_microbatch=packing.rows_per_microbatch,
        row_multiple=packing.row_multiple,
    )
    state, metrics = update(state, batch, stats.num_trained_tokens)
    return state, {**{name: float(value) for name, value in metrics.items()}, **_packing_metrics([stats])}


def deal_out(groups: Sequence[Group], trajectories_per_update: int, seed: str) -> list[int]:
    """The update that each trajectory is in, numbered from 0, in the order of the groups and of their trajectories.

    Groups and their trajectories are shuffled, then dealt out in turn: updates differ by one trajectory at most, in
    all and in what they hold of a group. A trajectory's place in its group decides nothing: a challenger's attempts
    stand in the order they were made in, and those before its first valid one are all invalid.
    """
    num_trajectories = sum(len(group.trajectories) for group in groups)
    num_updates = -(-num_trajectories // trajectories_per_update) if trajectories_per_update else 1
    draw = random.Random(seed)
    numbers = iter(range(num_trajectories))
    members = [[next(numbers) for _ in group.trajectories] for group in groups]
    for own in members:
        draw.shuffle(own)
    draw.shuffle(members)
    update_of = [0] * num_trajectories
    for place, trajectory in enumerate(chain.from_iterable(members)):
        update_of[trajectory] = place % num_updates
    return update_of


_OF_AN_UPDATE = (
    "policy/loss",
    "policy/grad_norm",
    "policy/update_norm",
    "policy/num_tokens",
    "policy/effective_tokens",
)
"""Begin the names of metrics that say one thing of a whole update; the others are means over its targets, or `_max`."""


def over_updates(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step of several updates, given those of each.

    The largest of what ends in `_max`, the sum of `learner/skipped_updates`, else the mean, weighted by the number of
    targets where it is one over targets. An update without a correlation (NaN, where probabilities do not vary) is left
    out of it.
    """

    def over(name: str) -> float:
        values = np.array([row[name] for row in rows])
        if name.endswith("_max"):
            return float(values.max())
        if name == "learner/skipped_updates":
            return float(values.sum())
        weights = np.array([1.0 if name.startswith(_OF_AN_UPDATE) else row["policy/num_tokens"] for row in rows])
        is_known = ~np.isnan(values) if name == "mismatch/pearson" else np.ones(len(rows), bool)
        return float(np.average(values[is_known], weights=weights[is_known])) if is_known.any() else float("nan")

    return {name: over(name) for name in (rows[0] if rows else ())}


def _first_ratio(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest |ratio - 1| of the first update, which rounding alone may move from 0."""
    name = "policy/ratio_deviation_max"
    return {"policy/first_ratio_deviation_max": rows[0][name]} if rows and name in rows[0] else {}


def _packing_metrics(stats: Sequence[BatchStats]) -> dict[str, float]:
    stored = sum(each.num_tokens_stored for each in stats)
    return {
        "learner/trained_tokens": sum(each.num_trained_tokens for each in stats),
        "learner/stored_tokens": stored,
        "learner/sharing_ratio": sum(each.num_tokens_separate for each in stats) / max(stored, 1),
        "learner/padding_frac": float(np.mean([each.padding_frac for each in stats if each.num_rows] or [0.0])),
        "learner/zero_advantage_frac": sum(each.num_zero_advantage for each in stats)
        / max(sum(each.num_trajectories for each in stats), 1),
        "learner/dropped": sum(each.num_dropped for each in stats),
    }
