"""The same update on 8 fake devices and on one, in a process of its own: devices are counted once, at JAX's start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import jax, numpy as np, jax.numpy as jnp
import learner_cases
from learner_cases import random_items, tiny_params
from jaxsp.learner.batch import make_batch
from jaxsp.learner.optimizers import make_optimizer
from jaxsp.learner.policy_loss import PolicyLoss
from jaxsp.learner.state import init_state
from jaxsp.learner.update import make_logprobs_fn, make_update
from jaxsp.mesh import make_mesh, num_parts, partition_spec, shardings
from jaxsp.model.decoder import logical_axes

assert jax.device_count() == 8
SIZES = getattr(learner_cases, sys.argv[1])
mesh = make_mesh(*map(int, sys.argv[2:]))
param_shardings = shardings(mesh, logical_axes(SIZES))
rows = jax.sharding.NamedSharding(mesh, partition_spec((None, "batch")))
adamw, muon = make_optimizer(1e-3), make_optimizer(1e-3, "muon")
row_multiple = num_parts(mesh, "batch")
batch, stats = make_batch(random_items(num_groups=6), row_tokens=64, rows_per_microbatch=1, row_multiple=row_multiple)
assert stats.num_rows > 2

def run(loss, optimizer, **placement):
    common = dict(compute_dtype=jnp.float32, logits_chunk=32, **placement)
    old = make_logprobs_fn(SIZES, **common)(tiny_params(SIZES), batch)
    update = make_update(SIZES, optimizer, loss, **common)
    state = init_state(tiny_params(SIZES), optimizer, placement.get("param_shardings"))
    reference = np.asarray(old) - 0.1
    for _ in range(2):
        state, metrics = update(state, batch, old, reference, stats.num_trajectories, 16.0)
    return np.asarray(old), state, metrics

sequences = PolicyLoss(clip_low=3e-4, clip_high=4e-4, importance_cap=2.0, kl_coef=0.1, objective="gspo")
tokens = PolicyLoss(clip_low=0.2, clip_high=0.2, importance_cap=2.0, kl_coef=0.1)
for loss, optimizer in ((sequences, muon), (tokens, adamw)):
    old, state, metrics = run(loss, optimizer)
    placement = dict(param_shardings=param_shardings, batch_sharding=rows)
    sharded_old, sharded_state, sharded_metrics = run(loss, optimizer, **placement)
    np.testing.assert_allclose(sharded_old, old, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), sharded_metrics, metrics)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), sharded_state, state)

mu = sharded_state["opt_state"][1][0].mu
for tree in (sharded_state["params"], mu):
    jax.tree.map(lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim) or 1 / 0, tree, param_shardings)
layers = mu["layers"]
kernel = layers["experts"]["gate"] if SIZES.moe else layers["gate"]["kernel"]
parts = mesh.shape["fsdp"] * mesh.shape["tensor"] * mesh.shape["expert"]
assert kernel.addressable_shards[0].data.size == kernel.size // parts
print("equal")
"""


@pytest.mark.parametrize(
    ("sizes", "mesh"),
    [
        ("SIZES", (2, 2, 1, 1, 2)),
        ("MOE_SIZES", (1, 2, 1, 2, 2)),
        pytest.param("MOE_SIZES", (1, 8, 1, 1, 1), marks=pytest.mark.slow),
        pytest.param("MIXED_SIZES", (2, 1, 1, 4, 1), marks=pytest.mark.slow),
    ],
)
def test_sharded_over_eight_devices_equals_unsharded(sizes, mesh):
    """The mesh has the axes data, fsdp, context, expert and tensor."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, sizes, *map(str, mesh)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "equal"
