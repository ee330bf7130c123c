"""Grouped-query attention over an explicit visibility rule.

Legend: B sequences, L query tokens, S key tokens, N query heads, K kv heads, H head size.

A row of training tokens is a forest in depth-first order: several sequences side by side, each a tree whose branches
share their prefix. `visible_until[j]` is the index at which the subtree of token `j` ends, and token `i` sees token
`j` iff `j <= i < visible_until[j]`. One integer per token thus states causality, packing and shared prefixes at any
depth; a plain sequence has `visible_until = length`, and padding sees itself alone.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def attention(
    q: Float[Array, "B L N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    mask: Bool[Array, "B L S"],
) -> Float[Array, "B L N H"]:
    """`softmax(q keys^T / sqrt(H)) values` with `mask` True where a query may look; scores and softmax in float32.

    N must be a multiple of K: query head n reads kv head `n // (N // K)`. A query that may look nowhere gets the mean
    of all values, which no caller uses.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    group = num_heads // num_kv_heads
    # The queries of all heads that share keys form one matrix [group * L, H]: products stay large and plain.
    stacked = q.reshape(batch, num_queries, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    stacked = stacked.reshape(batch, num_kv_heads, group * num_queries, head_dim)
    scores = jnp.einsum("bkqh,bksh->bkqs", stacked, keys, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = scores.reshape(batch, num_kv_heads, group, num_queries, num_keys)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    # The division comes after the product with the values, on L x H numbers instead of L x S.
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1)
    weights = weights.reshape(batch, num_kv_heads, group * num_queries, num_keys).astype(values.dtype)
    out = jnp.einsum("bkqs,bksh->bkqh", weights, values, preferred_element_type=jnp.float32)
    out = out.reshape(batch, num_kv_heads, group, num_queries, head_dim) / total[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, num_heads, head_dim).astype(values.dtype)


QUERY_CHUNK = 256
"""Queries whose scores exist at one time."""
MAX_SPANS = 16
"""Spans of a row are unrolled, so their number bounds the size of the program."""


def forest_attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    visible_until: Int[Array, "B L"],
    query_chunk: int = QUERY_CHUNK,
) -> Float[Array, "B L N H"]:
    """Attention of a row in depth-first order (module docstring), `query_chunk` queries at a time.

    The row is cut into at most `MAX_SPANS` spans of whole chunks. A span looks at the keys up to its own end, which
    saves nearly half of the work, and scores exist for one chunk only, forward and backward.
    """
    length = q.shape[1]
    keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    num_chunks = -(-length // query_chunk)
    span = -(-num_chunks // MAX_SPANS) * query_chunk

    def one_span(start: int) -> Array:
        end = min(start + span, length)
        index = jnp.arange(start, end)[None]
        return chunked_attention(
            q[:, start:end], keys[:, :, :end], values[:, :, :end], index, visible_until[:, :end], query_chunk
        )

    return jnp.concatenate([one_span(start) for start in range(0, length, span)], axis=1)


def chunked_attention(
    q: Float[Array, "B L N H"],
    keys: Float[Array, "B K S H"],
    values: Float[Array, "B K S H"],
    index: Int[Array, "#B L"],
    visible_until: Int[Array, "B S"],
    query_chunk: int = QUERY_CHUNK,
) -> Float[Array, "B L N H"]:
    """`attention` of the queries with these indices among S keys, `query_chunk` of them at a time."""
    length, num_keys = q.shape[1], keys.shape[2]

    @jax.checkpoint
    def one_chunk(queries: Array, index: Array) -> Array:
        index = index[..., None]
        mask = (jnp.arange(num_keys) <= index) & (index < visible_until[:, None])
        return attention(queries, keys, values, mask)

    if length <= query_chunk:
        return one_chunk(q, index)
    num_whole = length // query_chunk
    end = num_whole * query_chunk
    whole = q[:, :end].reshape(q.shape[0], num_whole, query_chunk, *q.shape[2:])
    index_of_chunk = index[:, :end].reshape(index.shape[0], num_whole, query_chunk)
    chunks = jnp.moveaxis(whole, 1, 0), jnp.moveaxis(index_of_chunk, 1, 0)
    out = jnp.moveaxis(jax.lax.map(lambda chunk: one_chunk(*chunk), chunks), 0, 1).reshape(q[:, :end].shape)
    return out if end == length else jnp.concatenate([out, one_chunk(q[:, end:], index[:, end:])], axis=1)
