"""The mesh, the table of logical axes, and several processes that wait for each other."""

import os
import socket
import subprocess
import sys

import jax
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxsp.config import UsageError
from jaxsp.mesh import (
    LOGICAL_AXES,
    MESH_AXES,
    barrier,
    initialize_distributed,
    is_main_process,
    make_mesh,
    mesh_sizes,
    partition_spec,
    shardings,
)

EIGHT_DEVICES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxsp.config import UsageError
from jaxsp.mesh import make_mesh, num_parts, shardable

mesh = make_mesh(2, -1, 1, 1, 2)
assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "context": 1, "expert": 1, "tensor": 2}, mesh
assert mesh.axis_types == (AxisType.Auto,) * 5
assert sorted(device.id for device in mesh.devices.flat) == list(range(8))
assert make_mesh(1, -1, 1, 1, 1, devices=jax.devices()[:3]).devices.shape == (1, 3, 1, 1, 1)

assert [num_parts(mesh, name) for name in ("batch", "embed", "layers", None)] == [4, 2, 1, 1]

weight = jax.device_put(np.arange(4 * 2 * 3, dtype=np.float32).reshape(4, 2, 3),
                        shardable(mesh, ("embed", "kv_heads", "head_dim"), (4, 2, 3)))
assert weight.sharding.shard_shape(weight.shape) == (2, 1, 3)
rows = jax.device_put(np.ones((8, 4), np.float32), shardable(mesh, ("batch", None), (8, 4)))
assert rows.sharding.shard_shape(rows.shape) == (2, 4)
with jax.set_mesh(mesh):
    result = jax.jit(lambda rows, weight: jnp.einsum("be,ehd->bhd", rows, weight))(rows, weight)
np.testing.assert_array_equal(result, np.einsum("be,ehd->bhd", np.ones((8, 4)), np.asarray(weight)))

for axes, shape, message in [
    (("embed", "kv_heads", "head_dim"), (4, 3, 8), "kv_heads = 3 does not divide over mesh.tensor = 2"),
    (("batch", None), (6, 4), "batch = 6 does not divide over mesh.data x mesh.fsdp = 4"),
    (("layers", "embed"), (3, 5), "embed = 5 does not divide over mesh.fsdp = 2"),
]:
    try:
        shardable(mesh, axes, shape)
    except UsageError as error:
        assert message in str(error), error
    else:
        raise AssertionError(shape)
print("ok")
"""

TWO_PROCESSES = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
from jaxsp.config import UserError
from jaxsp.mesh import barrier, initialize_distributed, is_main_process, make_mesh
assert initialize_distributed(timeout_s=60)
assert initialize_distributed(), "a second call changes nothing"
assert jax.process_count() == 2 and is_main_process() == (jax.process_index() == 0)
assert make_mesh(-1, 1, 1, 1, 1).devices.size == 4
barrier("start", timeout_s=60)
barrier("start", timeout_s=60)
if is_main_process():
    start_s = time.monotonic()
    try:
        barrier("never", timeout_s=0.5)
    except UserError as error:
        assert "'never'" in str(error) and time.monotonic() - start_s < 10, error
        print("timed out")
barrier("end", timeout_s=60)
jax.distributed.shutdown()
"""


