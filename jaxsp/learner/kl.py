"""The divergence from a reference policy, estimated at the sampled tokens.

Legend: T targets.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsp.learner.ratios import log_ratio


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
    d = log_ratio(jax.lax.stop_gradient(reference_logprobs), logprobs, target_mask)
    divergence = jnp.exp(d) - 1 - d
    if weights is not None:
        divergence *= jnp.where(target_mask, weights, 0.0)
    return jnp.sum(divergence, where=target_mask)
