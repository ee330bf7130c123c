"""Trajectories packed into rows of fixed shapes, as tries in depth-first order (see `jaxsp.model.attention`).

Legend: M micro-batches, R rows, L tokens of a row, T targets of a row, A allowed tokens of a target.

Tokens that several sequences of a row share as a prefix are stored once, at any depth; each sequence keeps its own
targets. A target knows the row index of the token before it (its predictor), so nothing is shifted. What comes after a
sequence's last predictor decides nothing and is not stored.

A worked example, two answers `[7, 2]` and `[7, 9]` to the prompt `[5, 6]`, in a row of 6::

    tokens         5 6 7 . . .      positions  0 1 2 0 0 0
    visible_until  3 3 3 4 5 6
    target_tokens     7 2 7 9
    target_predictor  1 2 1 2
    target_sequence   0 0 1 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxsp.config import UserError
from jaxsp.learner.packing import Sorted, common_prefix, pack_rows, sort_sequences
from jaxsp.trajectory import Group, Segment

SHORTEST_ROW = 64
FEWEST_MICROBATCHES = 16
"""Batches of up to so many micro-batches have one shape: the empty ones cost no computation."""
MICROBATCH_TOKENS = 64
"""What starting one more micro-batch costs, in tokens: reading the weights, adding up the gradients."""


Rows = Any
"""A numpy array on the host, a `jax.Array` inside `jit`."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Batch:
    """The arrays of one update. Padding: tokens 0 that see themselves alone, targets with `target_mask` False."""

    tokens: Rows  # int32 [M, R, L]
    positions: Rows  # int32 [M, R, L], depth in the trie
    visible_until: Rows  # int32 [M, R, L]
    target_predictor: Rows  # int32 [M, R, T], row index of the token whose logits predict the target
    target_tokens: Rows  # int32 [M, R, T]
    target_mask: Rows  # bool [M, R, T], True first, then False, in each row
    target_sequence: Rows  # int32 [M, R, T], which trajectory
    behaviour_logprobs: Rows  # float32 [M, R, T]
    advantages: Rows  # float32 [M, R, T]
    weights: Rows  # float32 [M, R, T], of the target in the loss, besides the advantage
    temperatures: Rows  # float32 [M, R, T], logits are divided by it
    allowed_tokens: Rows | None = None  # int32 [M, R, T, A], what a target was drawn from, then -1; None: all, always


@dataclass(frozen=True)
class BatchStats:
    """What packing did.

    Attributes:
        num_trajectories: those with an advantage, 0 included: the denominator of the loss.
        num_dropped: trajectories without one (NaN), which enter nothing.
        num_zero_advantage: trajectories counted in `num_trajectories` that are in no row, as their gradient is 0.
        num_trained_tokens: targets in the rows.
        num_tokens_separate: tokens that one row per sequence would compute.
        num_tokens_stored: tokens that the rows hold.
        num_rows: rows that hold something.
        padding_frac: share of the computed row tokens that is padding; see `microbatch_lengths`.
    """

    num_trajectories: int
    num_dropped: int
    num_zero_advantage: int
    num_trained_tokens: int
    num_tokens_separate: int
    num_tokens_stored: int
    num_rows: int
    padding_frac: float


Item = tuple[Segment, float]
"""A segment and its trajectory's advantage."""


def training_items(groups: Sequence[Group], advantages: Sequence[np.ndarray]) -> tuple[list[Item], list[int]]:
    """Every segment of every trajectory with its advantage, and the number of the trajectory that it belongs to."""
    items, trajectory_ids, trajectory_id = [], [], 0
    for group, group_advantages in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, group_advantages, strict=True):
            items += [(segment, float(advantage)) for segment in trajectory.segments]
            trajectory_ids += [trajectory_id] * len(trajectory.segments)
            trajectory_id += 1
    return items, trajectory_ids


