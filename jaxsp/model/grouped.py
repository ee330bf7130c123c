"""Products of rows with the weights of the expert that each row was sent to, and only those: no expert meets all rows.

Rows are sorted by expert and each expert's are filled up to whole blocks, so that a block of rows has one expert. The
work is that of the routed rows and of what fills the blocks: `jax.lax.ragged_dot` compiles to products of every row
with every expert on GPUs and on most TPUs.

Legend: T tokens, C choices (experts of a token), E experts, R rows, D and F features before and after a product.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_MAX_BLOCK, _MIN_BLOCK = 256, 8
_TILE = 512
"""Features of a tile of the TPU's kernel: with rows of a block they fit into its fast memory many times."""


class Groups(NamedTuple):
    """Where the choices of tokens stand once they are sorted by expert and filled up to blocks."""

    row: Any
    """int32 `[T, C]`: the row of each choice; R where its expert is not among those here."""
    choice: Any
    """int32 `[R]`: which choice, counted through all tokens, stands in a row; T C where none does."""
    sizes: Any
    """int32 `[E]`: rows of each expert, a multiple of the block; the rows after the last expert's are not used."""


@dataclass(frozen=True)
class Blocks:
    """How rows are cut, which is known while tracing."""

    rows: int
    """Of one block."""
    may_be_unused: bool = False
    """Whether there are far more blocks than are used, as where most choices have their expert on another device."""


@dataclass(frozen=True)
class Implementation:
    """A way to multiply groups of rows."""

    name: str
    platforms: tuple[str, ...] | None
    """Where it runs; None: everywhere."""
    multiply: Callable[..., Array]
    """`(blocks, x [R, D], weights [E, D, F], sizes [E], is_transposed) -> [R, F]`: each row times the weights of its
    expert, or their transpose (then x is `[R, F]`). What is in rows that are not used is undefined. Those of Pallas
    take `interpret` as well."""
    weigh: Callable[..., Array]
    """`(blocks, x [R, D], y [R, F], sizes [E]) -> float32 [E, D, F]`: the sum over an expert's rows of x times y."""


