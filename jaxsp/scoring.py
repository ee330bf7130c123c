"""What a model says of given tokens: their log-probabilities, or its scalar head's score."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.config import UserError
from jaxsp.inference import FoundModel, Input, TextReader, load_weights
from jaxsp.learner.losses import token_logprobs
from jaxsp.model.attention import forest_attention
from jaxsp.model.decoder import Params, hidden_states, scalar_scores
from jaxsp.model.sizes import DecoderSizes
from jaxsp.model.source import tokenizer_path
from jaxsp.sampler.scheduler import bucket, row_buckets
from jaxsp.tokenizer import load_tokenizer

TOKENS_PER_PASS = 4096
"""Tokens of one forward pass, unless a single input is longer."""
_SHORTEST = 32
_WINDOW = 256
"""Inputs that are sorted by length together; results are written in the order of the inputs, window by window."""
_LOGITS_CHUNK = 256


@dataclass(frozen=True)
class Scores:
    """Of one input, what the model says of its tokens.

    Attributes:
        logprobs: each token's natural-log probability given those before it, None for the first; None where the model
            has a scalar head in place of the language head.
        score: the scalar head's output at the last token; a list where it has several labels, None without that head.
    """

    tokens: tuple[int, ...]
    logprobs: list[float | None] | None
    score: float | list[float] | None


def score(model: FoundModel, inputs: Sequence[Input], write: Callable[[Scores], None]) -> None:
    """Calls `write` with the scores of each input, in order. Raises `UserError` naming the input that cannot be used.

    The tokenizer is opened only if an input is a text, which begins as a text to sample from does.
    """
    sizes = model.source.sizes
    has_text = any(given.field == "text" for given in inputs)
    reader = TextReader(sizes, load_tokenizer(tokenizer_path(model.source)) if has_text else None)
    sequences = [reader.tokens(given) for given in inputs]
    params = load_weights(model)
    forward = _score_forward(sizes, model.config.compute_dtype)
    for start in range(0, len(sequences), _WINDOW):
        window = sequences[start : start + _WINDOW]
        for result in _score_window(forward, params, window, sizes.max_positions):
            write(result)


def padded_length(num_tokens: int, max_positions: int) -> int:
    """Tokens of the row that an input is computed in: a power of 2 from 32, at most what the model was made for."""
    return min(max(_SHORTEST, 1 << (num_tokens - 1).bit_length()), max_positions)


def _score_window(
    forward: Any, params: Params, sequences: Sequence[tuple[int, ...]], max_positions: int
) -> list[Scores]:
    by_length: dict[int, list[int]] = {}
    for index, tokens in enumerate(sequences):
        length = padded_length(len(tokens), max_positions)
        by_length.setdefault(length, []).append(index)
    results: dict[int, Scores] = {}
    for length, indices in by_length.items():
        num_rows = max(1, TOKENS_PER_PASS // length)
        for start in range(0, len(indices), num_rows):
            chosen = indices[start : start + num_rows]
            outputs = _score_batch(forward, params, [sequences[i] for i in chosen], length, num_rows)
            results |= zip(chosen, outputs, strict=True)
    return [results[index] for index in range(len(sequences))]


def _score_batch(
    forward: Any, params: Params, sequences: Sequence[tuple[int, ...]], length: int, num_rows: int
) -> list[Scores]:
    """The scores of sequences of at most `length` tokens, in a batch of few different shapes."""
    tokens = np.zeros((bucket(len(sequences), row_buckets(num_rows)), length), np.int32)
    lengths = np.ones(len(tokens), np.int32)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = sequence
        lengths[row] = len(sequence)
    logprobs, scores = jax.device_get(forward(params, tokens, lengths))
    if not np.all(np.isfinite(logprobs if scores is None else scores)):
        raise UserError("the model gives numbers that are not finite; its weights are damaged, or need --dtype float32")
    results = []
    for row, sequence in enumerate(sequences):
        if scores is None:
            results.append(Scores(sequence, [None, *logprobs[row, : len(sequence) - 1].tolist()], None))
        else:
            labels = scores[row].tolist()
            results.append(Scores(sequence, None, labels[0] if len(labels) == 1 else labels))
    return results


@functools.cache
def _score_forward(sizes: DecoderSizes, compute_dtype: Any) -> Any:
    """A jitted `forward(params, tokens [R, L], lengths [R])`."""

    def forward(params: Params, tokens: jax.Array, lengths: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        """`(logprobs [R, L - 1], None)`, or `(None, scores [R, labels])` for a decoder with a scalar head."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        visible_until = jnp.where(positions < lengths[:, None], lengths[:, None], positions + 1)

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            return forest_attention(q, k, v, visible_until), cache

        hidden, _ = hidden_states(sizes, params, tokens, positions, attend, compute_dtype=jnp.dtype(compute_dtype))
        if sizes.num_labels:
            return None, scalar_scores(params, hidden, lengths - 1)
        is_target = positions[:, 1:] < lengths[:, None]
        temperatures = jnp.ones(is_target.shape)
        logprobs, _ = token_logprobs(
            params, hidden, positions[:, :-1], tokens[:, 1:], temperatures, is_target, chunk=_LOGITS_CHUNK
        )
        return logprobs, None

    return jax.jit(forward)
