"""From logits to tokens, with the log-probability of each token under the very distribution it was drawn from.

Legend: B rows (one sample each), V vocabulary, M blocks of the vocabulary, C tokens of a block.

Every setting is an array with one value per row, so no value of it needs a compilation of its own. The truncations
apply in this order: temperature, top-k, top-p (of what top-k kept), min-p.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_BLOCK = 128
"""Tokens per block of the two-stage draw. It divides the vocabularies of Qwen3, Llama 3 and SmolLM2."""


def process_logits(
    logits: Float[Array, "B V"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> Float[Array, "B V"]:
    """float32 scores whose softmax is the distribution sampled from: the largest is 0, -inf outside the kept set.

    top_k 0, top_p 1 and min_p 0 keep everything. top-k keeps the k most probable tokens; top-p the smallest set of the
    most probable ones whose mass reaches p (Holtzman et al. 2020, arXiv 1904.09751); min-p those with at least min_p
    times the largest probability (Nguyen et al. 2024, arXiv 2407.01082). Among equals the lower id goes first.
    A row with temperature 0 is greedy, and its scores are those of the untempered, untruncated distribution.
    """
    logits = logits.astype(jnp.float32)
    is_greedy = temperature == 0
    # The largest is taken away before the division, so that a tiny temperature overflows to -inf and not to +inf.
    scores = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(is_greedy, 1.0, temperature)[:, None]
    top_k = jnp.where(is_greedy, 0, top_k)
    top_p = jnp.where(is_greedy, 1.0, top_p)
    min_p = jnp.where(is_greedy, 0.0, min_p)
    # The sort costs as much as a layer of the model, so it runs only when some row asks for it.
    scores = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1)), _truncate, lambda scores, top_k, top_p: scores, scores, top_k, top_p
    )
    return jnp.where(scores >= jnp.log(min_p)[:, None], scores, -jnp.inf)


def sample_tokens(
    logits: Float[Array, "B V"],
    seeds: UInt32[Array, "B 2"],
    token_index: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """One int32 token per row, drawn from the softmax of `process_logits`, and its log-probability there.

    `seeds` holds 64-bit seeds as (high, low) words. A row's randomness is a function of its seed and of `token_index`
    (how many tokens it has sampled before), never of the other rows.

    The draw is the Gumbel-max trick in two exact stages, first a block of the vocabulary, by its total probability,
    then a token of the block: V / C + C random numbers instead of V, which on a CPU would cost a fifth of the step.
    """
    is_greedy = temperature == 0
    blocks = _in_blocks(process_logits(logits, temperature, top_k, top_p, min_p))
    block_max = jnp.max(blocks, axis=-1)
    shift = jnp.where(jnp.isneginf(block_max), 0.0, block_max)  # -inf - -inf would be NaN in an empty block
    block_mass = shift + jnp.log(jnp.sum(jnp.exp(blocks - shift[..., None]), axis=-1))

    noise = _gumbel_noise(seeds, token_index, blocks.shape[1] + _BLOCK)
    block_noise, token_noise = noise[:, :-_BLOCK], noise[:, -_BLOCK:]
    block = jnp.argmax(jnp.where(is_greedy[:, None], block_max, block_mass + block_noise), axis=-1)
    scores = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    within = jnp.argmax(jnp.where(is_greedy[:, None], scores, scores + token_noise), axis=-1)
    score = jnp.take_along_axis(scores, within[:, None], axis=1)[:, 0]
    return (block * _BLOCK + within).astype(jnp.int32), score - jax.nn.logsumexp(block_mass, axis=-1)


def raw_and_kept(
    logits: Float[Array, "B V"],
    edited: Float[Array, "B V"],
    token: Int[Array, " B"],
    temperature: Float[Array, " B"],
    top_k: Int[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
) -> tuple[Float[Array, " B"], Float[Array, " B"]]:
    """The log-probability of `token` in `softmax(logits)`, and the mass that the truncations kept of `edited`'s.

    `edited` are the logits after penalty, bias and choices; the mass is that of their tempered softmax.
    """
    raw = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    off = jnp.zeros_like(top_k), jnp.ones_like(top_p), jnp.zeros_like(min_p)
    kept, whole = (
        jax.nn.logsumexp(process_logits(edited, temperature, *truncations), axis=-1)
        for truncations in ((top_k, top_p, min_p), off)
    )
    return jnp.take_along_axis(raw, token[:, None], axis=1)[:, 0], jnp.exp(kept - whole)


def _truncate(scores: Float[Array, "B V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]) -> Float[Array, "B V"]:
    """`scores` with -inf outside top-k, then top-p."""
    vocab_size = scores.shape[1]
    ids = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    negated, sorted_ids = jax.lax.sort((-scores, ids), dimension=1, is_stable=True, num_keys=1)
    is_in_top_k = ids < jnp.where(top_k > 0, top_k, vocab_size)[:, None]
    probabilities = jax.nn.softmax(jnp.where(is_in_top_k, -negated, -jnp.inf), axis=-1)
    mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
    is_kept = is_in_top_k & ((mass_before < top_p[:, None]) | (top_p[:, None] >= 1))
    last = jnp.sum(is_kept, axis=-1, keepdims=True) - 1
    last_score = -jnp.take_along_axis(negated, last, axis=-1)
    last_id = jnp.take_along_axis(sorted_ids, last, axis=-1)
    is_inside: Bool[Array, "B V"] = (scores > last_score) | ((scores == last_score) & (ids <= last_id))
    return jnp.where(is_inside, scores, -jnp.inf)


def _in_blocks(scores: Float[Array, "B V"]) -> Float[Array, "B M C"]:
    batch, vocab_size = scores.shape
    padding = -vocab_size % _BLOCK
    if padding:
        scores = jnp.pad(scores, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return scores.reshape(batch, -1, _BLOCK)


def _gumbel_noise(seeds: UInt32[Array, "B 2"], token_index: Int[Array, " B"], count: int) -> Float[Array, "B count"]:
    """Gumbel noise that is a function of each row's seed and of its place in the sample."""

    def one_row(seed: Array, index: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        # "high" spends two words per number, so that tokens rarer than 2^-24 of their block can still be drawn.
        return jax.random.gumbel(key, (count,), jnp.float32, mode="high")

    return jax.vmap(one_row)(seeds, token_index)
