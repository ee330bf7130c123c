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


MAX_CHUNKS = 16
"""Chunks are unrolled, so their number bounds the size of the program."""


def forest_attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    visible_until: Int[Array, "B L"],
    query_chunk: int = 256,
) -> Float[Array, "B L N H"]:
    """Attention of a row in depth-first order (module docstring), `query_chunk` queries at a time.

    A chunk looks at the keys up to its own end, which saves half of the work, and its scores exist for that chunk
    only, forward and backward. Rows of more than `MAX_CHUNKS` chunks get longer ones.
    """
    length = q.shape[1]
    keys, values = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    query_chunk = max(query_chunk, -(-length // MAX_CHUNKS))

    def one_chunk(start: int) -> Array:
        end = min(start + query_chunk, length)
        queries = jnp.arange(start, end)[None, :, None]
        mask = (jnp.arange(end) <= queries) & (queries < visible_until[:, None, :end])
        return jax.checkpoint(attention)(q[:, start:end], keys[:, :, :end], values[:, :, :end], mask)

    return jnp.concatenate([one_chunk(start) for start in range(0, length, query_chunk)], axis=1)
