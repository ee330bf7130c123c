"""A run's state on disk: arrays and a JSON manifest per step, saved while the run goes on, and the run's lock.

A checkpoint is a directory `step_000012`. It is written under another name and renamed when it is complete, so what is
found under that name was complete once. Orbax writes the arrays, each process its own shards.
"""

import contextlib
import errno
import fcntl
import functools
import gc
import json
import logging
import os
import re
import shutil
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxsp.config import UserError
from jaxsp.mesh import is_main_process

FORMAT_VERSION = 1
_STEP_DIRECTORY = re.compile(r"step_(\d{6,})")
_PARTIAL = ".orbax-checkpoint-tmp"  # what Orbax appends to a name while it writes
_DELETED = ".deleted"
# What Python says of the writes that Orbax never began because one beside them failed
_ABANDONED_WRITE = r"coroutine '.*(serialize|fragment|shard).*' was never awaited"


class Checkpointer:
    """Saves and restores the checkpoints of one directory.

    All processes of a run make one and call its methods in the same order. Arrays are jax.Arrays of at least one
    element in any pytree, typed random keys included; what is restored is equal bit for bit.

    Args:
        directory: where the checkpoints lie, on a file system that all processes share.
        keep: how many of the newest are kept; older ones are deleted when a newer one is complete.
        is_read_only: for those who look at the checkpoints of a run that may be going on: nothing is tidied up.

    Raises:
        UserError: the directory cannot be made or read; later, from any method, that a save did not succeed.
    """

    def __init__(self, directory: str | Path, keep: int = 1, is_read_only: bool = False) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self._directory = Path(directory).absolute()
        self._keep = keep
        self._is_read_only = is_read_only
        self._saving: tuple[int, int] | None = None  # step and bytes of the save that may be under way
        self._undo_quiet = _quiet_orbax()
        if not is_read_only:
            with self._write_errors():
                self._directory.mkdir(parents=True, exist_ok=True)
                self._remove_leftovers()
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler("arrays", "manifest"))

    def save(self, step: int, arrays: Any, manifest: dict[str, Any]) -> bool:
        """Begins to save and returns once the arrays may be changed or donated; False if the step is saved already.

        `manifest` must come back from JSON as it is: dicts with text keys, lists, text, finite numbers, booleans and
        None (else ValueError). Raises the error of the save before this one, as `check` does.
        """
        _check_json(manifest, "manifest")
        self.wait()
        if step in self.steps():
            return False
        state = {"arrays": arrays, "checksums": [_checksum(leaf) for leaf in jax.tree.leaves(arrays)]}
        record = {"format_version": FORMAT_VERSION, "step": step, "leaves": _describe(arrays), "manifest": manifest}
        self._saving = step, sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
        with self._write_errors():
            self._orbax.save(
                self.path(step),
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(state),  # pyright: ignore[reportCallIssue]  # dataclass made by Orbax
                    manifest=ocp.args.JsonSave(record),  # pyright: ignore[reportCallIssue]
                ),
            )
        return True

    def check(self) -> None:
        """Raises the error of an earlier save if it failed; call it every step. Never waits for a save."""
        with self._write_errors():
            self._orbax.check_for_errors()
            self._remove_old()

    def wait(self) -> None:
        """Waits until the save under way is complete. Raises as `check` does."""
        with self._write_errors():
            self._orbax.wait_until_finished()
            self._saving = None
            self._remove_old()

    def close(self) -> None:
        """Waits as `wait` does and frees what Orbax holds, also if the save failed."""
        try:
            self.wait()
        finally:
            self._orbax.close()
            gc.collect()  # what failed reads and writes left prints nothing as long as this is open
            self._undo_quiet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def path(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, in order."""
        if not self._directory.is_dir():
            return []
        matches = (_STEP_DIRECTORY.fullmatch(path.name) for path in self._directory.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in matches if match)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None if there is none."""
        steps = self.steps()
        return steps[-1] if steps else None

    def read_manifest(self, step: int) -> dict[str, Any]:
        """The manifest saved with `step`. Raises `UserError` if there is none, it is damaged, or of another format."""
        return self._read_record(step)["manifest"]

    def restore(self, step: int, abstract_arrays: Any) -> tuple[Any, dict[str, Any]]:
        """The arrays and the manifest of `step`.

        Args:
            step: one of `steps()`.
            abstract_arrays: the tree that was saved, with a `jax.ShapeDtypeStruct` that has a sharding, or an array,
                for each leaf. The shardings may be of another mesh than the saved arrays'.

        Raises:
            UserError: there is no such checkpoint, it is damaged, it was written by another version, or it holds
                other arrays than `abstract_arrays` says.
        """
        record = self._read_record(step)
        _check_same_leaves(self.path(step), record["leaves"], _describe(abstract_arrays))
        leaves, structure = jax.tree.flatten(abstract_arrays)
        wanted = jax.tree.unflatten(
            structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in leaves]
        )
        state = {"arrays": wanted, "checksums": [np.zeros((), np.uint32)] * len(leaves)}
        restore_args = ocp.args.StandardRestore(state)  # pyright: ignore[reportCallIssue]
        try:
            restored = self._orbax.restore(self.path(step), args=ocp.args.Composite(arrays=restore_args)).arrays
        except Exception as error:  # Orbax and TensorStore raise every kind, also bare Exception
            self._raise_damaged(step, "its arrays cannot be read", error)
        for name, leaf, saved in zip(
            record["leaves"], jax.tree.leaves(restored["arrays"]), restored["checksums"], strict=True
        ):
            if int(_checksum(leaf)) != int(saved):
                self._raise_damaged(step, f"{name} is not what was saved", None)
        return restored["arrays"], record["manifest"]

    def restore_part(self, step: int, place: Sequence[str], abstract_part: Any) -> Any:
        """The part of a step's arrays below the dictionary keys `place`; nothing else is read.

        `abstract_part` is as `abstract_arrays` of `restore`, and raises as there.
        """
        record = self._read_record(step)
        wanted = functools.reduce(lambda tree, key: {key: tree}, reversed(place), abstract_part)
        leaves = _describe(wanted)
        _check_same_leaves(self.path(step), {name: record["leaves"].get(name, "absent") for name in leaves}, leaves)
        checksums = [np.zeros((), np.uint32)] * len(record["leaves"])
        item = {"arrays": wanted, "checksums": checksums}
        restore_args = ocp.args.PyTreeRestore(
            item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                restored = reader.restore(self.path(step) / "arrays", args=restore_args)
        except Exception as error:  # as in `restore`
            self._raise_damaged(step, "its arrays cannot be read", error)
        saved = dict(zip(record["leaves"], restored["checksums"], strict=True))
        for name, leaf in zip(leaves, jax.tree.leaves(restored["arrays"]), strict=True):
            if int(_checksum(leaf)) != int(saved[name]):
                self._raise_damaged(step, f"{name} is not what was saved", None)
        return functools.reduce(lambda tree, key: tree[key], place, restored["arrays"])

    def _read_record(self, step: int) -> dict[str, Any]:
        self.wait()  # the step asked for may be the one being saved
        steps = self.steps()
        if step not in steps:
            raise UserError(f"there is no checkpoint {self.path(step)}; there are steps {steps or 'none'}")
        try:
            restore_args = ocp.args.JsonRestore()
            record = self._orbax.restore(self.path(step), args=ocp.args.Composite(manifest=restore_args)).manifest
            version = record["format_version"]
        except Exception as error:
            self._raise_damaged(step, "its manifest cannot be read", error)
        if version != FORMAT_VERSION:
            raise UserError(
                f"checkpoint {self.path(step)} has format {version}, this program reads format {FORMAT_VERSION}; "
                "resume with the version that wrote it"
            )
        return record

    def _raise_damaged(self, step: int, what: str, error: Exception | None) -> NoReturn:
        others = [other for other in self.steps() if other != step]
        fix = f"to go on from step {others[-1]}" if others else "and begin the run anew: there is no other checkpoint"
        raise UserError(f"checkpoint {self.path(step)} is damaged ({what}); delete it {fix}") from error

    def _remove_leftovers(self, patience_s: float = 0.0) -> None:
        """Deletes what an interrupted save or deletion left.

        The writes beside one that failed may go on for a moment and make files anew: looks until nothing has come for
        a tenth of `patience_s`, at most that long.
        """
        deadline_s = time.monotonic() + patience_s
        while is_main_process():
            leftovers = [
                path
                for path in self._directory.iterdir()
                if path.name.startswith("step_") and (_PARTIAL in path.name or path.name.endswith(_DELETED))
            ]
            for path in leftovers:
                shutil.rmtree(path, ignore_errors=True)
            if time.monotonic() >= deadline_s:
                return
            if not leftovers:
                deadline_s = min(deadline_s, time.monotonic() + patience_s / 10)
            time.sleep(patience_s / 50)

    def _remove_old(self) -> None:
        if is_main_process() and not self._is_read_only:
            for step in self.steps()[: -self._keep]:
                self._delete(step)

    def _delete(self, step: int) -> None:
        # Renamed first: a checkpoint that is half deleted must not look like one.
        doomed = self.path(step).with_name(self.path(step).name + _DELETED)
        shutil.rmtree(doomed, ignore_errors=True)
        self.path(step).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turns what the disk refused into one message, after deleting the partial checkpoint."""
        try:
            yield
        except Exception as error:
            number = _os_error_number(error)
            if number is None:
                raise
            saving, self._saving = self._saving, None
            with contextlib.suppress(OSError):
                self._remove_leftovers(patience_s=3.0)
            if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(
                    f"cannot write checkpoints in {self._directory}: {os.strerror(number)}; "
                    "mend that or choose another runs_dir"
                ) from error
            what = f"checkpoint {saving[0]} needs up to {_gigabytes(saving[1])}, " if saving else ""
            raise UserError(
                f"no space left for a checkpoint in {self._directory}: {what}"
                f"{_gigabytes(shutil.disk_usage(_existing(self._directory)).free)} are free ({os.strerror(number)}); "
                "free space there, lower checkpoint.keep, or choose a runs_dir on another disk. "
                f"The partial checkpoint was deleted; complete ones: {self.steps() or 'none'}"
            ) from error


class RunLock:
    """Holds a run directory for this process, so that no second run writes into it; freed also when it is killed.

    Use it as a context manager, in the main process. Raises `UserError` that names the process which holds the lock.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = Path(run_dir)
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"run directory {self._run_dir} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "of another process"
            os.close(descriptor)
            raise UserError(
                f"run directory {self._run_dir} is in use by pid {holder}; wait for it, stop it, or begin a new run"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._descriptor is not None:
            # The file stays: deleting it could give two processes locks on two files of this name.
            os.close(self._descriptor)
            self._descriptor = None


@jax.jit
def _weighted_sum(bits: jax.Array) -> jax.Array:
    index = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits.astype(jnp.uint32) * (2 * index + 1), dtype=jnp.uint32)


def _checksum(array: jax.Array) -> jax.Array:
    """uint32 scalar: sum of bits[i] * (2 i + 1) mod 2^32 over the elements' bits.

    The storage format detects cut files but not changed bytes, which would become wrong weights. The weights are
    odd, so any change of one element changes the sum. Integer sums do not depend on their order: the sum is the same
    under every sharding, and no element leaves its device.
    """
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        return _weighted_sum(array)
    num_bits = min(32, array.dtype.itemsize * 8)  # 64-bit elements become two
    return _weighted_sum(jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{num_bits}")))


def _describe(arrays: Any) -> dict[str, str]:
    """Each leaf's place in the tree -> its dtype and shape, such as `{"['w']": "float32[4, 2]"}`."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def _check_same_leaves(path: Path, saved: dict[str, str], wanted: dict[str, str]) -> None:
    differences = [
        f"{name} is {saved.get(name, 'absent')} there and {wanted.get(name, 'absent')} in this run"
        for name in [*saved, *(name for name in wanted if name not in saved)]
        if saved.get(name) != wanted.get(name)
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise UserError(
            f"checkpoint {path} does not fit this run: {'; '.join(differences[:3])}{more}; "
            "resume with the config it was made with"
        )


def _check_json(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, which JSON would turn into text")
            _check_json(item, f"{where}[{key!r}]")
    elif type(value) is list:
        for place, item in enumerate(value):
            _check_json(item, f"{where}[{place}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise ValueError(f"{where} is a {type(value).__name__}, which does not come back from JSON as it is")
    elif isinstance(value, float):
        json.dumps(value, allow_nan=False)  # raises ValueError for NaN and infinity


def _os_error_number(error: BaseException) -> int | None:
    """The operating system's error number behind an exception; TensorStore gives it in its text only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno is not None:
            return seen.errno
        if match := re.search(r"os_error_code='(\d+)'", str(seen)):
            return int(match.group(1))
        seen = seen.__cause__ or seen.__context__
    return None


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB"


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _quiet_orbax() -> Callable[[], None]:
    """Keeps Orbax's tracebacks off the console, for its errors are raised as one message; logging at DEBUG shows them.

    When one of its concurrent reads or writes fails, the others print theirs from threads and as they are collected.
    Returns what undoes it.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_wanted)  # adds a filter once only
    warnings.filterwarnings("ignore", _ABANDONED_WRITE, RuntimeWarning)
    previous = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        files = [frame.filename for frame in traceback.extract_tb(unraisable.exc_traceback)]
        is_orbax = any("orbax" in file for file in files) or str(unraisable.exc_value) == "Event loop is closed"
        if not is_orbax or logging.getLogger().isEnabledFor(logging.DEBUG):
            previous(unraisable)

    def undo() -> None:
        if sys.unraisablehook is hook:
            sys.unraisablehook = previous

    sys.unraisablehook = hook
    return undo


def _is_wanted(record: logging.LogRecord) -> bool:
    is_orbax = "orbax" in record.pathname or "orbax" in record.getMessage()
    return not is_orbax or logging.getLogger().isEnabledFor(logging.DEBUG)
