"""The divergence from a reference policy, estimated at the sampled tokens.

Legend: T targets.

With `d = reference_logprobs - logprobs` at a token that the policy sampled (Schulman 2020, "Approximating KL
divergence"), the means of k1 and k3 are KL(policy || reference), that of k2 is near it where the two are close. What
they do in a loss differs: autodiff sees the value at the tokens, not which tokens are sampled.

| | value | mean gradient in the loss | where it is meant to stand |
|---|---|---|---|
| k1 | -d | 0: that of the log-probability itself | in the reward: there it gives that of KL(policy || reference) |
| k2 | d^2 / 2 | that of KL(policy || reference) | in the loss |
| k3 | exp(d) - 1 - d | that of KL(reference || policy) | in the loss (GRPO, arXiv 2402.03300, equation 4) |
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsp.learner.ratios import log_ratio


def k1(d: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """`-d`: unbiased, of both signs."""
    return -d


def k2(d: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """`d^2 / 2`."""
    return d * d / 2


def k3(d: Float[Array, "*rows T"]) -> Float[Array, "*rows T"]:
    """`exp(d) - 1 - d`: unbiased, never negative, of less variance than k1."""
    return jnp.exp(d) - 1 - d


KL_ESTIMATORS: dict[str, Callable[[Array], Array]] = {"k1": k1, "k2": k2, "k3": k3}
"""By the name in `learner.kl_estimator`."""


def divergences(
    kind: str,
    logprobs: Float[Array, "*rows T"],
    reference_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
) -> Float[Array, "*rows T"]:
    """The estimate `kind` at each target, 0 where masked; no gradient through the reference."""
    return KL_ESTIMATORS[kind](log_ratio(jax.lax.stop_gradient(reference_logprobs), logprobs, target_mask))


def kl_sum(
    kind: str,
    logprobs: Float[Array, "*rows T"],
    reference_logprobs: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    weights: Float[Array, "*rows T"] | None = None,
) -> Float[Array, ""]:
    """The sum over targets of `divergences`, each multiplied by its `weights`, where given."""
    divergence = divergences(kind, logprobs, reference_logprobs, target_mask)
    if weights is not None:
        divergence *= jnp.where(target_mask, weights, 0.0)
    return jnp.sum(divergence, where=target_mask)
