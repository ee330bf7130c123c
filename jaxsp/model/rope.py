"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864, section 3.2), halves rotated as Llama and Qwen3 do.

Legend: B sequences, L tokens, N heads, H head size, F = H / 2 frequencies.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxsp.model.sizes import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 `[H/2]`: `theta^(-2i/H)`, stretched for long wavelengths if the model has llama3 scaling.

    The scaling (Llama 3.1's release): wavelengths beyond `original/low` are divided by `factor`, those below
    `original/high` are kept, and between the two the change is linear in `original/wavelength`.
    """
    frequencies = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return frequencies.astype(np.float32)
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # full turns over the original context
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return ((1 - smooth) * frequencies / scaling.factor + smooth * frequencies).astype(np.float32)


def rotation_angles(
    rope: Rope, head_dim: int, positions: Int[Array, "B L"]
) -> tuple[Float[Array, "B L 1 F"], Float[Array, "B L 1 F"]]:
    """Cosines and sines of `position * frequency`, float32, with an axis to broadcast over heads."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, head_dim)
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotate(
    x: Float[Array, "B L N H"], cos: Float[Array, "B L 1 F"], sin: Float[Array, "B L 1 F"]
) -> Float[Array, "B L N H"]:
    """`x` rotated in the planes of dimensions (i, i + H/2); computed in float32, returned in x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
