"""Importance weights: what corrects the sampler's log-probabilities against the learner's, of the same parameters.

Legend: T targets.

The sampler draws from `behaviour`, the learner computes `old` for the same tokens under the same parameters; the two
differ by rounding, in mixtures of experts by much. Weights have no gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsp.learner.ratios import MAX_LOG_RATIO, log_ratio, trajectory_sums


def truncated(ratio: Float[Array, "*rows T"], *, cap: float, low: float, high: float) -> Float[Array, "*rows T"]:
    """`min(ratio, cap)`: truncated importance sampling (Ionides 2008; for samplers and learners Yao et al. 2025)."""
    return jnp.minimum(ratio, cap)


def masked(ratio: Float[Array, "*rows T"], *, cap: float, low: float, high: float) -> Float[Array, "*rows T"]:
    """`ratio` where it is in `[low, high]`, else 0 (IcePop; Ling team 2025, arXiv 2510.18855)."""
    return jnp.where((ratio >= low) & (ratio <= high), ratio, 0.0)


@dataclass(frozen=True)
class Importance:
    """One entry of `IMPORTANCE`.

    Attributes:
        weights: `(ratio, *, cap, low, high)`, the ratios `exp(old - behaviour)` to weights.
        is_of_sequences: whether the ratio is that of a whole trajectory, the product over its targets.
    """

    weights: Callable[..., Array]
    is_of_sequences: bool


IMPORTANCE = {
    "token": Importance(truncated, is_of_sequences=False),
    "sequence": Importance(truncated, is_of_sequences=True),
    "masked": Importance(masked, is_of_sequences=False),
}
"""By the name in `learner.importance`."""


def importance_log_ratios(
    kind: str,
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    target_sequence: Int[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
) -> Float[Array, "*rows T"]:
    """The log-ratio of each target, or the sum of its whole trajectory's; 0 where masked."""
    log_ratios = log_ratio(old_logprobs, behaviour_logprobs, target_mask)
    if IMPORTANCE[kind].is_of_sequences:
        sums = trajectory_sums(log_ratios, target_sequence, target_mask)
        log_ratios = jnp.clip(sums, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratios


def importance_weights(
    kind: str,
    log_ratios: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    *,
    cap: float,
    low: float,
    high: float,
) -> tuple[Float[Array, "*rows T"], Bool[Array, "*rows T"]]:
    """The weights `kind`, 1 where masked, and which of them were cut or left out."""
    ratio = jnp.exp(log_ratios)
    weights = IMPORTANCE[kind].weights(ratio, cap=cap, low=low, high=high)
    return jax.lax.stop_gradient(jnp.where(target_mask, weights, 1.0)), (weights != ratio) & target_mask
