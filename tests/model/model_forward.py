"""A full forward pass without a cache, for tests that need logits."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxsp.model.attention import forest_attention
from jaxsp.model.decoder import Params, hidden_states, logits
from jaxsp.model.sizes import DecoderSizes

GOLDEN = Path(__file__).parents[1] / "golden" / "model"


def attend_causally(q, k, v, cache):
    length = q.shape[1]
    return forest_attention(q, k, v, jnp.full(q.shape[:2], length, jnp.int32)), cache


@functools.partial(jax.jit, static_argnums=0)  # equal sizes and shapes compile once in all tests
def _hidden(sizes, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return hidden_states(sizes, params, tokens, positions, attend_causally)[0]


def full_hidden(sizes: DecoderSizes, params: Params, tokens: np.ndarray) -> jax.Array:
    """Normed hidden states `[B, L, D]` of whole sequences that begin at position 0."""
    return _hidden(sizes, params, jnp.asarray(tokens, jnp.int32))


def full_logits(sizes: DecoderSizes, params: Params, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(logits(params, full_hidden(sizes, params, tokens)))
