import os
import subprocess
import sys

from gguf_file import golden_as_gguf
from model_forward import GOLDEN

SCRIPT = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxsp.model.decoder import abstract_params
from jaxsp.model.source import load_params, open_model
assert jax.device_count() == 8
mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("a", "b", "c"))
specs = {  # over layers, heads, the two halves of a head, the inside and the outside; the rest is replicated
    ("layers", "q", "kernel"): P(None, "a", "b", "c"),
    ("layers", "k", "kernel"): P("c", ("a", "b")),
    ("layers", "o", "kernel"): P(None, "b", "a", "c"),
    ("layers", "q", "bias"): P("a", "b", "c"),
    ("layers", "gate", "kernel"): P(None, "a", ("b", "c")),
    ("layers", "down", "kernel"): P(None, ("b", "c"), "a"),
    ("layers", "mlp_norm", "scale"): P("a", "b"),
    ("layers", "experts", "gate"): P(None, "a", "b", "c"),
    ("layers", "experts", "down"): P("a", "b", "c"),
    ("layers", "router"): P(None, "c", "a"),
    ("embed",): P(("a", "b"), "c"),
    ("lm_head", "kernel"): P("a", ("b", "c")),
}
for name in sys.argv[1:]:
    source = open_model(name)
    shardings = jax.tree_util.tree_map_with_path(
        lambda path, _: NamedSharding(mesh, specs.get(tuple(part.key for part in path), P())),
        abstract_params(source.sizes),
    )
    plain, sharded = load_params(source), load_params(source, shardings=shardings)
    jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim) or sys.exit("sharding"), sharded, shardings)
    jax.tree.map(np.testing.assert_array_equal, plain, sharded)
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p), donate_argnums=0)(sharded)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(2 * x, y), plain, doubled)
print("equal")
"""


def test_loading_onto_eight_devices_gives_the_same_parameters(tmp_path):
    directories = [GOLDEN / name for name in ("qwen3_untied", "llama_bias", "qwen3_moe_mixed")]
    path = golden_as_gguf("llama_bias", tmp_path / "m.gguf")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *map(str, directories), str(path)],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "equal", done.stderr[-2000:]
