"""Checkpoints: equal bits on any mesh, never a half one, and one message when the disk or the file is bad."""

import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxsp.checkpoint import Checkpointer, RunLock
from jaxsp.config import UserError


def make_arrays(seed: int = 0) -> dict:
    bits = np.random.default_rng(seed).integers(0, 2**32, 64, dtype=np.uint32)
    params = {"w": jnp.asarray(bits.view(np.float32).reshape(16, 4)), "scale": jnp.ones((3,), jnp.bfloat16) / 3}
    return {
        "params": params,
        "optimizer": optax.adam(1e-3).init(jax.tree.map(jnp.ones_like, params)),
        "ids": jnp.asarray(bits.view(np.int32)),
        "key_data": jax.random.key_data(jax.random.key(seed)),
        "key": jax.random.split(jax.random.key(seed), 3),
        "mask": jnp.asarray(bits % 2 == 0),
        "step": jnp.int32(seed),
    }


def abstract(arrays):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays)


def as_bytes(arrays) -> list[bytes]:
    return [
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf).tobytes()
        for leaf in jax.tree.leaves(arrays)
    ]


def run_python(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def array_files(path: Path) -> list[Path]:
    return sorted((file for file in (path / "arrays").rglob("*") if file.is_file()), key=lambda f: f.stat().st_size)


def test_arrays_and_manifest_come_back_bit_for_bit(tmp_path):
    arrays = make_arrays(3)  # random bits, NaN payloads and denormals among them
    manifest = {"phase": "joint", "documents": [3, 1, 2], "loss": 0.1 + 0.2, "seed": 2**62, "text": "ü\n", "none": None}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        assert checkpointer.save(7, arrays, manifest)
        checkpointer.wait()
        assert checkpointer.latest_step() == 7
    with Checkpointer(tmp_path, is_read_only=True) as checkpointer:
        restored, restored_manifest = checkpointer.restore(7, abstract(arrays))
        assert checkpointer.read_manifest(7) == manifest
    assert restored_manifest == manifest
    assert jax.tree.structure(restored) == jax.tree.structure(arrays)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), restored) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), arrays
    )
    assert as_bytes(restored) == as_bytes(arrays)


def test_who_only_reads_deletes_nothing(tmp_path):
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.ones(2)}, {})
    (tmp_path / "step_000003.orbax-checkpoint-tmp").mkdir()
    with Checkpointer(tmp_path, is_read_only=True) as checkpointer:
        assert checkpointer.steps() == [1, 2]
        checkpointer.check()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_part_is_read_without_the_rest_and_its_damage_is_seen(tmp_path):
    arrays = {"state": make_arrays(3), "reference": {}}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, arrays, {})
        checkpointer.wait()
        wanted = abstract(arrays["state"]["params"])
        part = checkpointer.restore_part(7, ("state", "params"), wanted)
        assert jax.tree.structure(part) == jax.tree.structure(wanted)
        assert as_bytes(part) == as_bytes(arrays["state"]["params"])
        other = {**wanted, "w": jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=wanted["w"].sharding)}
        with pytest.raises(UserError, match=r"\['state'\]\['params'\]\['w'\] is float32\[16, 4\] there"):
            checkpointer.restore_part(7, ("state", "params"), other)
        with pytest.raises(UserError, match=r"\['state'\]\['w'\] is absent there"):
            checkpointer.restore_part(7, ("state",), {"w": wanted["w"]})
        for file in array_files(checkpointer.path(7)):
            if file.stat().st_size:
                file.write_bytes(b"\0" * file.stat().st_size)
        with pytest.raises(UserError, match="is damaged"):
            checkpointer.restore_part(7, ("state", "params"), wanted)


def test_a_save_holds_the_arrays_as_they_were_though_an_update_takes_their_memory(tmp_path):
    before = np.arange(1_000_000, dtype=np.float32)
    arrays = {"w": jnp.asarray(before.copy()) + 0}
    update = jax.jit(lambda w: w * 0 - 1, donate_argnums=0)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, arrays, {})
        arrays["w"] = update(arrays["w"])
        jax.block_until_ready(update(arrays["w"]))
        checkpointer.wait()
        restored, _ = checkpointer.restore(1, {"w": jnp.zeros_like(before)})
    np.testing.assert_array_equal(restored["w"], before)


def test_the_newest_are_kept_and_a_step_is_saved_once(tmp_path):
    arrays = {"w": jnp.arange(4.0)}
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for step in (1, 2, 10, 1_000_000):
            assert checkpointer.save(step, arrays, {"step": step})
        assert not checkpointer.save(1_000_000, arrays, {"step": -1})
        assert checkpointer.steps() == [10, 1_000_000]
        assert checkpointer.read_manifest(1_000_000) == {"step": 1_000_000}
        assert checkpointer.latest_step() == 1_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000010", "step_1000000"]


