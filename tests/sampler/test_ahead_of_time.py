"""Decoding and prompts of real sizes, compiled for accelerators that are not here: `make test-aot`.

64 slots of 40,960 tokens in bfloat16, and a cache of all tokens that `jaxsp.sampler.capacity` promises.
"""

import importlib.util
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

from jaxsp.mesh import make_mesh
from jaxsp.model.decoder import abstract_params
from jaxsp.model.sizes import sizes_from_hf_config
from jaxsp.sampler.capacity import TARGETS, WORK_SHARE, Capacity, capacity
from jaxsp.sampler.paged_attention import choose
from jaxsp.sampler.programs import make_programs
from jaxsp.sampler.scheduler import make_slots
from jaxsp.sampler.weight_sync import sampler_shardings, sampler_sizes

SLOTS, CONTEXT, CHUNK = 64, 40_960, 16
PREFILL_ROWS, PREFILL_LENGTH = 16, 128
"""Of the calls of 2,048 tokens, the one that gathers the most pages."""
DTYPE = jnp.dtype(jnp.bfloat16)
TARGET = {target.name: target for target in TARGETS}
MODELS = {
    name: sizes_from_hf_config(json.loads((Path(__file__).parent / f"{name}.json").read_text()))
    for name in ("Qwen3-4B", "Qwen3-8B")
}

H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132  fpus_per_core: 128  clock_rate_ghz: 1.98
  threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  shared_memory_per_core: 233472  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  device_memory_size: 151397597184  memory_bandwidth: 4800000000000  l2_cache_size: 52428800
}
platform_name: "CUDA"
dnn_version_info { major: 9  minor: 10 }
device_description_str: "NVIDIA H200"
"""


def devices_of(target: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    plugin, extra = ("jax_cuda12_plugin", "cuda12") if target == "H200" else ("libtpu", "tpu")
    if importlib.util.find_spec(plugin) is None:
        pytest.skip(f"{plugin} is not installed: pip install .[{extra}], or make test-aot")
    if target == "H200":
        description = topologies.get_topology_desc("", "cuda", topology="1x1x1", target_config=H200)
    else:
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        description = topologies.get_topology_desc(target, "tpu")
    return list(description.devices)


class Compiled:
    """The sampler's programs for a model on a target, as shapes."""

    def __init__(self, model: str, target: str, devices: list[Any]) -> None:
        self.capacity: Capacity = capacity(MODELS[model], TARGET[target])
        self.target, self.platform = TARGET[target], devices[0].platform
        mesh = make_mesh(1, 1, 1, 1, len(devices), devices)
        sizes = sampler_sizes(MODELS[model], mesh)
        shardings, kv_sharding = sampler_shardings(sizes, mesh)
        implementation, page_tokens, _ = choose(
            "auto", devices[0], num_slots=SLOTS, max_context=CONTEXT, page_tokens=None, head_dim=sizes.head_dim,
            dtype=DTYPE,
        )  # fmt: skip
        assert implementation.name == self.platform
        self.programs = make_programs(sizes, DTYPE, page_tokens, CHUNK, kv_sharding, implementation)
        self.width = CONTEXT // page_tokens
        self._whole = NamedSharding(mesh, PartitionSpec())
        shapes = abstract_params(sizes)
        one_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), shapes["layers"])
        shapes = {**shapes, "layers": [one_layer] * sizes.num_layers}
        self.params = jax.tree_util.tree_map_with_path(
            lambda path, leaf, sharding: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype if path[-1].key == "scale" else DTYPE, sharding=sharding
            ),
            shapes, shardings,
        )  # fmt: skip
        head = self.params.get("lm_head", {}).get("kernel")
        self.head_bytes = 0 if head is None else math.prod(head.sharding.shard_shape(head.shape)) * DTYPE.itemsize
        num_pages = self.capacity.num_tokens // page_tokens
        pool = jax.ShapeDtypeStruct(
            (num_pages, sizes.num_kv_heads, page_tokens, sizes.head_dim), DTYPE, sharding=kv_sharding
        )
        self.cache = [(pool, pool)] * sizes.num_layers
        self.pool_shape = kv_sharding.shard_shape(pool.shape)
        self.pool_bytes = 2 * sizes.num_layers * math.prod(self.pool_shape) * DTYPE.itemsize

    def from_host(self, array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=self._whole)

    def compile(self, program: Any, *arguments: Any) -> Any:
        kind = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
        lowered_for = AbstractMesh((), (), abstract_device=kind) if self.platform == "gpu" else AbstractMesh((), ())
        with jax.sharding.use_abstract_mesh(lowered_for):
            return program.lower(*arguments).compile()

    def assert_fits(self, compiled: Any, unused_bytes: int = 0) -> int:
        """Weights but the unused ones, cache and temporaries fit, and the cache is changed in place; the bytes of
        temporaries."""
        memory = compiled.memory_analysis()
        shape = ",".join(map(str, self.pool_shape))
        assert not re.findall(rf"= bf16\[{shape}\]\S* copy\(", compiled.as_text())
        assert memory.alias_size_in_bytes >= self.pool_bytes
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        work = memory.temp_size_in_bytes + memory.generated_code_size_in_bytes + results
        assert memory.argument_size_in_bytes >= self.capacity.weight_bytes - unused_bytes + self.pool_bytes
        assert work < WORK_SHARE * self.target.memory_bytes
        assert memory.argument_size_in_bytes + unused_bytes + work < self.target.memory_bytes
        return memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("Qwen3-4B", "v5e:2x2"), ("Qwen3-4B", "v6e:2x2"), ("Qwen3-4B", "v5p:2x2x1"), ("Qwen3-4B", "H200"),
        ("Qwen3-8B", "v6e:2x2"), ("Qwen3-8B", "v5p:2x2x1"), ("Qwen3-8B", "H200"),
    ],
)  # fmt: skip
def test_decoding_and_prompts_compile_and_fit_beside_weights_and_cache(
    model: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Compiled(model, target, devices_of(target, monkeypatch))

    def table(num_rows: int) -> jax.ShapeDtypeStruct:
        return case.from_host(np.zeros((num_rows, case.width), np.int32))

    slots = jax.tree.map(case.from_host, make_slots(SLOTS, []))
    stop_at = case.from_host(np.zeros((), np.int32))
    decode = case.compile(case.programs.decode, case.params, case.cache, table(SLOTS), slots, None, stop_at)
    # Far from the 64 x 40,960 tokens that gathering would copy; what there is serves the vocabulary's scores, and an
    # untied head, of which XLA for TPU makes a copy in another layout.
    assert case.assert_fits(decode) < 2**29 + case.head_bytes
    tokens = case.from_host(np.zeros((PREFILL_ROWS, PREFILL_LENGTH), np.int32))
    each = case.from_host(np.zeros(PREFILL_ROWS, np.int32))
    prefill = case.compile(case.programs.prefill, case.params, case.cache, tokens, each, each, table(PREFILL_ROWS))
    case.assert_fits(prefill, unused_bytes=case.head_bytes)  # prompts end as hidden states
