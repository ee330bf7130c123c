"""Attention of decoding on GPU: a Pallas kernel (Triton) that reads pages where they stand and writes each new token.

Legend: B decoding rows, N query heads, K kv heads, R query heads of a kv head, G pages, T tokens of a page, H head
size, W pages of a row, C parts of a row.

A row's pages are read in parts by programs of their own, so that one long row keeps the whole chip busy; what they
return is joined by their largest scores ("flash decoding", as in Dao et al. 2023). The program of the first part
begins with the new token and stores it in its page; nobody else looks at that place.

Pallas calls its Triton backend deprecated in favour of Mosaic GPU, whose matrix products are for tiles of 64 queries
and more; JAX's version is pinned, and this file is all that knows of it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

PART_TOKENS = 2048
"""Tokens of a row that one program reads."""
BLOCK_TOKENS = 64
"""Of these, how many at one time."""
SMALLEST_TILE = 16
"""Rows of a product on tensor cores; fewer query heads are padded."""


def is_known(device_kind: str) -> bool:
    """Whether Pallas can compile for a GPU that calls itself so."""
    return any(version.value in device_kind for version in plgpu.GpuVersion)


def decode_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    keys: Float[Array, "G K T H"],
    values: Float[Array, "G K T H"],
    table: Int[Array, "B W"],
    length: Int[Array, " B"],
    is_active: Bool[Array, " B"],
    *,
    interpret: bool = False,
    part_tokens: int = PART_TOKENS,
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[Float[Array, "B N H"], Float[Array, "G K T H"], Float[Array, "G K T H"]]:
    """See `jaxsp.sampler.paged_attention.Implementation.decode`."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_tokens, _ = keys.shape
    group = num_heads // num_kv_heads
    num_parts = -(-table.shape[1] * page_tokens // part_tokens)
    parts = (num_rows, num_kv_heads, num_parts, group)
    largest, total, weighted, keys, values = pl.pallas_call(
        functools.partial(_kernel, part_tokens=part_tokens, block_tokens=block_tokens),
        grid=parts[:3],
        out_shape=[
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct(parts, jnp.float32),
            jax.ShapeDtypeStruct((*parts, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        input_output_aliases={5: 3, 6: 4},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="paged_decode_attention",
    )(
        table.astype(jnp.int32),
        jnp.where(is_active, length, -1).astype(jnp.int32),
        q.reshape(num_rows, num_kv_heads, group, head_dim),
        k.astype(keys.dtype),
        v.astype(values.dtype),
        keys,
        values,
    )
    weight = jnp.exp(largest - jnp.max(largest, axis=2, keepdims=True)) * (total > 0)
    joined = jnp.sum(weighted * weight[..., None], axis=2)
    joined = joined / jnp.maximum(jnp.sum(total * weight, axis=2), jnp.finfo(jnp.float32).tiny)[..., None]
    return joined.reshape(q.shape).astype(q.dtype), keys, values


def _kernel(
    table: Any, lengths: Any, q: Any, k: Any, v: Any, _keys: Any, _values: Any, largest_out: Any, total_out: Any,
    weighted_out: Any, keys: Any, values: Any, *, part_tokens: int, block_tokens: int,
) -> None:  # fmt: skip
    """One part of a row for one kv head; `lengths` holds -1 for a row that has ended, which writes nothing."""
    row, head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, _, page_tokens, head_dim = keys.shape
    group = q.shape[2]
    tile = max(SMALLEST_TILE, pl.next_power_of_2(group))
    length = plgpu.load(lengths.at[row])
    features = jnp.arange(head_dim)
    heads = jnp.arange(tile)
    is_head = jnp.broadcast_to((heads < group)[:, None], (tile, head_dim))
    query = plgpu.load(q.at[row, head, heads[:, None], features[None]], mask=is_head, other=0)
    key, value = plgpu.load(k.at[row, head, features]), plgpu.load(v.at[row, head, features])
    begin = part * part_tokens
    begins = (part == 0) & (length >= 0)

    @pl.when(begins)
    def _() -> None:
        page = plgpu.load(table.at[row, jax.lax.div(length, page_tokens)])
        plgpu.store(keys.at[page, head, jax.lax.rem(length, page_tokens), features], key)
        plgpu.store(values.at[page, head, jax.lax.rem(length, page_tokens), features], value)

    def one_block(block: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """The running maxima, sums and weighted values once a block more has been looked at."""
        largest, total, weighted = carry
        token = begin + block * block_tokens + jnp.arange(block_tokens)
        is_cached = token < length
        page = plgpu.load(table.at[row, jax.lax.div(token, page_tokens)], mask=is_cached, other=0)
        place = page[:, None], head, jax.lax.rem(token, page_tokens)[:, None], features[None]
        is_there = jnp.broadcast_to(is_cached[:, None], (block_tokens, head_dim))
        old_keys = plgpu.load(keys.at[place], mask=is_there, other=0)
        old_values = plgpu.load(values.at[place], mask=is_there, other=0)
        scores = _product(query, old_keys.T) * head_dim**-0.5
        scores = jnp.where(jnp.broadcast_to(is_cached[None], scores.shape), scores, lowest)
        new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - new_largest[:, None])
        shrink = jnp.exp(largest - new_largest)
        added = _product(weights.astype(old_values.dtype), old_values)
        return new_largest, total * shrink + jnp.sum(weights, axis=1), weighted * shrink[:, None] + added

    lowest = jnp.finfo(jnp.float32).min
    own = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32)[None], axis=1) * head_dim**-0.5
    start = (
        jnp.where(begins, own, lowest),
        jnp.where(begins, jnp.ones(tile, jnp.float32), 0.0),
        jnp.where(begins, jnp.broadcast_to(value.astype(jnp.float32)[None], (tile, head_dim)), 0.0),
    )
    num_cached = jnp.clip(length - begin, 0, part_tokens)
    num_blocks = jax.lax.div(num_cached + block_tokens - 1, block_tokens)
    largest, total, weighted = jax.lax.fori_loop(0, num_blocks, one_block, start)
    plgpu.store(largest_out.at[row, head, part, heads], largest, mask=heads < group)
    plgpu.store(total_out.at[row, head, part, heads], total, mask=heads < group)
    plgpu.store(weighted_out.at[row, head, part, heads[:, None], features[None]], weighted, mask=is_head)


def _product(x: Array, y: Array) -> Array:
    """Sums in float32; float32 factors are not rounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return plgpu.dot(x, y, precision=precision)
