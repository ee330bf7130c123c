"""Qwen3, Qwen3-MoE and Llama decoders: Flax NNX layers inside, plain nested dicts of arrays outside.

Legend: B sequences, L tokens, D embedding, N query heads, K kv heads, H head size, F mlp, V vocabulary, E experts.

Parameters cross `jit` as one nested dict. `params["layers"]` is either one dict whose arrays are stacked on a leading
layer axis (training: `lax.scan` keeps compilation short and memory flat) or a list of dicts (sampling: unrolled layers
decode faster). Where only some layers have experts, each part is stacked over the layers that have it
(`DecoderSizes.layers_with`), and layers are unrolled. The forward pass returns hidden states; logits are made only
where somebody needs them.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxsp.model.moe import Experts, RunExperts, route, run_experts_on
from jaxsp.model.rope import rotate, rotation_angles
from jaxsp.model.sizes import DecoderSizes

Params = dict[str, Any]
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
"""`attend(q, k, v, cache) -> (out, new_cache)` with q, out `[B, L, N, H]` and k, v `[B, L, K, H]` of these tokens.

Training passes a mask rule and no cache; prefill keeps k and v; decoding writes them into a cache and reads it."""


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale`, computed in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(jnp.ones(dim))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
    """`x` times a kernel of shape `in_shape + out_shape`, contracting the trailing axes `in_shape` of x."""

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int], has_bias: bool = False, *, rngs: nnx.Rngs):
        fan_in = 1
        for size in in_shape:
            fan_in *= size
        self.num_in, self.out_shape = len(in_shape), tuple(out_shape)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (*in_shape, *out_shape)) * fan_in**-0.5)
        self.bias = nnx.Param(jnp.zeros(self.out_shape)) if has_bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        y = jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.num_in)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


Project = Callable[[Array, Sequence[Projection]], list[Array]]
"""`project(x, projections)`: what each of them makes of `x`, as `Projection.__call__` does."""


class Layer(nnx.Module):
    """One pre-norm block: grouped-query attention, then SwiGLU, of one mlp or of each token's experts."""

    def __init__(self, sizes: DecoderSizes, is_sparse: bool, *, rngs: nnx.Rngs):
        embed, head, bias = sizes.embed_dim, sizes.head_dim, sizes.has_attention_bias
        self.attention_norm = RMSNorm(embed, sizes.rms_eps, rngs=rngs)
        self.q = Projection([embed], [sizes.num_heads, head], bias, rngs=rngs)
        self.k = Projection([embed], [sizes.num_kv_heads, head], bias, rngs=rngs)
        self.v = Projection([embed], [sizes.num_kv_heads, head], bias, rngs=rngs)
        self.o = Projection([sizes.num_heads, head], [embed], bias, rngs=rngs)
        self.q_norm = RMSNorm(head, sizes.rms_eps, rngs=rngs) if sizes.has_qk_norm else None
        self.k_norm = RMSNorm(head, sizes.rms_eps, rngs=rngs) if sizes.has_qk_norm else None
        self.mlp_norm = RMSNorm(embed, sizes.rms_eps, rngs=rngs)
        self.moe = sizes.moe if is_sparse else None
        if self.moe is None:
            self.gate = Projection([embed], [sizes.mlp_dim], rngs=rngs)
            self.up = Projection([embed], [sizes.mlp_dim], rngs=rngs)
            self.down = Projection([sizes.mlp_dim], [embed], rngs=rngs)
        else:
            self.router = nnx.Param(jax.random.normal(rngs.params(), (embed, self.moe.num_experts)) * embed**-0.5)
            self.experts = Experts(self.moe, embed, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B L D"],
        angles: tuple[Array, Array],
        attend: Attend,
        cache: Any,
        products: "Products",
    ) -> tuple[Float[Array, "B L D"], Any]:
        normed = self.attention_norm(x)
        with jax.named_scope("qkv"):
            q, k, v = products.project(normed, (self.q, self.k, self.v))
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            q, k = rotate(q, *angles), rotate(k, *angles)
        with jax.named_scope("attention"):
            attended, cache = attend(q, k, v, cache)
            (out,) = products.project(attended, (self.o,))
            x = x + out
        with jax.named_scope("mlp"):
            normed = self.mlp_norm(x)
            if self.moe is None:
                gate, up = products.project(normed, (self.gate, self.up))
                (out,) = products.project(jax.nn.silu(gate) * up, (self.down,))
            else:
                _, experts, weights = route(self.moe, self.router[...], normed)
                kernels = (self.experts.gate, self.experts.up, self.experts.down)
                out = products.run_experts(normed, experts, weights, *(each[...].astype(x.dtype) for each in kernels))
            return x + out, cache


