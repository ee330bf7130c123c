"""The routes: OpenAI's `/v1/models`, `/v1/completions` and `/v1/chat/completions`, and `/health`."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jaxsp.sampler.streaming import Delta
from jaxsp.serving.asked import Asked, Endpoint, RequestError, parse_request
from jaxsp.serving.replies import Choice, envelope, error, usage
from jaxsp.serving.service import Service
from jaxsp.trajectory import GenerateRequest

MAX_BODY_BYTES = 16 * 2**20
_STOPPED = "the server stops before this answer is done; ask again when it is back"
_FAREWELL_S = 1.0
"""How long a client may take to hear that."""
_LOGGER = logging.getLogger("uvicorn.error")


def make_app(service: Service, api_key: str | None = None) -> Starlette:
    """The ASGI application. With an `api_key`, who does not show it gets nothing but `/health`."""
    created = int(time.time())

    def check_key(request: Request) -> None:
        if api_key is None:
            return
        shown = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(shown.encode(), api_key.encode()):
            raise RequestError("the API key is missing or wrong", status=401, code="invalid_api_key")

    def card() -> dict[str, Any]:
        own = {"id": service.name, "object": "model", "created": created, "owned_by": "jaxsp"}
        return {**own, "max_model_len": service.max_context}

    async def health(request: Request) -> Response:
        return _json({"status": "ok", "num_in_flight": service.num_in_flight})

    async def models(request: Request) -> Response:
        check_key(request)
        return _json({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        check_key(request)
        if (name := request.path_params["name"]) != service.name:
            raise RequestError(f"there is no model {name!r} here", "model", status=404, code="model_not_found")
        return _json(card())

    def endpoint(kind: Endpoint) -> Callable[[Request], Awaitable[Any]]:
        """What answers requests to complete prompts."""

        async def answer(request: Request) -> Any:
            try:
                body = await _read_body(request)
                check_key(request)
                return await _answer(service, parse_request(_parse_json(request, body), kind), request)
            except asyncio.CancelledError as stopped:
                raise RequestError(_STOPPED, status=503) from stopped

        return answer

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/completions", endpoint("completions"), methods=["POST"]),
            Route("/v1/chat/completions", endpoint("chat"), methods=["POST"]),
        ],
        exception_handlers={
            RequestError: _refusal, HTTPException: _http_error, ClientDisconnect: _nobody, Exception: _internal_error,
        },
    )  # fmt: skip


async def _answer(service: Service, asked: Asked, request: Request) -> Any:
    requests = service.requests(asked)
    service.check_places(requests)
    if asked.is_streamed:
        return _EventStream(service, asked, requests)
    with service.places_for(requests):
        deltas = await _while_connected(request.receive, service.all_of(requests))
    if deltas is None:
        raise ClientDisconnect
    return _json(_reply(asked, service.choices(asked, requests), requests, deltas))


def _json(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    # ASCII: a lone surrogate that a client sent would have no UTF-8.
    return Response(json.dumps(payload, allow_nan=False), status, headers, "application/json")


async def _refusal(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, RequestError)
    kinds = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    headers = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(refused.status)
    return _json(error(str(refused), kind=kind, param=refused.param, code=refused.code), refused.status, headers)


async def _http_error(request: Request, refused: Exception) -> Response:
    assert isinstance(refused, HTTPException)
    message = f"{request.method} {request.url.path}: {refused.detail}"
    return _json(error(message), refused.status_code, dict(refused.headers or {}))


async def _nobody(request: Request, left: Exception) -> Response:
    """For the log of a server before this one: who asked is not there any more."""
    return Response(status_code=499)


async def _internal_error(request: Request, failed: Exception) -> Response:
    return _json(error(_describe(failed), kind="server_error"), 500)


def _describe(failed: Exception) -> str:
    return f"internal error: {type(failed).__name__}: {(str(failed).strip() or 'no message').splitlines()[0]}"


async def _read_body(request: Request) -> bytes:
    """All of it, since who is still sending may not see an answer. Raises `RequestError` if it is too long."""
    body, num_bytes = bytearray(), 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes <= MAX_BODY_BYTES:
            body += chunk
        elif num_bytes > 8 * MAX_BODY_BYTES:
            break
    if num_bytes > MAX_BODY_BYTES:
        raise RequestError(f"the body is longer than {MAX_BODY_BYTES} bytes", status=413)
    return bytes(body)


def _parse_json(request: Request, body: bytes) -> Any:
    """Raises `RequestError` if it is not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # A web page may send anything else to this machine without asking first.
        raise RequestError("the request needs the header Content-Type: application/json", status=415)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as failed:
        raise RequestError(f"the body is not JSON: {failed}") from failed


def _reply(asked: Asked, choices: list[Choice], requests: list[GenerateRequest], deltas: list[Delta]) -> dict[str, Any]:
    shown = [choice.whole(delta) for choice, delta in zip(choices, deltas, strict=True)]
    used = usage(_num_prompt(asked, requests), sum(len(delta.tokens) for delta in deltas))
    return envelope(asked, secrets.token_hex(12), int(time.time()), shown, usage=used)


def _num_prompt(asked: Asked, requests: list[GenerateRequest]) -> int:
    return sum(len(request.tokens) for request in requests[:: asked.num_samples])


async def _events(service: Service, asked: Asked, requests: list[GenerateRequest]) -> AsyncGenerator[str]:
    """The payloads of a stream's events."""
    key, created, num_sampled = secrets.token_hex(12), int(time.time()), 0
    choices = service.choices(asked, requests)
    more: dict[str, Any] = {"usage": None} if asked.has_usage else {}

    def chunk(shown: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps(envelope(asked, key, created, shown, **more), allow_nan=False)

    for choice in choices:
        for shown in choice.opening():
            yield chunk([shown], **more)
    try:
        async with contextlib.aclosing(service.each_of(requests)) as deltas:
            async for index, delta in deltas:
                num_sampled += len(delta.tokens)
                for shown in choices[index].chunks(delta):
                    yield chunk([shown], **more)
    except Exception as failed:
        _LOGGER.exception("a stream failed")
        yield json.dumps(error(_describe(failed), kind="server_error"))
        return
    if asked.has_usage:
        yield chunk([], usage=usage(_num_prompt(asked, requests), num_sampled))
    yield "[DONE]"


def _event(payload: str) -> bytes:
    return f"data: {payload}\n\n".encode()


class _EventStream:
    """A response of server-sent events. Its samples are left as soon as the client is."""

    def __init__(self, service: Service, asked: Asked, requests: list[GenerateRequest]) -> None:
        self._service, self._asked, self._requests = service, asked, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.places_for(self._requests):
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            try:
                await _while_connected(receive, self._send(send))
            except asyncio.CancelledError:  # as the server ends what has not ended in its grace
                async with asyncio.timeout(_FAREWELL_S):
                    last = json.dumps(error(_STOPPED, kind="server_error"))
                    await send({"type": "http.response.body", "body": _event(last), "more_body": False})

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(_events(self._service, self._asked, self._requests)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": _event(event), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None if the client leaves before; then the work is cancelled."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
