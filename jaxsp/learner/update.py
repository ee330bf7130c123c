"""One optimizer update as one jitted function: micro-batches one after the other, then the optimizer.

Legend: M micro-batches, R rows, L tokens of a row, T targets of a row.

Losses are sums divided by global counts that the caller passes, so the result depends neither on how trajectories are
packed and split into micro-batches nor on how arrays are sharded. The loop over micro-batches ends after the last one
that has a target, and computes rows that end early at a shorter length: of the padding little costs anything.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxsp.learner.batch import Batch, microbatch_lengths
from jaxsp.learner.diagnostics import gradient_norms
from jaxsp.learner.losses import cross_entropy, token_logprobs
from jaxsp.learner.policy_loss import Anchors, PolicyLoss
from jaxsp.learner.ratios import log_ratio, trajectory_means
from jaxsp.learner.state import TrainState, state_shardings
from jaxsp.model.attention import forest_attention
from jaxsp.model.decoder import PLAIN, Params, abstract_params, hidden_states
from jaxsp.model.moe import run_experts_on
from jaxsp.model.sizes import DecoderSizes

Metrics = dict[str, jax.Array]
Forward = Callable[[Params, Batch], tuple[jax.Array, jax.Array]]
"""Parameters and one micro-batch to log-probabilities and entropies of its targets, float32 `[R, T]`."""
Loss = Callable[[jax.Array, Batch, Any], jax.Array]
"""`loss(logprobs, batch, extras)`: a sum over targets of arrays with any leading axes, already divided."""


def make_logprobs_fn(
    sizes: DecoderSizes,
    *,
    compute_dtype: Any,
    logits_chunk: int,
    param_shardings: Params | None = None,
    batch_sharding: jax.sharding.NamedSharding | None = None,
) -> Callable[[Params, Batch], jax.Array]:
    """A jitted `(params, batch) -> logprobs`, float32 `[M, R, T]`, 0 where masked; params are kept.

    For old log-probabilities when several updates share them, and for a reference policy's.
    """
    forward = _make_forward(sizes, compute_dtype, logits_chunk, False, param_shardings)

    def logprobs(params: Params, batch: Batch) -> jax.Array:
        return _all_logprobs(forward, params, batch)

    if param_shardings is None:
        return jax.jit(logprobs)
    return jax.jit(logprobs, in_shardings=(param_shardings, batch_sharding), out_shardings=batch_sharding)


def make_update(
    sizes: DecoderSizes,
    optimizer: optax.GradientTransformation,
    policy_loss: PolicyLoss,
    *,
    compute_dtype: Any,
    logits_chunk: int,
    remat: bool = True,
    param_shardings: Params | None = None,
    batch_sharding: jax.sharding.NamedSharding | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted policy-gradient update, whose docstring is that of `update` below; it donates the state.

    With `param_shardings` (a tree like the parameters) and `batch_sharding` (of arrays `[M, R, ...]`, rows spread over
    data axes) parameters, moments and gradients stay sharded.
    """
    forward = _make_forward(sizes, compute_dtype, logits_chunk, remat, param_shardings)

    def update(
        state: TrainState,
        batch: Batch,
        old_logprobs: jax.Array | None,
        reference_logprobs: jax.Array | None,
        num_trajectories: jax.typing.ArrayLike,
        length_normaliser: jax.typing.ArrayLike,
    ) -> tuple[TrainState, Metrics]:
        """The state after one update, and scalar metrics.

        `old_logprobs` `[M, R, T]` are those before a step's first update; None says that this is the first, where they
        are the current ones and need no forward pass of their own. With `reference_logprobs` `[M, R, T]` the divergence
        is logged, and is in the loss if that has such a term; the batch must then have kept trajectories of advantage
        0. The loss is the weighted sum over targets / (num_trajectories * length_normaliser), both of the whole update.
        """
        denominator = jnp.asarray(num_trajectories, jnp.float32) * jnp.asarray(length_normaliser, jnp.float32)
        anchors = _anchors(forward, policy_loss, state["params"], batch, old_logprobs, reference_logprobs)
        gradients, logprobs, entropy = _accumulate(
            forward, policy_loss, state["params"], batch, lambda index: (_take(anchors, index), denominator)
        )
        if anchors.old is None:
            anchors = anchors._replace(old=logprobs)
        metrics = {
            "policy/loss": policy_loss(logprobs, batch, (anchors, denominator)),
            **policy_loss.metrics(logprobs, entropy, batch, anchors),
        }
        return _apply(optimizer, state, gradients, metrics, param_shardings)

    return _jit_update(update, sizes, optimizer, param_shardings, batch_sharding, num_arrays=3, num_counts=2)


