"""What is sampled together: who waits, which prompts are being computed, which rows decode; one step at a time.

A step admits waiting samples, computes a chunk of each prompt, then decodes a chunk of tokens for all rows. Keys and
values stand in pages (`jaxsp/sampler/kv_pages.py`). Samples that begin with the same tokens share the pages of that
beginning: those of one prompt, prompts with one header, the turns of one episode. A prompt whose next page is being
computed for another one waits for it. Where pages run out, the youngest row gives its own back and is computed again
later; it goes on with the same tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.sampler.kv_pages import KVPages
from jaxsp.sampler.programs import Cache, Drawn, Programs
from jaxsp.sampler.scheduler import (
    Counts,
    Ending,
    Slots,
    bucket,
    context_buckets,
    find_ending,
    make_slots,
    plan_prefill,
    row_buckets,
)
from jaxsp.sampler.score_edits import ScoreEdits, make_score_edits
from jaxsp.sampler.streaming import Decoded, decode_more, new_stops
from jaxsp.trajectory import GenerateRequest


@dataclass(eq=False)
class Sample:
    """A request on its way: waiting, in a prompt that is computed, or decoding."""

    request: GenerateRequest
    on_end: Callable[["Sample", Ending], None]
    """Called once, when the sample is complete."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    """These two only where the request wants them."""
    decoded: Decoded = field(default_factory=Decoded)
    """The text so far, where the request has stop strings."""
    is_ended: bool = False
    """Complete, or nobody waits for it any more: anyone may set it, between two steps."""
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
    samples: list[Sample]
    pages: list[int]
    num_done: int
    """Tokens whose keys and values are cached."""
    num_registered: int


@dataclass(frozen=True)
class BatchSettings:
    """See `jaxsp.sampler.engine.make_engine`."""

    num_slots: int
    max_context: int
    decode_chunk: int
    prefill_tokens: int
    page_tokens: int
    num_pages: int
    embed_dim: int
    compute_dtype: Any
    decode_text: Callable[[Sequence[int]], str]


class Batch:
    """Samples in the cache and on their way there. Nothing here knows of event loops."""

    def __init__(self, programs: Programs, settings: BatchSettings) -> None:
        self._programs, self._settings = programs, settings
        self._row_buckets = row_buckets(settings.num_slots)
        self._context_buckets = context_buckets(settings.max_context, settings.page_tokens)
        self.counts = Counts()
        self.start_anew()

    def start_anew(self) -> None:
        """Leaves nothing of a step that failed: samples may stand half-way, and its program may have taken the cache
        with it."""
        self._waiting: deque[Sample] = deque()
        self._prompts: list[_Prompt] = []
        self._rows: list[Sample] = []
        self._cache: Cache | None = None
        self._pages = KVPages(self._settings.num_pages, self._settings.page_tokens)

    def add(self, sample: Sample) -> None:
        """Lets a sample wait for a slot."""
        self._waiting.append(sample)

    @property
    def is_empty(self) -> bool:
        return not (self._waiting or self._prompts or self._rows)

    def forget_prefixes(self) -> None:
        """Makes what has been computed so far impossible to find. ValueError while there are samples."""
        self.drop_ended()
        self._pages.clear()

    def drop_ended(self) -> None:
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

    def step(self, params: Params) -> None:
        """One step of a batch that is not empty. Raises `UserError` if the model gives numbers that are not finite."""
        started = time.perf_counter()
        if self._cache is None:
            cache = self._programs.new_cache(self._pages.num_pages)
            # Tied to its devices as every later cache is, or each program would be compiled once more for the first.
            self._cache = jax.device_put(cache, jax.tree.map(lambda pages: pages.sharding, cache))
        num_left = self._settings.prefill_tokens if self._rows else None
        advanced: list[_Prompt] = []
        while True:
            self._admit()
            due = [prompt for prompt in self._prompts if prompt not in advanced]
            if not due or (num_left is not None and num_left <= 0):
                break
            num_computed = self._prefill(params, due, num_left)
            advanced += due
            num_left = None if num_left is None else num_left - num_computed
        self.counts.prefill_s += time.perf_counter() - started

        if self._rows:
            started = time.perf_counter()
            self._decode(params)
            self.counts.decode_s += time.perf_counter() - started

    def _admit(self) -> None:
        """Makes prompts of waiting samples, in their order, as far as there are slots and pages."""
        pages = self._pages
        num_free = self._settings.num_slots - len(self._rows) - sum(len(prompt.samples) for prompt in self._prompts)
        by_tokens = {prompt.tokens: prompt for prompt in self._prompts}
        under_way = {pages.next_key(prompt.tokens, prompt.pages[: prompt.num_registered]) for prompt in self._prompts}
        kept: deque[Sample] = deque()
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
            self.counts.shared_prompt_tokens += prompt.num_done
        self._waiting.extendleft(reversed(kept))

    def _prefill(self, params: Params, prompts: Sequence[_Prompt], num_left: int | None) -> int:
        """Computes the next chunk of each prompt, at most `num_left` tokens of all together, and lets the samples of
        finished prompts go on to decoding. Returns how many tokens were computed."""
        chunks: list[tuple[_Prompt, int]] = []
        num_computed = 0
        for prompt in prompts:
            length = min(len(prompt.tokens) - prompt.num_done, self._settings.prefill_tokens)
            if num_left is not None:
                length = min(length, num_left - num_computed)
            if length > 0:
                chunks.append((prompt, length))
                num_computed += length
        finished: list[tuple[_Prompt, np.ndarray]] = []
        for call in plan_prefill([length for _, length in chunks], self._settings.prefill_tokens):
            own = [chunks[index] for index in call.chunks]
            hidden = self._run_prefill(params, own, call.num_rows, call.length)
            if any(prompt.num_done + length == len(prompt.tokens) for prompt, length in own):
                hidden = np.asarray(hidden)
            for row, index in enumerate(call.chunks):
                prompt, length = chunks[index]
                prompt.num_done += length
                prompt.num_registered = self._pages.register(
                    prompt.tokens[: prompt.num_done], prompt.pages, prompt.num_registered
                )
                if prompt.num_done == len(prompt.tokens):
                    finished.append((prompt, np.asarray(hidden[row])))
        self.counts.prefill_tokens += num_computed
        if finished:
            self._start_decoding(params, finished)
        return num_computed

    def _run_prefill(
        self, params: Params, chunks: Sequence[tuple[_Prompt, int]], num_rows: int, length: int
    ) -> jax.Array:
        """Hidden states `[num_rows, D]` of the last token of each chunk."""
        tokens = np.zeros((num_rows, length), np.int32)
        start, count = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for row, (prompt, num_tokens) in enumerate(chunks):
            tokens[row, :num_tokens] = prompt.tokens[prompt.num_done : prompt.num_done + num_tokens]
            start[row], count[row] = prompt.num_done, num_tokens
        table = self._table(num_rows, [prompt.pages for prompt, _ in chunks], int((start + count).max()))
        self._cache, hidden = self._programs.prefill(params, self._cache, tokens, start, count, table)
        self.counts.padding_tokens += tokens.size - int(count.sum())
        return hidden

    def _table(self, num_rows: int, pages: Sequence[Sequence[int]], num_positions: int) -> np.ndarray:
        """int32 `[num_rows, W]`: the pages of each row, for a bucket of at least `num_positions`."""
        width = bucket(num_positions, self._context_buckets) // self._pages.page_tokens
        table = np.zeros((num_rows, width), np.int32)
        for row, own in enumerate(pages):
            table[row, : len(own)] = own[:width]
        return table

    def _start_decoding(self, params: Params, finished: Sequence[tuple[_Prompt, np.ndarray]]) -> None:
        """Gives the samples of finished prompts pages of their own, and their first tokens."""
        rows: list[Sample] = []
        states: list[np.ndarray] = []
        copies: list[tuple[int, int]] = []
        for prompt, state in finished:
            num_full = len(prompt.tokens) // self._pages.page_tokens
            shared, partial = prompt.pages[:num_full], prompt.pages[num_full:]
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
                self.counts.shared_prompt_tokens += len(prompt.tokens)
            first = prompt.samples[0]
            first.pages, first.num_registered = prompt.pages, prompt.num_registered
            rows.append(first)
            states.append(state)
            self._prompts.remove(prompt)
        self._copy_pages(copies)
        num_rows = bucket(len(rows), self._row_buckets)
        hidden_rows = np.zeros((num_rows, self._settings.embed_dim), self._settings.compute_dtype)
        hidden_rows[: len(rows)] = states
        slots, edits = self._make_slots(num_rows, rows)
        drawn = jax.device_get(self._programs.first_tokens(params, hidden_rows, slots, edits))
        for row, sample in enumerate(rows):
            self._extend(sample, jax.tree.map(lambda values, row=row: values[row : row + 1], drawn))
        self._rows += rows
        self.drop_ended()

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for begin in range(0, len(copies), self._settings.num_slots):
            part = copies[begin : begin + self._settings.num_slots]
            source = np.zeros(self._settings.num_slots, np.int32)
            target = np.full(self._settings.num_slots, self._pages.num_pages, np.int32)
            source[: len(part)], target[: len(part)] = zip(*part, strict=True)
            self._cache = self._programs.copy_pages(self._cache, source, target)

    def _decode(self, params: Params) -> None:
        self._make_room()
        rows = self._rows
        num_rows = bucket(len(rows), self._row_buckets)
        slots, edits = self._make_slots(num_rows, rows)
        table = self._table(num_rows, [sample.pages for sample in rows], max(map(self._num_needed, rows)))
        stop_at = np.int32(self._when_to_stop(len(rows), num_rows))
        self._cache, *rest = self._programs.decode(params, self._cache, table, slots, edits, stop_at)
        drawn, num_new, num_steps = jax.device_get(rest)
        self.counts.decode_steps += int(num_steps)
        self.counts.row_steps += int(num_steps) * num_rows
        self.counts.used_row_steps += int(num_new.sum())
        for row, sample in enumerate(rows):
            end = int(num_new[row])
            self._extend(sample, jax.tree.map(lambda values, row=row, end=end: values[row, :end], drawn))
            # The last token was sampled and not yet read: its keys and values are not there.
            sample.num_registered = self._pages.register(sample.context[:-1], sample.pages, sample.num_registered)
        self.drop_ended()

    def _make_slots(self, num_rows: int, samples: Sequence[Sample]) -> tuple[Slots, ScoreEdits | None]:
        rows = [(sample.request, sample.tokens) for sample in samples]
        num_positions = bucket(
            max(len(request.tokens) + len(tokens) for request, tokens in rows), self._context_buckets
        )
        return make_slots(num_rows, rows), make_score_edits(num_rows, rows, num_positions)

    def _num_needed(self, sample: Sample) -> int:
        """Positions that the sample occupies at most when the next chunk is done."""
        num_left = sample.request.max_tokens - len(sample.tokens)
        return len(sample.request.tokens) + len(sample.tokens) - 1 + min(num_left, self._settings.decode_chunk)

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
        self.counts.preemptions += 1

    def _when_to_stop(self, num_active: int, num_rows: int) -> int:
        """Active rows at which a chunk ends early: where a smaller batch, or a refill from the queue, pays."""
        if self._waiting or self._prompts:
            return num_active - max(1, num_active // 4)
        return max((size for size in self._row_buckets if size < min(num_rows, num_active)), default=0)

    def _extend(self, sample: Sample, drawn: Drawn) -> None:
        """Adds a row's new tokens to its sample, and completes it if they end it.

        Raises `UserError` if a log-probability is not finite, which those of tokens drawn from finite logits are.
        """
        if not np.isfinite(drawn.logprobs).all():
            raise UserError(
                "the model gives numbers that are not finite, so nothing can be sampled from it; its weights are "
                "damaged, or need model.compute_dtype=float32 (--dtype float32) or a lower learning rate"
            )
        num_checked = len(sample.tokens)
        sample.tokens += drawn.tokens.tolist()
        sample.logprobs += drawn.logprobs.tolist()
        if sample.request.wants_raw:
            sample.raw_logprobs += drawn.raw_logprobs.tolist()
            sample.kept_mass += drawn.kept_mass.tolist()
        decode_text = self._settings.decode_text
        stops: tuple[str, ...] = ()
        if sample.request.stop_strings:
            before = sample.decoded
            text, sample.decoded = decode_more(before, sample.tokens, decode_text)
            stops = new_stops(before, text, sample.request.stop_strings)
        ending = find_ending(sample.request, sample.tokens, num_checked, decode_text, stops)
        if ending is None:
            self.counts.sampled_tokens += len(sample.tokens) - num_checked
            return
        self.counts.sampled_tokens += ending.num_tokens - num_checked
        sample.is_ended = True
        sample.on_end(sample, ending)
