"""A tiny model, served by uvicorn on a free port of this machine, in a thread."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from jaxsp.inference import FoundModel, find_model
from jaxsp.serving.app import make_app
from jaxsp.serving.server import bind, make_server
from jaxsp.serving.service import Service, open_service
from tests.tiny import write_tiny_model


@dataclass(frozen=True)
class Served:
    model: FoundModel
    service: Service
    url: str
    client: openai.OpenAI


@contextlib.contextmanager
def running(service: Service, api_key: str | None = None) -> Iterator[str]:
    """The address of a server of `service`, until the end of the block."""
    with bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = make_server(make_app(service, api_key))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield url
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path: Path = write_tiny_model(tmp_path_factory.mktemp("serving") / "qwen3")
    model = find_model(str(path), compute_dtype="float32")
    service = open_service(model, "tiny", num_slots=4, max_context=256)
    with (
        running(service) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield Served(model, service, url, client)