def block_rows(num_choices: int, num_experts: int) -> int:
    """Rows of a block: a quarter of an expert's share at even load, a power of two. Blocks that are not full then add
    an eighth to the work, or a quarter of it at worst; far fewer rows would read weights too often."""
    share = max(num_choices // (4 * num_experts), 1)
    return min(max(1 << (share.bit_length() - 1), _MIN_BLOCK), _MAX_BLOCK)


def num_rows(num_choices: int, num_experts: int, block: int) -> int:
    """R, enough for any way in which the choices may fall: every expert's last block may hold one row only."""
    num_open = min(num_choices, num_experts)
    return block * (num_open + (num_choices - num_open) // block)


def group_choices(experts: Int[Array, "T C"], num_experts: int, block: int) -> Groups:
    """Sorts choices by expert, those of one expert by token. Choices outside `[0, num_experts)` get no row."""
    num_choices = experts.size
    total = num_rows(num_choices, num_experts, block)
    flat = experts.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = jnp.argsort(flat, stable=True)
    by_expert = flat[order]
    counts = jnp.bincount(flat, length=num_experts + 1)
    sizes = -(-counts // block) * block
    rank = jnp.arange(num_choices) - (jnp.cumsum(counts) - counts)[by_expert]
    row = jnp.where(by_expert < num_experts, (jnp.cumsum(sizes) - sizes)[by_expert] + rank, total)
    return Groups(
        row=jnp.zeros(num_choices, jnp.int32).at[order].set(row, unique_indices=True).reshape(experts.shape),
        choice=jnp.full(total, num_choices, jnp.int32).at[row].set(order, mode="drop"),
        sizes=sizes[:num_experts].astype(jnp.int32),
    )


@jax.custom_vjp
def lay_out(x: Float[Array, "T D"], groups: Groups) -> Float[Array, "R D"]:
    """Each row's token; zeros where a row has none."""
    return _rows_of(x, groups.choice // groups.row.shape[1])


@jax.custom_vjp
def take_back(y: Float[Array, "R F"], groups: Groups) -> Float[Array, "T C F"]:
    """What came out for each choice; zeros where its expert is not here."""
    return _rows_of(y, groups.row)


def _rows_of(array: Array, index: Array) -> Array:
    return array.at[index].get(mode="fill", fill_value=0)


# Both only move rows, each to places that the other knows: their gradients are gathers too, where JAX's would scatter.
lay_out.defvjp(
    lambda x, groups: (lay_out(x, groups), groups),
    lambda groups, gradient: (jnp.sum(_rows_of(gradient, groups.row), axis=1), None),
)
take_back.defvjp(
    lambda y, groups: (take_back(y, groups), groups),
    lambda groups, gradient: (_rows_of(gradient.reshape(-1, gradient.shape[-1]), groups.choice), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def grouped_product(
    implementation: Implementation,
    blocks: Blocks,
    x: Float[Array, "R D"],
    weights: Float[Array, "E D F"],
    sizes: Int[Array, " E"],
) -> Float[Array, "R F"]:
    """Each row times the weights of its expert, in the dtype of `x`, summed in float32."""
    return implementation.multiply(blocks, x, weights, sizes, False)


def _product_forward(
    implementation: Implementation, blocks: Blocks, x: Array, weights: Array, sizes: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_product(implementation, blocks, x, weights, sizes), (x, weights, sizes)


def _product_backward(
    implementation: Implementation, blocks: Blocks, kept: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    x, weights, sizes = kept
    of_weights = implementation.weigh(blocks, x, gradient, sizes).astype(weights.dtype)
    return implementation.multiply(blocks, gradient, weights, sizes, True), of_weights, None


grouped_product.defvjp(_product_forward, _product_backward)


def _dot(x: Array, y: Array, contracted: tuple[int, int]) -> Array:
    """Float32 `x y` over these axes; products of float32 are not rounded (nor in the backward pass)."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _over_blocks(
    blocks: Blocks, rows: int, sizes: Array, one_block: Callable[[Array, Array, Array], Array], start: Array
) -> Array:
    """`one_block(first_row, expert, carry)` for one block after the other."""
    ends = jnp.cumsum(sizes)

    def body(block: Array, carry: Array) -> Array:
        first = block * blocks.rows
        # Blocks after the last expert's hold zeros, to which any expert's weights may be applied.
        expert = jnp.minimum(jnp.searchsorted(ends, first, side="right"), len(sizes) - 1)
        return one_block(first, expert, carry)

    num_blocks = ends[-1] // blocks.rows if blocks.may_be_unused else rows // blocks.rows
    return jax.lax.fori_loop(0, num_blocks, body, start)


def _multiply_blocks(blocks: Blocks, x: Array, weights: Array, sizes: Array, is_transposed: bool) -> Array:
    def one_block(first: Array, expert: Array, out: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(x, first, blocks.rows)
        weight = jax.lax.dynamic_index_in_dim(weights, expert, keepdims=False)
        product = _dot(own, weight, (1, 1 if is_transposed else 0)).astype(x.dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, product, first, axis=0)

    out = jnp.zeros((len(x), weights.shape[1 if is_transposed else 2]), x.dtype)
    return _over_blocks(blocks, len(x), sizes, one_block, out)


def _weigh_blocks(blocks: Blocks, x: Array, y: Array, sizes: Array) -> Array:
    def one_block(first: Array, expert: Array, total: Array) -> Array:
        own_x, own_y = (jax.lax.dynamic_slice_in_dim(array, first, blocks.rows) for array in (x, y))
        so_far = jax.lax.dynamic_index_in_dim(total, expert, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, so_far + _dot(own_x, own_y, (0, 0)), expert, axis=0)

    total = jnp.zeros((len(sizes), x.shape[1], y.shape[1]), jnp.float32)
    return _over_blocks(blocks, len(x), sizes, one_block, total)


def _tiling(blocks: Blocks, num_in: int, num_out: int) -> tuple[int, int, int]:
    return blocks.rows, min(num_in, _TILE), min(num_out, _TILE)


def _multiply_megablox(
    blocks: Blocks, x: Array, weights: Array, sizes: Array, is_transposed: bool, interpret: bool = False
) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # a second of imports, for TPUs only

    tiling = _tiling(blocks, x.shape[1], weights.shape[1 if is_transposed else 2])
    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        return gmm(x, weights, sizes, x.dtype, tiling, transpose_rhs=is_transposed, interpret=interpret)


def _weigh_megablox(blocks: Blocks, x: Array, y: Array, sizes: Array, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    with jax.default_matmul_precision("highest" if x.dtype == jnp.float32 else "default"):
        tiling = _tiling(blocks, x.shape[1], y.shape[1])
        return tgmm(x.T, y, sizes, jnp.float32, tiling, interpret=interpret)


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation("megablox", ("tpu",), _multiply_megablox, _weigh_megablox),
        Implementation("blocks", None, _multiply_blocks, _weigh_blocks),
    )
}
"""In the order of preference. `megablox` is the Pallas kernel that comes with JAX; `blocks` is a loop of XLA's
products, whose weights are read where they stand."""


def choose(platform: str) -> Implementation:
    """The first implementation that runs on such devices."""
    return next(
        implementation
        for implementation in IMPLEMENTATIONS.values()
        if implementation.platforms is None or platform in implementation.platforms
    )
