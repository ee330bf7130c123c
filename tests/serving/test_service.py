"""What becomes of samples that fail and of clients that leave, without a model."""

import asyncio
from typing import Any

import pytest

from jaxsp.serving.app import make_app
from jaxsp.serving.service import Service
from jaxsp.trajectory import Completion, GenerateRequest


class FailingEngine:
    """Fails the first sample, and draws the others for ever."""

    num_in_flight = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.num_in_flight += 1
        try:
            await asyncio.sleep(0 if request.seed == 0 else 3600)
        finally:
            self.num_in_flight -= 1
        raise RuntimeError("the device is gone")


class NoText:
    tokenizer = None


def failing_service() -> Service:
    return Service("tiny", NoText(), FailingEngine(), 16)  # pyright: ignore[reportArgumentType]


def test_no_sample_goes_on_for_a_request_of_which_one_has_failed() -> None:
    service = failing_service()

    async def run() -> int:
        with pytest.raises(RuntimeError, match="the device is gone"):
            await service.all_of([GenerateRequest((1,), seed, 4) for seed in range(3)])
        return service.engine.num_in_flight  # pyright: ignore[reportAttributeAccessIssue]

    assert asyncio.run(run()) == 0


def test_a_client_that_leaves_within_its_body_is_no_error_of_the_server() -> None:
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])

    async def receive() -> dict[str, Any]:
        return next(parts)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(make_app(failing_service())(scope, receive, send))
    assert sent[0]["status"] == 499
