"""Policy objectives in one table: what each target adds to what is maximised, and where its gradient is cut.

Legend: T targets.

With `ratio = exp(logprobs - old_logprobs)`, where the learner computed `old_logprobs` before any update, all of them
have the gradient of REINFORCE as long as the parameters are the old ones. Sums over targets are divided as the
aggregation says (`jaxsp.learner.aggregation`).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxsp.learner.ratios import log_ratio


def clipped_ratio(
    logprobs: Float[Array, "*rows T"],
    log_ratios: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*rows T"], Bool[Array, "*rows T"]]:
    """`min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)`, and where it has no gradient.

    PPO (Schulman et al. 2017, arXiv 1707.06347, equation 7) and GRPO (arXiv 2402.03300, equation 3); with two bounds
    DAPO (arXiv 2503.14476, equation 8). It is clipped where the ratio has left the bounds on the side that the
    advantage pushes to.
    """
    ratio = jnp.exp(log_ratios)
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    is_clipped = ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))
    return jnp.minimum(ratio * advantages, clipped * advantages), is_clipped


def clipped_weight(
    logprobs: Float[Array, "*rows T"],
    log_ratios: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*rows T"], Bool[Array, "*rows T"]]:
    """`clip(ratio, 1 - clip_low, 1 + clip_high) A logprobs`, no gradient through the ratio, and where it was clipped.

    CISPO (MiniMax-M1, arXiv 2506.13585, section 3.1): every target keeps a gradient, and only its
    weight is bounded. The paper has no lower bound, which is a `clip_low` of 1, and tunes `clip_high`.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratios))
    clipped = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    return clipped * advantages * logprobs, clipped != ratio


@dataclass(frozen=True)
class Objective:
    """One entry of `OBJECTIVES`.

    Attributes:
        terms: `(logprobs, log_ratios, advantages, *, clip_low, clip_high)`, each `[..., T]` without junk, to what
            each target adds and whether the clipping holds it.
        is_of_sequences: whether the ratio is one of a trajectory instead of one of a token.
        aggregation: that of its paper, a name of `jaxsp.learner.aggregation.AGGREGATIONS`.
    """

    terms: Callable[..., tuple[Array, Array]]
    is_of_sequences: bool
    aggregation: str


OBJECTIVES = {
    "clip": Objective(clipped_ratio, is_of_sequences=False, aggregation="constant"),
    "gspo": Objective(clipped_ratio, is_of_sequences=True, aggregation="sequence_mean"),
    "cispo": Objective(clipped_weight, is_of_sequences=False, aggregation="token_mean"),
}
"""Name in `learner.objective` to what is maximised.

`clip` with `constant` is DrGRPO (Liu et al. 2025, arXiv 2503.20783, section 3.2), which SPICE (arXiv 2510.24684) uses:
division by a trajectory's own length would favour short right answers and long wrong ones.

`gspo` (Zheng et al. 2025, arXiv 2507.18071, section 4.1): one ratio `s = exp(mean over the trajectory's own targets
of the log-ratio)`, clipped as a whole, so all of a trajectory has a gradient or nothing of it. Its bounds are some
thousand times narrower than those of tokens (the paper's: 3e-4 and 4e-4).
"""


def objective_terms(
    kind: str,
    logprobs: Float[Array, "*rows T"],
    old_logprobs: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    sequence_log_ratio: Float[Array, "*rows T"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Array, "*rows T"], Float[Array, "*rows T"], Bool[Array, "*rows T"]]:
    """What each target adds to the objective `kind`, its ratio, and whether it is clipped; 0, 1 and False if masked.

    `sequence_log_ratio` is what `trajectory_means` makes of the current log-ratios, for objectives of sequences; None
    says that it is 0, as before any update. It has no gradient of its own: at equal value, GSPO's gradient is that of
    `s = stop_gradient(s) exp(logprobs - stop_gradient(logprobs))` in each target (the paper's section 4.3), for
    which a micro-batch need not hold a trajectory whole.
    """
    objective = OBJECTIVES[kind]
    old_logprobs = jax.lax.stop_gradient(logprobs if objective.is_of_sequences else old_logprobs)
    log_ratios = log_ratio(logprobs, old_logprobs, target_mask)
    if objective.is_of_sequences and sequence_log_ratio is not None:
        log_ratios += jax.lax.stop_gradient(jnp.where(target_mask, sequence_log_ratio, 0.0))
    terms, is_clipped = objective.terms(
        jnp.where(target_mask, logprobs, 0.0),
        log_ratios,
        jnp.where(target_mask, advantages, 0.0),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return terms, jnp.exp(log_ratios), is_clipped & target_mask


def surrogate(
    kind: str,
    logprobs: Float[Array, "*rows T"],
    old_logprobs: Float[Array, "*rows T"],
    advantages: Float[Array, "*rows T"],
    importance: Float[Array, "*rows T"],
    target_mask: Bool[Array, "*rows T"],
    sequence_log_ratio: Float[Array, "*rows T"] | None = None,
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Array, ""]:
    """The loss of the objective `kind`: minus the sum over targets of `importance` times `objective_terms`."""
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    terms, _, _ = objective_terms(kind, logprobs, old_logprobs, advantages, target_mask, sequence_log_ratio, **bounds)
    return -jnp.sum(importance * terms, where=target_mask)
