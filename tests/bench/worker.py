"""An engine's side of the benchmark: a process that is told by lines of JSON what to sample, and says how long it took.

Each engine has a process, and mostly an environment, of its own; only one of them works at a time. Nothing but the
standard library is imported here.
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.bench.workloads import Workload, check_outputs, read_workloads

Reply = dict[str, Any]
Handle = Callable[[str, Workload], Reply]
"""`(verb, workload) -> reply`: `prepare` comes once before a workload is measured, `run` is what is measured."""


@dataclass(frozen=True)
class Place:
    """What a process is told when it starts."""

    model_dir: Path
    """In Hugging Face format, float32."""
    gguf_path: Path
    """The same weights in float16."""
    num_threads: int


@dataclass
class Outputs:
    """What an engine sampled: token ids of each request, or of each turn of each episode (episode by episode)."""

    tokens: Sequence[Sequence[int]]
    details: Reply = field(default_factory=dict)
    """Whatever else is worth keeping: how it was set, what it says of itself."""


class Sampler(Protocol):
    """An engine as the benchmark sees it."""

    def prepare(self, workload: Workload) -> None:
        """Compiles and warms up whatever `run` will need. Not measured."""
        ...

    def run(self, workload: Workload) -> Outputs:
        """Samples a workload as if it had never seen it."""
        ...

    def num_compilations(self) -> int | None:
        """Programs compiled so far; None for an engine that compiles nothing."""
        ...


def serve(open_handle: Callable[[Place], Handle], packages: Sequence[str]) -> None:
    """Answers lines on standard input until it ends. `packages` are those whose versions belong in the results.

    Whatever libraries print goes to standard error. An exception is a reply with `error` and `traceback`; what
    `open_handle` raises is the first and last of them.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", type=Path, required=True)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    workloads = read_workloads(arguments.workloads)

    def reply(make: Callable[[], Reply]) -> bool:
        try:
            row = make()
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        print(json.dumps(row), file=replies, flush=True)
        return "error" not in row

    handles: list[Handle] = []

    def start() -> Reply:
        handles.append(open_handle(Place(arguments.model_dir, arguments.gguf, arguments.threads)))
        versions = {package: importlib.metadata.version(package) for package in packages}
        return {"versions": {"python": sys.version.split()[0], **versions}}

    if not reply(start):
        return
    for line in sys.stdin:
        command = json.loads(line)
        reply(lambda command=command: handles[0](command["verb"], workloads[command["workload"]]))


def sampling(sampler: Sampler) -> Handle:
    """Times a sampler, and refuses outputs of other lengths than asked for."""

    def handle(verb: str, workload: Workload) -> Reply:
        started = time.perf_counter()
        if verb == "prepare":
            sampler.prepare(workload)
            return {"seconds": time.perf_counter() - started}
        compiled = sampler.num_compilations()
        cpu_started, started = time.process_time(), time.perf_counter()
        outputs = sampler.run(workload)
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        check_outputs(workload, outputs.tokens)
        row = {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "tokens_per_s": workload.num_outputs / seconds,
            "num_compilations": [compiled, sampler.num_compilations()],
            "details": outputs.details,
        }
        return row | ({"tokens": list(map(list, outputs.tokens))} if workload.temperature == 0 else {})

    return handle
