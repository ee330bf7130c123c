"""Mixture of experts: which experts a token goes to, what they make of it, and how evenly tokens are spread.

Legend: B sequences, L tokens of one, T tokens, D embedding, E experts, C choices (experts of a token), F mlp of one
expert.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Bool, Float, Int

from jaxsp.mesh import num_parts, partition_spec
from jaxsp.model.grouped import (
    Blocks,
    Implementation,
    block_rows,
    choose,
    group_choices,
    grouped_product,
    lay_out,
    take_back,
)
from jaxsp.model.sizes import Moe

RunExperts = Callable[[Array, Array, Array, Array, Array, Array], Array]
"""`(x [B, L, D], experts [B, L, C], weights [B, L, C], gate [E, D, F], up [E, D, F], down [E, F, D]) -> [B, L, D]`."""


class Experts(nnx.Module):
    """SwiGLU weights of all experts, each kernel stacked on a leading axis."""

    def __init__(self, sizes: Moe, embed_dim: int, *, rngs: nnx.Rngs):
        into, back = (sizes.num_experts, embed_dim, sizes.mlp_dim), (sizes.num_experts, sizes.mlp_dim, embed_dim)
        self.gate = nnx.Param(jax.random.normal(rngs.params(), into) * embed_dim**-0.5)
        self.up = nnx.Param(jax.random.normal(rngs.params(), into) * embed_dim**-0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), back) * sizes.mlp_dim**-0.5)


def route(
    sizes: Moe, router: Float[Array, "D E"], x: Float[Array, "*batch D"]
) -> tuple[Float[Array, "*batch E"], Int[Array, "*batch C"], Float[Array, "*batch C"]]:
    """Probabilities of all experts, the likeliest ones, and their weights, all computed in float32.

    The weights are the experts' probabilities, divided by their sum where the model was trained so
    (`norm_topk_prob`): Qwen3 technical report, arXiv 2505.09388, section 2.
    """
    scores = jnp.einsum("...d,de->...e", x.astype(jnp.float32), router.astype(jnp.float32), precision="highest")
    probs = jax.nn.softmax(scores, axis=-1)
    weights, experts = jax.lax.top_k(probs, sizes.num_chosen)
    if sizes.normalises_weights:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return probs, experts, weights


def load_balancing_loss(
    probs: Float[Array, "N T E"], experts: Int[Array, "N T C"], is_token: Bool[Array, " T"] | None = None
) -> Float[Array, ""]:
    """`E * sum_e f_e P_e`: `f_e` choices of expert e for a token, `P_e` its mean probability, over N layers together.

    Fedus et al. 2021 (arXiv 2101.03961, equations 4 to 6), as `transformers` computes it for several choices and
    layers: at even load it is C. `is_token` leaves out padding.
    """
    num_experts = probs.shape[-1]
    mask = jnp.ones(probs.shape[1]) if is_token is None else is_token.astype(jnp.float32)
    num_tokens = probs.shape[0] * jnp.sum(mask)
    chosen = jnp.sum(jax.nn.one_hot(experts, num_experts), axis=2)
    frequency = jnp.einsum("nte,t->e", chosen, mask) / num_tokens
    mean_prob = jnp.einsum("nte,t->e", probs.astype(jnp.float32), mask) / num_tokens
    return num_experts * jnp.sum(frequency * mean_prob)


def _run(
    implementation: Implementation,
    x: Float[Array, "T D"],
    experts: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    kernels: tuple[Array, Array, Array],
    *,
    is_part: bool = False,
) -> Float[Array, "T D"]:
    """The weighted sum of what each token's experts make of it. `is_part`: other experts are elsewhere, their numbers
    are outside `[0, E)` here, and they add nothing."""
    num_experts = len(kernels[0])
    block = block_rows(experts.size, num_experts)
    blocks = Blocks(block, may_be_unused=is_part)
    groups = group_choices(experts, num_experts, block)
    rows = lay_out(x, groups)
    gate, up = (grouped_product(implementation, blocks, rows, kernel, groups.sizes) for kernel in kernels[:2])
    out = grouped_product(implementation, blocks, jax.nn.silu(gate) * up, kernels[2], groups.sizes)
    return jnp.einsum("tcd,tc->td", take_back(out, groups), weights.astype(jnp.float32)).astype(x.dtype)


@functools.cache  # equal arguments give the same function, which programs are kept for
def run_experts_on(mesh: Mesh | AbstractMesh | None, platform: str, *, splits_tokens: bool) -> RunExperts:
    """`RunExperts` for devices of `platform`; on a mesh each multiplies with the experts, and the part of each one's
    mlp, that it holds.

    `splits_tokens`: sequences lie as a batch does, otherwise every device has all. Where experts are spread over
    devices, tokens go to all of these and what comes of them is summed on their way back: with as many choices as
    devices along `expert`, or more, that moves no more than sending each token to its experts alone would.
    """
    implementation = choose(platform)

    def run(x: Array, experts: Array, weights: Array, gate: Array, up: Array, down: Array, is_part: bool) -> Array:
        tokens, choices, shares = (array.reshape(-1, array.shape[-1]) for array in (x, experts, weights))
        return _run(implementation, tokens, choices, shares, (gate, up, down), is_part=is_part).reshape(x.shape)

    if mesh is None or mesh.size == 1:
        return functools.partial(run, is_part=False)
    is_spread = num_parts(mesh, "expert") > 1

    def run_local(x: Array, experts: Array, weights: Array, *kernels: Array) -> Array:
        if is_spread and splits_tokens:
            x, experts, weights = (jax.lax.all_gather(each, "expert", tiled=True) for each in (x, experts, weights))
        if is_spread:
            experts = experts - jax.lax.axis_index("expert") * len(kernels[0])
        out = run(x, experts, weights, *kernels, is_part=is_spread)
        if is_spread and splits_tokens:
            out = jax.lax.psum_scatter(out, "expert", tiled=True)
        elif is_spread:
            out = jax.lax.psum(out, "expert")
        return jax.lax.psum(out, "tensor")

    tokens = partition_spec(("batch" if splits_tokens else None, None, None))
    into, back = partition_spec(("expert", None, "mlp")), partition_spec(("expert", "mlp", None))
    return jax.shard_map(
        run_local,
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, into, into, back),
        out_specs=tokens,
        check_vma=False,  # what a kernel returns says nothing about it
    )
