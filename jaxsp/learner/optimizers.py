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
    "q": ((1,), (2, 3)),
    "k": ((1,), (2, 3)),
    "v": ((1,), (2, 3)),
    "o": ((1, 2), (3,)),
    "experts": ((2,), (3,)),
}
"""Axes of a stacked kernel that are summed over, and those that come out; of the others `((1,), (2,))`."""


def _axes(path: tuple[Any, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _MATRICES.get(path[1].key, ((1,), (2,)))


def _muon_axes(kernels: Any) -> Any:
    """How each layer's kernels, and each expert's, are matrices; `kernels` hold nothing else."""
    return jax.tree_util.tree_map_with_path(lambda path, _: MuonDimensionNumbers(*_axes(path)), kernels)


def _to_rms(updates: Any, params: Any) -> Any:
    """Orthogonal matrices scaled so that the root mean square of their entries is `MUON_RMS`."""

    def scale(path: tuple[Any, ...], update: jax.Array) -> jax.Array:
        longest = max(math.prod(update.shape[axis] for axis in axes) for axes in _axes(path))
        return update * (MUON_RMS * longest**0.5)

    return jax.tree_util.tree_map_with_path(scale, updates)


def _muon(rate: Rate, beta1: float, beta2: float, weight_decay: float) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024) for the kernels of layers, each layer's or expert's a matrix of its own; AdamW for the
    rest.

    Updates have AdamW's size (Liu et al. 2025, arXiv 2502.16982), so that one rate serves both.
    """
    kernels = optax.chain(
        scale_by_muon(weight_dimension_numbers=_muon_axes),  # pyright: ignore[reportArgumentType]  # not every tree
        optax.stateless(_to_rms),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )

    def labels(params: Params) -> Any:
        """Who takes each parameter."""

        def label(path: tuple[Any, ...], _: Any) -> str:
            is_of_layer = path[0].key == "layers"
            return "muon" if is_of_layer and (path[-1].key == "kernel" or path[1].key == "experts") else "adamw"

        return jax.tree_util.tree_map_with_path(label, params)

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


def make_schedule(kind: str, peak: float, *, warmup: int, num_updates: int) -> float | optax.Schedule:
    """The learning rate of each update: `peak (n + 1) / warmup` in the first `warmup`, then `kind` over the others.

    `num_updates` counts those of the warm-up too. A constant rate without warm-up is a number.
    """
    if kind == "constant" and not warmup:
        return peak
    later = SCHEDULES[kind](peak, max(num_updates - warmup, 1))
    if not warmup:
        return later

    def rate(count: Any) -> Any:
        """The warm-up's or, after it, the schedule's."""
        return jnp.where(count < warmup, peak * (count + 1) / warmup, later(count - warmup))

    return rate
