"""Calls functions in killable worker processes, with one deadline per call that the parent enforces.

Each worker is a fresh interpreter (`python -m jaxsp.verifiers.worker_process`, never a fork) in a process group of its
own, fed over two pipes by one thread of the parent. That thread alone starts, times, kills and reaps its worker, so a
hung call costs its deadline and one worker's restart, and the other workers go on. Workers never import JAX.
"""

import asyncio
import os
import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxsp.config import UserError
from jaxsp.verifiers.worker import FEWER_WORKERS, Outcome, StartError, Worker, reason_and_fix

_STARTS_PER_CALL = 3


@dataclass(frozen=True)
class _Call:
    function: str
    args: tuple[Any, ...]
    timeout_s: float
    future: "Future[Outcome]"


class ProcessPool:
    """A fixed number of worker processes, each serving one call at a time.

    Start it before JAX (a worker costs about a second of imports then, and none later); use it as a context manager or
    call `close`. A worker that its parent leaves behind, however the parent ended, ends itself.

    Args:
        num_workers: worker processes, at least 1.
        timeout_s: seconds that a call may run once a worker has taken it up; waiting in the queue does not count.
        preload: what a worker does before it counts as started, so that no call pays for it: modules (`"module"`) to
            import, and functions (`"module:name"`) to call without arguments.
        calls_per_worker: calls after which a worker is replaced, which bounds what caches and leaks grow to.
        memory_limit_bytes: resident memory at which a worker is killed (status `died`, no second try), looked at
            every 0.1 s where `/proc` exists. Four times as much address space is a second limit, for what is faster.
        start_timeout_s: seconds that a worker may take to start.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        timeout_s: float = 5.0,
        preload: Sequence[str] = (),
        calls_per_worker: int = 1000,
        memory_limit_bytes: int = 2 << 30,
        start_timeout_s: float = 60.0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self.timeout_s = timeout_s
        self._num_workers = num_workers
        self._preload = tuple(preload)
        self._calls_per_worker = calls_per_worker
        self._memory_limit_bytes = memory_limit_bytes
        self._start_timeout_s = start_timeout_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards _counts, and _is_closed against submit
        self._is_closed = False
        self._wake_read, self._wake_write = -1, -1

    def start(self) -> "ProcessPool":
        """Starts every worker and waits for it; raises `UserError` with the worker's own words if one cannot start."""
        assert not self._threads, "a pool starts once"
        try:
            tempfile.gettempdir()  # chosen now: once files run short, it would blame the folders
            self._wake_read, self._wake_write = os.pipe()
        except OSError as error:
            raise UserError(f"a verifier worker process did not start: {reason_and_fix(error)}") from error
        ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        refused = None
        for index in range(self._num_workers):
            # Daemons: a pool that nobody closed must not keep the interpreter from ending.
            thread = threading.Thread(target=self._serve, args=(ready,), name=f"process-pool-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads
                refused = f"{error}; {FEWER_WORKERS}"
                break
            self._threads.append(thread)
        failures = [failure for _ in self._threads if (failure := ready.get()) is not None]
        if refused is not None:
            failures.append(refused)
        if failures:
            self.close()
            raise UserError(f"a verifier worker process did not start: {failures[0]}")
        return self

    def __enter__(self) -> "ProcessPool":
        return self if self._threads else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills and reaps the workers. Running calls end as `died`, queued ones are cancelled. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if not self._threads:
            return
        os.close(self._wake_write)  # every serving thread polls the read end, and sees it hang up
        for _ in self._threads:
            self._calls.put(None)
        for thread in self._threads:
            thread.join()
        os.close(self._wake_read)
        while not self._calls.empty():
            if (call := self._calls.get()) is not None:
                call.future.cancel()

    def submit(self, function: Callable[..., Any] | str, *args: Any, timeout_s: float | None = None) -> Future[Outcome]:
        """Queues a call; the future's result is an `Outcome`, whatever happens to the worker.

        `function` is importable in the worker: a module-level callable, or `"module:name"`. `timeout_s` overrides the
        pool's deadline. A call whose worker died is tried once more, on a fresh worker, with a fresh deadline.
        """
        call = _Call(_function_name(function), args, self.timeout_s if timeout_s is None else timeout_s, Future())
        with self._lock:
            if self._is_closed or not self._threads:
                raise ValueError("the process pool is not running: call start() first, and nothing after close()")
            self._calls.put(call)
        return call.future

    def run(self, function: Callable[..., Any] | str, *args: Any, timeout_s: float | None = None) -> Outcome:
        """The blocking form of `submit`."""
        return self.submit(function, *args, timeout_s=timeout_s).result()

    async def call(self, function: Callable[..., Any] | str, *args: Any, timeout_s: float | None = None) -> Outcome:
        """The asyncio form of `submit`. A blocked event loop delays the result and never turns it into a timeout."""
        return await asyncio.wrap_future(self.submit(function, *args, timeout_s=timeout_s))

    def counts(self) -> dict[str, int]:
        """Outcomes so far by status, `retried` calls and `restarted` workers (recycled ones included)."""
        names = ("ok", "timeout", "died", "error", "retried", "restarted")
        with self._lock:
            return {name: self._counts[name] for name in names}

    def _serve(self, ready: "queue.SimpleQueue[str | None]") -> None:
        """One thread's life: keeps one worker running and hands it calls until the pool closes."""
        try:
            worker = self._start_worker()
        except StartError as error:
            ready.put(str(error))
            return
        ready.put(None)
        while (call := self._calls.get()) is not None and not self._is_closed:
            if not call.future.set_running_or_notify_cancel():
                continue
            outcome, worker = self._attempt_twice(worker, call)
            self._count(outcome.status)
            call.future.set_result(outcome)
            if worker is not None and worker.num_calls >= self._calls_per_worker:
                worker.stop()
                worker = None
            if worker is None and not self._is_closed:
                worker, _ = self._restart_worker()  # if that fails, the next call tries again and tells why
        if call is not None:
            call.future.cancel()
        if worker is not None:
            worker.stop()

    def _attempt_twice(self, worker: Worker | None, call: _Call) -> tuple[Outcome, Worker | None]:
        """The call's outcome, and its worker if that is still fit for the next call."""
        for attempt in range(2):
            if worker is not None and not worker.is_alive():
                worker.stop()
                worker = None
            reason = "the pool was closed"
            for _ in range(_STARTS_PER_CALL):
                if worker is None and not self._is_closed:
                    worker, reason = self._restart_worker()
            if worker is None:
                return Outcome("died", detail=f"no worker process could be started: {reason}"), None
            outcome, is_retryable = worker.call(call.function, call.args, call.timeout_s)
            if outcome.status in ("ok", "error"):
                return outcome, worker
            reason = worker.stop()
            worker = None
            if outcome.status == "died":
                outcome = Outcome("died", detail=f"{outcome.detail}: {reason}")
            if not is_retryable or attempt == 1:
                return outcome, None
            self._count("retried")
        raise AssertionError("the second attempt returns")

    def _start_worker(self) -> Worker:
        return Worker(self._preload, self._memory_limit_bytes, self._start_timeout_s, self._wake_read)

    def _restart_worker(self) -> tuple[Worker | None, str]:
        """A fresh worker, or why there is none."""
        self._count("restarted")
        try:
            return self._start_worker(), ""
        except StartError as error:
            return None, str(error)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _function_name(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot be imported in a worker: move it to the top of a module")
    return f"{function.__module__}:{function.__qualname__}"
