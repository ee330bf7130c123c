"""What losses of the policy are made of: log-ratios, sums over a trajectory's targets, means over all targets.

Legend: T targets.

Every function takes `target_mask`, and what stands in a masked slot changes nothing: masked slots are emptied before
any exponential, so that they may hold -inf or NaN and gradients stay finite.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 already says "another distribution", e^89 overflows float32."""


def log_ratio(
    numerator: Float[Array, "*rows T"], denominator: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """`numerator - denominator`, clamped, 0 where masked. Both are emptied first: -inf minus -inf has no gradient."""
    numerator, denominator = jnp.where(target_mask, numerator, 0.0), jnp.where(target_mask, denominator, 0.0)
    return jnp.clip(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def target_mean(x: Float[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]) -> Float[Array, ""]:
    """The mean over targets; 0 where there is none."""
    return jnp.sum(x, where=target_mask) / jnp.maximum(jnp.sum(target_mask), 1).astype(jnp.float32)


def trajectory_sums(
    x: Float[Array, "*rows T"], target_sequence: Int[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """At each target the sum of `x` over all targets of its trajectory, whichever rows they stand in; 0 where masked.

    The arrays must hold a trajectory whole: all micro-batches of an update.
    """
    numbers = jnp.where(target_mask, target_sequence, -1)
    # Numbers run over the step's trajectories, of which an update may hold few: renumbered, they fit the slots.
    _, places = jnp.unique(numbers, return_inverse=True, size=numbers.size)
    sums = jax.ops.segment_sum(jnp.where(target_mask, x, 0.0).ravel(), places.ravel(), num_segments=numbers.size)
    return jnp.where(target_mask, sums[places].reshape(x.shape), 0.0)


def trajectory_means(
    x: Float[Array, "*rows T"], target_sequence: Int[Array, "*rows T"], target_mask: Bool[Array, "*rows T"]
) -> Float[Array, "*rows T"]:
    """As `trajectory_sums`, divided by the number of the trajectory's targets."""
    number = trajectory_sums(jnp.ones_like(x), target_sequence, target_mask)
    return trajectory_sums(x, target_sequence, target_mask) / jnp.maximum(number, 1.0)
