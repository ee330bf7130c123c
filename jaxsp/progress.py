"""How far a run is: the console's progress bars, or lines where there is no terminal."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from jaxsp.trajectory import Completion, Generate, GenerateRequest

_INTERVAL_S = 15.0
"""Between two lines where there is no terminal."""


@dataclass
class _Bar:
    """Something that is counted up: `done` of `total` units, of which `skipped` were done before the run started.

    `spent_s` is what the others took; None: all the time since `started_s`.
    """

    name: str
    unit: str
    total: int
    done: int
    started_s: float
    skipped: int = 0
    spent_s: float | None = None

    @property
    def num_left(self) -> int:
        return self.total - self.done

    def pace_s(self, now_s: float) -> float | None:
        """Mean seconds per unit, or None before the first unit."""
        num_units = self.done - self.skipped
        spent_s = now_s - self.started_s if self.spent_s is None else self.spent_s
        return spent_s / num_units if num_units > 0 else None


class Progress:
    """How far a run is, on the console: steps, the phase's steps and what is going on at the moment.

    On a terminal these are bars that stay up to date. Elsewhere (a pipe, a log file) a line is printed when a phase
    begins and at least every `interval_s` seconds, also while nothing is reported, with time elapsed and time left.
    The time left is the number of steps left times the mean duration of the phase's steps so far; what lies between
    steps, such as an evaluation, is in neither. Nobody knows it before the phase's first step, nor how long steps of
    a later phase take: it is `?` then, with the phase's own time behind it.

    Example::

        with Progress(80, "spice") as progress:
            progress.phase("joint", 80)
            progress.activity("challenger samples", 12, 32)
            progress.advance(12.3, reward=0.31)

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
        interval_s: float = _INTERVAL_S,
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
            self._phase = _Bar(name, "step", num_steps, done, time.monotonic(), skipped=done, spent_s=0.0)
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

    def advance(self, duration_s: float, **stats: float | str) -> None:
        """One step of the phase is done, which took `duration_s`; `stats` are shown beside it until the next one."""
        with self._lock:
            assert self._phase is not None and self._phase.spent_s is not None
            self._steps.done += 1
            self._phase.done += 1
            self._phase.spent_s += duration_s
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
        phase = self._phase
        pace_s = None if phase is None else phase.pace_s(now_s)
        left = "?"
        if phase is not None and pace_s is not None:
            left = _clock(pace_s * phase.num_left)
            if phase.num_left < self._steps.num_left:
                left = f"? ({left} of {phase.name})"
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
            left = "" if pace_s is None else f"left {_clock(pace_s * bar.num_left)}"
            return f"{bar.done}/{bar.total}  {_rate(pace_s, bar.unit)}{left}"

    def _tick(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._print_line()

    def _print_line(self) -> None:
        self.log(self.line())


@contextlib.contextmanager
def counted(generate: Generate, total: int) -> Iterator[Generate]:
    """`generate`, with a bar on standard error that says how many answers there are and how long yet.

    Where that is no terminal, a line says it, at most every `_INTERVAL_S`.
    """
    console = Console(stderr=True)
    columns = (TextColumn("answers"), *RichProgress.get_default_columns()[1:2], MofNCompleteColumn())
    clocks = (TimeElapsedColumn(), TimeRemainingColumn())
    with RichProgress(*columns, *clocks, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        done, last_line_s = 0, time.monotonic()

        async def generate_counted(request: GenerateRequest) -> Completion:
            nonlocal done, last_line_s
            completion = await generate(request)
            progress.advance(task)
            done += 1
            if not console.is_terminal and time.monotonic() - last_line_s > _INTERVAL_S:
                print(f"jaxsp: {done} of {total} answers", file=sys.stderr, flush=True)
                last_line_s = time.monotonic()
            return completion

        yield generate_counted


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
