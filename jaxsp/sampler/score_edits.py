"""What requests change about scores before anything is drawn: penalty, bias, banned stops, choices.

Host and device hold the same arrays (B rows). Rows without a wish have values that change nothing, and a batch in which
nobody has one passes None, for which programs of their own are compiled that do none of this.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxsp.token_trie import make_trie
from jaxsp.trajectory import GenerateRequest

_FEWEST = 16
"""Biases and edges that the arrays of a row have room for; where it takes more, powers of 4 of it."""


class ScoreEdits(NamedTuple):
    """Of each row; numpy on the host, traced on device. `-1` is no token and no node.

    The edges of a row are those of its trie (`jaxsp.token_trie`), at whose `node` it stands.
    """

    repetition_penalty: Any  # float32 [B]
    seen_tokens: Any  # int32 [B, S], of prompt and sample so far, in any order
    bias_tokens: Any  # int32 [B, K]
    bias_values: Any  # float32 [B, K]
    num_before_stop: Any  # int32 [B], tokens that must still come before a stop id may
    node: Any  # int32 [B]
    edge_node: Any  # int32 [B, E]
    edge_token: Any  # int32 [B, E]
    edge_child: Any  # int32 [B, E]


def has_edits(request: GenerateRequest) -> bool:
    """Whether the request asks for anything that the plain programs do not do."""
    return bool(
        request.repetition_penalty != 1 or request.logit_bias or request.min_tokens or request.choices
        or request.wants_raw
    )  # fmt: skip


def make_score_edits(
    num_rows: int, rows: Sequence[tuple[GenerateRequest, Sequence[int]]], num_positions: int
) -> ScoreEdits | None:
    """Arrays for `num_rows` rows, of which the first hold `rows` (a request and its tokens so far); None if none of
    them has a wish.

    `num_positions` (S) holds the longest of them.
    """
    if not any(has_edits(request) for request, _ in rows):
        return None
    num_biases = _room(len(request.logit_bias) for request, _ in rows)
    num_edges = _room(len(make_trie(request.choices).edges) for request, _ in rows if request.choices)
    edits = ScoreEdits(
        repetition_penalty=np.ones(num_rows, np.float32),
        seen_tokens=np.full((num_rows, num_positions), -1, np.int32),
        bias_tokens=np.full((num_rows, num_biases), -1, np.int32),
        bias_values=np.zeros((num_rows, num_biases), np.float32),
        num_before_stop=np.zeros(num_rows, np.int32),
        node=np.zeros(num_rows, np.int32),
        edge_node=np.full((num_rows, num_edges), -1, np.int32),
        edge_token=np.full((num_rows, num_edges), -1, np.int32),
        edge_child=np.full((num_rows, num_edges), -1, np.int32),
    )
    for row, (request, sampled) in enumerate(rows):
        if request.repetition_penalty != 1:
            edits.repetition_penalty[row] = request.repetition_penalty
            context = (*request.tokens, *sampled)
            edits.seen_tokens[row, : len(context)] = context
        for place, (token, value) in enumerate(request.logit_bias):
            edits.bias_tokens[row, place], edits.bias_values[row, place] = token, value
        edits.num_before_stop[row] = max(request.min_tokens - len(sampled), 0)
        if request.choices:
            trie = make_trie(request.choices)
            edits.node[row] = trie.walk(sampled)
            nodes, tokens, children = np.array(trie.edges, np.int32).T
            for array, values in zip(edits[-3:], (nodes, tokens, children), strict=True):
                array[row, : len(values)] = values
    return edits


def _room(numbers: Iterable[int]) -> int:
    most, room = max(numbers, default=0), _FEWEST
    while room < most:
        room *= 4
    return room


def seen_at_first(edits: ScoreEdits, vocab_size: int) -> Bool[Array, "B V"]:
    """Which tokens each row has seen before it goes on."""
    return _mark(jnp.zeros((len(edits.node), vocab_size), bool), edits.seen_tokens)


def edit_scores(
    logits: Float[Array, "B V"], edits: ScoreEdits, seen: Bool[Array, "B V"], stop_ids: Int[Array, "B stops"]
) -> Float[Array, "B V"]:
    """float32 scores after penalty and bias, -inf for what cannot be drawn."""
    logits = logits.astype(jnp.float32)
    rows = jnp.arange(logits.shape[0])[:, None]
    penalty = edits.repetition_penalty[:, None]
    scores = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    scores = scores.at[rows, _or_nowhere(edits.bias_tokens, scores)].add(edits.bias_values, mode="drop")
    nothing = jnp.zeros(scores.shape, bool)
    is_banned = _mark(nothing, jnp.where(edits.num_before_stop[:, None] > 0, stop_ids, -1))
    is_edge_here = edits.edge_node == edits.node[:, None]
    is_allowed = _mark(nothing, jnp.where(is_edge_here, edits.edge_token, -1))
    is_free = ~jnp.any(is_edge_here, axis=1, keepdims=True)
    return jnp.where((is_allowed | is_free) & ~is_banned, scores, -jnp.inf)


def after_token(
    edits: ScoreEdits, seen: Bool[Array, "B V"], token: Int[Array, " B"]
) -> tuple[ScoreEdits, Bool[Array, "B V"], Bool[Array, " B"]]:
    """Edits and seen tokens once each row has drawn `token`, and whether that brought it to a leaf of its choices."""
    is_taken = (edits.edge_node == edits.node[:, None]) & (edits.edge_token == token[:, None])
    is_held = jnp.any(is_taken, axis=1)
    node = jnp.where(is_held, jnp.max(jnp.where(is_taken, edits.edge_child, -1), axis=1), edits.node)
    is_leaf = is_held & ~jnp.any(edits.edge_node == node[:, None], axis=1)
    num_before_stop = jnp.maximum(edits.num_before_stop - 1, 0)
    return edits._replace(node=node, num_before_stop=num_before_stop), _mark(seen, token[:, None]), is_leaf


def _mark(marks: Bool[Array, "B V"], tokens: Int[Array, "B S"]) -> Bool[Array, "B V"]:
    return marks.at[jnp.arange(marks.shape[0])[:, None], _or_nowhere(tokens, marks)].set(True, mode="drop")


def _or_nowhere(tokens: Int[Array, "B S"], scores: Array) -> Int[Array, "B S"]:
    """`-1` would be the last token of the vocabulary; the index after it is none, and dropped."""
    return jnp.where(tokens < 0, scores.shape[1], tokens)
