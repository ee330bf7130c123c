"""Continuous batching over a paged KV cache, one device step at a time, on the caller's event loop.

A step admits waiting requests, computes a chunk of each prompt, then decodes a chunk of tokens for all rows. Device
work runs in the loop's own thread, and between two steps the loop runs on, so whoever got a completion can submit the
next request in time for the next step.

Keys and values stand in pages (`jaxsp/sampler/kv_pages.py`). Requests that begin with the same tokens share the pages
of that beginning: samples of one prompt, prompts with one header, the turns of one episode. A prompt whose next page is
being computed for another one waits for it. Where pages run out, the youngest row gives its own back and is computed
again later; it goes on with the same tokens.

Given the same order of submissions between steps, everything is reproducible bit for bit: batches, shapes and tokens.
A sample itself depends on its request alone. Its numbers may differ in the last bits from batch to batch, since
products of other shapes sum in another order; a token changes only where two candidates tie within that rounding.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.kv_pages import KVPages
from jaxsp.sampler.programs import Cache, Programs, make_programs
from jaxsp.sampler.scheduler import (
    Counts,
    bucket,
    check_request,
    context_buckets,
    find_ending,
    make_slots,
    plan_prefill,
    row_buckets,
)
from jaxsp.sampler.weight_sync import sampler_shardings, to_sampler_layout
from jaxsp.trajectory import Completion, GenerateRequest

_LOOP_TURNS = 16
"""Turns of the event loop between steps: enough for a completion to pass through a few tasks, gathers and queues."""


@dataclass(eq=False)
class _Sample:
    """A request on its way: waiting, in a prompt that is computed, or decoding."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_ended: bool = False
    pages: list[int] = field(default_factory=list)
    num_registered: int = 0
    """Of its pages, the first that others can find."""

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.tokens, *self.tokens)


@dataclass(eq=False)
class _Prompt:
    """Tokens on their way into the cache, for the samples that go on from them."""

    tokens: tuple[int, ...]
    samples: list[_Sample]
    pages: list[int]
    num_done: int
    """Tokens whose keys and values are cached."""
    num_registered: int


