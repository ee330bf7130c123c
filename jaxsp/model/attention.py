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
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B L S"],
) -> Float[Array, "B L N H"]:
    """`softmax(q k^T / sqrt(H)) v` with `mask` True where a query may look; scores and softmax in float32.

    N must be a multiple of K: query head n reads kv head `n // (N // K)`. A query that may look nowhere gets the mean
    of all values, which no caller uses.
    """
    batch, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    grouped = q.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("blkgh,bskh->bkgls", grouped, k, preferred_element_type=jnp.float32) * head_dim**-0.5
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgls,bskh->blkgh", weights, v).reshape(batch, num_queries, num_heads, head_dim)


def forest_attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    visible_until: Int[Array, "B L"],
    query_chunk: int = 512,
) -> Float[Array, "B L N H"]:
    """Attention of a row in depth-first order (module docstring), `query_chunk` queries at a time.

    Scores exist for one chunk only, forward and backward, so memory grows with L * query_chunk and not with L^2.
    """
    length = q.shape[1]
    keys = jnp.arange(length)

    def mask(start: Int[Array, ""] | int, count: int) -> Bool[Array, "B Q L"]:
        queries = (start + jnp.arange(count))[None, :, None]
        return (keys <= queries) & (queries < visible_until[:, None, :])

    if length <= query_chunk or length % query_chunk:
        return attention(q, k, v, mask(0, length))
    num_chunks = length // query_chunk
    chunks = jnp.moveaxis(q.reshape(q.shape[0], num_chunks, query_chunk, *q.shape[2:]), 1, 0)

    @jax.checkpoint
    def one_chunk(args: tuple[Array, Array]) -> Array:
        index, q_chunk = args
        return attention(q_chunk, k, v, mask(index * query_chunk, query_chunk))

    outputs = jax.lax.map(one_chunk, (jnp.arange(num_chunks), chunks))
    return jnp.moveaxis(outputs, 0, 1).reshape(q.shape)
