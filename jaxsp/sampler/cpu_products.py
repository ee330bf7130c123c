"""Products with weights on a CPU by a C kernel (`cpu/products.c`), which reads each weight once, in order.

XLA's own products lay the weights out anew at every call: the kernel takes half to two thirds of their time for 8 to
32 rows.
Where it cannot be, XLA multiplies.

Legend: D places of a row, P columns of a panel, G panels of a matrix.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxsp.config import UsageError
from jaxsp.model.decoder import PLAIN, Params, Products, Projection
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.cpu_kernels import PRODUCTS, kernel_call, load_kernels


@dataclass(frozen=True)
class Choice:
    """How a sampler multiplies with its weights."""

    name: str
    """`cpu` or `xla`."""
    products: Products
    panel: int | None
    """Columns of a panel of weights (`jaxsp.sampler.weight_sync.in_panels`); None: weights lie as the learner's do."""
    why_not: str | None = None
    """Why `cpu` cannot be."""


def choose_products(wanted: str, device: Any, num_devices: int, dtype: Any) -> Choice:
    """What `sampler.products` = `wanted` means on such devices: `auto` is `cpu` where it can be, else `xla`.

    Raises `UsageError` naming what keeps the named one from running.
    """
    if wanted not in ("auto", "cpu", "xla"):
        raise UsageError(f"sampler.products = {wanted} is none of auto, cpu, xla")
    if wanted == "xla":
        return Choice("xla", PLAIN, None)
    why_not = None
    if device.platform != "cpu":
        why_not = f"runs on CPUs, and the devices here are {device.platform}"
    elif num_devices > 1:
        why_not = f"runs on one device, and the sampler has {num_devices}"
    elif jnp.dtype(dtype) != jnp.float32:
        why_not = f"multiplies float32, and model.compute_dtype is {jnp.dtype(dtype).name}"
    else:
        kernels = load_kernels()
        if not isinstance(kernels, str):
            return Choice("cpu", _products(kernels.panel), kernels.panel)
        why_not = kernels
    if wanted == "cpu":
        raise UsageError(f"sampler.products = cpu {why_not}; or set it to auto")
    return Choice("xla", PLAIN, None, why_not)


@functools.cache
def _products(panel: int) -> Products:
    def logits(sizes: DecoderSizes, params: Params, hidden: Array) -> Array:
        table = params["lm_head"]["kernel"] if "lm_head" in params else params["embed"]
        return multiply(hidden.reshape(-1, hidden.shape[-1]), [table], [sizes.vocab_size])[0].reshape(
            *hidden.shape[:-1], sizes.vocab_size
        )

    return replace(PLAIN, project=_project, look_up=functools.partial(_look_up, panel), logits=logits)


def multiply(
    x: Float[Array, "rows D"], panels: Sequence[Float[Array, "_ D P"]], num_out: Sequence[int]
) -> list[Float[Array, "rows _"]]:
    """`x` times each matrix, which `in_panels` has laid out and which has `num_out` columns.

    A row of the result is the same to the last bit whatever the other rows are.
    """
    shapes = [jax.ShapeDtypeStruct((x.shape[0], width), jnp.float32) for width in num_out]
    *found, _ = kernel_call(PRODUCTS, [*shapes, x])(x, *panels)  # the last is room in which x is laid out
    return found


def _project(x: Array, projections: Sequence[Projection]) -> list[Array]:
    num_in = projections[0].num_in
    lead, places = x.shape[: x.ndim - num_in], math.prod(x.shape[x.ndim - num_in :])
    kernels = [projection.kernel[...] for projection in projections]
    found = multiply(x.reshape(-1, places), kernels, [math.prod(projection.out_shape) for projection in projections])
    shaped = [y.reshape(*lead, *projection.out_shape) for y, projection in zip(found, projections, strict=True)]
    return [
        y if projection.bias is None else y + projection.bias[...].astype(y.dtype)
        for y, projection in zip(shaped, projections, strict=True)
    ]


def _look_up(panel: int, embed: Float[Array, "G D P"], tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    return embed[tokens // panel, :, tokens % panel]
