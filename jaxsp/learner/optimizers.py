"""Optimizers and learning rates in two tables, by Optax; gradients are clipped by their global norm before each."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxsp.model.decoder import Params

Rate = optax.ScalarOrSchedule


def decay_mask(params: Params) -> Any:
    """True for each parameter that weight decay applies to: by name, as stacked norm scales have two axes."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)


def _adamw(rate: Rate, beta1: float, beta2: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101)."""
    return optax.adamw(rate, b1=beta1, b2=beta2, weight_decay=weight_decay, mask=decay_mask)


def _adafactor(rate: Rate, beta1: float, beta2: float, weight_decay: float) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235): second moments as a row and a column for each matrix.

    No first moment, updates of a root mean square of at most 1, and no scaling by the parameters' own size: rates mean
    what they mean for AdamW, and so does weight decay, which Optax's own `adafactor` would not multiply by the rate.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(rate),
    )


MUON_RMS = 0.2
"""Of an entry of Muon's updates, which is AdamW's (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""

_MATRICES = {
    # Axes of a stacked kernel that are summed over, and those that come out; the layer's is neither.
    "q": MuonDimensionNumbers((1,), (2, 3)),
    "k": MuonDimensionNumbers((1,), (2, 3)),
    "v": MuonDimensionNumbers((1,), (2, 3)),
    "o": MuonDimensionNumbers((1, 2), (3,)),
}


def _is_matrix(path: tuple[Any, ...]) -> bool:
    return path[0].key == "layers" and path[-1].key == "kernel"


def _muon_axes(kernels: Params) -> Any:
    """How each layer's kernels are matrices; `kernels` hold nothing else."""

    def axes(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers:
        return _MATRICES.get(path[1].key, MuonDimensionNumbers((leaf.ndim - 2,), (leaf.ndim - 1,)))

    return jax.tree_util.tree_map_with_path(axes, kernels)


def _to_rms(update: jax.Array, axes: MuonDimensionNumbers) -> jax.Array:
    """An orthogonal matrix scaled so that the root mean square of its entries is `MUON_RMS`."""
    numbers = [math.prod(update.shape[axis] for axis in own) for own in (axes.reduction_axis, axes.output_axis)]
    return update * (MUON_RMS * max(numbers) ** 0.5)


def _muon(rate: Rate, beta1: float, beta2: float, weight_decay: float) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the kernels of layers, each layer's a matrix of its own; AdamW for all else.

    Updates have AdamW's size (Liu et al. 2025, arXiv 2502.16982), so that one rate serves both.
    """
    kernels = optax.chain(
        scale_by_muon(weight_dimension_numbers=_muon_axes),
        optax.stateless(lambda updates, _: jax.tree.map(_to_rms, updates, _muon_axes(updates))),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )

    def labels(params: Params) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if _is_matrix(path) else "adamw", params)

    return optax.partition({"muon": kernels, "adamw": _adamw(rate, beta1, beta2, weight_decay)}, labels)


OPTIMIZERS: dict[str, Callable[[Rate, float, float, float], optax.GradientTransformation]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
}
"""By the name in `learner.optimizer`: `(learning_rate, beta1, beta2, weight_decay)`. Norm scales and biases never
decay."""


def make_optimizer(
    learning_rate: Rate,
    kind: str = "adamw",
    *,
    beta1: float = 0.9,
    beta2: float = 0.95,
    weight_decay: float = 0.0,
    max_grad_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """The optimizer `kind` after clipping by the global norm; `None` clips nothing."""
    clip = optax.identity() if max_grad_norm is None else optax.clip_by_global_norm(max_grad_norm)
    return optax.chain(clip, OPTIMIZERS[kind](learning_rate, beta1, beta2, weight_decay))


def _constant(peak: float, num_updates: int) -> optax.Schedule:
    return optax.constant_schedule(peak)


def _linear(peak: float, num_updates: int) -> optax.Schedule:
    """From `peak` to 0 after `num_updates`."""
    return optax.linear_schedule(peak, 0.0, num_updates)


def _cosine(peak: float, num_updates: int) -> optax.Schedule:
    """`peak (1 + cos(pi n / num_updates)) / 2` (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5)."""
    return optax.cosine_decay_schedule(peak, num_updates)


SCHEDULES: dict[str, Callable[[float, int], optax.Schedule]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
}
"""By the name in `learner.schedule`: `(peak, num_updates)` to the rate of the n-th update after the warm-up, from 0."""


def make_schedule(kind: str, peak: float, *, warmup: int, num_updates: int) -> Rate:
    """The learning rate of each update: `peak (n + 1) / warmup` in the first `warmup`, then `kind` over the others.

    `num_updates` counts those of the warm-up too. A constant rate without warm-up is a number.
    """
    if kind == "constant" and not warmup:
        return peak
    later = SCHEDULES[kind](peak, max(num_updates - warmup, 1))

    def rate(count: Any) -> Any:
        rising = peak * (count + 1) / max(warmup, 1)
        return jnp.where(count < warmup, rising, later(count - warmup))

    return rate