def make_warm_start_update(
    sizes: DecoderSizes,
    optimizer: optax.GradientTransformation,
    *,
    compute_dtype: Any,
    logits_chunk: int,
    remat: bool = True,
    param_shardings: Params | None = None,
    batch_sharding: jax.sharding.NamedSharding | None = None,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """A jitted `update(state, batch, num_target_tokens) -> (state, metrics)` by cross-entropy; it donates the state.

    The loss is the sum over targets / `num_target_tokens`, counted over the whole update. Make the batch with any
    advantage but 0: it plays no part.
    """
    forward = _make_forward(sizes, compute_dtype, logits_chunk, remat, param_shardings)

    def loss(logprobs: jax.Array, batch: Batch, denominator: Any) -> jax.Array:
        return cross_entropy(logprobs, batch.target_mask) / denominator

    def update(state: TrainState, batch: Batch, num_target_tokens: jax.typing.ArrayLike) -> tuple[TrainState, Metrics]:
        denominator = jnp.asarray(num_target_tokens, jnp.float32)
        gradients, logprobs, entropy = _accumulate(forward, loss, state["params"], batch, lambda _: denominator)
        num_tokens = jnp.sum(batch.target_mask).astype(jnp.float32)
        metrics = {
            "policy/loss": loss(logprobs, batch, denominator),
            "policy/num_tokens": num_tokens,
            "policy/entropy": jnp.sum(entropy) / jnp.maximum(num_tokens, 1.0),
        }
        return _apply(optimizer, state, gradients, metrics, param_shardings)

    return _jit_update(update, sizes, optimizer, param_shardings, batch_sharding, num_arrays=1, num_counts=1)


def _anchors(
    forward: Forward,
    policy_loss: PolicyLoss,
    params: Params,
    batch: Batch,
    old: jax.Array | None,
    reference: jax.Array | None,
) -> Anchors:
    """What the loss compares with.

    What it takes of whole trajectories has a forward pass of its own, as their segments may stand in several
    micro-batches.
    """
    sequence_log_ratio = importance_log_ratio = None
    if policy_loss.is_of_sequences and old is not None:
        current = _all_logprobs(forward, params, batch)
        log_ratios = log_ratio(current, old, batch.target_mask)
        sequence_log_ratio = trajectory_means(log_ratios, batch.target_sequence, batch.target_mask)
    if policy_loss.weighs_sequences:
        old = _all_logprobs(forward, params, batch) if old is None else old
        importance_log_ratio = policy_loss.importance_log_ratio(old, batch)
    return Anchors(old, reference, sequence_log_ratio, importance_log_ratio)


def _all_logprobs(forward: Forward, params: Params, batch: Batch) -> jax.Array:
    """Log-probabilities of all targets, `[M, R, T]`, 0 where masked."""

    def one_microbatch(index: jax.Array, microbatch: Batch, results: jax.Array) -> jax.Array:
        return results.at[index].set(forward(params, microbatch)[0])

    return _fold_microbatches(batch, one_microbatch, jnp.zeros(batch.target_mask.shape, jnp.float32))


def _make_forward(
    sizes: DecoderSizes, compute_dtype: Any, logits_chunk: int, remat: bool, param_shardings: Params | None
) -> Forward:
    mesh = None if param_shardings is None else jax.tree.leaves(param_shardings)[0].mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    products = replace(PLAIN, run_experts=run_experts_on(mesh, platform, splits_tokens=True))

    def forward(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Log-probability of each target and entropy of its distribution, both `[R, T]`."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
            return forest_attention(q, k, v, batch.visible_until), cache

        hidden, _ = hidden_states(
            sizes, params, batch.tokens, batch.positions, attend, compute_dtype=compute_dtype, remat=remat,
            products=products,
        )  # fmt: skip
        with jax.named_scope("token_logprobs"):
            return token_logprobs(
                params,
                hidden,
                batch.target_predictor,
                batch.target_tokens,
                batch.temperatures,
                batch.target_mask,
                batch.allowed_tokens,
                chunk=logits_chunk,
            )

    return forward


def _accumulate(
    forward: Forward, loss: Loss, params: Params, batch: Batch, extras_of: Callable[[jax.Array], Any]
) -> tuple[Params, jax.Array, jax.Array]:
    """The loss's float32 gradients summed over micro-batches; log-probabilities and entropies `[M, R, T]`."""

    def loss_of(params: Params, index: jax.Array, microbatch: Batch) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        logprobs, entropy = forward(params, microbatch)
        return loss(logprobs, microbatch, extras_of(index)), (logprobs, entropy)

    def one_microbatch(index: jax.Array, microbatch: Batch, carry: tuple[Params, jax.Array, jax.Array]) -> Any:
        gradients, logprobs, entropy = carry
        own, results = jax.grad(loss_of, has_aux=True)(params, index, microbatch)
        gradients = jax.tree.map(lambda total, x: total + x.astype(jnp.float32), gradients, own)
        return gradients, logprobs.at[index].set(results[0]), entropy.at[index].set(results[1])

    zeros = jnp.zeros(batch.target_mask.shape, jnp.float32)
    no_gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    return _fold_microbatches(batch, one_microbatch, (no_gradients, zeros, zeros))


def _apply(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    gradients: Params,
    metrics: Metrics,
    param_shardings: Params | None,
) -> tuple[TrainState, Metrics]:
    """One optimizer step, left out (parameters and moments stay) where a gradient is not finite."""
    if param_shardings is not None:
        gradients = jax.lax.with_sharding_constraint(gradients, param_shardings)
    grad_norm = optax.tree.norm(gradients)
    is_finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    kept = {"params": state["params"], "opt_state": state["opt_state"]}
    applied = {"params": params, "opt_state": opt_state}
    chosen = jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), applied, kept)
    metrics = {
        **metrics,
        "policy/grad_norm": grad_norm,
        **gradient_norms(gradients),
        "policy/update_norm": jnp.where(is_finite, optax.tree.norm(updates), 0.0),
        "learner/skipped_updates": 1.0 - is_finite.astype(jnp.float32),
    }
    return {**chosen, "step": state["step"] + 1}, metrics