class Engine:
    """Samples from one set of parameters at a time; `make_engine` makes it, `load` gives it parameters.

    Use it from one event loop at a time. It keeps no task alive while no request is in flight.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        programs: Programs,
        pages: KVPages,
        *,
        num_slots: int,
        max_context: int,
        decode_chunk: int,
        prefill_tokens: int,
        compute_dtype: Any,
        decode_text: Callable[[Sequence[int]], str],
        param_shardings: Params | None,
    ):
        self._sizes, self._programs, self._pages = sizes, programs, pages
        self._num_slots, self._max_context = num_slots, max_context
        self._decode_chunk, self._prefill_tokens = decode_chunk, prefill_tokens
        self._compute_dtype, self._decode_text = compute_dtype, decode_text
        self._param_shardings = param_shardings
        self._row_buckets = row_buckets(num_slots)
        self._context_buckets = context_buckets(max_context, pages.page_tokens)
        self._params: Params | None = None
        self._policy_version = -1
        self._cache: Cache | None = None
        self._in_flight: dict[_Sample, None] = {}  # every sample that somebody awaits, wherever it stands
        self._waiting: deque[_Sample] = deque()
        self._prompts: list[_Prompt] = []
        self._rows: list[_Sample] = []
        self._task: asyncio.Task[None] | None = None
        self._counts = Counts()

    @property
    def num_compilations(self) -> int:
        """Programs compiled so far in this process for this decoder; constant once every shape has been met."""
        return self._programs.num_compilations

    def load(self, params: Params, policy_version: int, *, consumes: bool = False) -> None:
        """Samples from `params` (stacked layout, any sharding) from here on; completions carry `policy_version`.

        `consumes` deletes the arrays of `params` as they are converted, so that there are never two copies.
        Raises ValueError while requests are in flight: no sample and no cached key may mix two policies.
        """
        self.forget_prefixes()
        self._params = None  # before there are new ones
        self._params = to_sampler_layout(params, self._compute_dtype, self._param_shardings, consumes=consumes)
        self._policy_version = policy_version

    def forget_prefixes(self) -> None:
        """Forgets what earlier requests have left in the cache, so that later ones do not depend on it.

        Raises ValueError while requests are in flight.
        """
        if self._in_flight:
            raise ValueError(f"{len(self._in_flight)} requests in flight; await them first")
        self._drop_ended()
        self._pages.clear()

    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of `request`. Cancelling the awaiting task frees its place in the batch.

        Raises `UserError` naming the field of a request that cannot be meant or cannot fit.
        """
        if self._params is None:
            raise ValueError("generate was called before load")
        check_request(
            request,
            max_context=self._max_context,
            max_positions=self._sizes.max_positions,
            vocab_size=self._sizes.vocab_size,
        )
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._task = loop.create_task(self._serve())
        elif self._task.get_loop() is not loop:
            raise ValueError("the engine is in use by another event loop")
        sample = _Sample(request, loop.create_future())
        self._in_flight[sample] = None
        self._waiting.append(sample)
        self._counts.requests += 1
        try:
            return await sample.future
        finally:
            sample.is_ended = True
            del self._in_flight[sample]

    def stats(self) -> dict[str, float]:
        """Metrics since the last `reset_stats`: counts, seconds and shares of the work done."""
        return {**self._counts.metrics(self._num_slots), "sampler/num_compilations": self.num_compilations}

    def reset_stats(self) -> None:
        """Starts counting `stats` afresh."""
        self._counts = Counts()

    async def _serve(self) -> None:
        """Runs steps until nobody waits."""
        try:
            await _let_others_run()  # so that all requests of this turn of the loop share the first step
            self._drop_ended()
            while self._waiting or self._prompts or self._rows:
                self._step()
                await _let_others_run()
                self._drop_ended()
        except Exception as error:
            self._tell_everybody(error)
            self._start_anew()
        except asyncio.CancelledError:  # between two steps, as when the event loop ends
            self._tell_everybody(None)
            self._drop_ended()
            raise
        except BaseException:  # in the middle of a step
            self._tell_everybody(None)
            self._start_anew()
            raise

    def _tell_everybody(self, error: Exception | None) -> None:
        """Ends all requests with the error, or cancels them."""
        for sample in self._in_flight:
            sample.is_ended = True
            if sample.future.done() or sample.future.get_loop().is_closed():
                continue
            if error is None:
                sample.future.cancel()
            else:
                sample.future.set_exception(error)

    def _start_anew(self) -> None:
        """Leaves nothing of a step that failed: samples may stand half-way, and its program may have taken the cache
        with it."""
        self._waiting, self._prompts, self._rows = deque(), [], []
        self._cache, self._pages = None, KVPages(self._pages.num_pages, self._pages.page_tokens)

    def _drop_ended(self) -> None:
        """Takes ended samples out, and gives back the pages of those and of prompts that nobody waits for."""
        self._waiting = deque(sample for sample in self._waiting if not sample.is_ended)
        for prompt in self._prompts:
            prompt.samples = [sample for sample in prompt.samples if not sample.is_ended]
            if not prompt.samples:
                self._pages.release(prompt.pages)
        self._prompts = [prompt for prompt in self._prompts if prompt.samples]
        for sample in self._rows:
            if sample.is_ended:
                self._pages.release(sample.pages)
                sample.pages = []
        self._rows = [sample for sample in self._rows if not sample.is_ended]

    def _step(self) -> None:
        assert self._params is not None
        started = time.perf_counter()
        if self._cache is None:
            self._cache = self._programs.new_cache(self._pages.num_pages)
        num_left = self._prefill_tokens if self._rows else None
        advanced: list[_Prompt] = []
        while True:
            self._admit()
            due = [prompt for prompt in self._prompts if prompt not in advanced]
            if not due or (num_left is not None and num_left <= 0):
                break
            num_computed = self._prefill(due, num_left)
            advanced += due
            num_left = None if num_left is None else num_left - num_computed
        self._counts.prefill_s += time.perf_counter() - started

        if self._rows:
            started = time.perf_counter()
            self._decode()
            self._counts.decode_s += time.perf_counter() - started

    def _admit(self) -> None:
        """Makes prompts of waiting samples, in their order, as far as there are slots and pages."""
        pages = self._pages
        num_free = self._num_slots - len(self._rows) - sum(len(prompt.samples) for prompt in self._prompts)
        by_tokens = {prompt.tokens: prompt for prompt in self._prompts}
        under_way = {pages.next_key(prompt.tokens, prompt.pages[: prompt.num_registered]) for prompt in self._prompts}
        kept: deque[_Sample] = deque()
        while self._waiting and num_free > 0:
            sample = self._waiting.popleft()
            tokens = sample.context
            if (prompt := by_tokens.get(tokens)) is not None:
                prompt.samples.append(sample)
                num_free -= 1
                continue
            found = pages.find(tokens)
            key = pages.next_key(tokens, found)
            if key in under_way and (len(found) + 1) * pages.page_tokens < len(tokens):
                pages.release(found)
                kept.append(sample)  # it waits for the page
                continue
            fresh = pages.take(pages.num_for(len(tokens)) - len(found))
            if fresh is None:
                pages.release(found)
                kept.append(sample)
                break
            prompt = _Prompt(tokens, [sample], found + fresh, len(found) * pages.page_tokens, len(found))
            self._prompts.append(prompt)
            by_tokens[tokens] = prompt
            under_way.add(key)
            num_free -= 1
            self._counts.shared_prompt_tokens += prompt.num_done
        self._waiting.extendleft(reversed(kept))

    def _prefill(self, prompts: Sequence[_Prompt], num_left: int | None) -> int:
        """Computes the next chunk of each prompt, at most `num_left` tokens of all together, and lets the samples of
        finished prompts go on to decoding. Returns how many tokens were computed."""
        chunks: list[tuple[_Prompt, int]] = []
        num_computed = 0
        for prompt in prompts:
            length = min(len(prompt.tokens) - prompt.num_done, self._prefill_tokens)
            if num_left is not None:
                length = min(length, num_left - num_computed)
            if length > 0:
                chunks.append((prompt, length))
                num_computed += length
        finished: list[tuple[_Prompt, jax.Array, int]] = []
        for call in plan_prefill([length for _, length in chunks], self._prefill_tokens):
            hidden = self._run_prefill([chunks[index] for index in call.chunks], call.num_rows, call.length)
            for row, index in enumerate(call.chunks):
                prompt, length = chunks[index]
                prompt.num_done += length
                prompt.num_registered = self._pages.register(
                    prompt.tokens[: prompt.num_done], prompt.pages, prompt.num_registered
                )
                if prompt.num_done == len(prompt.tokens):
                    finished.append((prompt, hidden, row))
        self._counts.prefill_tokens += num_computed
        if finished:
            self._start_decoding(finished)
        return num_computed

    def _run_prefill(self, chunks: Sequence[tuple[_Prompt, int]], num_rows: int, length: int) -> jax.Array:
        """Hidden states `[num_rows, D]` of the last token of each chunk."""
        tokens = np.zeros((num_rows, length), np.int32)
        start, count = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for row, (prompt, num_tokens) in enumerate(chunks):
            tokens[row, :num_tokens] = prompt.tokens[prompt.num_done : prompt.num_done + num_tokens]
            start[row], count[row] = prompt.num_done, num_tokens
        table = self._table(num_rows, [prompt.pages for prompt, _ in chunks], int((start + count).max()))
        self._cache, hidden = self._programs.prefill(self._params, self._cache, tokens, start, count, table)
        self._counts.padding_tokens += tokens.size - int(count.sum())
        return hidden

    def _table(self, num_rows: int, pages: Sequence[Sequence[int]], num_positions: int) -> np.ndarray:
        """int32 `[num_rows, W]`: the pages of each row, for a bucket of at least `num_positions`."""
        width = bucket(num_positions, self._context_buckets) // self._pages.page_tokens
        table = np.zeros((num_rows, width), np.int32)
        for row, own in enumerate(pages):
            table[row, : len(own)] = own[:width]
        return table

    def _start_decoding(self, finished: Sequence[tuple[_Prompt, jax.Array, int]]) -> None:
        """Gives the samples of finished prompts pages of their own, and their first tokens."""
        rows: list[_Sample] = []
        states: list[np.ndarray] = []
        copies: list[tuple[int, int]] = []
        for prompt, hidden, row in finished:
            num_full = len(prompt.tokens) // self._pages.page_tokens
            shared, partial = prompt.pages[:num_full], prompt.pages[num_full:]
            state = np.asarray(hidden[row])
            for sample in prompt.samples[1:]:
                own = self._pages.take(len(partial))
                if own is None:  # it finds the prompt's pages when its turn comes again
                    self._waiting.appendleft(sample)
                    continue
                self._pages.share(shared)
                copies += zip(partial, own, strict=True)
                sample.pages, sample.num_registered = [*shared, *own], prompt.num_registered
                rows.append(sample)
                states.append(state)
                self._counts.shared_prompt_tokens += len(prompt.tokens)
            first = prompt.samples[0]
            first.pages, first.num_registered = prompt.pages, prompt.num_registered
            rows.append(first)
            states.append(state)
            self._prompts.remove(prompt)
        self._copy_pages(copies)
        num_rows = bucket(len(rows), self._row_buckets)
        hidden_rows = np.zeros((num_rows, self._sizes.embed_dim), self._compute_dtype)
        hidden_rows[: len(rows)] = states
        slots = make_slots(num_rows, ((sample.request, sample.tokens) for sample in rows))
        tokens, logprobs = self._programs.first_tokens(self._params, hidden_rows, slots)
        tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
        for row, sample in enumerate(rows):
            self._extend(sample, tokens[row : row + 1], logprobs[row : row + 1])
        self._rows += rows
        self._drop_ended()

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(copies), self._num_slots):
            part = copies[begin : begin + self._num_slots]
            source = np.zeros(self._num_slots, np.int32)
            target = np.full(self._num_slots, self._pages.num_pages, np.int32)
            source[: len(part)], target[: len(part)] = zip(*part, strict=True)
            self._cache = self._programs.copy_pages(self._cache, source, target)

    def _decode(self) -> None:
        self._make_room()
        rows = self._rows
        num_rows = bucket(len(rows), self._row_buckets)
        slots = make_slots(num_rows, ((sample.request, sample.tokens) for sample in rows))
        table = self._table(num_rows, [sample.pages for sample in rows], max(map(self._num_needed, rows)))
        stop_at = np.int32(self._when_to_stop(len(rows), num_rows))
        self._cache, tokens, logprobs, num_new, num_steps = self._programs.decode(
            self._params, self._cache, table, slots, stop_at
        )
        tokens, logprobs, num_new = np.asarray(tokens), np.asarray(logprobs), np.asarray(num_new)
        self._counts.decode_steps += int(num_steps)
        self._counts.row_steps += int(num_steps) * num_rows
        self._counts.used_row_steps += int(num_new.sum())
        for row, sample in enumerate(rows):
            self._extend(sample, tokens[row, : num_new[row]], logprobs[row, : num_new[row]])
            # The last token was sampled and not yet read: its keys and values are not there.
            sample.num_registered = self._pages.register(sample.context[:-1], sample.pages, sample.num_registered)
        self._drop_ended()

    def _num_needed(self, sample: _Sample) -> int:
        """Positions that the sample occupies at most when the next chunk is done."""
        num_left = sample.request.max_tokens - len(sample.tokens)
        return len(sample.request.tokens) + len(sample.tokens) - 1 + min(num_left, self._decode_chunk)

    def _make_room(self) -> None:
        """Gives every row pages for the next chunk; where there are too few, the youngest rows go back to waiting."""
        for sample in list(self._rows):
            while not sample.is_ended and sample in self._rows:
                fresh = self._pages.take(self._pages.num_for(self._num_needed(sample)) - len(sample.pages))
                if fresh is not None:
                    sample.pages += fresh
                    break
                self._pre_empt()

    def _pre_empt(self) -> None:
        """Sends back the prompt that was begun last, else the row that was; its pages are free for others."""
        if self._prompts:
            prompt = self._prompts.pop()
            self._pages.release(prompt.pages)
            self._waiting.extendleft(reversed(prompt.samples))
        else:
            sample = self._rows.pop()
            self._pages.release(sample.pages)
            sample.pages, sample.num_registered = [], 0
            self._waiting.appendleft(sample)
        self._counts.preemptions += 1

    def _when_to_stop(self, num_active: int, num_rows: int) -> int:
        """Active rows at which a chunk ends early: where a smaller batch, or a refill from the queue, pays."""
        if self._waiting or self._prompts:
            return num_active - max(1, num_active // 4)
        return max((size for size in self._row_buckets if size < min(num_rows, num_active)), default=0)

    def _extend(self, sample: _Sample, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """Adds sampled tokens to a sample, and completes it if they end it.

        Raises `UserError` if a log-probability is not finite, which those of tokens drawn from finite logits are.
        """
        if not np.isfinite(logprobs).all():
            raise UserError(
                "the model gives numbers that are not finite, so nothing can be sampled from it; its weights are "
                "damaged, or need model.compute_dtype=float32 (--dtype float32) or a lower learning rate"
            )
        num_checked = len(sample.tokens)
        sample.tokens += tokens.tolist()
        sample.logprobs += logprobs.tolist()
        ending = find_ending(sample.request, sample.tokens, num_checked, self._decode_text)
        if ending is None:
            self._counts.sampled_tokens += len(sample.tokens) - num_checked
            return
        self._counts.sampled_tokens += ending.num_tokens - num_checked
        sample.is_ended = True
        if not sample.future.done():
            sample.future.set_result(
                Completion(
                    tokens=tuple(sample.tokens[: ending.num_tokens]),
                    behaviour_logprobs=tuple(sample.logprobs[: ending.num_tokens]),
                    text=ending.text,
                    finish_reason=ending.finish_reason,
                    policy_version=self._policy_version,
                )
            )


def make_engine(
    sizes: DecoderSizes,
    *,
    num_slots: int,
    max_context: int,
    decode_chunk: int,
    prefill_tokens: int,
    compute_dtype: Any,
    decode_text: Callable[[Sequence[int]], str],
    page_tokens: int = 16,
    cache_tokens: int | None = None,
    mesh: Mesh | None = None,
) -> Engine:
    """An engine for one decoder, without parameters yet (`Engine.load`).

    Args:
        sizes: of the decoder; it must have a language head.
        num_slots: sequences decoded together at most.
        max_context: tokens of prompt and answer together.
        decode_chunk: tokens decoded between two looks at the queue.
        prefill_tokens: prompt tokens of one prefill call; longer prompts take several.
        compute_dtype: of weights, activations and cache.
        decode_text: ids to text, without special tokens.
        page_tokens: tokens of a page of the KV cache: what sharing and eviction come in.
        cache_tokens: tokens that the KV cache holds; None: `num_slots * max_context`.
        mesh: local devices to shard over (`jaxsp.mesh`); None: the default device.

    Raises `UserError` naming the setting that is wrong, `UsageError` where the decoder does not divide over the mesh.
    """
    cache_tokens = num_slots * max_context if cache_tokens is None else cache_tokens
    named = {
        "num_slots": num_slots, "max_context": max_context, "decode_chunk": decode_chunk,
        "prefill_tokens": prefill_tokens, "page_tokens": page_tokens,
    }  # fmt: skip
    for name, value in named.items():
        if value < 1:
            raise UserError(f"sampler.{name} = {value} is below 1")
    if cache_tokens < max_context:
        raise UserError(f"sampler.cache_tokens = {cache_tokens} is below sampler.max_context = {max_context}")
    if max_context > sizes.max_positions:
        raise UserError(
            f"sampler.max_context = {max_context} exceeds the {sizes.max_positions} positions the model was made for "
            "(max_position_embeddings); lower sampler.max_context"
        )
    if sizes.num_labels:
        raise UserError("model: a sequence-classification checkpoint has no language head and cannot be sampled from")
    compute_dtype = jnp.dtype(compute_dtype)
    param_shardings, kv_sharding = (None, None) if mesh is None else sampler_shardings(sizes, mesh)
    return Engine(
        sizes,
        make_programs(sizes, compute_dtype, page_tokens, decode_chunk, kv_sharding),
        KVPages(-(-cache_tokens // page_tokens) + num_slots, page_tokens),
        num_slots=num_slots,
        max_context=max_context,
        decode_chunk=decode_chunk,
        prefill_tokens=prefill_tokens,
        compute_dtype=compute_dtype,
        decode_text=decode_text,
        param_shardings=param_shardings,
    )


async def _let_others_run() -> None:
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)
