"""The parent's end of a worker process: starts it, hands it calls, times them, kills and reaps it."""

import contextlib
import errno
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any, Literal

import psutil

from jaxsp.verifiers.worker_process import HEADER

_POLL_S = 0.1
_TERMINATE_S = 0.5
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
FEWER_WORKERS = "free memory or start fewer workers"
"""What to do where nothing else is known to help."""


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


class StartError(Exception):
    """Why a worker did not come up, and what to do about it."""


class Worker:
    """The parent's end of one worker process. Only the thread that made it may use it.

    Making one waits until the process is ready, or raises `StartError`; `ProcessPool` tells what the limits mean. When
    `wake_fd`, the reading end of a pipe, hangs up, a call that runs ends as `died`.
    """

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
            raise StartError(reason_and_fix(error)) from error
        status, message = self._exchange(b"", start_timeout_s)
        if status != "ok":
            reason = f"not ready within {start_timeout_s:g} s" if status == "timeout" else message
            end = self.stop()
            was_killed = status == "died" and self._process.returncode == -signal.SIGKILL
            raise StartError(f"{reason}: {end}" + (f" (out of memory?); {FEWER_WORKERS}" if was_killed else ""))

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

    def call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> tuple[Outcome, bool]:
        """The outcome of one attempt at `function`, `"module:name"`, and whether another could end better."""
        self.num_calls += 1
        try:
            request = pickle.dumps((function, args))
        except Exception:  # pickle raises many kinds; all mean that the caller's arguments cannot be sent
            return Outcome("error", detail=traceback.format_exc()), False
        status, reply = self._exchange(HEADER.pack(len(request)) + request, timeout_s)
        if status == "ok":
            try:
                status, value = pickle.loads(reply)
            except Exception:  # a class that only the worker can import
                status, value = "error", traceback.format_exc()
            return (Outcome("ok", value) if status == "ok" else Outcome(status, detail=value)), False
        if status == "timeout":
            return Outcome("timeout", detail=f"not done after {timeout_s:g} s"), False
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


def reason_and_fix(error: OSError) -> str:
    """Why nothing could be started, in the system's words, and what to do about it."""
    file = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{file}; {_START_FIXES.get(error.errno or 0, FEWER_WORKERS)}"
