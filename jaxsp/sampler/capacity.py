"""What a sampler can hold and how fast memory lets it decode, per kind of accelerator: arithmetic, no device.

    python -m jaxsp.sampler.capacity MODEL_DIR_OR_CONFIG.json ...

prints the table of `jaxsp/sampler/README.md`. A decode step reads every weight but the embedding of tokens that it does
not look up, and the keys and values of all rows; at 64 rows the products take less time than that, so bandwidth bounds
the step. Nothing is measured here.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from jaxsp.mesh import MESH_AXES
from jaxsp.model.decoder import KEPT_IN_FLOAT32, abstract_params
from jaxsp.model.sizes import DecoderSizes, sizes_from_hf_config
from jaxsp.sampler.weight_sync import like_stacked, sampler_shardings, sampler_sizes

GIB = 2**30
WORK_SHARE = 1 / 8
"""Of a device's memory, left to what programs need for a moment: a prompt's scores, gathered pages, logits."""


@dataclass(frozen=True)
class Target:
    """Devices that share a model along `tensor`."""

    name: str
    num_devices: int
    memory_bytes: int
    """Of one device, as a program can use it."""
    bandwidth: float
    """Bytes per second between one device and its memory, as its maker states it."""


TARGETS = (
    Target("v5e:2x2", 4, round(15.75 * GIB), 819e9),
    Target("v6e:2x2", 4, round(31.24 * GIB), 1640e9),
    Target("v5p:2x2x1", 4, round(95.73 * GIB), 2765e9),
    Target("H200", 1, round(0.9 * 151397597184), 4.8e12),
)
"""TPUs' memory is what their compiler grants; a GPU's is nine tenths of it (`XLA_PYTHON_CLIENT_MEM_FRACTION=0.9`)."""


@dataclass(frozen=True)
class Capacity:
    """Bytes are those of one device."""

    weight_bytes: int
    token_bytes: int
    """Of one token's keys and values."""
    num_tokens: int
    """That the cache can hold."""
    step_bytes: int
    """That one decode step reads and writes."""
    tokens_per_s: float
    """That the bandwidth allows, of all rows and devices together."""


def capacity(
    sizes: DecoderSizes, target: Target, *, num_rows: int = 64, context: int = 4096, dtype: Any = jnp.bfloat16
) -> Capacity:
    """For rows that all have `context` tokens. Raises `UsageError` where the decoder does not divide over the devices,
    ValueError where its weights leave no memory."""
    shape = (*(1 for _ in MESH_AXES[1:]), target.num_devices)
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
    sizes = sampler_sizes(sizes, mesh)
    shardings, kv_sharding = sampler_shardings(sizes, mesh)
    params = abstract_params(sizes)
    itemsize = jnp.dtype(dtype).itemsize

    def device_bytes(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct, sharding: Any) -> int:
        num_layers, one = (leaf.shape[0], leaf.shape[1:]) if path[0].key == "layers" else (1, leaf.shape)
        size = leaf.dtype.itemsize if path[-1].key in KEPT_IN_FLOAT32 else itemsize
        return num_layers * math.prod(sharding.shard_shape(one)) * size

    by_name = jax.tree_util.tree_map_with_path(device_bytes, params, like_stacked(shardings))
    weight_bytes = sum(jax.tree.leaves(by_name))
    token = kv_sharding.shard_shape((1, sizes.num_kv_heads, 1, sizes.head_dim))
    token_bytes = 2 * sizes.num_layers * math.prod(token) * itemsize
    free = int(target.memory_bytes * (1 - WORK_SHARE)) - weight_bytes
    if free < token_bytes:
        raise ValueError(f"{weight_bytes} bytes of weights leave no memory of {target.memory_bytes}")
    looked_up = 0 if sizes.has_tied_embeddings else by_name["embed"]
    step_bytes = weight_bytes - looked_up + num_rows * (context + 1) * token_bytes
    return Capacity(
        weight_bytes, token_bytes, free // token_bytes, step_bytes, num_rows / (step_bytes / target.bandwidth)
    )


def markdown_table(models: dict[str, DecoderSizes], targets: Sequence[Target] = TARGETS) -> str:
    """A line for each model on each target, in bfloat16."""
    lines = [
        "| model | devices | weights, a device | KV cache, a token of a device | tokens that fit | "
        "a step of 64 x 4,096 moves, a device | tokens/s that bandwidth allows |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sizes in models.items():
        for target in targets:
            found = capacity(sizes, target)
            lines.append(
                f"| {name} | {target.num_devices} of {target.name} | {found.weight_bytes / 1e9:.2f} GB | "
                f"{found.token_bytes / 1e3:.1f} kB | {found.num_tokens:,} | {found.step_bytes / 1e9:.2f} GB | "
                f"{found.tokens_per_s:,.0f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Prints the table for models' `config.json` files, or directories that hold one."""
    models = {}
    for argument in arguments:
        path = Path(argument)
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" else path.stem
        models[name] = sizes_from_hf_config(json.loads(path.read_text()), str(path))
    print(markdown_table(models))


if __name__ == "__main__":
    main(sys.argv[1:])
