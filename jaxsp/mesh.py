"""Devices as a mesh, and the one table that says which mesh axis a logical axis is split over.

Everyone else names what an axis means (`("embed", "heads", "head_dim")`); only this file knows `data`, `fsdp`,
`context`, `expert` and `tensor`. It also starts several processes and lets them wait for each other.
"""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxsp.config import UsageError, UserError

MESH_AXES = ("data", "fsdp", "context", "expert", "tensor")

LOGICAL_AXES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "context": ("context",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "expert": ("expert",),
    "layers": (),
    "head_dim": (),
    "norm": (),
}
"""Logical axis -> the mesh axes it is split over; none means that every device holds it whole."""

LogicalAxes = tuple[str | None, ...]
"""One name of `LOGICAL_AXES`, or None, for each dimension of an array."""


def make_mesh(
    data: int, fsdp: int, context: int, expert: int, tensor: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes `MESH_AXES` over all of `devices` (None: all devices of all processes).

    At most one of the sizes may be -1, which takes what the others leave. The axes are of type Auto: the compiler
    propagates shardings, as `NamedSharding`s and `with_sharding_constraint` ask for them.

    Raises `UsageError` naming the field of `mesh` that is wrong, or that the sizes do not fit the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = mesh_sizes(data, fsdp, context, expert, tensor, num_devices=len(devices))
    return jax.make_mesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=devices)


def mesh_sizes(
    data: int, fsdp: int, context: int, expert: int, tensor: int, *, num_devices: int
) -> tuple[int, int, int, int, int]:
    """The five sizes with -1 filled in, so that their product is `num_devices`. Raises as `make_mesh` does."""
    sizes: dict[str, int] = dict(zip(MESH_AXES, (data, fsdp, context, expert, tensor), strict=True))
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise UsageError(f"mesh.{name} = {size} is not a number of devices; give 1 or more, or -1 for what is left")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        named = " and ".join(f"mesh.{name}" for name in open_axes)
        raise UsageError(f"{named} are both -1, but only one axis can take what is left; give the others a number")
    given = math.prod(size for size in sizes.values() if size != -1)
    named = " x ".join(f"mesh.{name} = {size}" for name, size in sizes.items() if size > 1) or "every mesh axis = 1"
    if open_axes:
        if num_devices % given:
            raise UsageError(
                f"mesh.{open_axes[0]} = -1 cannot take what is left: {named} does not divide {num_devices} devices"
            )
        sizes[open_axes[0]] = num_devices // given
    elif given != num_devices:
        raise UsageError(
            f"{named} is a mesh of {given} devices, but there are {num_devices}; "
            "change one of them, or set mesh.fsdp or mesh.data to -1 to take what is left"
        )
    return sizes["data"], sizes["fsdp"], sizes["context"], sizes["expert"], sizes["tensor"]


def partition_spec(logical_axes: LogicalAxes) -> PartitionSpec:
    """The mesh axes of each dimension. `("embed", "heads", "head_dim")` gives `PartitionSpec("fsdp", "tensor", None)`.

    Raises ValueError for an unknown name, or where two dimensions would be split over the same mesh axis (the batch of
    activations is split over `fsdp` already, so their features are `None`, not `embed`).
    """
    entries: list[str | tuple[str, ...] | None] = []
    taken: dict[str, str] = {}
    for name in logical_axes:
        if name is not None and name not in LOGICAL_AXES:
            raise ValueError(f"unknown logical axis {name!r} in {logical_axes}; known are {', '.join(LOGICAL_AXES)}")
        mesh_axes = LOGICAL_AXES[name] if name is not None else ()
        for axis in mesh_axes:
            if axis in taken:
                raise ValueError(
                    f"{taken[axis]!r} and {name!r} of {logical_axes} are both split over mesh axis {axis!r}"
                )
            taken[axis] = str(name)
        entries.append(None if not mesh_axes else mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes)
    return PartitionSpec(*entries)


def num_parts(mesh: Mesh | AbstractMesh, logical_axis: str | None) -> int:
    """How many parts a dimension is split into; 1 for None."""
    mesh_axes = LOGICAL_AXES[logical_axis] if logical_axis is not None else ()
    return math.prod(mesh.shape[axis] for axis in mesh_axes)


def shardings(mesh: Mesh | AbstractMesh, logical_axes: Any) -> Any:
    """The same tree with a `NamedSharding` for each tuple of logical axis names (`()` for a scalar)."""
    return jax.tree.map(lambda axes: NamedSharding(mesh, partition_spec(axes)), logical_axes, is_leaf=_is_logical_axes)


