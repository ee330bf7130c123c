"""The learner's parameters in the layout and precision that the sampler decodes with, made on device."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, Float

from jaxsp.config import UsageError
from jaxsp.mesh import num_parts, shardable
from jaxsp.model.decoder import KEPT_IN_FLOAT32, Params, abstract_params, logical_axes, unstack_layers
from jaxsp.model.sizes import DecoderSizes


def to_sampler_layout(
    sizes: DecoderSizes,
    params: Params,
    dtype: Any,
    shardings: Params | None = None,
    *,
    panel: int | None = None,
    consumes: bool = False,
) -> Params:
    """A copy of `params` with `layers` unstacked into a list and weights in `dtype`, resharded on device.

    Norm scales and routers stay as they are: the decoder applies them in float32, and the learner's are not rounded.
    `sizes` are those of the result, which has each kv head of `params` once or several times over (`sampler_sizes`).
    `shardings` has the shape of the result (`sampler_shardings` makes it); None leaves the placement to the compiler.
    `panel` lays weights out for `jaxsp/sampler/cpu_products.py`, in panels of so many columns (`in_panels`).
    The result shares no buffer with `params`, which the learner may donate to its next update. `consumes` deletes each
    array of `params` once it is converted: beside the result, only one parameter of all layers exists at a time.
    """

    def convert(path: tuple[Any, ...], leaf: jax.Array, sharding: NamedSharding | None = None) -> Any:
        own_dtype = leaf.dtype if path[-1].key in KEPT_IN_FLOAT32 else jnp.dtype(dtype)
        is_of_kv_heads = any(part.key in ("k", "v") for part in path[1:2])
        copies = sizes.num_kv_heads // leaf.shape[-2] if is_of_kv_heads else 1
        layout = None if panel is None else _layout(tuple(part.key for part in path), panel)
        converted = _conversion(path[0].key == "layers", own_dtype, sharding, copies, layout)(leaf)
        if consumes:
            jax.block_until_ready(converted)
            leaf.delete()
        return converted

    trees = (params,) if shardings is None else (params, like_stacked(shardings))
    converted = jax.tree_util.tree_map_with_path(convert, *trees)
    return {**converted, "layers": unstack_layers(sizes, converted["layers"], lambda layers: layers)}


def like_stacked(unstacked: Params) -> Params:
    """The shardings of a list of layers as a tree like stacked parameters: layers that have a part place it alike."""
    layer = functools.reduce(operator.or_, unstacked["layers"])
    return {**unstacked, "layers": layer}


def sampler_sizes(sizes: DecoderSizes, mesh: Mesh | AbstractMesh) -> DecoderSizes:
    """The decoder as it is split over the mesh: with as many kv heads as devices along `tensor`, if it has fewer.

    Each kv head then stands on several devices, beside the query heads there that read it.
    Raises `UsageError` where the kv heads can be neither split nor copied evenly.
    """
    parts = num_parts(mesh, "kv_heads")
    if sizes.num_kv_heads % parts and parts % sizes.num_kv_heads:
        raise UsageError(
            f"kv_heads = {sizes.num_kv_heads} cannot be split or copied evenly over mesh.tensor = {parts}; "
            f"choose a divisor or a multiple of {sizes.num_kv_heads}"
        )
    return dataclasses.replace(sizes, num_kv_heads=max(sizes.num_kv_heads, parts))


def sampler_shardings(sizes: DecoderSizes, mesh: Mesh | AbstractMesh) -> tuple[Params, NamedSharding]:
    """Shardings of the parameters in the sampler's layout, and of a layer's cached keys or values `[B, K, S, H]`.

    Raises `UsageError` naming the dimension that does not divide over the mesh. `sizes` are those of `sampler_sizes`.
    """
    stacked = jax.tree.map(
        lambda shape, axes: shardable(mesh, axes, shape.shape), abstract_params(sizes), logical_axes(sizes)
    )

    def without_layer_axis(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))

    layer = jax.tree.map(without_layer_axis, stacked["layers"])
    layers = unstack_layers(sizes, layer, lambda sharding: [sharding] * sizes.num_layers)
    unstacked = {**stacked, "layers": layers}
    kv_sharding = shardable(mesh, (None, "kv_heads", None, None), (1, sizes.num_kv_heads, 1, sizes.head_dim))
    return unstacked, kv_sharding


def in_panels(kernel: Float[Array, "*shape"], num_in: int, panel: int) -> Float[Array, "G D P"]:
    """A kernel whose first `num_in` axes are contracted, as G panels of P of its columns, zeros after the last."""
    matrix = kernel.reshape(math.prod(kernel.shape[:num_in]), -1)
    matrix = jnp.pad(matrix, ((0, 0), (0, -matrix.shape[1] % panel)))
    return matrix.reshape(matrix.shape[0], -1, panel).swapaxes(0, 1)


def _layout(path: tuple[str, ...], panel: int) -> Callable[[Array], Array] | None:
    """What lays out the parameter of this name (of one layer); None: it stays as it is."""
    if path[-1] not in ("embed", "kernel"):
        return None
    return _panel_layout(path[-1] == "embed", 2 if "o" in path else 1, panel)


@functools.cache
def _panel_layout(is_table: bool, num_in: int, panel: int) -> Callable[[Array], Array]:
    return lambda kernel: in_panels(kernel.T if is_table else kernel, num_in, panel)


@functools.cache
def _conversion(
    is_stacked: bool, dtype: Any, sharding: NamedSharding | None, copies: int, layout: Callable[[Array], Array] | None
) -> Any:
    """A jitted `array -> array`, or `array [layers, ...] -> list of arrays`, in `dtype`; never the array itself.

    Each head of an array `[..., heads, H]` comes `copies` times; `layout` makes of each array what is kept.
    """

    def convert(leaf: jax.Array) -> Any:
        leaf = jnp.copy(leaf.astype(dtype))
        if copies > 1:
            leaf = jnp.repeat(leaf, copies, axis=-2)
        lay_out = layout or (lambda array: array)
        return [lay_out(leaf[i]) for i in range(leaf.shape[0])] if is_stacked else lay_out(leaf)

    return jax.jit(convert, out_shardings=sharding)
