"""The model that is served: from what was asked for to samples."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxsp.config import SamplerConfig, UserError
from jaxsp.inference import FoundModel, Input, TextReader, load_engine, sample_seed, stops
from jaxsp.policy import TextSide, open_text_side
from jaxsp.sampler.engine import Engine
from jaxsp.sampler.streaming import Delta
from jaxsp.serving.asked import MAX_SAMPLES, Asked, RequestError
from jaxsp.serving.replies import Choice, TokenTexts
from jaxsp.trajectory import GenerateRequest

DECODE_CHUNK = 8
"""Tokens between two looks at who has come: small steps for streams, and still few."""
COMPLETION_TOKENS = 16
"""Of a completion whose request does not say; of a chat it is what the context holds."""


@dataclass(eq=False)
class Service:
    """A model under a name, on one event loop."""

    name: str
    text: TextSide
    engine: Engine
    max_context: int
    num_in_flight: int = 0
    """Samples that are being drawn, or wait."""
    texts: TokenTexts = field(init=False)

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.text.tokenizer)

    def requests(self, asked: Asked) -> list[GenerateRequest]:
        """A request for each sample, prompt by prompt, with the seeds that `jaxsp sample` gives.

        Raises `RequestError` naming the field that cannot be meant, or what does not fit.
        """
        if asked.model != self.name:
            raise RequestError(
                f"there is no model {asked.model!r} here, only {self.name!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        is_chat = asked.endpoint == "chat"
        renderer = self.text.renderer if is_chat else None
        reader = TextReader(self.text.source.sizes, self.text.tokenizer, renderer)
        stop_ids, stop_strings = stops(self.text.source, self.text.tokenizer, renderer)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        requests = []
        for index, prompt in enumerate(asked.prompts):
            name = "messages" if is_chat else "prompt"
            tokens = _encode(reader, name, prompt)
            first = GenerateRequest(
                tokens=tokens,
                seed=sample_seed(seed, index, 0),
                max_tokens=self._max_tokens(asked, len(tokens), name),
                temperature=asked.temperature,
                top_k=asked.top_k,
                top_p=asked.top_p,
                min_p=asked.min_p,
                stop_ids=stop_ids,
                stop_strings=(*stop_strings, *asked.stop_strings),
                min_tokens=asked.min_tokens,
                repetition_penalty=asked.repetition_penalty,
                logit_bias=asked.logit_bias,
            )
            try:
                self.engine.check(first)
            except UserError as error:
                field_name = str(error).partition(" ")[0].rstrip(":")
                raise RequestError(str(error), name if field_name == "tokens" else field_name) from error
            requests += [replace(first, seed=sample_seed(seed, index, number)) for number in range(asked.num_samples)]
        return requests

    def _max_tokens(self, asked: Asked, num_prompt: int, name: str) -> int:
        num_left = self.max_context - num_prompt
        if asked.max_tokens is None and num_left > 0:
            return num_left if asked.endpoint == "chat" else min(COMPLETION_TOKENS, num_left)
        if asked.max_tokens is not None and asked.max_tokens <= num_left:
            return asked.max_tokens
        wanted = f" and max_tokens = {asked.max_tokens}" if asked.max_tokens is not None else ", without an answer,"
        raise RequestError(
            f"the {num_prompt} tokens of {name}{wanted} are more than the {self.max_context} that the context holds "
            "(jaxsp serve --max-context)",
            name if num_left < 1 else "max_tokens",
            code="context_length_exceeded",
        )

    def choices(self, asked: Asked, requests: Sequence[GenerateRequest]) -> list[Choice]:
        """What becomes of each request."""
        is_chat = asked.endpoint == "chat"
        before = self.text.renderer.before_reply if is_chat else ""
        echoes = [""] * len(asked.prompts)
        if asked.has_echo:
            echoes = [text if isinstance(text, str) else self.text.tokenizer.decode(text) for text in asked.prompts]
        return [
            Choice(asked, self.texts, index, request.tokens, before, echoes[index // asked.num_samples])
            for index, request in enumerate(requests)
        ]

    def check_places(self, requests: Sequence[GenerateRequest]) -> None:
        """Raises `RequestError` if there are too many in flight to take these."""
        if self.num_in_flight + len(requests) > MAX_SAMPLES:
            raise RequestError(
                f"{self.num_in_flight} samples are being drawn or wait; come again later", status=429, code="overloaded"
            )

    @contextlib.contextmanager
    def places_for(self, requests: Sequence[GenerateRequest]) -> Iterator[None]:
        """Counts them among those in flight for the time of the block."""
        self.num_in_flight += len(requests)
        try:
            yield
        finally:
            self.num_in_flight -= len(requests)

    async def all_of(self, requests: Sequence[GenerateRequest]) -> list[Delta]:
        """Each sample as one delta. Where one fails, none goes on."""
        tasks = [asyncio.create_task(self.engine.generate(request)) for request in requests]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            await _end(tasks)
        return [Delta(each.tokens, each.behaviour_logprobs, each.text, completion=each) for each in completions]

    async def each_of(self, requests: Sequence[GenerateRequest]) -> AsyncGenerator[tuple[int, Delta]]:
        """The samples as they come, each delta with the index of its request. Close it to leave."""
        queue: asyncio.Queue[tuple[int, Delta] | BaseException] = asyncio.Queue(maxsize=2 * len(requests))

        async def read(index: int, request: GenerateRequest) -> None:
            try:
                async with contextlib.aclosing(self.engine.stream(request)) as deltas:
                    async for delta in deltas:
                        await queue.put((index, delta))
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(read(index, request)) for index, request in enumerate(requests)]
        try:
            num_left = len(tasks)
            while num_left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                num_left -= item[1].completion is not None
        finally:
            await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def open_service(model: FoundModel, name: str, *, num_slots: int, max_context: int) -> Service:
    """Loads the model to be served under `name`. Raises `UserError` naming what cannot be opened."""
    text = open_text_side(model.config, model.source)
    sampler = SamplerConfig(num_slots=num_slots, max_context=max_context, decode_chunk=DECODE_CHUNK)
    engine = load_engine(model, text.tokenizer, sampler, steps_in_thread=True)
    return Service(name, text, engine, max_context)


def _encode(reader: TextReader, name: str, prompt: str | list) -> tuple[int, ...]:
    kind = "messages" if name == "messages" else "prompt" if isinstance(prompt, str) else "tokens"
    try:
        return reader.encode(Input(name, kind, prompt))
    except UserError as error:
        raise RequestError(str(error), name) from error
