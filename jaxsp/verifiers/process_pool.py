"""Calls functions in killable worker processes, with one deadline per call that the parent enforces.

Each worker is a fresh interpreter (`python -m jaxsp.verifiers.worker_process`, never a fork) in a process group of its
own, fed over two pipes by one thread of the parent. That thread alone starts, times, kills and reaps its worker, so a
hung call costs its deadline and one worker's restart, and the other workers go on. Workers never import JAX.
"""

import asyncio
import contextlib
import errno
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from jaxsp.config import UserError
from jaxsp.verifiers.worker_process import HEADER

_POLL_S = 0.1
_TERMINATE_S = 0.5
_STARTS_PER_CALL = 3
_TMPDIR_FIX = "set TMPDIR to a folder on a disk with space that can be written"
_START_FIXES = {
    errno.EMFILE: "raise the number of open files that the shell allows (ulimit -n) or start fewer workers",
    errno.ENFILE: "end other programs, all of this machine's open files are in use",
    errno.ENOENT: _TMPDIR_FIX,
    errno.EACCES: _TMPDIR_FIX,
    errno.EROFS: _TMPDIR_FIX,
    errno.ENOSPC: _TMPDIR_FIX,
    errno.EDQUOT: _TMPDIR_FIX,
}
_FEWER_WORKERS = "free memory or start fewer workers"


