"""The sampler's device programs: prefill, decoding, and moving cached rows about.

Legend: B rows of the cache, P prompts of a prefill call, L tokens of such a call, N query heads, K kv heads,
S positions that the cache holds, H head size, D embedding, V vocabulary, T tokens of a decode chunk.

The cache is a list with one `(keys, values)` per layer, each `[B, K, S, H]`: the layout that XLA's batched products
read without a transpose. Its B and S are bucket sizes; it is gathered into another size when the load changes, so
no step reads rows or positions that nobody needs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxsp.model import decoder
from jaxsp.model.attention import attention, chunked_attention
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.sampling import sample_tokens
from jaxsp.sampler.scheduler import Slots

Cache = list[tuple[Array, Array]]


@dataclass(frozen=True)
class Programs:
    """The jitted functions of one decoder, and how often they were compiled."""

    new_cache: Callable[..., Cache]
    """`(num_rows, capacity) -> cache` of zeros."""
    prefill: Callable[..., tuple[Cache, Array]]
    """`(params, cache, tokens, start, last_index, hidden) -> (cache, hidden)`, see `_prefill`."""
    first_tokens: Callable[..., tuple[Array, Array]]
    """`(params, hidden [B, D], slots) -> (tokens, logprobs)`."""
    decode: Callable[..., tuple[Cache, Array, Array, Array, Array]]
    """`(params, cache, slots, stop_at) -> (cache, tokens, logprobs, num_new, num_steps)`, see `_decode`."""
    gather_rows: Callable[..., Array]
    """`(array, index, capacity) -> array`: rows `index` of one cached array, cut or zero-padded to `capacity`."""
    copy_rows: Callable[..., Array]
    """`(array, fresh, source, target, count) -> array` with `array[target[i]] = fresh[source[i]]` for i < count."""

    @property
    def num_compilations(self) -> int:
        functions: tuple[Any, ...] = (
            self.new_cache, self.prefill, self.first_tokens, self.decode, self.gather_rows, self.copy_rows,
        )  # fmt: skip
        return sum(function._cache_size() for function in functions)


@functools.lru_cache(maxsize=16)
def make_programs(sizes: DecoderSizes, compute_dtype: Any, decode_chunk: int, kv_sharding: Any) -> Programs:
    """The programs for one decoder. The same arguments give the same object, so a second engine compiles nothing."""

    def constrain(array: Array) -> Array:
        return array if kv_sharding is None else jax.lax.with_sharding_constraint(array, kv_sharding)

    def new_cache(num_rows: int, capacity: int) -> Cache:
        shape = (num_rows, sizes.num_kv_heads, capacity, sizes.head_dim)
        zeros = [[constrain(jnp.zeros(shape, compute_dtype)) for _ in range(2)] for _ in range(sizes.num_layers)]
        return [(keys, values) for keys, values in zeros]

    def prefill(params: Params, cache: Cache, tokens: Array, start: Array, last_index: Array, hidden: Array) -> Any:
        cache, hidden = _prefill(sizes, compute_dtype, params, cache, tokens, start, last_index, hidden)
        return jax.tree.map(constrain, cache), hidden

    def first_tokens(params: Params, hidden: Array, slots: Slots) -> tuple[Array, Array]:
        return _sample(decoder.logits(params, hidden), slots)

    def decode(params: Params, cache: Cache, slots: Slots, stop_at: Array) -> Any:
        cache, *rest = _decode(sizes, compute_dtype, decode_chunk, params, cache, slots, stop_at)
        return jax.tree.map(constrain, cache), *rest

    return Programs(
        new_cache=jax.jit(new_cache, static_argnums=(0, 1)),
        prefill=jax.jit(prefill, donate_argnums=1),
        first_tokens=jax.jit(first_tokens),
        decode=jax.jit(decode, donate_argnums=1),
        gather_rows=jax.jit(
            lambda array, index, capacity: constrain(_gather_rows(array, index, capacity)), static_argnums=2
        ),
        copy_rows=jax.jit(lambda *args: constrain(_copy_rows(*args)), donate_argnums=0),
    )


def _prefill(
    sizes: DecoderSizes,
    compute_dtype: Any,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "P L"],
    start: Int[Array, ""],
    last_index: Int[Array, " P"],
    hidden: Float[Array, "P D"],
) -> tuple[Cache, Float[Array, "P D"]]:
    """Positions `start` to `start + L` of each prompt: the cache with their keys and values written.

    `hidden` is carried from call to call and takes a row's hidden state when `last_index`, its last prompt token, is
    among these positions. Tokens after it are padding: what they write is overwritten before anything reads it.
    """
    length = tokens.shape[1]
    positions = start + jnp.arange(length)
    until_the_end = jnp.full((len(tokens), cache[0][0].shape[2]), cache[0][0].shape[2])

    def attend(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), start, axis=2)
            for old, new in zip(entry, (k, v), strict=True)
        )
        return chunked_attention(q, keys, values, positions, until_the_end), (keys, values)

    states, cache = decoder.hidden_states(
        sizes, params, tokens, jnp.broadcast_to(positions, tokens.shape), attend, cache, compute_dtype=compute_dtype
    )
    offset = last_index - start
    here = jnp.take_along_axis(states, jnp.clip(offset, 0, length - 1)[:, None, None], axis=1)[:, 0]
    return cache, jnp.where(((offset >= 0) & (offset < length))[:, None], here, hidden)


def _decode(
    sizes: DecoderSizes,
    compute_dtype: Any,
    decode_chunk: int,
    params: Params,
    cache: Cache,
    slots: Slots,
    stop_at: Int[Array, ""],
) -> tuple[Cache, Int[Array, "B T"], Float[Array, "B T"], Int[Array, " B"], Int[Array, ""]]:
    """Up to `decode_chunk` tokens for every active row, fewer if at most `stop_at` rows are still active.

    Row b's new tokens are the first `num_new[b]` of its line. A row stops after a stop id or its last allowed token.
    """
    num_rows, capacity = cache[0][0].shape[0], cache[0][0].shape[2]

    def attend_at(length: Array) -> decoder.Attend:
        mask = (jnp.arange(capacity)[None] <= length[:, None])[:, None]

        def attend(q: Array, k: Array, v: Array, entry: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
            keys, values = (_write_token(old, new[:, 0], length) for old, new in zip(entry, (k, v), strict=True))
            return attention(q, keys, values, mask), (keys, values)

        return attend

    def is_running(state: tuple[Any, ...]) -> Array:
        step, slots = state[0], state[1]
        return (step < decode_chunk) & (jnp.sum(slots.is_active) > stop_at)

    def one_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, slots, cache, tokens, logprobs, num_new = state
        hidden, cache = decoder.hidden_states(
            sizes, params, slots.last_token[:, None], slots.length[:, None], attend_at(slots.length), cache,
            compute_dtype=compute_dtype,
        )  # fmt: skip
        token, logprob = _sample(decoder.logits(params, hidden[:, 0]), slots)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        logprobs = jax.lax.dynamic_update_slice(logprobs, logprob[:, None], (0, step))
        is_last = jnp.any(token[:, None] == slots.stop_ids, axis=1) | (slots.num_left <= 1)
        one = slots.is_active.astype(jnp.int32)
        slots = slots._replace(
            last_token=jnp.where(slots.is_active, token, slots.last_token),
            length=slots.length + one,
            token_index=slots.token_index + one,
            num_left=slots.num_left - one,
            is_active=slots.is_active & ~is_last,
        )
        return step + 1, slots, cache, tokens, logprobs, num_new + one

    shape = (num_rows, decode_chunk)
    start = (jnp.int32(0), slots, cache, jnp.zeros(shape, jnp.int32), jnp.zeros(shape), jnp.zeros(num_rows, jnp.int32))
    num_steps, _, cache, tokens, logprobs, num_new = jax.lax.while_loop(is_running, one_token, start)
    return cache, tokens, logprobs, num_new, num_steps


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


def _sample(logits: Float[Array, "B V"], slots: Slots) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    return sample_tokens(
        logits, slots.seed, slots.token_index, slots.temperature, slots.top_k, slots.top_p, slots.min_p
    )


def _gather_rows(array: Float[Array, "B K S H"], index: Int[Array, " B2"], capacity: int) -> Float[Array, "B2 K S2 H"]:
    array = jnp.take(array[:, :, :capacity], index, axis=0)
    return jnp.pad(array, ((0, 0), (0, 0), (0, capacity - array.shape[2]), (0, 0)))


def _copy_rows(
    array: Float[Array, "B K S H"],
    fresh: Float[Array, "P K S2 H"],
    source: Int[Array, " B"],
    target: Int[Array, " B"],
    count: Int[Array, ""],
) -> Float[Array, "B K S H"]:
    """A loop of row copies: XLA keeps it in place, where a gather and a select would rewrite the whole array."""
    fresh = fresh[:, :, : array.shape[2]]

    def copy(i: Array, array: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(fresh, source[i], axis=0)
        return jax.lax.dynamic_update_slice(array, row, (target[i], 0, 0, 0))

    return jax.lax.fori_loop(0, count, copy, array)
