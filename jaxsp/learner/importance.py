"""Importance weights: what corrects the sampler's log-probabilities against the learner's, of the same parameters.

Legend: T targets.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsp.learner.ratios import log_ratio


def importance_weights(
    old_logprobs: Float[Array, "*rows T"],
    behaviour_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    importance_cap: float,
) -> Float[Array, "*rows T"]:
    """Token-level truncated importance weights `min(exp(old - behaviour), cap)`, without gradient; 1 where masked."""
    log_weight = log_ratio(old_logprobs, behaviour_logprobs, target_mask)
    return jax.lax.stop_gradient(jnp.where(target_mask, jnp.minimum(jnp.exp(log_weight), importance_cap), 1.0))
