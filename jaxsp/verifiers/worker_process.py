"""The other end of `jaxsp.verifiers.worker`: a process that answers calls until its parent is gone."""

import ctypes
import functools
import importlib
import os
import pickle
import queue
import resource
import signal
import struct
import sys
import threading
import traceback
from typing import Any

HEADER = struct.Struct("<Q")
"""Before each message, in both directions: its length in bytes."""
_ADDRESS_SPACE_FACTOR = 4
_PR_SET_PDEATHSIG = 1


def run_worker(read_fd: int, write_fd: int, parent_pid: int, memory_limit_bytes: int, preload: list[str]) -> None:
    """The worker's life: imports, says that it is ready, then answers one call after another until the pipe ends."""
    _die_with_parent(parent_pid)
    os.set_inheritable(read_fd, False)  # a process that a call starts must not hold the pipes open
    os.set_inheritable(write_fd, False)
    for name in preload:
        if callable(found := _resolve(name)):
            found()
    address_space = _ADDRESS_SPACE_FACTOR * memory_limit_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (address_space if hard < 0 else min(address_space, hard), hard))
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(read_fd, requests), daemon=True).start()
    _write_message(write_fd, b"ready")
    while True:
        try:
            function, args = pickle.loads(requests.get())
            reply = pickle.dumps(("ok", _resolve(function)(*args)))
        except MemoryError:
            reply = pickle.dumps(("died", f"more than {address_space >> 20} MiB of address space were asked for"))
        except BaseException:  # SystemExit too: what a call raises is its outcome, never the worker's end
            reply = pickle.dumps(("error", traceback.format_exc(limit=-10)))
        _write_message(write_fd, reply)


def _die_with_parent(parent_pid: int) -> None:
    """Asks Linux to kill this worker with the thread that started it; the end of the pipe does the same elsewhere."""
    if sys.platform == "linux":
        # Also reaches a call that holds the interpreter lock, where the reading thread could not act.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def _read_requests(read_fd: int, requests: "queue.SimpleQueue[bytes]") -> None:
    with os.fdopen(read_fd, "rb") as stream:
        while len(header := stream.read(HEADER.size)) == HEADER.size:
            requests.put(stream.read(HEADER.unpack(header)[0]))
    os.killpg(os.getpgrp(), signal.SIGKILL)  # the parent is gone: so is this worker and what its calls started


def _resolve(name: str) -> Any:
    """The module or, after a colon, what is in it under that name."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split(".") if path else [], importlib.import_module(module))


def _write_message(write_fd: int, message: bytes) -> None:
    data = memoryview(HEADER.pack(len(message)) + message)
    while data:
        data = data[os.write(write_fd, data) :]


if __name__ == "__main__":
    assert sys.argv[1] == "--worker", "this module is started by ProcessPool"
    run_worker(*(int(value) for value in sys.argv[2:6]), preload=sys.argv[6:])
