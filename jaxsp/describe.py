"""What a config amounts to before anything runs: its mesh, sizes, shapes, and an estimate of each device's memory."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxsp.config import RunConfig, dump_config
from jaxsp.learner.batch import row_lengths
from jaxsp.learner.optimizers import make_optimizer
from jaxsp.mesh import num_parts, shardings
from jaxsp.model.decoder import KEPT_IN_FLOAT32, abstract_params, logical_axes
from jaxsp.model.sizes import DecoderSizes
from jaxsp.policy import sampler_mesh
from jaxsp.run import abstract_arrays, open_parts
from jaxsp.sampler.cpu_products import choose_products
from jaxsp.sampler.paged_attention import choose
from jaxsp.sampler.scheduler import context_buckets, prompt_buckets, row_buckets
from jaxsp.sampler.weight_sync import sampler_shardings, sampler_sizes
from jaxsp.verifiers.verify import make_verifier_pool


def describe(config: RunConfig, console: Console) -> None:
    """Prints the resolved config, then what it amounts to on the devices there are; reads no weights.

    Raises `UserError` as a run would for what the config names and for what does not fit together.
    """
    parts = open_parts(config, make_verifier_pool(config.verifier.num_workers, config.verifier.timeout_s))
    mesh, text, sizes = parts.mesh, parts.text, parts.text.source.sizes
    memory = memory_estimate(config, sizes, mesh)
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(sizes)))
    devices = list(mesh.devices.flat)
    num_splits, num_copies = num_parts(parts.sampler_mesh, "heads"), num_parts(parts.sampler_mesh, "batch")

    def line(name: str, value: Any) -> None:
        console.print(f"{name:<22}{value}", highlight=False, markup=False, soft_wrap=True)

    console.print(dump_config(config), highlight=False, markup=False, soft_wrap=True)
    line("model", f"{sizes.model_type}, {num_params:,} parameters, {sizes.num_layers} layers, {text.source.path}")
    line("chat format", text.renderer.kind)
    line("mesh", ", ".join(f"{name} {size}" for name, size in mesh.shape.items()))
    line("devices", f"{len(devices)} x {devices[0].device_kind}: {_listed([str(device) for device in devices])}")
    line("learner row lengths", _listed(sorted(row_lengths(config.learner.row_tokens))))
    line(
        "sampler split",
        f"{num_splits} part{'s' if num_splits > 1 else ''} of weights and cache, on {num_copies} "
        f"device{'s' if num_copies > 1 else ''} each",
    )
    line("sampler rows", _listed(row_buckets(config.sampler.num_slots)))
    attention, page_tokens, why_not = choose(
        config.sampler.attention, devices[0], num_slots=config.sampler.num_slots,
        max_context=config.sampler.max_context, page_tokens=config.sampler.page_tokens, head_dim=sizes.head_dim,
        dtype=config.model.compute_dtype,
    )  # fmt: skip
    line("sampler attention", f"{attention.name}, pages of {page_tokens} tokens" + (f" ({why_not})" if why_not else ""))
    chosen = choose_products(config.sampler.products, devices[0], parts.sampler_mesh.size, config.model.compute_dtype)
    line("sampler products", chosen.name + (f" (cpu {chosen.why_not})" if chosen.why_not else ""))
    line("sampler contexts", _listed(context_buckets(config.sampler.max_context, page_tokens)))
    line("sampler prompts", _listed(prompt_buckets(config.sampler.prefill_tokens)))
    console.print(_memory_table(memory, devices[0]))


def memory_estimate(config: RunConfig, sizes: DecoderSizes, mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Bytes on each device of what a run holds, by name; the last is what an update adds for a moment, roughly.

    The learner's arrays lie on `mesh`, the sampler's on the `sampler_mesh` of its devices.
    """
    axes = logical_axes(sizes)
    has_reference = config.learner.kl_coef > 0
    optimizer = make_optimizer(config.learner.learning_rate, config.learner.optimizer)
    placed = abstract_arrays(sizes, optimizer, shardings(mesh, axes), has_reference)
    params = placed["state"]["params"]
    compute_bytes = jnp.dtype(config.model.compute_dtype).itemsize
    weight_dtype = config.sampler.weight_dtype or config.model.compute_dtype
    cache_tokens = config.sampler.cache_tokens or config.sampler.num_slots * config.sampler.max_context
    decoding = sampler_mesh(mesh, sizes)
    split = sampler_sizes(sizes, decoding)
    weights = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        abstract_params(split),
        shardings(decoding, axes),
    )
    _, kv_sharding = sampler_shardings(split, decoding)
    layer_cache = kv_sharding.shard_shape((1, split.num_kv_heads, cache_tokens, split.head_dim))
    num_rows = -(-config.learner.rows_per_microbatch // num_parts(mesh, "batch"))
    layer_inputs = num_rows * config.learner.row_tokens * sizes.embed_dim * (sizes.num_layers + 1)
    logits = 2 * config.learner.logits_chunk * sizes.vocab_size
    return {
        "parameters": _device_bytes(params),
        "gradients, and those of a micro-batch": 2 * _device_bytes(params),
        "optimizer moments": _device_bytes(placed["state"]["opt_state"]),
        "reference": _device_bytes(placed["reference"]),
        f"sampler weights ({weight_dtype})": _device_bytes(weights, jnp.dtype(weight_dtype).itemsize),
        f"KV cache ({cache_tokens} tokens)": 2 * sizes.num_layers * math.prod(layer_cache) * compute_bytes,
        "activations of an update": layer_inputs * compute_bytes + logits * 4,
    }


def _device_bytes(tree: Any, itemsize: int | None = None) -> int:
    """Bytes of one device's shards; those kept in float32 have their own size where `itemsize` replaces the others'."""
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_kept = getattr(path[-1], "key", None) in KEPT_IN_FLOAT32
        size = leaf.dtype.itemsize if itemsize is None or is_kept else itemsize
        total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * size
    return total


def _memory_table(memory: dict[str, int], device: Any) -> Table:
    table = Table(title="Memory per device, estimated", title_justify="left")
    table.add_column("")
    table.add_column("GB", justify="right")
    for name, num_bytes in memory.items():
        table.add_row(name, f"{num_bytes / 1e9:.2f}")
    table.add_section()
    table.add_row("total", f"{sum(memory.values()) / 1e9:.2f}")
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        table.add_row("there is", f"{limit / 1e9:.2f}")
    return table


def _listed(values: Sequence[Any]) -> str:
    """All of a few values, else the first and the last of them."""
    shown = [str(value) for value in values]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:8], "...", *shown[-4:]])
