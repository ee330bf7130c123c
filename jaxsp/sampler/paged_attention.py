"""Attention over the paged cache: one interface, and a table of what implements it.

Legend: B decoding rows, P prompts of a prefill call, L tokens of such a call, N query heads, K kv heads, W pages of a
row, T tokens of a page, S = W T positions, G pages of the cache, H head size, C tokens of a decode chunk.

A layer's cache is `(keys, values)`, each `[G, K, T, H]`. `xla` reads the pages of a row side by side as `[B, K, S, H]`,
which XLA's batched products read without a transpose: decoding gathers them once for a chunk of tokens and puts the new
tokens into their pages at its end. The kernels decode in the pages where they stand: they copy nothing, and read of a
row what it has and no more. Prompts are bound by arithmetic, not by reading, and go through XLA, but for those of the
kernel for CPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxsp.config import UsageError
from jaxsp.model import decoder
from jaxsp.model.attention import QUERY_CHUNK, attention, chunked_attention
from jaxsp.sampler import cpu_attention, gpu_attention, tpu_attention

Cache = list[tuple[Array, Array]]


@dataclass(frozen=True)
class CacheShape:
    """What decides whether an implementation can run."""

    num_slots: int
    max_context: int
    page_tokens: int
    head_dim: int
    dtype: Any
    device_kind: str


@dataclass(frozen=True)
class Implementation:
    """A way to decode from the cache."""

    name: str
    platform: str | None
    """Where it runs; None: everywhere."""
    page_tokens: int
    """Of a page, where the user names no size."""
    writes_pages: bool
    """Whether prompts are written into the cache by whole pages, not by tokens."""
    complaint: Callable[[CacheShape], str | None]
    """Why it cannot run, or None."""
    decode: Callable[..., tuple[Array, Array, Array]] | None
    """`(q [B, N, H], k [B, K, H], v [B, K, H], keys, values, table [B, W], length [B], is_active [B]) ->
    (out [B, N, H], keys, values)`; those of Pallas take `interpret` as well.

    Writes `k[b]` and `v[b]` at position `length[b]` of each active row, into the page that its table names, and lets
    `q[b]` look at the `length[b] + 1` first positions. A row that is not active writes nothing, and its numbers are
    finite. `keys` and `values` are changed in place where they are donated. None: rows are gathered."""
    prefill: Callable[..., tuple[Array, Array, Array]] | None = None
    """`(q [P, L, N, H], k [P, L, K, H], v [P, L, K, H], keys, values, table [P, W], start [P], count [P]) -> (out
    [P, L, N, H], keys, values)`: likewise for the `count[p]` first tokens of each prompt, from position `start[p]` on.
    None: XLA's products over gathered rows."""


def _tpu_complaint(shape: CacheShape) -> str | None:
    tile = 32 // jnp.dtype(shape.dtype).itemsize
    if shape.head_dim % 128:
        return f"needs a head size that is a multiple of 128, and the model's is {shape.head_dim}"
    if shape.page_tokens % tile:
        return f"needs pages of a multiple of {tile} tokens, and sampler.page_tokens = {shape.page_tokens}"
    table_bytes = 4 * shape.num_slots * -(-shape.max_context // shape.page_tokens)
    if table_bytes > tpu_attention.MAX_TABLE_BYTES:
        return (
            f"keeps the pages' numbers in {tpu_attention.MAX_TABLE_BYTES} bytes of scalar memory, and "
            f"sampler.num_slots x sampler.max_context / sampler.page_tokens make {table_bytes}; raise "
            "sampler.page_tokens"
        )
    return None


def _gpu_complaint(shape: CacheShape) -> str | None:
    if not gpu_attention.is_known(shape.device_kind):
        return f"is compiled by Pallas, which does not know the GPU {shape.device_kind!r}"
    if shape.head_dim < 16 or shape.head_dim & (shape.head_dim - 1):
        return f"needs a head size that is a power of 2 and at least 16, and the model's is {shape.head_dim}"
    return None


def _cpu_complaint(shape: CacheShape) -> str | None:
    return cpu_attention.complaint(shape.head_dim, jnp.dtype(shape.dtype))


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("tpu", "tpu", 64, True, _tpu_complaint, tpu_attention.decode_attention),
        Implementation("gpu", "gpu", 16, False, _gpu_complaint, gpu_attention.decode_attention),
        Implementation(
            "cpu", "cpu", 16, False, _cpu_complaint, cpu_attention.decode_attention, cpu_attention.prompt_attention
        ),
        Implementation("xla", None, 16, False, lambda shape: None, None),
    )
}
"""One for each platform, and one for all. A page is what prompts share, so a small one shares more; a copy from memory
wants a few kilobytes that stand together: 16 tokens of a head of 128 in bfloat16 are 4 KiB, enough for a GPU's loads,
and 64 are 16 KiB, one copy of a TPU's."""


