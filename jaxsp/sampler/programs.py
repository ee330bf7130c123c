"""The sampler's device programs: prefill into pages, decoding, copying a page.

Legend: B decoding rows, P prompts of a prefill call, L tokens of such a call, K kv heads, W pages of a row, T tokens of
a page, G pages of the cache, H head size, D embedding, V vocabulary, C tokens of a decode chunk.

The cache is a list with one `(keys, values)` per layer, each `[G, K, T, H]`; `jaxsp/sampler/paged_attention.py` writes
and reads it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jaxsp.model import decoder
from jaxsp.model.decoder import PLAIN, Params, Products
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.paged_attention import (
    IMPLEMENTATIONS,
    Cache,
    Implementation,
    close_rows,
    decode_attend,
    open_rows,
    prefill_attend,
)
from jaxsp.sampler.sampling import raw_and_kept, sample_tokens
from jaxsp.sampler.scheduler import Slots
from jaxsp.sampler.score_edits import ScoreEdits, after_token, edit_scores, seen_at_first


class Drawn(NamedTuple):
    """Tokens and what is known of each; arrays `[B]`, or `[B, C]` for several tokens of a row."""

    tokens: Any  # int32
    logprobs: Any  # float32
    raw_logprobs: Any = None  # float32 in a batch with score edits
    kept_mass: Any = None  # float32, likewise


@dataclass(frozen=True)
class Programs:
    """The jitted functions of one decoder, and how often they were compiled."""

    new_cache: Callable[..., Cache]
    """`(num_pages) -> cache` of zeros."""
    prefill: Callable[..., tuple[Cache, Array]]
    """`(params, cache, tokens, start, count, table) -> (cache, hidden)`, see `_prefill`."""
    first_tokens: Callable[..., Drawn]
    """`(params, hidden [B, D], slots, edits) -> drawn [B]`."""
    decode: Callable[..., tuple[Cache, Drawn, Array, Array]]
    """`(params, cache, table, slots, edits, stop_at) -> (cache, drawn [B, C], num_new, num_steps)`, see `_decode`."""
    copy_pages: Callable[..., Cache]
    """`(cache, source, target) -> cache` with page `target[i]` like page `source[i]`, where that target exists."""

    @property
    def num_compilations(self) -> int:
        functions: tuple[Any, ...] = (
            self.new_cache, self.prefill, self.first_tokens, self.decode, self.copy_pages,
        )  # fmt: skip
        return sum(function._cache_size() for function in functions)


@functools.lru_cache(maxsize=16)
def make_programs(
    sizes: DecoderSizes,
    compute_dtype: Any,
    page_tokens: int,
    decode_chunk: int,
    kv_sharding: NamedSharding | None,
    implementation: Implementation = IMPLEMENTATIONS["xla"],
    products: Products = PLAIN,
) -> Programs:
    """The programs for one decoder. The same arguments give the same object, so a second engine compiles nothing."""
    hidden_states = functools.partial(decoder.hidden_states, sizes, compute_dtype=compute_dtype, products=products)
    logits = functools.partial(products.logits, sizes)

    def constrain(cache: Any) -> Any:
        if kv_sharding is None:
            return cache
        return jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, kv_sharding), cache)

    def new_cache(num_pages: int) -> Cache:
        shape = (num_pages, sizes.num_kv_heads, page_tokens, sizes.head_dim)
        zeros = [[constrain(jnp.zeros(shape, compute_dtype)) for _ in range(2)] for _ in range(sizes.num_layers)]
        return [(keys, values) for keys, values in zeros]

    def prefill(params: Params, cache: Cache, tokens: Array, start: Array, count: Array, table: Array) -> Any:
        cache, hidden = _prefill(hidden_states, implementation, kv_sharding, params, cache, tokens, start, count, table)
        return constrain(cache), hidden

    def seen_before(edits: ScoreEdits | None) -> Array | None:
        return None if edits is None else seen_at_first(edits, sizes.vocab_size)

    def first_tokens(params: Params, hidden: Array, slots: Slots, edits: ScoreEdits | None) -> Drawn:
        return _sample(logits(params, hidden), slots, edits, seen_before(edits))

    def decode(
        params: Params, cache: Cache, table: Array, slots: Slots, edits: ScoreEdits | None, stop_at: Array
    ) -> Any:
        cache, *rest = _decode(
            hidden_states, logits, decode_chunk, implementation, kv_sharding, params, cache, table, slots, edits,
            seen_before(edits), stop_at,
        )  # fmt: skip
        return constrain(cache), *rest

    def copy_pages(cache: Cache, source: Array, target: Array) -> Cache:
        return constrain(jax.tree.map(lambda pages: pages.at[target].set(pages[source], mode="drop"), cache))

    return Programs(
        new_cache=jax.jit(new_cache, static_argnums=0),
        prefill=jax.jit(prefill, donate_argnums=1),
        first_tokens=jax.jit(first_tokens),
        decode=jax.jit(decode, donate_argnums=1),
        copy_pages=jax.jit(copy_pages, donate_argnums=0),
    )


def _prefill(
    hidden_states: Callable[..., tuple[Array, Any]],
    implementation: Implementation,
    kv_sharding: NamedSharding | None,
    params: Params,
    cache: Cache,
    tokens: Int[Array, "P L"],
    start: Int[Array, " P"],
    count: Int[Array, " P"],
    table: Int[Array, "P W"],
) -> tuple[Cache, Float[Array, "P D"]]:
    """Computes `count[p]` tokens of each prompt from position `start[p]` on: the cache with their keys and values, and
    the hidden state of the last of them.

    What stands before `start` is read from the row's pages. The rest of a row is padding, which is written nowhere.
    """
    offset = jnp.arange(tokens.shape[1])
    position = start[:, None] + offset
    attend = prefill_attend(implementation, kv_sharding, table, position, offset < count[:, None])
    states, cache = hidden_states(params, tokens, position, attend, cache)
    return cache, jnp.take_along_axis(states, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]


def _decode(
    hidden_states: Callable[..., tuple[Array, Any]],
    logits: Callable[[Params, Array], Array],
    decode_chunk: int,
    implementation: Implementation,
    kv_sharding: NamedSharding | None,
    params: Params,
    cache: Cache,
    table: Int[Array, "B W"],
    slots: Slots,
    edits: ScoreEdits | None,
    seen: Bool[Array, "B V"] | None,
    stop_at: Int[Array, ""],
) -> tuple[Cache, Drawn, Int[Array, " B"], Int[Array, ""]]:
    """Up to `decode_chunk` tokens for every active row, fewer if at most `stop_at` rows are still active.

    Row b's new tokens are the first `num_new[b]` of its line. A row stops after a stop id, at the end of a choice or
    after its last allowed token.
    """
    num_rows = table.shape[0]
    rows = open_rows(implementation, cache, table)

    def is_running(state: tuple[Any, ...]) -> Array:
        step, slots = state[0], state[1]
        return (step < decode_chunk) & (jnp.sum(slots.is_active) > stop_at)

    def one_token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state after every active row has drawn one token more."""
        step, slots, edits, seen, rows, drawn, num_new = state
        attend = decode_attend(implementation, kv_sharding, table, slots.length, slots.is_active)
        hidden, rows = hidden_states(params, slots.last_token[:, None], slots.length[:, None], attend, rows)
        one_drawn = _sample(logits(params, hidden[:, 0]), slots, edits, seen)
        token = one_drawn.tokens
        drawn = jax.tree.map(
            lambda all_, new: jax.lax.dynamic_update_slice(all_, new[:, None], (0, step)), drawn, one_drawn
        )
        is_last = jnp.any(token[:, None] == slots.stop_ids, axis=1) | (slots.num_left <= 1)
        if edits is not None:
            edits, seen, is_leaf = after_token(edits, seen, token)
            is_last |= is_leaf
        one = slots.is_active.astype(jnp.int32)
        slots = slots._replace(
            last_token=jnp.where(slots.is_active, token, slots.last_token),
            length=slots.length + one,
            token_index=slots.token_index + one,
            num_left=slots.num_left - one,
            is_active=slots.is_active & ~is_last,
        )
        return step + 1, slots, edits, seen, rows, drawn, num_new + one

    details = () if edits is None else (jnp.zeros((num_rows, decode_chunk)),) * 2
    drawn = Drawn(jnp.zeros((num_rows, decode_chunk), jnp.int32), jnp.zeros((num_rows, decode_chunk)), *details)
    start = (jnp.int32(0), slots, edits, seen, rows, drawn, jnp.zeros(num_rows, jnp.int32))
    num_steps, _, _, _, rows, drawn, num_new = jax.lax.while_loop(is_running, one_token, start)
    cache = close_rows(implementation, cache, rows, table, slots.length, num_new, decode_chunk)
    return cache, drawn, num_new, num_steps


def _sample(
    logits: Float[Array, "B V"], slots: Slots, edits: ScoreEdits | None, seen: Bool[Array, "B V"] | None
) -> Drawn:
    truncations = slots.temperature, slots.top_k, slots.top_p, slots.min_p
    if edits is None or seen is None:
        return Drawn(*sample_tokens(logits, slots.seed, slots.token_index, *truncations))
    edited = edit_scores(logits, edits, seen, slots.stop_ids)
    token, logprob = sample_tokens(edited, slots.seed, slots.token_index, *truncations)
    return Drawn(token, logprob, *raw_and_kept(logits, edited, token, *truncations))
