"""Where a run's numbers and texts go: scalars to TensorBoard and `metrics.jsonl`, episodes to gzipped JSON lines.

In a run of several processes the main one alone makes a `MetricsWriter`; every process has its own `EpisodeLog`.
"""

import gzip
import io
import json
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsFloat

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]  # generated
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # generated

from jaxsp.config import UserError

METRIC_NAME = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9][a-z0-9_]*)+")
"""`<part>/<what>`, such as `reasoner/accuracy_frac` or `time/play_s`; more parts may follow."""


class MetricsWriter:
    """Writes named scalars to `run_dir/metrics.jsonl` and, for TensorBoard, to `run_dir/tb`.

    A line of `metrics.jsonl` is `{"step": 3, "time_s": 1767225600.1, "reasoner/reward": 0.5}`; `time_s` is Unix time.
    NaN and infinity mean "no value": JSON has neither, so they are `null` there and no point in TensorBoard.

    Args:
        run_dir: the run's directory, made if missing.
        resume_step: the restored step. Rows of later steps are dropped from `metrics.jsonl`, which is replaced
            atomically, and TensorBoard is told to drop them. None keeps every row there is.

    Raises:
        UserError: a file cannot be written (full disk, no permission) or `metrics.jsonl` is damaged.
    """

    def __init__(self, run_dir: str | Path, resume_step: int | None = None) -> None:
        self._path = Path(run_dir) / "metrics.jsonl"
        rows = read_metrics(run_dir)
        kept = [row for row in rows if resume_step is None or row["step"] <= resume_step]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in kept).encode())
            self._file = self._path.open("a", encoding="utf-8")
            # tensorboardX's queued writer is not used: when its thread dies on a full disk, the queue blocks the run.
            # The suffix orders and separates files that are opened within one second.
            tensorboard_dir = self._path.parent / "tb"
            tensorboard_dir.mkdir(exist_ok=True)
            self._events = EventsWriter(str(tensorboard_dir / "events"), f".{time.time_ns()}")
            if resume_step is not None:
                self._events.write_event(
                    Event(wall_time=time.time(), step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))
                )
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error

    def write(self, step: int, scalars: Mapping[str, SupportsFloat]) -> None:
        """Appends one row and one TensorBoard event, and flushes both. Names must match `METRIC_NAME` (ValueError)."""
        _check_names(scalars)
        values = {name: float(value) for name, value in scalars.items()}
        row = {"step": int(step), "time_s": time.time()} | {name: _finite(value) for name, value in values.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error
        self.plot(step, values)

    def plot(self, step: int, scalars: Mapping[str, float]) -> None:
        """Writes one TensorBoard event alone: for numbers that stand in another file than `metrics.jsonl`."""
        _check_names(scalars)
        points = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if math.isfinite(value)
        ]
        try:
            self._events.write_event(Event(wall_time=time.time(), step=int(step), summary=Summary(value=points)))
            self._events.flush()
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error

    def close(self) -> None:
        """Flushes and closes both files, each whatever became of the other. Raises `UserError` if the disk refuses."""
        errors = []
        # A failed flush ends `EventsWriter.close` before it closes its file: hence the last of the three.
        for close in (self._file.close, self._events.close, self._events._py_recordio_writer.close):
            try:
                close()
            except OSError as error:
                errors.append(error)
        if errors:
            raise cannot_write(self._path.parent, errors[0]) from errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except UserError:
            if kind is None:  # else the earlier error is the one to tell
                raise


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if not METRIC_NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} is not of the form part/what: {METRIC_NAME.pattern}")


def read_metrics(
    run_dir: str | Path, is_row: Callable[[dict[str, Any]], bool] = lambda row: True
) -> list[dict[str, Any]]:
    """The rows of `run_dir/metrics.jsonl`, oldest first: numbers and None by name; empty if there is none.

    A last line without its end, which a killed run leaves, is left out. Raises `UserError` for any other bad line, or
    one that `is_row` refuses, and for a file that cannot be read.
    """
    return read_rows(
        Path(run_dir) / "metrics.jsonl",
        lambda row: all(value is None or is_number(value) for value in row.values()) and is_row(row),
    )


def read_rows(path: Path, is_row: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The JSON objects with an integer `step` in the file's lines, which `is_row` must accept; as `read_metrics`."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not (isinstance(row, dict) and type(row.get("step")) is int and is_row(row)):
            raise UserError(f"{path}:{number} is not a row of this file; mend or delete that line")
        rows.append(row)
    return rows


def is_number(value: Any) -> bool:
    """Whether a value out of JSON is a number that a float can hold: no NaN and no infinity."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class EpisodeLog:
    """Writes a step's episodes, one JSON object a line, to `run_dir/episodes/step_000012.jsonl.gz` (or another folder).

    Processes other than the first write `step_000012-1.jsonl.gz` and so on. A file appears whole or not at all, and
    equal rows give equal bytes. Rows may hold numpy scalars and arrays; NaN and infinity become `null`.
    """

    def __init__(self, run_dir: str | Path, process_index: int = 0, folder: str = "episodes") -> None:
        self._directory = Path(run_dir) / folder
        self._suffix = f"-{process_index}" if process_index else ""

    def path(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}{self._suffix}.jsonl.gz"

    def write(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes (or replaces) the step's file and returns its path. Raises `UserError` if the disk refuses."""
        buffer = io.BytesIO()
        with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0) as file:
            for row in rows:
                file.write(json.dumps(_as_json(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        path = self.path(step)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, buffer.getvalue())
        except OSError as error:
            raise cannot_write(path, error) from error
        return path

    def read(self, step: int) -> list[dict[str, Any]]:
        """The rows of a step, as they come out of JSON. Raises `UserError` for a missing or damaged file."""
        path = self.path(step)
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            raise UserError(f"episodes {path} cannot be read: {error}") from error

    def drop_after(self, step: int) -> int:
        """Deletes this process's files of steps later than `step`; returns how many. For resuming at `step`."""
        pattern = re.compile(r"step_(\d+)" + re.escape(self._suffix) + r"\.jsonl\.gz")
        newer = [
            path
            for path in self._directory.glob("step_*.jsonl.gz")
            if (match := pattern.fullmatch(path.name)) and int(match.group(1)) > step
        ]
        for path in newer:
            path.unlink()
        return len(newer)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _as_json(value: Any) -> Any:
    """`value` in terms of JSON: numpy scalars and arrays as numbers and lists, NaN and infinity as None."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _as_json(value.tolist())
    return _finite(value) if isinstance(value, float) else value


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces the file at `path` by `data`: whoever looks sees the old file or the new one, also after a crash."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def cannot_write(path: Path, error: OSError) -> UserError:
    """What to say to a user whose disk refused the file."""
    return UserError(f"cannot write {path}: {error.strerror or error}; free space there or mend its permissions")
