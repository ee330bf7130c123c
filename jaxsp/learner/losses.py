"""Losses of the policy as sums over targets; whoever calls them divides by counts that are global and known before.

Legend: R rows, L tokens, T targets, C targets of one chunk, D embedding, V vocabulary, A allowed tokens of a target.

Every function takes `target_mask`, and what stands in a masked slot changes nothing: masked slots are emptied before
any exponential, so that they may hold -inf or NaN and gradients stay finite.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsp.model.decoder import Params, exact_products, logits

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 already says "another distribution", e^89 overflows float32."""


def token_logprobs(
    params: Params,
    hidden: Float[Array, "R L D"],
    predictor: Int[Array, "R T"],
    target_tokens: Int[Array, "R T"],
    temperatures: Float[Array, "R T"],
    target_mask: Bool[Array, "R T"],
    allowed: Int[Array, "R T A"] | None = None,
    *,
    chunk: int,
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    """Log-probability of each target and entropy of its distribution, `softmax(logits / temperature)`, in float32.

    `predictor` says whose hidden states predict each target. `allowed` holds the tokens that a target was drawn from,
    filled up with -1; the softmax is over these, or over the vocabulary where there are none. Masked slots give 0.
    Logits exist for at most `chunk` targets at a time (rounded down to a multiple of R, and at least R), forward and
    backward, and none are computed for chunks after the last unmasked target. Both results have gradients.
    """
    num_rows, num_targets = predictor.shape
    width = max(1, min(chunk // num_rows, num_targets))
    slots = jnp.arange(1, num_targets + 1)
    num_used = jnp.max(jnp.where(target_mask, slots[None], 0))
    num_chunks = (num_used + width - 1) // width
    selected = jnp.take_along_axis(hidden, predictor[..., None], axis=1, mode="clip")
    temperatures = jnp.where(target_mask, temperatures, 1.0)
    if padding := -num_targets % width:
        selected = jnp.pad(selected, ((0, 0), (0, padding), (0, 0)))
        target_tokens = jnp.pad(target_tokens, ((0, 0), (0, padding)))
        temperatures = jnp.pad(temperatures, ((0, 0), (0, padding)), constant_values=1.0)
        if allowed is not None:
            allowed = jnp.pad(allowed, ((0, 0), (0, padding), (0, 0)), constant_values=-1)
    head = {name: params[name] for name in ("lm_head", "embed") if name in params}
    head = {"lm_head": head["lm_head"]} if "lm_head" in head else head
    logprobs, entropy = _chunked_logprobs(width, head, selected, target_tokens, temperatures, allowed, num_chunks)
    return (
        jnp.where(target_mask, logprobs[:, :num_targets], 0.0),
        jnp.where(target_mask, entropy[:, :num_targets], 0.0),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked_logprobs(
    width: int,
    head: Params,
    selected: Float[Array, "R T D"],
    target_tokens: Int[Array, "R T"],
    temperatures: Float[Array, "R T"],
    allowed: Int[Array, "R T A"] | None,
    num_chunks: Int[Array, ""],
) -> tuple[Float[Array, "R T"], Float[Array, "R T"]]:
    return _chunked_forward(width, head, selected, target_tokens, temperatures, allowed, num_chunks)[0]


def _scores(
    head: Params,
    selected: Float[Array, "R C D"],
    temperatures: Float[Array, "R C"],
    allowed: Int[Array, "R C A"] | None,
) -> Float[Array, "R C V"]:
    """Tempered logits, -inf outside the allowed tokens of a target that has some."""
    scores = logits(head, selected) / temperatures[..., None]
    if allowed is None:
        return scores
    row, column = jnp.ogrid[: scores.shape[0], : scores.shape[1]]
    place = jnp.where(allowed < 0, scores.shape[-1], allowed)  # past the end: dropped
    is_allowed = jnp.zeros(scores.shape, bool).at[row[..., None], column[..., None], place].set(True, mode="drop")
    is_free = jnp.all(allowed < 0, axis=-1, keepdims=True)
    return jnp.where(is_allowed | is_free, scores, -jnp.inf)


def _chunked_forward(
    width: int,
    head: Params,
    selected: Array,
    target_tokens: Array,
    temperatures: Array,
    allowed: Array | None,
    num_chunks: Array,
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    """The results and what the backward pass needs: one float32 log-sum-exp for each target, no logits."""
    cast_head = jax.tree.map(lambda x: x.astype(selected.dtype), head)

    def one_chunk(index: Array, results: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        """The results, with those of one chunk of targets written into them."""
        hidden, tokens, temperature, allowed_here = (
            _chunk(x, index, width) for x in (selected, target_tokens, temperatures, allowed)
        )
        scores = _scores(cast_head, hidden, temperature, allowed_here)
        largest = jnp.max(scores, axis=-1)
        centred = scores - largest[..., None]
        exponentials = jnp.exp(centred)
        total = jnp.sum(exponentials, axis=-1)
        log_total = jnp.log(total)
        target = jnp.take_along_axis(centred, tokens[..., None], axis=-1)[..., 0]
        # Where the exponential is 0, its score may be -inf, and their product would be NaN.
        entropy = log_total - jnp.sum(exponentials * jnp.where(exponentials > 0, centred, 0.0), axis=-1) / total
        logprobs, entropies, log_sums = results
        return (
            _write(logprobs, target - log_total, index, width),
            _write(entropies, entropy, index, width),
            _write(log_sums, log_total + largest, index, width),
        )

    zeros = jnp.zeros(selected.shape[:2], jnp.float32)
    logprobs, entropy, log_sum = jax.lax.fori_loop(0, num_chunks, one_chunk, (zeros, zeros, zeros))
    saved = head, selected, target_tokens, temperatures, allowed, num_chunks, log_sum, entropy
    return (logprobs, entropy), saved


def _chunked_backward(width: int, saved: tuple[Any, ...], cotangents: tuple[Array, Array]) -> tuple[Any, ...]:
    """With p the distribution: d logprob / d score = onehot - p, and d entropy / d score = -p (log p + entropy).

    The head's gradient is added up over chunks in float32, whatever the compute dtype.
    """
    head, selected, target_tokens, temperatures, allowed, num_chunks, log_sum, entropy = saved
    cast_head = jax.tree.map(lambda x: x.astype(selected.dtype), head)
    (kernel,) = jax.tree.leaves(cast_head)
    is_tied = "embed" in head  # [V, D], else [D, V]
    inputs = (selected, target_tokens, temperatures, allowed, log_sum, entropy, *cotangents)

    def one_chunk(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
        """The kernel's gradient with a chunk's added, and the hidden states' with it written into them."""
        hidden, tokens, temperature, allowed_here, log_sums, entropies, d_logprob, d_entropy = (
            _chunk(x, index, width) for x in inputs
        )
        d_kernel, d_selected = gradients
        log_p = _scores(cast_head, hidden, temperature, allowed_here) - log_sums[..., None]
        p = jnp.exp(log_p)
        log_p = jnp.where(p > 0, log_p, 0.0)  # it is multiplied by p, and 0 times -inf would be NaN
        is_target = tokens[..., None] == jnp.arange(log_p.shape[-1])[None, None]
        d_scores = jnp.where(is_target, d_logprob[..., None], 0.0) - p * (
            d_logprob[..., None] + d_entropy[..., None] * (log_p + entropies[..., None])
        )
        d_scores = (d_scores / temperature[..., None]).astype(hidden.dtype)
        hidden_equation, kernel_equation = ("rcv,vd->rcd", "rcv,rcd->vd") if is_tied else ("rcv,dv->rcd", "rcv,rcd->dv")
        with exact_products(hidden.dtype):
            d_hidden = jnp.einsum(hidden_equation, d_scores, kernel)
            d_kernel += jnp.einsum(kernel_equation, d_scores, hidden, preferred_element_type=jnp.float32)
        return d_kernel, _write(d_selected, d_hidden, index, width)

    zeros = (jnp.zeros(kernel.shape, jnp.float32), jnp.zeros_like(selected))
    d_kernel, d_selected = jax.lax.fori_loop(0, num_chunks, one_chunk, zeros)
    d_head = jax.tree.map(lambda x: d_kernel.astype(x.dtype), head)
    return d_head, d_selected, None, None, None, None


_chunked_logprobs.defvjp(_chunked_forward, _chunked_backward)


def _chunk(x: Any, index: Array, width: int) -> Any:
    """One chunk of targets; of None, which is an option not taken, None."""
    return None if x is None else jax.lax.dynamic_slice_in_dim(x, index * width, width, axis=1)


def _write(x: Array, chunk: Array, index: Array, width: int) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, index * width, axis=1)


def clipped_surrogate(
    logprobs: Float[Array, "*rows T"],
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    *,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> Float[Array, ""]:
    """The sum over targets of `-w min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`.

    `ratio = exp(logprobs - old_logprobs)` where the learner computed `old_logprobs` before any update (PPO, Schulman
    et al. 2017, arXiv 1707.06347, equation 7; two bounds as in DAPO, arXiv 2503.14476, equation 8), and
    `w = min(exp(old_logprobs - behaviour_logprobs), importance_cap)`, without gradient, corrects the sampler's numbers
    against the learner's. DrGRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2) divides the sum by a constant length
    and by the number of trajectories, not by the lengths of the answers, which would favour short right ones and long
    wrong ones; so does SPICE (arXiv 2510.24684), which uses it.
    """
    ratio = jnp.exp(_log_ratio(logprobs, jax.lax.stop_gradient(old_logprobs), target_mask))
    weight = importance_weights(old_logprobs, behaviour_logprobs, target_mask, importance_cap)
    advantages = jnp.where(target_mask, advantages, 0.0)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return -jnp.sum(weight * jnp.minimum(ratio * advantages, clipped * advantages), where=target_mask)


def importance_weights(
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    importance_cap: float,
) -> Float[Array, "*rows T"]:
    """Token-level truncated importance weights `min(exp(old - behaviour), cap)`, without gradient; 1 where masked."""
    log_weight = _log_ratio(old_logprobs, behaviour_logprobs, target_mask)
    return jax.lax.stop_gradient(jnp.where(target_mask, jnp.minimum(jnp.exp(log_weight), importance_cap), 1.0))


def k3_kl(
    logprobs: Float[Array, "*rows T"],
    reference_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    weights: Float[Array, "*rows T"] | None = None,
) -> Float[Array, ""]:
    """The sum over targets of `exp(d) - 1 - d` with `d = reference_logprobs - logprobs` (Schulman 2020, k3).

    Each is multiplied by its `weights`, where given.

    On samples of the policy its mean is KL(policy || reference), at less variance than that of `-d` and never negative.
    Its gradient in the loss, `(1 - exp(d)) grad logprobs`, is on average that of KL(reference || policy).
    """
    log_ratio = _log_ratio(jax.lax.stop_gradient(reference_logprobs), logprobs, target_mask)
    divergence = jnp.exp(log_ratio) - 1 - log_ratio
    if weights is not None:
        divergence *= jnp.where(target_mask, weights, 0.0)
    return jnp.sum(divergence, where=target_mask)


def cross_entropy(logprobs: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]) -> Float[Array, ""]:
    """The sum over targets of `-logprobs`; its denominator is the global number of targets."""
    return -jnp.sum(jnp.where(target_mask, logprobs, 0.0))


def policy_metrics(
    logprobs: Float[Array, "*rows T"],
    entropy: Float[Array, "*rows T"],
    old_logprobs: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Float[Array, ""]]:
    """Means over targets of entropy and ratio, the largest ratio, and the share of targets whose gradient is clipped.

    A target is clipped where its ratio has left the bounds on the side that its advantage pushes to.
    """
    ratio = jnp.exp(_log_ratio(logprobs, old_logprobs, target_mask))
    advantages = jnp.where(target_mask, advantages, 0.0)
    is_clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return {
        "policy/entropy": _mean(entropy, target_mask),
        "policy/ratio_mean": _mean(ratio, target_mask),
        "policy/ratio_max": jnp.max(ratio, where=target_mask, initial=0.0),
        "policy/clipped_frac": _mean(is_clipped.astype(jnp.float32), target_mask),
    }


def mismatch_metrics(
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    *,
    importance_cap: float,
) -> dict[str, Float[Array, ""]]:
    """How far the learner's log-probabilities are from the sampler's, of the same tokens under the same parameters.

    With `d = old - behaviour`: mean and largest |d|, the estimates `k1 = mean(-d)` and `k3 = mean(exp(d) - 1 - d)` of
    KL(sampler || learner), the correlation of the two probabilities (NaN where they do not vary), and the share of
    importance weights that were cut.
    """
    log_ratio = _log_ratio(old_logprobs, behaviour_logprobs, target_mask)
    probabilities = [jnp.exp(jnp.where(target_mask, x, 0.0)) for x in (old_logprobs, behaviour_logprobs)]
    old, behaviour = (jnp.where(target_mask, p - _mean(p, target_mask), 0.0) for p in probabilities)
    spread = jnp.sqrt(jnp.sum(old * old) * jnp.sum(behaviour * behaviour))
    is_capped = jnp.exp(log_ratio) > importance_cap
    return {
        "mismatch/abs_mean": _mean(jnp.abs(log_ratio), target_mask),
        "mismatch/abs_max": jnp.max(jnp.abs(log_ratio)),
        "mismatch/k1": _mean(-log_ratio, target_mask),
        "mismatch/k3": _mean(jnp.exp(log_ratio) - 1 - log_ratio, target_mask),
        "mismatch/pearson": jnp.where(spread > 0, jnp.sum(old * behaviour) / jnp.where(spread > 0, spread, 1), jnp.nan),
        "policy/importance_capped_frac": _mean(is_capped.astype(jnp.float32), target_mask),
    }


def _log_ratio(
    numerator: Float[Array, "*rows T"], denominator: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """`numerator - denominator`, clamped, 0 where masked. Both are emptied first: -inf minus -inf has no gradient."""
    numerator, denominator = jnp.where(target_mask, numerator, 0.0), jnp.where(target_mask, denominator, 0.0)
    return jnp.clip(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _mean(x: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]) -> Float[Array, ""]:
    """The mean over targets; 0 where there is none."""
    return jnp.sum(x, where=target_mask) / jnp.maximum(jnp.sum(target_mask), 1).astype(jnp.float32)
