"""What is logged of every update: how far the policy moved, what was clipped, how sampler and learner differ.

Legend: T targets.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsp.learner.objectives import objective_terms
from jaxsp.learner.ratios import log_ratio, target_mean
from jaxsp.model.decoder import Params


def policy_metrics(
    objective: str,
    logprobs: Float[Array, "*rows T"],
    entropy: Float[Array, "*rows T"],
    old_logprobs: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    sequence_log_ratio: Float[Array, "*rows T"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Float[Array, ""]]:
    """Means over targets of entropy and ratio, the largest ratio and |ratio - 1|, and the share that is clipped.

    Ratio and clipping are the objective's: `gspo` has one ratio for all targets of a trajectory.
    """
    _, ratio, is_clipped = objective_terms(
        objective,
        logprobs,
        old_logprobs,
        advantages,
        target_mask,
        sequence_log_ratio,
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return {
        "policy/entropy": target_mean(entropy, target_mask),
        "policy/ratio_mean": target_mean(ratio, target_mask),
        "policy/ratio_max": jnp.max(ratio, where=target_mask, initial=0.0),
        "policy/ratio_deviation_max": jnp.max(jnp.abs(ratio - 1), where=target_mask, initial=0.0),
        "policy/clipped_frac": target_mean(is_clipped.astype(jnp.float32), target_mask),
    }


def mismatch_metrics(
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
) -> dict[str, Float[Array, ""]]:
    """How far the learner's log-probabilities are from the sampler's, of the same tokens under the same parameters.

    With `d = old - behaviour`: mean and largest |d|, the estimates `k1 = mean(-d)` and `k3 = mean(exp(d) - 1 - d)` of
    KL(sampler || learner), and the correlation of the two probabilities (NaN where they do not vary).
    """
    d = log_ratio(old_logprobs, behaviour_logprobs, target_mask)
    probabilities = [jnp.exp(jnp.where(target_mask, x, 0.0)) for x in (old_logprobs, behaviour_logprobs)]
    old, behaviour = (jnp.where(target_mask, p - target_mean(p, target_mask), 0.0) for p in probabilities)
    spread = jnp.sqrt(jnp.sum(old * old) * jnp.sum(behaviour * behaviour))
    return {
        "mismatch/abs_mean": target_mean(jnp.abs(d), target_mask),
        "mismatch/abs_max": jnp.max(jnp.abs(d)),
        "mismatch/k1": target_mean(-d, target_mask),
        "mismatch/k3": target_mean(jnp.exp(d) - 1 - d, target_mask),
        "mismatch/pearson": jnp.where(spread > 0, jnp.sum(old * behaviour) / jnp.where(spread > 0, spread, 1), jnp.nan),
    }


def gradient_norms(gradients: Params) -> dict[str, Float[Array, ""]]:
    """The norm of each part's gradient: `embed`, `attention`, `mlp`, `norms` and, where there is one, `head`.

    Tied embeddings are `embed` alone. The squares of the parts add up to that of `policy/grad_norm`.
    """
    squares: dict[str, Float[Array, ""]] = {}
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        part = _part([key.key for key in path])
        squares[part] = squares.get(part, jnp.zeros(())) + jnp.sum(jnp.square(gradient))
    return {f"policy/grad_norm_{part}": jnp.sqrt(square) for part, square in sorted(squares.items())}


def _part(names: Sequence[str]) -> str:
    """Which part of the decoder a parameter is in."""
    if names[-1] == "scale":
        return "norms"
    if names[0] != "layers":
        return "embed" if names[0] == "embed" else "head"
    return "attention" if names[1] in ("q", "k", "v", "o") else "mlp"