class Chosen(NamedTuple):
    """How a sampler reads its cache."""

    implementation: Implementation
    page_tokens: int
    why_not: str | None = None
    """Why it is not the kernel of the platform where `auto` would have it so, beginning with the kernel's name."""


def choose(
    wanted: str | Implementation,
    device: Any,
    *,
    num_slots: int,
    max_context: int,
    page_tokens: int | None,
    head_dim: int,
    dtype: Any,
) -> Chosen:
    """What `sampler.attention` = `wanted` means on such a device.

    `auto` is the kernel of the platform where it can run, else `xla`. A `page_tokens` of None is what the
    implementation likes. Raises `UsageError` naming what keeps the named implementation from running.
    """

    def with_page(implementation: Implementation, why_not: str | None = None) -> Chosen:
        return Chosen(implementation, implementation.page_tokens if page_tokens is None else page_tokens, why_not)

    def complaint(implementation: Implementation) -> str | None:
        if implementation.platform not in (None, device.platform):
            return f"runs on {implementation.platform}, and the devices here are {device.platform}"
        own_page = with_page(implementation).page_tokens
        return implementation.complaint(
            CacheShape(num_slots, max_context, own_page, head_dim, dtype, device.device_kind)
        )

    if wanted == "auto":
        everywhere = IMPLEMENTATIONS["xla"]
        own = next((each for each in IMPLEMENTATIONS.values() if each.platform == device.platform), everywhere)
        why_not = complaint(own)
        return with_page(own) if why_not is None else with_page(everywhere, f"{own.name} {why_not}")
    if isinstance(wanted, str):
        if wanted not in IMPLEMENTATIONS:
            raise UsageError(f"sampler.attention = {wanted} is none of auto, {', '.join(IMPLEMENTATIONS)}")
        wanted = IMPLEMENTATIONS[wanted]
    why_not = complaint(wanted)
    if why_not is not None:
        raise UsageError(f"sampler.attention = {wanted.name} {why_not}; or set it to auto")
    return with_page(wanted)