class Outside(nnx.Module):
    """What is not a layer: embeddings, the last norm, and the language or score head."""

    def __init__(self, sizes: DecoderSizes, *, rngs: nnx.Rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (sizes.vocab_size, sizes.embed_dim)) * 0.02)
        self.final_norm = RMSNorm(sizes.embed_dim, sizes.rms_eps, rngs=rngs)
        has_lm_head = not sizes.has_tied_embeddings and not sizes.num_labels
        self.lm_head = Projection([sizes.embed_dim], [sizes.vocab_size], rngs=rngs) if has_lm_head else None
        self.score = Projection([sizes.embed_dim], [sizes.num_labels], rngs=rngs) if sizes.num_labels else None


def init_params(sizes: DecoderSizes, key: Array) -> Params:
    """Random float32 parameters, `{"embed", "final_norm", "layers": stacked, "lm_head" or "score"?}`."""
    outside_key, layers_key = jax.random.split(key)
    outside = nnx.as_pure(nnx.state(Outside(sizes, rngs=nnx.Rngs(outside_key))))

    def one_layer(is_sparse: bool, layer_key: Array) -> Params:
        return _as_dict(nnx.as_pure(nnx.state(Layer(sizes, is_sparse, rngs=nnx.Rngs(layer_key)))))

    keys = jax.random.split(layers_key, sizes.num_layers)
    kinds = [(False, sizes.layers_with("gate")), (True, sizes.layers_with("router"))]
    kinds = [(is_sparse, np.array(layers)) for is_sparse, layers in kinds if layers]
    stacks = [jax.vmap(functools.partial(one_layer, is_sparse))(keys[layers]) for is_sparse, layers in kinds]
    order = np.argsort(np.concatenate([layers for _, layers in kinds]))
    shared = [{part: stack[part] for part in stacks[0].keys() & stacks[-1].keys()} for stack in stacks]
    merged = jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[order], *shared)
    return {**_as_dict(outside), "layers": {**stacks[0], **stacks[-1], **merged}}


def abstract_params(sizes: DecoderSizes) -> Params:
    """The shapes and dtypes of `init_params`, without arrays."""
    return jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))


def _as_dict(tree: Any) -> Any:
    """Nested NNX states as plain dicts; absent options (None) are left out."""
    if not hasattr(tree, "items"):
        return tree
    return {name: _as_dict(value) for name, value in tree.items() if value is not None}


_LOGICAL_AXES = {
    ("embed",): ("vocab", "embed"),
    ("lm_head", "kernel"): ("embed", "vocab"),
    ("score", "kernel"): ("embed", None),
    ("q", "kernel"): ("embed", "heads", None),
    ("k", "kernel"): ("embed", "kv_heads", None),
    ("v", "kernel"): ("embed", "kv_heads", None),
    ("o", "kernel"): ("heads", None, "embed"),
    ("q", "bias"): ("heads", None),
    ("k", "bias"): ("kv_heads", None),
    ("v", "bias"): ("kv_heads", None),
    ("o", "bias"): ("embed",),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
    ("router",): ("embed", None),
    ("experts", "gate"): ("expert", "embed", "mlp"),
    ("experts", "up"): ("expert", "embed", "mlp"),
    ("experts", "down"): ("expert", "mlp", "embed"),
}

KEPT_IN_FLOAT32 = ("scale", "router")
"""Last names of the parameters that are applied in float32, and are kept so where weights are in another dtype."""