SAVE_ON_A_MESH = """
import sys
import jax, numpy as np
from jaxsp.checkpoint import Checkpointer
from jaxsp.mesh import make_mesh, shardable
mesh = make_mesh(1, -1, 1, 1, 2)
w = np.random.default_rng(0).integers(0, 2**32, (16, 4, 3), dtype=np.uint32).view(np.float32)
sharding = shardable(mesh, ("embed", "heads", "head_dim"), w.shape)
if sys.argv[2] == "save":
    arrays = {"w": jax.device_put(w, sharding), "step": jax.device_put(np.int32(5), shardable(mesh, (), ()))}
    with Checkpointer(sys.argv[1]) as checkpointer:
        checkpointer.save(5, arrays, {"devices": jax.device_count()})
else:
    wanted = {"w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding),
              "step": jax.ShapeDtypeStruct((), np.int32, sharding=shardable(mesh, (), ()))}
    with Checkpointer(sys.argv[1]) as checkpointer:
        arrays, manifest = checkpointer.restore(5, wanted)
    assert manifest == {"devices": 8} and int(arrays["step"]) == 5
    assert arrays["w"].sharding == sharding and len(arrays["w"].addressable_shards) == jax.device_count()
    assert np.asarray(arrays["w"]).tobytes() == w.tobytes()
print("ok")
"""


def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path):
    for what, num_devices in (("save", 8), ("restore", 2), ("restore", 8)):
        result = run_python(
            SAVE_ON_A_MESH,
            str(tmp_path),
            what,
            XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices}",
        )
        assert result.stdout == "ok\n", result.stderr
    arrays = {"w": jnp.zeros((16, 4, 3)), "step": jnp.int32(0)}
    with Checkpointer(tmp_path) as checkpointer:
        restored, _ = checkpointer.restore(5, arrays)
    assert restored["w"].sharding.device_set == {jax.devices()[0]}


