"""The learner's parameters in the layout and precision that the sampler decodes with, made on device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxsp.mesh import shardable
from jaxsp.model.decoder import Params, abstract_params, logical_axes
from jaxsp.model.sizes import DecoderSizes


def to_sampler_layout(
    params: Params, compute_dtype: Any, shardings: Params | None = None, *, consumes: bool = False
) -> Params:
    """A copy of `params` with `layers` unstacked into a list and weights in `compute_dtype`, resharded on device.

    Norm scales stay as they are: the decoder applies them in float32, and the learner's are not rounded either.
    `shardings` has the shape of the result (`sampler_shardings` makes it); None leaves the placement to the compiler.
    The result shares no buffer with `params`, which the learner may donate to its next update. `consumes` deletes each
    array of `params` once it is converted: beside the result, only one parameter of all layers exists at a time.
    """

    def convert(path: tuple[Any, ...], leaf: jax.Array, sharding: NamedSharding | None = None) -> Any:
        is_norm_scale = path[-1].key == "scale"
        dtype = leaf.dtype if is_norm_scale else jnp.dtype(compute_dtype)
        converted = _conversion(path[0].key == "layers", dtype, sharding)(leaf)
        if consumes:
            jax.block_until_ready(converted)
            leaf.delete()
        return converted

    if shardings is not None:  # all layers are placed alike
        shardings = {**shardings, "layers": shardings["layers"][0]}
    trees = (params,) if shardings is None else (params, shardings)
    converted = jax.tree_util.tree_map_with_path(convert, *trees)
    num_layers = jax.tree.leaves(params["layers"])[0].shape[0]
    layers = [
        jax.tree.map(lambda each, i=i: each[i], converted["layers"], is_leaf=lambda node: isinstance(node, list))
        for i in range(num_layers)
    ]
    return {**converted, "layers": layers}


def sampler_shardings(sizes: DecoderSizes, mesh: Mesh) -> tuple[Params, NamedSharding]:
    """Shardings of the parameters in the sampler's layout, and of a layer's cached keys or values `[B, K, S, H]`.

    Raises `UsageError` naming the dimension that does not divide over the mesh.
    """
    stacked = jax.tree.map(
        lambda shape, axes: shardable(mesh, axes, shape.shape), abstract_params(sizes), logical_axes(sizes)
    )

    def without_layer_axis(sharding: NamedSharding) -> NamedSharding:
        return NamedSharding(mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))

    layer = jax.tree.map(without_layer_axis, stacked["layers"])
    unstacked = {**stacked, "layers": [layer] * sizes.num_layers}
    kv_sharding = shardable(mesh, (None, "kv_heads", None, None), (1, sizes.num_kv_heads, 1, sizes.head_dim))
    return unstacked, kv_sharding


@functools.cache
def _conversion(is_stacked: bool, dtype: Any, sharding: NamedSharding | None) -> Any:
    """A jitted `array -> array`, or `array [layers, ...] -> list of arrays`, in `dtype`; never the array itself."""

    def convert(leaf: jax.Array) -> Any:
        leaf = jnp.copy(leaf.astype(dtype))
        return [leaf[i] for i in range(leaf.shape[0])] if is_stacked else leaf

    return jax.jit(convert, out_shardings=sharding)