def shardable(mesh: Mesh | AbstractMesh, logical_axes: LogicalAxes, shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array of `shape`.

    Raises `UsageError` that names the dimension which does not divide over its mesh axes.
    """
    if len(logical_axes) != len(shape):
        raise ValueError(f"{len(logical_axes)} logical axes {logical_axes} for an array of shape {tuple(shape)}")
    spec = partition_spec(logical_axes)
    for name, size in zip(logical_axes, shape, strict=True):
        parts = num_parts(mesh, name)
        if size % parts:
            named = " x ".join(f"mesh.{axis}" for axis in LOGICAL_AXES[str(name)] if mesh.shape[axis] > 1)
            raise UsageError(f"{name} = {size} does not divide over {named} = {parts}; choose a divisor of {size}")
    return NamedSharding(mesh, spec)


def initialize_distributed(timeout_s: int = 300) -> bool:
    """Joins the run's processes if the environment says that there are several; True if it does.

    Several processes are seen from `JAX_COORDINATOR_ADDRESS` with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, or from
    Slurm (`srun`), Open MPI or a TPU pod, which need no variables of the user's. Call it before JAX looks for devices.

    Raises `UsageError` naming the variable that is missing or wrong, `UserError` if the others do not come in time.
    """
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    arguments: dict[str, Any] = {}
    if address:
        num_processes = _number_from_environment("JAX_NUM_PROCESSES")
        arguments = {
            "coordinator_address": address,
            "num_processes": num_processes,
            "process_id": _number_from_environment("JAX_PROCESS_ID"),
            "local_device_ids": _local_device_ids(),
        }
        if ":" not in address:
            raise UsageError(f"JAX_COORDINATOR_ADDRESS = {address} has no port; write host:port")
        if not arguments["process_id"] < num_processes:
            raise UsageError(f"JAX_PROCESS_ID must be under JAX_NUM_PROCESSES = {num_processes}")
        if num_processes == 1:
            return False
    elif _scheduler_has_several_processes():
        # One process for all devices of a host: without this, JAX gives a Slurm or MPI task one device only.
        arguments = {"local_device_ids": _local_device_ids()} if _is_alone_on_host() else {}
    else:
        return False
    try:
        jax.distributed.initialize(**arguments, initialization_timeout=timeout_s)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"the processes of this run did not find each other within {timeout_s} s at "
            f"{address or 'the address that the scheduler gave'}; see that all were started and reach that address"
        ) from error
    return jax.process_count() > 1


def is_main_process() -> bool:
    """Whether this process writes what a run has once: metrics, the console, its lock."""
    return jax.process_index() == 0


_num_barriers: Counter[str] = Counter()


def barrier(name: str, timeout_s: float) -> None:
    """Waits until every process of the run has come to this barrier; returns at once if there is one process.

    It goes through the coordination service, not through devices, so that a process that never comes costs
    `timeout_s`, not the run's time. Every process must pass barriers of one name equally often.

    Raises `UserError` that names the barrier when the time is over or a process has died.
    """
    if jax.process_count() == 1:
        return
    from jax._src import distributed  # the coordination service's client has no public name

    client = distributed.global_state.client
    assert client is not None
    _num_barriers[name] += 1  # the service takes each id once
    try:
        client.wait_at_barrier(f"{name}:{_num_barriers[name]}", timeout_in_ms=round(timeout_s * 1000))
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"process {jax.process_index()} waited at {name!r} for the other processes, at most {timeout_s:g} s, and "
            f"they did not all come; look at their logs for the first error ({reason})"
        ) from error


def _is_logical_axes(node: Any) -> bool:
    # Named tuples are containers (optax's states), also empty ones.
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


def _number_from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise UsageError(f"JAX_COORDINATOR_ADDRESS is set, but {name} is {value!r}; give it a number")
    return int(value)


def _local_device_ids() -> list[int]:
    """The devices that this process may use; empty means all of its host."""
    return [int(number) for number in os.environ.get("JAX_LOCAL_DEVICE_IDS", "").split(",") if number]


def _scheduler_has_several_processes() -> bool:
    environment = os.environ
    # Slurm sets SLURM_NTASKS for the batch script too, but a step's node list only under srun.
    if "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment:
        return int(environment.get("SLURM_NTASKS", "1")) > 1
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return int(environment["OMPI_COMM_WORLD_SIZE"]) > 1
    from jax._src import cloud_tpu_init  # set when JAX is imported on a machine with TPU chips; no public name

    if not cloud_tpu_init.running_in_cloud_tpu_vm:
        return False
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    if hosts is not None:
        return "," in hosts or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    # Elsewhere only the metadata server knows the number of hosts; JAX asks it, and one host is fine too.
    return "TPU_SKIP_MDS_QUERY" not in environment


def _is_alone_on_host() -> bool:
    tasks_per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    return tasks_per_node.split("(")[0] == "1" or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
