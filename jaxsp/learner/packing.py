"""Which sequences share a row: prefix-sharing sequences together, then first fit, largest first (numpy only).

In lexicographic order the sequences of a trie stand in depth-first order, and the tokens that a row stores are the
first sequence's and, of each other one, those after its longest common prefix with the sequence before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False)
class Sorted:
    """Sequences in lexicographic order.

    Attributes:
        order: int `[S]`, the index of each sequence in the caller's list.
        lengths: int `[S]`.
        shared: int `[S]`, the length of the common prefix with the sequence before; `shared[0] == 0`.
    """

    order: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray


def common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """The number of leading tokens that two sequences have in common."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def sort_sequences(sequences: Sequence[np.ndarray]) -> Sorted:
    """Orders non-empty int sequences of non-negative ids lexicographically; equal ones keep their order."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]  # bytes compare as the ids do
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared = [0, *(common_prefix(sequences[first], sequences[second]) for first, second in pairwise(order))]
    shared = shared[: len(order)]
    lengths = [len(sequences[index]) for index in order]
    return Sorted(np.array(order, np.int64), np.array(lengths, np.int64), np.array(shared, np.int64))


def pack_rows(sequences: Sorted, capacity: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Rows of at most `capacity` stored tokens, and how many each stores, int `[rows]`.

    A row is the caller's indices of its sequences in depth-first order.

    Maximal subtries that fit a row are placed largest first, each into the row where it adds the fewest tokens.
    Every sequence must fit a row on its own.
    """
    assert not len(sequences.lengths) or sequences.lengths.max() <= capacity
    starts = _unit_starts(sequences, capacity)
    num_units = len(starts) - 1
    added = sequences.lengths - sequences.shared
    added_before = np.concatenate([[0], np.cumsum(added)])
    sizes = added_before[starts[1:]] - added_before[starts[:-1]] + sequences.shared[starts[:-1]]
    shared = sequences.shared[starts[:-1]]  # with the unit before

    row_of_unit = np.full(num_units, -1)
    used = np.zeros(0, np.int64)
    for unit in np.argsort(-sizes, kind="stable"):
        placed = row_of_unit >= 0
        sharing = _sharing(shared, int(unit))
        row_sharing = np.zeros(len(used), np.int64)
        np.maximum.at(row_sharing, row_of_unit[placed], sharing[placed])
        growth = sizes[unit] - row_sharing
        growth_if_fits = np.where(used + growth <= capacity, growth, capacity + 1)
        if len(used) and growth_if_fits.min() <= capacity:
            row = int(growth_if_fits.argmin())
            used[row] += growth[row]
        else:
            row = len(used)
            used = np.append(used, sizes[unit])
        row_of_unit[unit] = row
    members = [np.flatnonzero(row_of_unit == row) for row in range(len(used))]
    rows = [np.concatenate([sequences.order[starts[unit] : starts[unit + 1]] for unit in units]) for units in members]
    return rows, used


def _unit_starts(sequences: Sorted, capacity: int) -> np.ndarray:
    """Bounds of the maximal subtries that fit a row: int `[units + 1]`, positions in sorted order."""
    added = sequences.lengths - sequences.shared
    added_before = np.concatenate([[0], np.cumsum(added)])
    starts, pending = [], [(0, len(sequences.lengths))]
    while pending:
        start, end = pending.pop()
        if start == end:
            continue
        stored = added_before[end] - added_before[start] + sequences.shared[start]
        if stored <= capacity or end - start == 1:
            starts.append(start)
            continue
        inner = sequences.shared[start + 1 : end]  # the trie branches first where neighbours share least
        bounds = [start, *(start + 1 + np.flatnonzero(inner == inner.min())).tolist(), end]
        pending += reversed(list(pairwise(bounds)))
    return np.array([*starts, len(sequences.lengths)], np.int64)


def _sharing(shared: np.ndarray, unit: int) -> np.ndarray:
    """int `[units]`: the common prefix of `unit` with every unit, from those of neighbours; its own entry is 0."""
    sharing = np.zeros(len(shared), np.int64)
    sharing[unit + 1 :] = np.minimum.accumulate(shared[unit + 1 :])
    if unit:
        sharing[:unit] = np.minimum.accumulate(shared[1 : unit + 1][::-1])[::-1]
    return sharing