@dataclass(frozen=True)
class Outcome:
    """How a call ended.

    Attributes:
        status: `ok`; `timeout`: the deadline passed and the worker was killed; `died`: the worker ended during the
            call, twice, or was killed for its memory; `error`: the function raised.
        value: what the function returned, None unless `ok`.
        detail: traceback or reason, empty when `ok`.
    """

    status: Literal["ok", "timeout", "died", "error"]
    value: Any = None
    detail: str = ""


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
            raise UserError(f"a verifier worker process did not start: {_reason_and_fix(error)}") from error
        ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        refused = None
        for index in range(self._num_workers):
            # Daemons: a pool that nobody closed must not keep the interpreter from ending.
            thread = threading.Thread(target=self._serve, args=(ready,), name=f"process-pool-{index}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the limit of threads
                refused = f"{error}; {_FEWER_WORKERS}"
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
        except _StartError as error:
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

    def _attempt_twice(self, worker: "_Worker | None", call: _Call) -> "tuple[Outcome, _Worker | None]":
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
            outcome, is_retryable = worker.call(call)
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

    def _start_worker(self) -> "_Worker":
        return _Worker(self._preload, self._memory_limit_bytes, self._start_timeout_s, self._wake_read)

    def _restart_worker(self) -> "tuple[_Worker | None, str]":
        """A fresh worker, or why there is none."""
        self._count("restarted")
        try:
            return self._start_worker(), ""
        except _StartError as error:
            return None, str(error)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


class _StartError(Exception):
    """Why a worker did not come up, and what to do about it."""


class _Worker:
    """The parent's end of one worker process. Only the thread that made it may use it."""

    def __init__(self, preload: tuple[str, ...], memory_limit_bytes: int, start_timeout_s: float, wake_fd: int) -> None:
        self.num_calls = 0
        self._memory_limit_bytes = memory_limit_bytes
        self._wake_fd = wake_fd
        self._inbox = bytearray()
        self._files = contextlib.ExitStack()  # what the parent holds open for this worker
        try:
            self._spawn(preload)
        except OSError as error:
            self._files.close()
            raise _StartError(_reason_and_fix(error)) from error
        status, message = self._exchange(b"", start_timeout_s)
        if status != "ok":
            reason = f"not ready within {start_timeout_s:g} s" if status == "timeout" else message
            end = self.stop()
            was_killed = status == "died" and self._process.returncode == -signal.SIGKILL
            raise _StartError(f"{reason}: {end}" + (f" (out of memory?); {_FEWER_WORKERS}" if was_killed else ""))

    def _spawn(self, preload: tuple[str, ...]) -> None:
        """Opens the files and starts the process. Raises OSError; what it opened by then stands in `_files`."""
        with contextlib.ExitStack() as child_files:
            self._stderr = self._files.enter_context(tempfile.TemporaryFile())
            child_read, self._write_fd = os.pipe()
            child_files.callback(os.close, child_read)
            self._files.callback(os.close, self._write_fd)
            self._read_fd, child_write = os.pipe()
            self._files.callback(os.close, self._read_fd)
            child_files.callback(os.close, child_write)
            os.set_blocking(self._read_fd, False)
            os.set_blocking(self._write_fd, False)
            # The parent's import path, so that the worker finds the same code; -P keeps the working directory off it.
            path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
            arguments = [str(child_read), str(child_write), str(os.getpid()), str(self._memory_limit_bytes), *preload]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "jaxsp.verifiers.worker_process", "--worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=(child_read, child_write),
                env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
                start_new_session=True,
            )
        self._poll_end = select.poll()
        self._poll_end.register(self._read_fd, 0)

    def is_alive(self) -> bool:
        """Whether the worker still holds its end of the pipe. Unlike `Popen.poll` this does not reap it."""
        return not self._poll_end.poll(0)

    def call(self, call: _Call) -> tuple[Outcome, bool]:
        """The outcome of one attempt, and whether another could end better."""
        self.num_calls += 1
        try:
            request = pickle.dumps((call.function, call.args))
        except Exception:  # pickle raises many kinds; all mean that the caller's arguments cannot be sent
            return Outcome("error", detail=traceback.format_exc()), False
        status, reply = self._exchange(HEADER.pack(len(request)) + request, call.timeout_s)
        if status == "ok":
            try:
                status, value = pickle.loads(reply)
            except Exception:  # a class that only the worker can import
                status, value = "error", traceback.format_exc()
            return (Outcome("ok", value) if status == "ok" else Outcome(status, detail=value)), False
        if status == "timeout":
            return Outcome("timeout", detail=f"not done after {call.timeout_s:g} s"), False
        return Outcome("died", detail=reply), status == "died"

    def _exchange(self, request: bytes, timeout_s: float) -> tuple[str, Any]:
        """Sends `request`, waits for one message: (`ok`, its bytes), or (`timeout` | `died` | `killed`, a reason)."""
        deadline = time.monotonic() + timeout_s
        pending = memoryview(request)
        while True:
            poller = select.poll()
            poller.register(self._read_fd, select.POLLIN)
            poller.register(self._wake_fd, select.POLLIN)
            if pending:
                poller.register(self._write_fd, select.POLLOUT)
            is_late = time.monotonic() >= deadline
            # Late or not, the pipe is looked at once more: this thread may itself have been held up.
            events = dict(poller.poll(0 if is_late else 1000 * min(_POLL_S, deadline - time.monotonic())))
            if self._wake_fd in events:
                return "killed", "the pool was closed"
            if self._write_fd in events:
                try:
                    pending = pending[os.write(self._write_fd, pending) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    return "died", "the worker ended"
            if self._read_fd in events:
                data = os.read(self._read_fd, 1 << 20)
                if not data:
                    return "died", "the worker ended"
                self._inbox += data
                if (message := self._take_message()) is not None:
                    return "ok", message
            elif is_late:
                return "timeout", ""
            if self._resident_bytes() > self._memory_limit_bytes:
                return "killed", f"the worker used more than {self._memory_limit_bytes >> 20} MiB"

    def _take_message(self) -> bytes | None:
        if len(self._inbox) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._inbox)[0]
        if len(self._inbox) < end:
            return None
        message = bytes(self._inbox[HEADER.size : end])
        del self._inbox[:end]
        return message

    def _resident_bytes(self) -> int:
        try:
            return psutil.Process(self._process.pid).memory_info().rss
        except (psutil.Error, OSError):  # it ended, or this process may open no more files: the second limit is left
            return 0

    def stop(self) -> str:
        """Ends the whole process group, SIGTERM then SIGKILL, reaps the worker, and says how it ended."""
        self._signal_group(signal.SIGTERM)
        self._poll_end.poll(1000 * _TERMINATE_S)
        # Before the worker is reaped: until then its id, which names the group, cannot belong to anybody else.
        self._signal_group(signal.SIGKILL)
        code = self._process.wait()
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        words = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._files.close()
        end = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"
        return end + (f", last words: {words[-1].strip()}" if words else "")

    def _signal_group(self, number: signal.Signals) -> None:
        # macOS refuses with PermissionError when only the dead leader is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


def _reason_and_fix(error: OSError) -> str:
    file = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{file}; {_START_FIXES.get(error.errno or 0, _FEWER_WORKERS)}"


def _function_name(function: Callable[..., Any] | str) -> str:
    if isinstance(function, str):
        return function
    if function.__module__ == "__main__" or "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} cannot be imported in a worker: move it to the top of a module")
    return f"{function.__module__}:{function.__qualname__}"