def logical_axes(sizes: DecoderSizes) -> Params:
    """A tuple of logical axis names for every parameter, in the shape of `init_params`; norms are replicated."""

    def names(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> tuple[str | None, ...]:
        keys = tuple(str(part.key) for part in path)
        is_layer = keys[0] == "layers"
        own = _LOGICAL_AXES.get(keys[1:] if is_layer else keys, (None,) * (leaf.ndim - is_layer))
        return ("layers", *own) if is_layer else own

    return jax.tree_util.tree_map_with_path(names, abstract_params(sizes))


def exact_products(dtype: Any) -> AbstractContextManager[None]:
    """Within it, products of float32 are traced as such: accelerators would round their factors to 10 bits or to 7."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()


def logits(params: Params, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
    """Float32 scores of every next token: products in the hidden states' dtype, sums in float32."""
    table, axis = (params["lm_head"]["kernel"], 0) if "lm_head" in params else (params["embed"], 1)
    contracted = (((hidden.ndim - 1,), (axis,)), ((), ()))
    with exact_products(hidden.dtype):
        return jax.lax.dot_general(hidden, table.astype(hidden.dtype), contracted, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class Products:
    """What multiplies with a decoder's weights, and so decides how they lie in memory."""

    project: Project
    look_up: Callable[[Array, Array], Array]
    """`(params["embed"], tokens [...]) -> embeddings [..., D]`."""
    logits: Callable[[DecoderSizes, Params, Array], Array]
    """`(sizes, params, hidden [..., D]) -> scores [..., V]`, as `logits` gives them."""
    run_experts: RunExperts
    """The products of each token's experts, on the devices that there are (`run_experts_on`)."""


PLAIN = Products(
    project=lambda x, projections: [projection(x) for projection in projections],
    look_up=lambda embed, tokens: embed[tokens],
    logits=lambda sizes, params, hidden: logits(params, hidden),
    run_experts=run_experts_on(None, "cpu", splits_tokens=False),
)
"""XLA's products with weights as `init_params` makes them; those of experts are for one device."""


def hidden_states(
    sizes: DecoderSizes,
    params: Params,
    tokens: Int[Array, "B L"],
    positions: Int[Array, "B L"],
    attend: Attend,
    caches: Any = None,
    *,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    products: Products = PLAIN,
) -> tuple[Float[Array, "B L D"], Any]:
    """Normed hidden states of the last layer, and the new caches.

    `caches` holds one entry per layer: stacked on a leading axis where `params["layers"]` is stacked, a list where it
    is a list; None where `attend` keeps nothing. `remat` recomputes each layer in the backward pass. `products` are
    those that `params` are laid out for.
    """
    angles = rotation_angles(sizes.rope, sizes.head_dim, positions)

    def apply_layer(x: Array, layer_params: Params, cache: Any) -> tuple[Array, Any]:
        with exact_products(compute_dtype):
            graph = _layer_graph(sizes, "experts" in layer_params)
            return nnx.merge(graph, layer_params)(x, angles, attend, cache, products)

    if remat:
        apply_layer = jax.checkpoint(apply_layer)
    x = products.look_up(params["embed"], tokens).astype(compute_dtype)
    layers = params["layers"]
    if not isinstance(layers, list) and not sizes.has_equal_layers:
        layers = unstack_layers(sizes, layers, lambda stack: [x[0] for x in jax.lax.split(stack, (1,) * len(stack))])
    if isinstance(layers, list):
        new_caches = []
        for index, layer_params in enumerate(layers):
            x, cache = apply_layer(x, layer_params, None if caches is None else caches[index])
            new_caches.append(cache)
    else:
        x, new_caches = jax.lax.scan(
            lambda carry, layer: apply_layer(carry, *layer), x, (layers, caches), length=sizes.num_layers
        )
    outside = RMSNorm(sizes.embed_dim, sizes.rms_eps, rngs=nnx.Rngs(0))
    outside.scale[...] = params["final_norm"]["scale"]
    return outside(x), new_caches


@functools.cache
def _layer_graph(sizes: DecoderSizes, is_sparse: bool) -> Any:
    return nnx.graphdef(nnx.eval_shape(lambda: Layer(sizes, is_sparse, rngs=nnx.Rngs(0))))


def unstack_layers(sizes: DecoderSizes, stacked: Params, unstack: Callable[[Any], Sequence[Any]]) -> list[Params]:
    """One dict for each layer, of the parts that it has, from those stacked over layers; `unstack` cuts one leaf."""
    layers: list[Params] = [{} for _ in range(sizes.num_layers)]
    for part, stacks in stacked.items():
        leaves, structure = jax.tree.flatten(stacks, is_leaf=lambda node: isinstance(node, list))
        columns = [unstack(leaf) for leaf in leaves]
        for slot, layer in enumerate(sizes.layers_with(part)):
            layers[layer][part] = jax.tree.unflatten(structure, [column[slot] for column in columns])
    return layers


def scalar_scores(
    params: Params, hidden: Float[Array, "B L D"], last_index: Int[Array, " B"]
) -> Float[Array, "B labels"]:
    """The score head's float32 output at an explicit token of each sequence, never at one guessed from padding."""
    last = jnp.take_along_axis(hidden, last_index[:, None, None], axis=1)[:, 0]
    with exact_products(jnp.float32):
        return last.astype(jnp.float32) @ params["score"]["kernel"].astype(jnp.float32)
