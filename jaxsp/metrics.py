"""Where a run's numbers and texts go: scalars to TensorBoard and `metrics.jsonl`, episodes to gzipped JSON lines.

The console's progress is in `Progress`. Nothing here knows of JAX. In a run of several processes the main one alone
makes a `MetricsWriter` and a `Progress`; every process has its own `EpisodeLog`.
"""

import gzip
import io
import json
import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, SupportsFloat

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text
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
        for name in scalars:
            if not METRIC_NAME.fullmatch(name):
                raise ValueError(f"metric name {name!r} is not of the form part/what: {METRIC_NAME.pattern}")
        now_s = time.time()
        values = {name: float(value) for name, value in scalars.items()}
        row = {"step": int(step), "time_s": now_s} | {name: _finite(value) for name, value in values.items()}
        points = [Summary.Value(tag=name, simple_value=value) for name, value in values.items() if math.isfinite(value)]
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
            self._events.write_event(Event(wall_time=now_s, step=int(step), summary=Summary(value=points)))
            self._events.flush()
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error

    def close(self) -> None:
        self._file.close()
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows of `run_dir/metrics.jsonl`, oldest first; empty if there is none.

    A last line without its end, which a killed run leaves, is left out. Raises `UserError` for any other bad line.
    """
    return read_rows(Path(run_dir) / "metrics.jsonl")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The JSON objects with a `step` in the file's lines; as `read_metrics`."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}:{number} is not a row of this file; mend or delete that line") from error
        rows.append(row)
    return rows


class EpisodeLog:
    """Writes a step's episodes, one JSON object a line, to `run_dir/episodes/step_000012.jsonl.gz`.

    Processes other than the first write `step_000012-1.jsonl.gz` and so on. A file appears whole or not at all, and
    equal rows give equal bytes. Rows may hold numpy scalars and arrays; NaN and infinity become `null`.
    """

    def __init__(self, run_dir: str | Path, process_index: int = 0) -> None:
        self._directory = Path(run_dir) / "episodes"
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
        except (OSError, EOFError, ValueError) as error:
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


@dataclass
class _Bar:
    """Something that is counted up: `done` of `total` units, of which `skipped` were done before the run started."""

    name: str
    unit: str
    total: int
    done: int
    started_s: float
    skipped: int = 0

    def pace_s(self, now_s: float) -> float | None:
        """Seconds per unit since the start, or None before the first unit."""
        num_units = self.done - self.skipped
        return (now_s - self.started_s) / num_units if num_units > 0 else None


class Progress:
    """How far a run is, on the console: steps, the phase's steps and what is going on at the moment.

    On a terminal these are bars that stay up to date. Elsewhere (a pipe, a log file) a line is printed when a phase
    begins and at least every `interval_s` seconds, also while nothing is reported, with time elapsed and time left.
    The time left is the number of steps left times the mean duration of the phase's steps so far (before the phase's
    first step: of the run's).

    Example::

        with Progress(80, "spice") as progress:
            progress.phase("joint", 80)
            progress.activity("challenger samples", 12, 32)
            progress.advance(reward=0.31)

    Args:
        total_steps: steps of the whole run, those before a resume included.
        start_step: steps that were done before the run was resumed; they count as done but not in the rates.
    """

    def __init__(
        self,
        total_steps: int,
        description: str,
        *,
        start_step: int = 0,
        console: Console | None = None,
        interval_s: float = 15.0,
    ) -> None:
        now_s = time.monotonic()
        self._console = console or Console()
        self._interval_s = interval_s
        self._steps = _Bar(description, "step", total_steps, start_step, now_s, skipped=start_step)
        self._phase: _Bar | None = None
        self._activity: _Bar | None = None
        self._stats: dict[str, float | str] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._ticker: threading.Thread | None = None
        self._bars: RichProgress | None = None
        self._bar_ids: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bars = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                _TailColumn(),
                console=self._console,
                refresh_per_second=2,
            )
            self._bars.start()
            self._show()
        else:
            self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._ticker.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        if self._bars is not None:
            self._bars.stop()
        if self._ticker is not None:
            self._ticker.join()
            self._print_line()

    def phase(self, name: str, num_steps: int, done: int = 0) -> None:
        """Begins a phase of `num_steps` steps, `done` of them before a resume."""
        with self._lock:
            self._phase = _Bar(name, "step", num_steps, done, time.monotonic(), skipped=done)
            self._activity = None
            self._show()
        if self._ticker is not None:
            self._print_line()

    def activity(self, text: str, done: int, total: int) -> None:
        """What is going on now, such as `("challenger samples", 12, 32)`. A new text begins a new rate."""
        with self._lock:
            if self._activity is None or self._activity.name != text or done < self._activity.done:
                self._activity = _Bar(text, "", total, done, time.monotonic(), skipped=done)
            self._activity.done, self._activity.total = done, total
            self._show()

    def advance(self, **stats: float | str) -> None:
        """One step is done; `stats` are shown beside it until the next one."""
        with self._lock:
            self._steps.done += 1
            if self._phase is not None:
                self._phase.done += 1
            self._activity = None
            self._stats = stats
            self._show()

    def log(self, text: str) -> None:
        """Prints a line of its own, above the bars where there are any."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def line(self) -> str:
        """The whole state in one line of text."""
        now_s = time.monotonic()
        with self._lock:
            parts = [f"{self._steps.name} {self._steps.done}/{self._steps.total} steps"]
            if self._phase is not None:
                parts.append(f"{self._phase.name} {self._phase.done}/{self._phase.total}")
            if self._activity is not None:
                parts.append(f"{self._activity.name} {self._activity.done}/{self._activity.total}")
            return ", ".join([*parts, self._times(now_s), *self._shown_stats()])

    def _times(self, now_s: float) -> str:
        pace_s = (self._phase and self._phase.pace_s(now_s)) or self._steps.pace_s(now_s)
        left = "?" if pace_s is None else _clock(pace_s * (self._steps.total - self._steps.done))
        return f"{_rate(pace_s, 'step')}elapsed {_clock(now_s - self._steps.started_s)}, left {left}"

    def _shown_stats(self) -> list[str]:
        return [
            f"{name} {value:.3g}" if isinstance(value, int | float) else f"{name} {value}"
            for name, value in self._stats.items()
        ]

    def _show(self) -> None:
        """Brings the terminal's bars up to date with the state."""
        if self._bars is None:
            return
        rows = (("steps", self._steps), ("phase", self._phase), ("activity", self._activity))
        for place, bar in rows:
            if place not in self._bar_ids:
                self._bar_ids[place] = self._bars.add_task("", tail=lambda place=place: self._tail(place))
            self._bars.update(
                self._bar_ids[place],
                description=bar.name if bar else "",
                completed=bar.done if bar else 0,
                total=bar.total if bar else 1,
                visible=bar is not None,
            )

    def _tail(self, place: str) -> str:
        """The text right of a bar, made anew at each refresh so that the times go on."""
        now_s = time.monotonic()
        with self._lock:
            if place == "steps":
                parts = [f"{self._steps.done}/{self._steps.total} steps", self._times(now_s), *self._shown_stats()]
                return ", ".join(parts)
            bar = self._phase if place == "phase" else self._activity
            if bar is None:
                return ""
            pace_s = bar.pace_s(now_s)
            left = "" if pace_s is None else f"left {_clock(pace_s * (bar.total - bar.done))}"
            return f"{bar.done}/{bar.total}  {_rate(pace_s, bar.unit)}{left}"

    def _tick(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._print_line()

    def _print_line(self) -> None:
        self.log(self.line())


class _TailColumn(ProgressColumn):
    """Text that a task makes at each refresh."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["tail"]())


def _rate(pace_s: float | None, unit: str) -> str:
    """`3.1 s/step, ` for slow units, `12.0/s, ` for quick ones, nothing before the first."""
    if not pace_s:
        return ""
    if pace_s >= 0.5:
        return f"{pace_s:.1f} s/{unit or 'item'}, "
    return f"{1 / pace_s:.1f}{' ' + unit + 's' if unit else ''}/s, "


def _clock(seconds: float) -> str:
    minutes, second = divmod(max(0, round(seconds)), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"


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