def run_python(program: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_eight_devices_are_split_as_the_table_says():
    process = run_python(EIGHT_DEVICES, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    output, errors = process.communicate(timeout=120)
    assert output == "ok\n", errors


def test_two_processes_find_each_other_and_one_that_never_comes_costs_the_deadline():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [
        run_python(
            TWO_PROCESSES,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(number),
            XLA_FLAGS="--xla_force_host_platform_device_count=2",
        )
        for number in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == "timed out\n", results


@pytest.mark.parametrize(
    ("sizes", "num_devices", "expected"),
    [
        ((1, -1, 1, 1, 1), 8, (1, 8, 1, 1, 1)),
        ((-1, 2, 1, 1, 2), 8, (2, 2, 1, 1, 2)),
        ((1, 1, 1, -1, 8), 8, (1, 1, 1, 1, 8)),
        ((2, 3, 1, 1, 1), 6, (2, 3, 1, 1, 1)),
    ],
)
def test_sizes_fill_up_to_the_number_of_devices(sizes, num_devices, expected):
    assert mesh_sizes(*sizes, num_devices=num_devices) == expected


@pytest.mark.parametrize(
    ("sizes", "num_devices", "message"),
    [
        ((1, -1, 1, 1, 3), 8, r"mesh\.fsdp = -1 .* mesh\.tensor = 3 does not divide 8 devices"),
        ((2, 2, 1, 1, 1), 8, r"mesh\.data = 2 x mesh\.fsdp = 2 is a mesh of 4 devices, but there are 8"),
        ((1, 1, 1, 1, 1), 2, r"every mesh axis = 1 .* there are 2"),
        ((1, -1, 1, 1, 16), 8, r"mesh\.tensor = 16"),
        ((-1, -1, 1, 1, 1), 8, r"mesh\.data and mesh\.fsdp are both -1"),
        ((1, -1, 0, 1, 1), 8, r"mesh\.context = 0"),
        ((1, -1, 1, -2, 1), 8, r"mesh\.expert = -2"),
    ],
)
def test_sizes_that_do_not_fit_name_the_field(sizes, num_devices, message):
    with pytest.raises(UsageError, match=message):
        mesh_sizes(*sizes, num_devices=num_devices)


def test_logical_axes_become_mesh_axes():
    assert partition_spec(("embed", "heads", "head_dim")) == PartitionSpec("fsdp", "tensor", None)
    assert partition_spec(("layers", "expert", "embed", "mlp")) == PartitionSpec(None, "expert", "fsdp", "tensor")
    assert partition_spec(("batch", "context", None)) == PartitionSpec(("data", "fsdp", "expert"), "context", None)
    assert partition_spec(()) == PartitionSpec()
    assert {axis for axes in LOGICAL_AXES.values() for axis in axes} == set(MESH_AXES), "no mesh axis goes unused"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("heads", "mlp"), "'heads' and 'mlp' .* mesh axis 'tensor'"),
        (("batch", "context", "embed"), "'batch' and 'embed' .* mesh axis 'fsdp'"),
        (("vocab", "vocab"), "'vocab' and 'vocab'"),
        (("embed", "hidden"), "unknown logical axis 'hidden'"),
    ],
)
def test_two_dimensions_on_one_mesh_axis_and_unknown_names_are_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        partition_spec(axes)


def test_shardings_keep_the_tree_and_see_named_tuples_as_containers():
    mesh = make_mesh(1, -1, 1, 1, 1, devices=jax.devices()[:1])
    tree = {"w": ("embed", "mlp"), "scale": ("norm",), "step": (), "states": (optax.EmptyState(), {"mu": ("embed",)})}
    result = shardings(mesh, tree)
    assert result["w"].spec == PartitionSpec("fsdp", "tensor")
    assert result["scale"].spec == PartitionSpec(None)
    assert result["step"].spec == PartitionSpec()
    assert result["states"][0] == optax.EmptyState()
    assert result["states"][1]["mu"].spec == PartitionSpec("fsdp")
    assert jax.tree.structure(result["states"]) == jax.tree.structure((optax.EmptyState(), {"mu": 0}))


def test_one_process_neither_joins_nor_waits(monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert initialize_distributed() is False
    # A batch script of Slurm without srun, and a job of one task.
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert initialize_distributed() is False
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert initialize_distributed() is False
    assert not jax.distributed.is_initialized()
    barrier("alone", timeout_s=0.001)
    assert is_main_process()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "JAX_NUM_PROCESSES is ''"),
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID is ''"),
        ({"JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is 'two'"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID must be under"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "host"}, "no port"),
    ],
)
def test_half_a_multi_process_environment_names_the_variable(monkeypatch, environment, message):
    for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        initialize_distributed()
