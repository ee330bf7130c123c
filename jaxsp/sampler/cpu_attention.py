"""Attention in the pages of the cache on a CPU, by a C kernel (`cpu/attention.c`).

Legend: B rows, L new tokens of a row, N query heads, K kv heads, H head size, G pages of the cache,
T tokens of a page, W pages of a row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxsp.sampler.cpu_kernels import ATTENTION, kernel_call, load_kernels


def complaint(head_dim: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot run, or None."""
    if dtype != jnp.float32:
        return f"computes in float32, and model.compute_dtype is {dtype.name}"
    kernels = load_kernels()
    if isinstance(kernels, str):
        return kernels
    if head_dim % kernels.lanes:
        return f"needs a head size that is a multiple of {kernels.lanes}, and the model's is {head_dim}"
    return None


def decode_attention(
    q: Float[Array, "B N H"],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    keys: Float[Array, "G K T H"],
    values: Float[Array, "G K T H"],
    table: Int[Array, "B W"],
    length: Int[Array, " B"],
    is_active: Bool[Array, " B"],
) -> tuple[Float[Array, "B N H"], Float[Array, "G K T H"], Float[Array, "G K T H"]]:
    """See `jaxsp.sampler.paged_attention.Implementation.decode`."""
    out, keys, values = prompt_attention(
        q[:, None], k[:, None], v[:, None], keys, values, table, length, is_active.astype(jnp.int32)
    )
    return out[:, 0], keys, values


def prompt_attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    keys: Float[Array, "G K T H"],
    values: Float[Array, "G K T H"],
    table: Int[Array, "B W"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
) -> tuple[Float[Array, "B L N H"], Float[Array, "G K T H"], Float[Array, "G K T H"]]:
    """See `jaxsp.sampler.paged_attention.Implementation.prefill`."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (q, keys, values)]
    call = kernel_call(ATTENTION, shapes, input_output_aliases={3: 1, 4: 2})
    out, keys, values = call(q, k, v, keys, values, *(x.astype(jnp.int32) for x in (table, start, count)))
    return out, keys, values
