"""The learner's parameters in the layout and precision that the sampler decodes with, made on device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxsp.mesh import shardable
from jaxsp.model.decoder import Params, abstract_params, logical_axes, unstack_layers
from jaxsp.model.sizes import DecoderSizes


def to_sampler_layout(params: Params, compute_dtype: Any, shardings: Params | None = None) -> Params:
    """A copy of `params` with `layers` unstacked into a list and weights in `compute_dtype`, resharded on device.

    Norm scales stay as they are: the decoder applies them in float32, and the learner's are not rounded either.
    `shardings` has the shape of the result (`sampler_shardings` makes it); None leaves the placement to the compiler.
    The result shares no buffer with `params`, which the learner may donate to its next update.
    """
    leaves, treedef = jax.tree.flatten(shardings)
    return _conversion(jnp.dtype(compute_dtype), tuple(leaves), treedef)(params)


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
def _conversion(compute_dtype: Any, sharding_leaves: tuple[NamedSharding, ...], treedef: Any) -> Any:
    def convert(params: Params) -> Params:
        def cast(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            is_norm_scale = path[-1].key == "scale"
            return leaf if is_norm_scale else leaf.astype(compute_dtype)

        return jax.tree_util.tree_map_with_path(cast, unstack_layers(params))

    return jax.jit(convert, out_shardings=jax.tree.unflatten(treedef, sharding_leaves))
