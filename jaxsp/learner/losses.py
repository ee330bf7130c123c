"""Log-probabilities and entropies at targets, without whole logits, and their cross-entropy.

Legend: R rows, L tokens, T targets, C targets of one chunk, D embedding, V vocabulary, A allowed tokens of a target.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsp.model.decoder import Params, exact_products, logits


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


def cross_entropy(logprobs: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]) -> Float[Array, ""]:
    """The sum over targets of `-logprobs`; its denominator is the global number of targets."""
    return -jnp.sum(jnp.where(target_mask, logprobs, 0.0))
