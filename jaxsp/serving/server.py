"""`jaxsp serve`: a socket, a model, and uvicorn until somebody says stop."""

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jaxsp.config import UserError
from jaxsp.inference import FoundModel, choose_context
from jaxsp.serving.app import make_app
from jaxsp.serving.service import open_service

_API_KEY = "JAXSP_API_KEY"
GRACE_S = 20
"""How long answers that have begun may go on after a signal to stop."""


@dataclass(frozen=True)
class ServerOptions:
    """`port` 0 takes a free one, `max_context` None is for `choose_context`, `api_key` None for the environment."""

    host: str
    port: int
    num_slots: int
    max_context: int | None
    api_key: str | None


def serve(model: FoundModel, name: str, options: ServerOptions) -> None:
    """Serves the model until SIGTERM or Ctrl-C; answers that have begun are then finished, for `GRACE_S` at most.

    Raises `UserError` naming what cannot be opened, KeyboardInterrupt where another Ctrl-C does not wait for them.
    """
    max_context = choose_context(model, options.max_context)
    with bind(options.host, options.port) as listener:
        service = open_service(model, name, num_slots=options.num_slots, max_context=max_context)
        api_key = options.api_key or os.environ.get(_API_KEY) or None
        server = make_server(make_app(service, api_key))
        listen(listener, server.config.backlog)
        address, port = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        print(f"{name}, {options.num_slots} slots of {max_context} tokens, at http://{shown}:{port}/v1", flush=True)
        if api_key is None and not _is_loopback(address):
            print(f"jaxsp: whoever reaches {address} can use it: there is no --api-key", file=sys.stderr, flush=True)
        with _signals_end_nothing():
            server.run(sockets=[listener])
        if server.force_exit:
            raise KeyboardInterrupt


def make_server(app: Starlette) -> uvicorn.Server:
    """A server that runs with `run(sockets=[...])`, of errors alone it tells."""
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="warning", access_log=False,
        timeout_keep_alive=60, timeout_graceful_shutdown=GRACE_S,
    )  # fmt: skip
    return _Server(config)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """With the Ctrl-C that does not wait, ends the answers: uvicorn itself then waits until clients have gone."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            for task in list(self.server_state.tasks):
                task.get_loop().call_soon_threadsafe(task.cancel)


def bind(host: str, port: int) -> socket.socket:
    """A socket at the address, not listening yet. Raises `UserError` if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        raise _not_had(host, port, error) from error
    return listener


def listen(listener: socket.socket, backlog: int) -> None:
    """Lets clients come. Raises `UserError` if another program listens there by now."""
    try:
        listener.listen(backlog)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise _not_had(host, port, error) from error


def _not_had(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"--host {host} --port {port}: {reason}; choose another address or port")


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


@contextlib.contextmanager
def _signals_end_nothing() -> Iterator[None]:
    """uvicorn stops at a signal, and sends it again when it has stopped, which would end the program by it."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