KILLED_WHILE_SAVING = """
import os, signal, sys
import jax.numpy as jnp
import tensorstore
from jaxsp.checkpoint import Checkpointer
checkpointer = Checkpointer(sys.argv[1], keep=2)
checkpointer.save(1, {"w": jnp.arange(1000.0)}, {"n": 1})
checkpointer.wait()
checkpointer.save(2, {"w": jnp.arange(20_000_000.0)}, {"n": 2})
assert any("tmp" in name for name in os.listdir(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_save_that_was_killed_is_never_seen_and_is_tidied_up(tmp_path):
    assert run_python(KILLED_WHILE_SAVING, str(tmp_path)).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    with Checkpointer(tmp_path, is_read_only=True) as checkpointer:
        assert checkpointer.steps() == [1]
    assert len(list(tmp_path.iterdir())) == 2, "who only looks leaves the partial one: its writer may be at work"
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
        restored, manifest = checkpointer.restore(1, {"w": jnp.zeros(1000)})
        assert manifest == {"n": 1}
        np.testing.assert_array_equal(restored["w"], np.arange(1000.0))
        assert checkpointer.save(2, {"w": jnp.zeros(3)}, {"n": 2})


FULL_DISK = """
import os, resource, sys, time
import jax, jax.numpy as jnp
from jaxsp.checkpoint import Checkpointer
from jaxsp.config import UserError
small = {"w": jnp.arange(1000.0)}
large = {name: jax.random.normal(jax.random.key(0), (500_000,)) for name in "abcd"}
checkpointer = Checkpointer(sys.argv[1], keep=3)
checkpointer.save(1, small, {})
checkpointer.wait()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
for step, raising in ((2, "wait"), (3, "check"), (4, "save")):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        checkpointer.save(step, large, {})
        if raising == "wait":
            checkpointer.wait()
        elif raising == "check":
            for _ in range(600):
                checkpointer.check()
                time.sleep(0.1)
        else:
            checkpointer.save(step + 100, small, {})
    except UserError as error:
        print(error)
    assert checkpointer.steps() == [1] and os.listdir(sys.argv[1]) == ["step_000001"], os.listdir(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
checkpointer.save(9, large, {})
checkpointer.close()
assert checkpointer.steps() == [1, 9]
"""


def test_a_disk_without_space_is_one_message_and_leaves_no_partial_checkpoint(tmp_path):
    # A limit on the size of a file stands for the full disk: both reach Orbax as a write that the system refuses.
    result = run_python(FULL_DISK, str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 3, result.stdout
    for line, step in zip(lines, (2, 3, 4), strict=True):
        assert f"in {tmp_path}: checkpoint {step} needs up to 0.008 GB" in line
        assert "checkpoint.keep" in line and "complete ones: [1]" in line
    assert not result.stderr


def test_writes_that_orbax_abandons_print_nothing_and_forgotten_coroutines_of_others_do(tmp_path):
    async def write_fragment() -> None: ...

    async def forgotten() -> None: ...

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Checkpointer(tmp_path, keep=1):
            write_fragment()  # pyright: ignore[reportUnusedCoroutine]
            forgotten()  # pyright: ignore[reportUnusedCoroutine]
            gc.collect()
    assert ["forgotten" in str(warning.message) for warning in caught] == [True]


def test_damaged_checkpoints_are_named_with_the_step_to_go_on_from(tmp_path, capfd):
    arrays = {"w": jax.random.normal(jax.random.key(0), (50_000,)), "small": jnp.arange(3), "b": jnp.arange(7.0)}

    def flip(path: Path, place: float) -> None:
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 4
        path.write_bytes(data)

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    damages = {
        2: lambda path: flip(array_files(path)[-1], 0.3),
        3: lambda path: flip(array_files(path)[-1], 0.6),
        4: lambda path: cut(array_files(path)[-1]),
        5: lambda path: array_files(path)[-1].unlink(),
        6: lambda path: cut(path / "manifest" / "metadata"),
        7: lambda path: [file.unlink() for file in path.rglob("*") if file.is_file()],
        8: lambda path: (path / "manifest" / "metadata").write_text("[]"),
    }
    with Checkpointer(tmp_path, keep=9) as checkpointer:
        for step in (1, *damages):
            checkpointer.save(step, arrays, {})
    capfd.readouterr()
    for step, damage in damages.items():
        damage(tmp_path / f"step_{step:06d}")
        with Checkpointer(tmp_path, keep=9) as checkpointer:
            for _ in ("first", "again"):
                with pytest.raises(UserError, match=rf"step_{step:06d} is damaged .* delete it to go on from step \d"):
                    checkpointer.restore(step, arrays)
            restored, _ = checkpointer.restore(1, arrays)
            np.testing.assert_array_equal(restored["w"], arrays["w"])
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_of_another_format_version_is_refused(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": jnp.zeros(3)}, {})
        checkpointer.wait()
        path = tmp_path / "step_000001" / "manifest" / "metadata"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
        with pytest.raises(UserError, match="step_000001 has format 99"):
            checkpointer.restore(1, {"w": jnp.zeros(3)})


def test_a_step_that_is_not_there_and_arrays_that_do_not_fit_are_named(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(UserError, match=r"no checkpoint .*step_000003; there are steps none"):
            checkpointer.restore(3, {})
        checkpointer.save(1, {"params": {"w": jnp.zeros((3, 2))}}, {})
        for wanted, message in [
            ({"params": {"w": jnp.zeros((4, 2))}}, r"\['w'\] is float32\[3, 2\] there and float32\[4, 2\] in this run"),
            ({"params": {"w": jnp.zeros((3, 2), jnp.bfloat16)}}, r"float32\[3, 2\] there and bfloat16\[3, 2\]"),
            ({"params": {"w": jnp.zeros((3, 2)), "b": jnp.zeros(1)}}, r"\['b'\] is absent there"),
            ({"params": {}}, r"absent in this run"),
        ]:
            with pytest.raises(UserError, match=message):
                checkpointer.restore(1, wanted)


@pytest.mark.parametrize(
    "manifest", [{1: 2}, {"a": (1, 2)}, {"a": [float("nan")]}, {"a": np.float32(1)}, {"a": {"b": b""}}]
)
def test_a_manifest_that_json_would_change_is_refused(tmp_path, manifest):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError):
            checkpointer.save(1, {"w": jnp.zeros(1)}, manifest)
        assert checkpointer.steps() == []


def test_a_directory_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write checkpoints in .*file"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_a_run_directory_belongs_to_one_process_until_it_ends(tmp_path):
    program = """
import sys
import warnings
from jaxsp.checkpoint import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UserError, match=rf"run directory .*run is in use by pid {holder.pid} on "),
            RunLock(tmp_path / "run"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with RunLock(tmp_path / "run"):
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()} "), RunLock(tmp_path / "run"):
            pass
        descriptor = os.open(tmp_path / "run" / "lock", os.O_RDWR)
        assert not os.get_inheritable(descriptor)
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(descriptor)
    with RunLock(tmp_path / "run"):
        pass
