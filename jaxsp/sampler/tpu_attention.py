"""Attention of decoding on TPU: a Pallas kernel that reads pages where they stand and writes each new token into one.

Legend: B decoding rows, K kv heads, R query heads of a kv head, G pages, T tokens of a page, H head size, W pages of a
row, S tokens of a block.

The grid goes over rows; inside, a loop goes over blocks of a row's pages, whose copies from HBM overlap the block
before, also across rows. Softmax is accumulated block by block (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al.
2022, arXiv 2205.14135). The last block holds the new token's place: the token is put there in fast memory, and the page
is written back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

BLOCK_TOKENS = 512
"""Tokens of a row that are computed together."""
MAX_BUFFER_BYTES = 4 * 2**20
"""Fast memory for keys and values: two blocks, so that one can be copied while the other is computed."""
MAX_TABLE_BYTES = 512 * 2**10
"""Scalar memory for the table: half of what a chip has."""


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
    block_tokens: int = BLOCK_TOKENS,
) -> tuple[Float[Array, "B N H"], Float[Array, "G K T H"], Float[Array, "G K T H"]]:
    """See `jaxsp.sampler.paged_attention.Implementation.decode`."""
    num_rows, num_heads, head_dim = q.shape
    _, num_kv_heads, page_tokens, _ = keys.shape
    group = num_heads // num_kv_heads
    page_bytes = num_kv_heads * page_tokens * head_dim * keys.dtype.itemsize
    block_pages = max(1, min(block_tokens // page_tokens, MAX_BUFFER_BYTES // (4 * page_bytes), table.shape[1]))
    num_cores = 2 if num_rows % 2 == 0 else 1

    def of_row(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, *shape), lambda core, row, *_: (core * (num_rows // num_cores) + row, *(0 for _ in shape))
        )

    pages = pl.BlockSpec(memory_space=pl.ANY)
    buffer = pltpu.VMEM((2, num_kv_heads, block_pages * page_tokens, head_dim), keys.dtype)
    out, keys, values = pl.pallas_call(
        functools.partial(_kernel, block_pages=block_pages, page_tokens=page_tokens),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_cores, num_rows // num_cores),
            in_specs=[
                of_row(num_kv_heads, group, head_dim),
                of_row(num_kv_heads, 1, head_dim),
                of_row(num_kv_heads, 1, head_dim),
                pages,
                pages,
            ],
            out_specs=[of_row(num_kv_heads, group, head_dim), pages, pages],
            scratch_shapes=[
                buffer, buffer, pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2, 2)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_kv_heads, group, head_dim), q.dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        input_output_aliases={5: 1, 6: 2},  # the two prefetched arrays count
        # A chip of two cores takes half of the rows on each.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="paged_decode_attention",
    )(
        table.astype(jnp.int32),
        jnp.where(is_active, length, -1).astype(jnp.int32),
        q.reshape(num_rows, num_kv_heads, group, head_dim),
        k[:, :, None].astype(keys.dtype),
        v[:, :, None].astype(values.dtype),
        keys,
        values,
    )  # fmt: skip
    return out.reshape(q.shape), keys, values


def _kernel(
    table: Any, lengths: Any, q: Any, k: Any, v: Any, _keys: Any, _values: Any, out: Any, keys: Any, values: Any,
    key_buffer: Any, value_buffer: Any, slot_ref: Any, sems: Any, write_sems: Any, *, block_pages: int,
    page_tokens: int,
) -> None:  # fmt: skip
    """One row: `lengths` holds -1 for a row that has ended, which writes nothing and gives zeros."""
    row_of_core, rows_per_core = pl.program_id(1), pl.num_programs(1)
    row = pl.program_id(0) * rows_per_core + row_of_core
    num_kv_heads, group, head_dim = q.shape
    block_tokens = block_pages * page_tokens
    length = lengths[row]
    last_page = jax.lax.div(jnp.maximum(length, 0), page_tokens)  # lax's division: no signs to look at
    num_blocks = jax.lax.div(last_page, block_pages) + 1

    def copies(of_row: Array, block: Array, slot: Array, page: Array) -> list[Any]:
        at = pl.ds(pl.multiple_of(page * page_tokens, page_tokens), page_tokens)
        source = table[of_row, block * block_pages + page]
        return [
            pltpu.make_async_copy(pages.at[source], buffer.at[slot, :, at], sems.at[i, slot])
            for i, (pages, buffer) in enumerate(((keys, key_buffer), (values, value_buffer)))
        ]

    def for_copies(of_row: Array, block: Array, slot: Array, act: Callable[[Any], None]) -> None:
        """Of a block's pages, those that hold a token or are to hold one."""
        num_pages = jax.lax.div(jnp.maximum(lengths[of_row], 0), page_tokens) + 1 - block * block_pages

        def one_page(page: Array, _: None) -> None:
            for copy in copies(of_row, block, slot, page):
                act(copy)

        jax.lax.fori_loop(0, jnp.minimum(num_pages, block_pages), one_page, None)

    def start(of_row: Array, block: Array, slot: Array) -> None:
        for_copies(of_row, block, slot, lambda copy: copy.start())

    @pl.when(row_of_core == 0)
    def _() -> None:
        # What no page fills is multiplied by 0, so it must be finite.
        key_buffer[...] = jnp.zeros_like(key_buffer)
        value_buffer[...] = jnp.zeros_like(value_buffer)
        slot_ref[0] = 0
        start(row, jnp.int32(0), jnp.int32(0))

    first_slot = slot_ref[0]

    at = pl.ds(pl.multiple_of(jax.lax.rem(last_page, block_pages) * page_tokens, page_tokens), page_tokens)

    def write_backs(slot: Array) -> list[Any]:
        target = table[row, last_page]
        return [
            pltpu.make_async_copy(buffer.at[slot, :, at], pages.at[target], write_sems.at[i])
            for i, (pages, buffer) in enumerate(((keys, key_buffer), (values, value_buffer)))
        ]

    def put_token(slot: Array) -> None:
        token = jax.lax.broadcasted_iota(jnp.int32, (num_kv_heads, page_tokens, head_dim), 1)
        is_place = token == length - last_page * page_tokens
        key_buffer[slot, :, at] = jnp.where(is_place, k[...], key_buffer[slot, :, at])
        value_buffer[slot, :, at] = jnp.where(is_place, v[...], value_buffer[slot, :, at])
        for copy in write_backs(slot):
            copy.start()

    def one_block(block: Array, carry: Any) -> Any:
        """The running maxima, sums and weighted values once a block more has been looked at."""
        slot = jax.lax.rem(first_slot + block, 2)
        is_last = block + 1 == num_blocks
        next_row = jnp.where(is_last, row + 1, row)
        has_next = jnp.logical_or(~is_last, row_of_core + 1 < rows_per_core)
        pl.when(has_next)(lambda: start(next_row, jnp.where(is_last, 0, block + 1), 1 - slot))
        for_copies(row, block, slot, lambda copy: copy.wait())
        pl.when(jnp.logical_and(is_last, length >= 0))(lambda: put_token(slot))
        position = block * block_tokens + jax.lax.broadcasted_iota(jnp.int32, (group, block_tokens), 1)
        new = []
        for head, (largest, total, weighted) in enumerate(carry):
            scores = _product(q[head], key_buffer[slot, head], ((1,), (1,))) * head_dim**-0.5
            scores = jnp.where(position <= length, scores, -jnp.inf)
            new_largest = jnp.maximum(largest, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - new_largest)
            shrink = jnp.exp(largest - new_largest)
            added = _product(weights.astype(value_buffer.dtype), value_buffer[slot, head], ((1,), (0,)))
            new.append((
                new_largest, total * shrink + jnp.sum(weights, axis=1, keepdims=True), weighted * shrink + added,
            ))  # fmt: skip
        return tuple(new)

    lowest = jnp.full((group, 1), jnp.finfo(jnp.float32).min, jnp.float32)
    nothing = (lowest, jnp.zeros((group, 1), jnp.float32), jnp.zeros((group, head_dim), jnp.float32))
    heads = jax.lax.fori_loop(0, num_blocks, one_block, (nothing,) * num_kv_heads)
    for head, (_, total, weighted) in enumerate(heads):
        out[head] = (weighted / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(out.dtype)
    last_slot = jax.lax.rem(first_slot + num_blocks - 1, 2)
    slot_ref[0] = 1 - last_slot

    @pl.when(length >= 0)
    def _() -> None:
        for copy in write_backs(last_slot):
            copy.wait()


def _product(x: Array, y: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
    """Sums in float32; float32 factors are not rounded."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        x, y, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
