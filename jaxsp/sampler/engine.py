"""Continuous batching: requests join and leave a running batch, one device step at a time, on the caller's event loop.

A step admits waiting requests to free rows (computing each distinct prompt once, and a prefix that all of them share
once for all), then decodes a chunk of tokens for
all rows. Device work runs in the loop's own thread, and between two steps the loop runs on, so whoever got a
completion can submit the next request in time for the next step.

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

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.prefill import Prefill
from jaxsp.sampler.programs import Cache, Programs, make_programs
from jaxsp.sampler.scheduler import (
    Counts,
    bucket,
    check_request,
    context_buckets,
    find_ending,
    make_slots,
    row_buckets,
)
from jaxsp.sampler.weight_sync import sampler_shardings, to_sampler_layout
from jaxsp.trajectory import Completion, GenerateRequest

_LOOP_TURNS = 16
"""Turns of the event loop between steps: enough for a completion to pass through a few tasks, gathers and queues."""


@dataclass(eq=False)
class _Sample:
    """A request on its way: waiting, or decoding in a row of the cache."""

    request: GenerateRequest
    future: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_ended: bool = False


class Engine:
    """Samples from one set of parameters at a time; `make_engine` makes it, `load` gives it parameters.

    Use it from one event loop at a time. It keeps no task and no cache alive while no request is in flight.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        programs: Programs,
        *,
        num_slots: int,
        max_context: int,
        decode_chunk: int,
        prefill_tokens: int,
        compute_dtype: Any,
        decode_text: Callable[[Sequence[int]], str],
        param_shardings: Params | None,
    ):
        self._sizes, self._programs = sizes, programs
        self._num_slots, self._max_context = num_slots, max_context
        self._decode_chunk = decode_chunk
        self._compute_dtype, self._decode_text = compute_dtype, decode_text
        self._param_shardings = param_shardings
        self._row_buckets, self._context_buckets = row_buckets(num_slots), context_buckets(max_context)
        self._prefill = Prefill(
            programs,
            embed_dim=sizes.embed_dim,
            compute_dtype=compute_dtype,
            max_context=max_context,
            prefill_tokens=prefill_tokens,
        )
        self._params: Params | None = None
        self._policy_version = -1
        self._waiting: deque[_Sample] = deque()
        self._rows: list[_Sample] = []
        self._cache: Cache = []
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
        num_in_flight = sum(not sample.is_ended for sample in (*self._rows, *self._waiting))
        if num_in_flight:
            raise ValueError(f"load was called with {num_in_flight} requests in flight; await them first")
        self._cache, self._rows = [], []
        self._prefill.forget()
        self._params = None  # before there are new ones
        self._params = to_sampler_layout(params, self._compute_dtype, self._param_shardings, consumes=consumes)
        self._policy_version = policy_version

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
        self._waiting.append(sample)
        self._counts.requests += 1
        try:
            return await sample.future
        finally:
            sample.is_ended = True

    def stats(self) -> dict[str, float]:
        """Metrics since the last `reset_stats`: counts, seconds and shares of the work done."""
        return {**self._counts.metrics(self._num_slots), "sampler/num_compilations": self.num_compilations}

    def reset_stats(self) -> None:
        """Starts counting `stats` afresh."""
        self._counts = Counts()

    async def _serve(self) -> None:
        """Runs steps until nobody waits."""
        failure: BaseException | None = None
        try:
            await _let_others_run()  # so that all requests of this turn of the loop share the first step
            self._drop_ended()
            while self._waiting or self._rows:
                self._step()
                await _let_others_run()
                self._drop_ended()
        except BaseException as error:
            failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            for sample in (*self._rows, *self._waiting):
                if sample.future.done() or sample.future.get_loop().is_closed():
                    continue
                if isinstance(failure, Exception):
                    sample.future.set_exception(failure)
                else:
                    sample.future.cancel()
            self._waiting.clear()
            self._rows, self._cache = [], []
            self._prefill.forget()

    def _drop_ended(self) -> None:
        """Forgets waiting requests whose caller has gone; rows are left out at the next gathering."""
        self._waiting = deque(sample for sample in self._waiting if not sample.is_ended)
        if all(sample.is_ended for sample in self._rows):
            self._rows = []

    def _step(self) -> None:
        started = time.perf_counter()
        num_running = sum(not sample.is_ended for sample in self._rows)
        num_admitted = min(self._num_slots - num_running, len(self._waiting))
        admitted = [self._waiting.popleft() for _ in range(num_admitted)]
        rows = self._place(admitted)
        if admitted:
            self._begin(rows)
        self._counts.prefill_s += time.perf_counter() - started

        if any(not sample.is_ended for sample in self._rows):
            started = time.perf_counter()
            self._decode()
            self._counts.decode_s += time.perf_counter() - started
        if not self._waiting and all(sample.is_ended for sample in self._rows):
            # Not in `_serve` alone, which goes on if the next requests come at once: what they meet must not depend on
            # whether others came before, or a run that is resumed between the two would end with other bits.
            self._prefill.forget()

    def _place(self, admitted: Sequence[_Sample]) -> list[int]:
        """Rows for the admitted samples, in a cache with place for everybody's next chunk.

        A cache that still fits stays as it is, and its free rows are taken; else the running rows are gathered at the
        front of one that fits. So the context shrinks only when rows are gathered anyway.
        """
        running = [row for row, sample in enumerate(self._rows) if not sample.is_ended]
        samples = [self._rows[row] for row in running] + list(admitted)
        num_rows = bucket(len(samples), self._row_buckets)
        capacity = bucket(max(self._num_needed(sample) for sample in samples), self._context_buckets)
        if running and num_rows == self._cache_shape[0] and capacity <= self._cache_shape[1]:
            free = sorted(set(range(num_rows)) - set(running))[: len(admitted)]
            for row, sample in zip(free, admitted, strict=True):
                self._rows[row : row + 1] = [sample]  # appends where the row is the first without a sample
            return free
        self._rows = samples
        if not running:
            self._cache = []  # before the new one is made
            self._cache = self._programs.new_cache(num_rows, capacity)
            return list(range(len(admitted)))
        index = np.zeros(num_rows, np.int32)
        index[: len(running)] = running
        for layer, (keys, values) in enumerate(self._cache):  # layer by layer: never two whole caches at a time
            self._cache[layer] = (
                self._programs.gather_rows(keys, index, capacity),
                self._programs.gather_rows(values, index, capacity),
            )
        return list(range(len(running), len(samples)))

    @property
    def _cache_shape(self) -> tuple[int, int]:
        """Rows and positions."""
        num_rows, _, capacity, _ = self._cache[0][0].shape
        return num_rows, capacity

    def _num_needed(self, sample: _Sample) -> int:
        """Positions that the sample occupies at most when the next chunk is done."""
        num_left = sample.request.max_tokens - len(sample.tokens)
        return len(sample.request.tokens) + len(sample.tokens) + min(num_left, self._decode_chunk)

    def _begin(self, rows: Sequence[int]) -> None:
        """Computes the distinct prompts of `rows`, copies their cache to each row, and samples first tokens."""
        assert self._params is not None
        rows_of: dict[tuple[int, ...], list[int]] = {}
        for row in rows:
            rows_of.setdefault(self._rows[row].request.tokens, []).append(row)
        targets = list(rows_of.values())
        num_computed_before = self._counts.prefill_tokens
        computed = []
        for call in self._prefill.run(self._params, list(rows_of), self._counts):
            self._copy_rows(call.cache, [targets[index] for index in call.prompts])
            computed.append((call.prompts, call.hidden))
        num_rows, _ = self._cache_shape
        row_hidden = np.zeros((num_rows, self._sizes.embed_dim), self._compute_dtype)
        for prompts, hidden in computed:  # read back once all calls are under way
            call_hidden = np.asarray(hidden)
            for position, index in enumerate(prompts):
                row_hidden[targets[index]] = call_hidden[position]
        num_prompt_tokens = sum(len(self._rows[row].request.tokens) for row in rows)
        num_computed = self._counts.prefill_tokens - num_computed_before
        self._counts.shared_prompt_tokens += num_prompt_tokens - num_computed

        slots = make_slots(num_rows, ((sample.request, sample.tokens) for sample in self._rows))
        tokens, logprobs = self._programs.first_tokens(self._params, row_hidden, slots)
        tokens, logprobs = np.asarray(tokens), np.asarray(logprobs)
        for row in rows:
            self._extend(self._rows[row], tokens[row : row + 1], logprobs[row : row + 1])

    def _copy_rows(self, fresh: Cache, targets: Sequence[Sequence[int]]) -> None:
        """Copies row i of `fresh` to the rows `targets[i]` of the cache."""
        num_rows, _ = self._cache_shape
        pairs = [(source, target) for source, rows in enumerate(targets) for target in rows]
        source, target = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        source[: len(pairs)], target[: len(pairs)] = zip(*pairs, strict=True)
        count = np.int32(len(pairs))
        for layer, (old, new) in enumerate(zip(self._cache, fresh, strict=True)):
            keys, values = (
                self._programs.copy_rows(whole, part, source, target, count)
                for whole, part in zip(old, new, strict=True)
            )
            self._cache[layer] = (keys, values)

    def _decode(self) -> None:
        assert self._params is not None
        num_rows, _ = self._cache_shape
        slots = make_slots(num_rows, ((sample.request, sample.tokens) for sample in self._rows))
        slots.is_active[: len(self._rows)] = [not sample.is_ended for sample in self._rows]
        num_active = int(slots.is_active.sum())
        stop_at = np.int32(self._when_to_stop(num_active, num_rows))
        self._cache, tokens, logprobs, num_new, num_steps = self._programs.decode(
            self._params, self._cache, slots, stop_at
        )
        tokens, logprobs, num_new = np.asarray(tokens), np.asarray(logprobs), np.asarray(num_new)
        self._counts.decode_steps += int(num_steps)
        self._counts.row_steps += int(num_steps) * num_rows
        self._counts.used_row_steps += int(num_new.sum())
        for row, sample in enumerate(self._rows):
            if not sample.is_ended:
                self._extend(sample, tokens[row, : num_new[row]], logprobs[row, : num_new[row]])

    def _when_to_stop(self, num_active: int, num_rows: int) -> int:
        """Active rows at which a chunk ends early: where a smaller batch, or a refill from the queue, pays."""
        if self._waiting:
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
        mesh: local devices to shard over (`jaxsp.mesh`); None: the default device.

    Raises `UserError` naming the setting that is wrong, `UsageError` where the decoder does not divide over the mesh.
    """
    named = {
        "num_slots": num_slots, "max_context": max_context, "decode_chunk": decode_chunk,
        "prefill_tokens": prefill_tokens,
    }  # fmt: skip
    for name, value in named.items():
        if value < 1:
            raise UserError(f"sampler.{name} = {value} is below 1")
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
        make_programs(sizes, compute_dtype, decode_chunk, kv_sharding),
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