def _jit_update(
    update: Callable[..., tuple[TrainState, Metrics]],
    sizes: DecoderSizes,
    optimizer: optax.GradientTransformation,
    param_shardings: Params | None,
    batch_sharding: jax.sharding.NamedSharding | None,
    *,
    num_arrays: int,
    num_counts: int,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """Jits `update(state, *arrays, *counts)`, where arrays are `[M, R, ...]` or None, and donates the state."""
    if param_shardings is None:
        return jax.jit(update, donate_argnums=0)
    state = state_shardings(optimizer, abstract_params(sizes), param_shardings)
    return jax.jit(
        update,
        in_shardings=(state, *[batch_sharding] * num_arrays, *[state["step"]] * num_counts),
        out_shardings=(state, state["step"]),
        donate_argnums=0,
    )


def _fold_microbatches[Carry](
    batch: Batch, one_microbatch: Callable[[jax.Array, Batch, Carry], Carry], carry: Carry
) -> Carry:
    """`one_microbatch(index, microbatch, carry)` over those with targets, rows cut to `microbatch_lengths`."""

    def end_of(has_target: jax.Array) -> jax.Array:
        in_microbatch = jnp.any(has_target, axis=(1, 2))
        return jnp.max(jnp.where(in_microbatch, jnp.arange(1, len(in_microbatch) + 1), 0))

    full, shortest = microbatch_lengths(*batch.tokens.shape[::2])
    num_used = end_of(batch.target_mask)
    # A row's last stored token predicts a target, so predictors show where a row ends.
    num_full = end_of(batch.target_mask & (batch.target_predictor >= shortest))
    loops = [(full, 0, num_full), (shortest, num_full, num_used)] if shortest < full else [(full, 0, num_used)]
    for length, start, end in loops:

        def body(index: jax.Array, carry: Carry, length: int = length) -> Carry:
            return one_microbatch(index, _cut(_take(batch, index), length), carry)

        carry = jax.lax.fori_loop(start, end, body, carry)
    return carry


def _take(tree: Any, index: jax.Array) -> Any:
    """One micro-batch of arrays `[M, ...]`."""
    return jax.tree.map(lambda x: x[index], tree)


def _cut(microbatch: Batch, length: int) -> Batch:
    """The first `length` tokens of each row, which must be all that it stores."""
    names = ("tokens", "positions", "visible_until")
    return replace(microbatch, **{name: getattr(microbatch, name)[:, :length] for name in names})