def prefill_attend(
    implementation: Implementation,
    kv_sharding: NamedSharding | None,
    table: Int[Array, "P W"],
    position: Int[Array, "P L"],
    is_real: Bool[Array, "P L"],
) -> decoder.Attend:
    """Attention of prompts' tokens, which it writes into the rows' pages where they are real.

    A row's positions follow one another, and the real ones come first.
    """
    if implementation.prefill is not None:
        prefill = _over_heads(implementation.prefill, kv_sharding, (None, None))

        def attend_in_place(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, Any]:
            out, keys, values = prefill(q, k, v, *entry, table, position[:, 0], jnp.sum(is_real, axis=1))
            return out, (keys, values)

        return attend_in_place

    write = _write_pages if implementation.writes_pages else _write
    query_chunk = QUERY_CHUNK
    if implementation.decode is not None:  # scores of all rows at one time, against contexts of any length
        query_chunk = max(QUERY_CHUNK // len(table), 16)

    def attend(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        written = [write(old, new, table, position, is_real) for old, new in zip(entry, (k, v), strict=True)]
        # The barrier keeps XLA from fusing the write into what reads it, for which it would copy the whole cache.
        keys, values = jax.lax.optimization_barrier(written)
        rows = _side_by_side(keys, table), _side_by_side(values, table)
        num_positions = rows[0].shape[2]
        until_the_end = jnp.full((len(table), num_positions), num_positions)
        return chunked_attention(q, *rows, position, until_the_end, query_chunk), (keys, values)

    return attend


def open_rows(implementation: Implementation, cache: Cache, table: Int[Array, "B W"]) -> Cache:
    """What decoding carries from token to token: rows gathered from the cache, or the cache itself."""
    if implementation.decode is not None:
        return cache
    return [(_side_by_side(keys, table), _side_by_side(values, table)) for keys, values in cache]


def decode_attend(
    implementation: Implementation,
    kv_sharding: NamedSharding | None,
    table: Int[Array, "B W"],
    length: Int[Array, " B"],
    is_active: Bool[Array, " B"],
) -> decoder.Attend:
    """Attention of one token a row, at position `length`, over what `open_rows` gave, which it also writes into."""
    if implementation.decode is not None:
        decode = _over_heads(implementation.decode, kv_sharding, (None,))

        def attend_in_place(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, Any]:
            out, keys, values = decode(q[:, 0], k[:, 0], v[:, 0], *entry, table, length, is_active)
            return out[:, None], (keys, values)

        return attend_in_place

    def attend(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        keys, values = (_write_token(old, new[:, 0], length) for old, new in zip(entry, (k, v), strict=True))
        mask = (jnp.arange(keys.shape[2])[None] <= length[:, None])[:, None]
        return attention(q, keys, values, mask), (keys, values)

    return attend


def close_rows(
    implementation: Implementation,
    cache: Cache,
    rows: Cache,
    table: Int[Array, "B W"],
    begin: Int[Array, " B"],
    num_new: Int[Array, " B"],
    decode_chunk: int,
) -> Cache:
    """The cache with the `num_new` tokens from `begin` on (at most `decode_chunk`) that each row has got."""
    if implementation.decode is not None:
        return rows
    offset = jnp.arange(decode_chunk)
    position = begin[:, None] + offset
    is_real = offset < num_new[:, None]

    def put_back(pages: Array, row: Array) -> Array:
        index = jnp.minimum(position, row.shape[2] - 1)[:, None, :, None]
        new = jnp.take_along_axis(row, index, axis=2)
        return _write(pages, jnp.swapaxes(new, 1, 2), table, position, is_real)

    return jax.tree.map(put_back, cache, rows)


def _over_heads(
    attend: Callable[..., Any], kv_sharding: NamedSharding | None, lead: tuple[None, ...]
) -> Callable[..., Any]:
    """`attend` on every device with the kv heads that it holds and the query heads that read them; `lead` are the axes
    before the heads of what is new."""
    if kv_sharding is None:
        return attend
    new, cache = PartitionSpec(*lead, kv_sharding.spec[1]), PartitionSpec(None, kv_sharding.spec[1])
    whole = PartitionSpec()
    return jax.shard_map(
        attend,
        mesh=kv_sharding.mesh,
        in_specs=(new, new, new, cache, cache, whole, whole, whole),
        out_specs=(new, cache, cache),
        check_vma=False,  # what a kernel returns says nothing about it
    )


def _side_by_side(pages: Float[Array, "G K T H"], table: Int[Array, "B W"]) -> Float[Array, "B K S H"]:
    """The pages of each row in the order of its table."""
    gathered = jnp.swapaxes(pages[table], 1, 2)
    return gathered.reshape(*gathered.shape[:2], -1, gathered.shape[-1])


def _write(
    pages: Float[Array, "G K T H"],
    new: Float[Array, "B L K H"],
    table: Int[Array, "B W"],
    position: Int[Array, "B L"],
    is_real: Array,
) -> Float[Array, "G K T H"]:
    """`pages` with each real `new[b, l]` at `position[b, l]` of row b. XLA updates a donated cache in place."""
    num_pages, _, page_tokens, _ = pages.shape
    column = jnp.minimum(position // page_tokens, table.shape[1] - 1)
    page = jnp.where(is_real, jnp.take_along_axis(table, column, axis=1), num_pages)
    return pages.at[page, :, position % page_tokens].set(new.astype(pages.dtype), mode="drop")


def _write_pages(
    pages: Float[Array, "G K T H"],
    new: Float[Array, "B L K H"],
    table: Int[Array, "B W"],
    position: Int[Array, "B L"],
    is_real: Bool[Array, "B L"],
) -> Float[Array, "G K T H"]:
    """What `_write` gives, by whole pages that are read, changed and written: XLA for TPU lays the cache out anew to
    write single tokens, and copies all of it for that."""
    num_rows, length, num_kv_heads, head_dim = new.shape
    num_pages, _, page_tokens, _ = pages.shape
    first = position[:, :1] // page_tokens
    column = first + jnp.arange(-(-length // page_tokens) + 1)
    # token[b, c, t] is the place in the call of what comes to place t of the page of column c
    token = column[..., None] * page_tokens + jnp.arange(page_tokens) - position[:, :1, None]
    is_new = (token >= 0) & (token < jnp.sum(is_real, axis=1)[:, None, None])
    flat = jnp.clip(token, 0, length - 1).reshape(num_rows, -1, 1, 1)
    laid_out = jnp.take_along_axis(new, flat, axis=1).reshape(*token.shape, num_kv_heads, head_dim)
    page = jnp.take_along_axis(table, jnp.minimum(column, table.shape[1] - 1), axis=1)
    changed = jnp.where(is_new[:, :, None, :, None], jnp.swapaxes(laid_out, 2, 3).astype(pages.dtype), pages[page])
    return pages.at[jnp.where(jnp.any(is_new, axis=2), page, num_pages)].set(changed, mode="drop")


def _write_token(
    array: Float[Array, "B K S H"], token: Float[Array, "B K H"], place: Int[Array, " B"]
) -> Float[Array, "B K S H"]:
    """`array` with `array[b, :, place[b]] = token[b]`; a place past the end (an ended row's) harms no row that goes on.

    Two things keep this in place on CPU: one row is written as a slice, since XLA makes a select of such a scatter, and
    the barrier keeps XLA from fusing the write into the products that read it, for which it would copy the array.
    """
    if array.shape[0] == 1:
        written = jax.lax.dynamic_update_slice_in_dim(array, token[:, :, None], place[0], axis=2)
    else:
        written = array.at[jnp.arange(array.shape[0]), :, place].set(token, mode="drop")
    return jax.lax.optimization_barrier(written)
