"""The engines of the benchmark: where each stands, what it runs, its process."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.results import MACHINE, OURS

ROOT = Path(__file__).parents[2]
THIRD_PARTY = ROOT / "third_party"
_BATCHES = ("greedy", "batch_1", "batch_8", "batch_32")
_ALL = (*_BATCHES, "groups", "ragged", "episodes")


@dataclass(frozen=True, eq=False)
class Engine:
    """`expected_s` names the workloads it runs, with rough seconds of preparation and of one repeat on two cores.

    Those in `when_asked` are left out unless `--all` asks for them: they take long, and no target names them.
    """

    name: str
    expected_s: Mapping[str, tuple[float, float]]
    module: str | None = None
    """Of this repository, run in its environment; None: a script in `third_party/`, in an environment of its own."""
    folder: str = ""
    python: str = sys.executable
    """What makes that environment."""
    when_asked: frozenset[str] = frozenset()

    def runs(self, workload: str, is_all: bool) -> bool:
        """Whether it is measured on a workload."""
        return workload in self.expected_s and (is_all or workload not in self.when_asked)

    def least_s(self, workload: str, num_repeats: int) -> float:
        """Rough seconds of what is never left out: preparation, one repeat, and all of our own and the machine's."""
        prepare_s, run_s = self.expected_s[workload]
        return prepare_s + run_s * (num_repeats if self.name in (OURS, MACHINE) else 1)

    def command(self) -> list[str]:
        if self.module:
            return [sys.executable, "-m", self.module]
        folder = THIRD_PARTY / self.folder
        return [str(folder / ".venv" / "bin" / "python"), str(folder / "worker.py")]


def _expected(names: tuple[str, ...], prepare: str, run: str) -> dict[str, tuple[float, float]]:
    seconds = zip(map(float, prepare.split()), map(float, run.split()), strict=True)
    return dict(zip(names, seconds, strict=True))


ENGINES = (
    Engine(
        OURS,
        _expected((*_BATCHES, "batch_64", *_ALL[4:]), "15 10 18 25 32 15 60 45", "1 4 6 12 20 11 36 28"),
        module="tests.bench.jaxsp_worker",
    ),
    Engine("jaxsp-bf16", _expected(_BATCHES, "15 10 18 25", "1 3 5 12"), module="tests.bench.jaxsp_bfloat16_worker"),
    Engine(
        "transformers",
        _expected(_ALL, "1 2 4 4 4 9 15", "2 6 13 25 25 130 170"),
        folder="transformers",
        python=os.environ.get("BENCH_PYTHON311", "python3.11"),
    ),
    Engine(
        "tunix",
        _expected(_ALL, "10 12 15 20 20 60 90", "1 5 10 25 25 100 120"),
        folder="tunix",
        when_asked=frozenset({"groups", "ragged", "episodes"}),
    ),
    Engine("llama.cpp", _expected(_ALL[:2], "1 2", "1 2"), folder="llama_cpp"),
    Engine(MACHINE, _expected(("batch_1", "batch_32"), "0 0", "5 5"), module="tests.bench.machine_worker"),
)


def install(engine: Engine, log: Path) -> str | None:
    """Makes the engine's environment unless it stands already. Returns what went wrong."""
    if engine.module:
        return None
    with log.open("w") as file:
        done = subprocess.run(
            [THIRD_PARTY / "install.sh", engine.folder, engine.python], stdout=file, stderr=subprocess.STDOUT
        )
    if done.returncode == 0:
        return None
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    return f"cannot be installed: {lines[-1] if lines else f'exit code {done.returncode}'} (see {log})"


class Process:
    """An engine's process. `ask` gives its reply to a command; a process that fails is ended and answers no more."""

    def __init__(self, engine: Engine, arguments: list[str], log: Path, num_threads: int) -> None:
        self._log, self._replies = log, queue.Queue[str | None]()
        environment = {
            **os.environ,
            "GLIBC_TUNABLES": os.environ.get("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
            "OMP_NUM_THREADS": str(num_threads),
            "JAX_PLATFORMS": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [*engine.command(), *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, cwd=ROOT,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, command: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """The reply to a command; None asks for the first one, which comes without. Failures have an `error`."""
        try:
            if command is not None:
                assert self._process.stdin is not None
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self.close()
            return {"error": f"no reply within {timeout_s:g} s"}
        except OSError:
            line = None
        if line is None:
            return {"error": f"its process ended with code {self._process.wait()} (see {self._log})"}
        return json.loads(line)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)