def make_batch(
    items: Sequence[Item],
    *,
    row_tokens: int,
    rows_per_microbatch: int,
    trajectory_ids: Sequence[int] | None = None,
    weights: Sequence[float] | None = None,
    row_multiple: int = 1,
    keep_zero: bool = False,
) -> tuple[Batch, BatchStats]:
    """Packs `items` into a batch of numpy arrays.

    Args:
        row_tokens: the most tokens of one sequence, and of a row up to rounding. Smaller problems get shorter rows.
        rows_per_microbatch: R, rounded up to `row_multiple`, the number of devices that rows are spread over.
        trajectory_ids: which trajectory each item belongs to, where trajectories have several segments.
        weights: of each item in the loss, 1 by default.
        keep_zero: keeps items of advantage 0, whose policy gradient is 0 but whose KL and metrics are not.

    Shapes come from a small table (L of `row_lengths`; M is 16 and T is 2 L, or that times a power of 4), so few
    programs are compiled. Rows that end early come last, as `microbatch_lengths` asks for. Empty micro-batches and
    unused target slots cost no computation. Raises `UserError` when a sequence is too long.
    """
    trajectory_ids = range(len(items)) if trajectory_ids is None else trajectory_ids
    weights = [1.0] * len(items) if weights is None else weights
    longest = max((len(segment.tokens) for segment, _ in items), default=0)
    if longest > row_tokens:
        raise UserError(
            f"a trajectory of {longest} tokens does not fit a training row: learner.row_tokens is {row_tokens}; "
            f"raise it to at least {longest}, or lower the token limits of prompt and answer"
        )
    with_advantage = [i for i, (_, advantage) in enumerate(items) if not np.isnan(advantage)]
    kept = [i for i in with_advantage if items[i][0].loss_mask.any() and (keep_zero or items[i][1] != 0)]
    sequences = [_stored_tokens(items[i][0]) for i in kept]
    num_rows_each = -(-rows_per_microbatch // row_multiple) * row_multiple
    rows, num_stored, length = _choose_rows(sort_sequences(sequences), row_lengths(row_tokens), num_rows_each)
    rows = [[kept[index] for index in row] for row in rows]
    num_targets = [sum(int(items[i][0].loss_mask.sum()) for i in row) for row in rows]
    # Of rows computed alike, those with many targets come first: a micro-batch's head runs as long as its fullest row
    # asks for.
    _, shortest = microbatch_lengths(-(-len(rows) // num_rows_each), length)
    order = sorted(range(len(rows)), key=lambda row: (num_stored[row] <= shortest, -num_targets[row]))
    batch = _fill(items, trajectory_ids, weights, [rows[row] for row in order], length, num_rows_each)
    counted = {trajectory_ids[i] for i in with_advantage}
    computed = _computed_tokens(num_stored, length, num_rows_each)
    stats = BatchStats(
        num_trajectories=len(counted),
        num_dropped=len(set(trajectory_ids) - counted),
        num_zero_advantage=len(counted - {trajectory_ids[i] for i in kept}),
        num_trained_tokens=int(batch.target_mask.sum()),
        num_tokens_separate=sum(len(sequence) for sequence in sequences),
        num_tokens_stored=int(num_stored.sum()),
        num_rows=len(rows),
        padding_frac=1 - int(num_stored.sum()) / computed if computed else 0.0,
    )
    return batch, stats


def row_lengths(row_tokens: int) -> list[int]:
    """The row lengths in use, longest first: `row_tokens` and its halves."""
    lengths = [row_tokens]
    while lengths[-1] // 2 >= SHORTEST_ROW:
        lengths.append(lengths[-1] // 2)
    return lengths


def microbatch_lengths(num_microbatches: int, length: int) -> tuple[int, int]:
    """The tokens of a row that are computed, in full and where all rows of a micro-batch end that early.

    Each of the two is compiled, which is worth it where micro-batches are few and rows not too short; else both are
    `length`.
    """
    is_worth_it = num_microbatches <= FEWEST_MICROBATCHES and length >= 4 * SHORTEST_ROW
    return length, length * 3 // 4 if is_worth_it else length


def _stored_tokens(segment: Segment) -> np.ndarray:
    """The tokens up to the last predictor; what follows it is a target or decides nothing."""
    return segment.tokens[: int(np.flatnonzero(segment.loss_mask)[-1])]


def _choose_rows(
    sequences: Sorted, lengths: Sequence[int], num_rows_each: int
) -> tuple[list[np.ndarray], np.ndarray, int]:
    """The packing, its stored tokens and the row length that compute the fewest tokens.

    A shorter row must win by a tenth.
    """
    best_rows, best_stored = pack_rows(sequences, lengths[0])
    best_length, best_cost = lengths[0], _cost(best_stored, lengths[0], num_rows_each)
    if len(best_rows) > 10 * num_rows_each:  # the last, half-empty micro-batch no longer matters
        return best_rows, best_stored, best_length
    for length in lengths[1:]:
        if sequences.lengths.max(initial=0) > length:
            break
        rows, stored = pack_rows(sequences, length)
        cost = _cost(stored, length, num_rows_each)
        if cost < 0.9 * best_cost:
            best_rows, best_stored, best_length, best_cost = rows, stored, length, cost
    return best_rows, best_stored, best_length


def _cost(num_stored: np.ndarray, length: int, num_rows_each: int) -> int:
    num_microbatches = -(-len(num_stored) // num_rows_each)
    return _computed_tokens(num_stored, length, num_rows_each) + num_microbatches * MICROBATCH_TOKENS


def _computed_tokens(num_stored: np.ndarray, length: int, num_rows_each: int) -> int:
    """Row tokens of all micro-batches when the rows that end early come last; `num_stored` int `[rows]`."""
    num_microbatches = -(-len(num_stored) // num_rows_each)
    full, shortest = microbatch_lengths(num_microbatches, length)
    num_full = -(-int((num_stored > shortest).sum()) // num_rows_each)
    return num_rows_each * (num_full * full + (num_microbatches - num_full) * shortest)


def _fill(
    items: Sequence[Item],
    trajectory_ids: Sequence[int],
    weights: Sequence[float],
    rows: Sequence[Sequence[int]],
    length: int,
    num_rows_each: int,
) -> Batch:
    most_targets = max((sum(int(items[i][0].loss_mask.sum()) for i in row) for row in rows), default=0)
    num_targets, num_microbatches = 2 * length, FEWEST_MICROBATCHES
    while num_targets < most_targets:
        num_targets *= 4
    while num_microbatches * num_rows_each < len(rows):
        num_microbatches *= 4
    num_rows = num_microbatches * num_rows_each
    num_allowed = _room_for_allowed([items[i][0] for row in rows for i in row])
    flat = Batch(
        tokens=np.zeros((num_rows, length), np.int32),
        positions=np.zeros((num_rows, length), np.int32),
        visible_until=np.tile(np.arange(1, length + 1, dtype=np.int32), (num_rows, 1)),
        target_predictor=np.zeros((num_rows, num_targets), np.int32),
        target_tokens=np.zeros((num_rows, num_targets), np.int32),
        target_mask=np.zeros((num_rows, num_targets), bool),
        target_sequence=np.zeros((num_rows, num_targets), np.int32),
        behaviour_logprobs=np.zeros((num_rows, num_targets), np.float32),
        advantages=np.zeros((num_rows, num_targets), np.float32),
        weights=np.zeros((num_rows, num_targets), np.float32),
        temperatures=np.ones((num_rows, num_targets), np.float32),
        allowed_tokens=np.full((num_rows, num_targets, num_allowed), -1, np.int32) if num_allowed else None,
    )
    for row, members in enumerate(rows):
        _fill_row(flat, row, items, trajectory_ids, weights, members)
    return jax.tree.map(lambda array: array.reshape(num_microbatches, num_rows_each, *array.shape[1:]), flat)


def _room_for_allowed(segments: Sequence[Segment]) -> int:
    """A of the batch's shapes: a power of 4 from 16, 0 where every target was drawn from the whole vocabulary."""
    most = max((len(tokens) for segment in segments for _, tokens in segment.allowed_tokens), default=0)
    room = 16 if most else 0
    while room < most:
        room *= 4
    return room


def _fill_row(
    batch: Batch,
    row: int,
    items: Sequence[Item],
    trajectory_ids: Sequence[int],
    weights: Sequence[float],
    members: Sequence[int],
) -> None:
    """Writes the sequences `members`, in depth-first order, and their targets into one row."""
    path = np.zeros(0, np.int64)  # row indices of the tokens of the sequence before
    previous = np.zeros(0, np.int32)
    end = target_end = 0
    for index in members:
        segment, advantage = items[index]
        tokens = _stored_tokens(segment)
        num_shared = common_prefix(previous, tokens)
        batch.visible_until[row, path[num_shared:]] = end
        start, end = end, end + len(tokens) - num_shared
        path, previous = np.concatenate([path[:num_shared], np.arange(start, end)]), tokens
        batch.tokens[row, start:end] = tokens[num_shared:]
        batch.positions[row, start:end] = np.arange(num_shared, len(tokens))

        targets = np.flatnonzero(segment.loss_mask)
        slots = slice(target_end, target_end + len(targets))
        target_end = slots.stop
        batch.target_predictor[row, slots] = path[targets - 1]
        batch.target_tokens[row, slots] = segment.tokens[targets]
        batch.target_mask[row, slots] = True
        batch.target_sequence[row, slots] = trajectory_ids[index]
        batch.behaviour_logprobs[row, slots] = segment.behaviour_logprobs[targets]
        batch.advantages[row, slots] = advantage
        batch.weights[row, slots] = weights[index]
        # Greedy samples report the untempered distribution, and a temperature of 0 cannot divide logits.
        batch.temperatures[row, slots] = segment.temperature or 1.0
        for target, allowed in segment.allowed_tokens:
            if not segment.loss_mask[target]:
                continue
            slot = slots.start + int(np.searchsorted(targets, target))
            batch.allowed_tokens[row, slot, : len(allowed)] = allowed  # pyright: ignore[reportOptionalSubscript]
    batch.visible_until[row, path] = end
