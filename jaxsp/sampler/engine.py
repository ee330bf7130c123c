"""Continuous batching on the caller's event loop: requests join and leave a running batch between two device steps.

Device work runs in the loop's own thread, and between two steps (`jaxsp/sampler/batch.py`) the loop runs on, so whoever
got a completion can submit the next request in time for the next step. A server has it run in another thread
(`steps_in_thread`), since a long prompt or a compilation would leave everybody who knocks without an answer: then too
requests join, leave and are answered between two steps only.

Given the same order of submissions between steps, everything is reproducible bit for bit: batches, shapes and tokens.
A sample itself depends on its request alone. Its numbers may differ in the last bits from batch to batch, since
products of other shapes sum in another order; a token changes only where two candidates tie within that rounding.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.model.moe import run_experts_on
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.batch import Batch, BatchSettings, Sample
from jaxsp.sampler.cpu_products import choose_products
from jaxsp.sampler.paged_attention import Implementation, choose
from jaxsp.sampler.places import Places
from jaxsp.sampler.programs import Programs, make_programs
from jaxsp.sampler.scheduler import Counts, Ending, check_request
from jaxsp.sampler.streaming import Decoded, Delta, decode_more, num_certain
from jaxsp.sampler.weight_sync import sampler_shardings, sampler_sizes, to_sampler_layout
from jaxsp.trajectory import Completion, GenerateRequest

_LOOP_TURNS = 16
"""Turns of the event loop between steps: enough for a completion to pass through a few tasks, gathers and queues."""


@dataclass(eq=False)
class _Watch:
    """Lets a stream know when there is more of its sample, and how much of it stands."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    num_tokens: int = 0


class Engine:
    """Samples from one set of parameters at a time; `make_engine` makes it, `load` gives it parameters.

    Use it from one event loop at a time. It keeps no task alive while no request is in flight.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        programs: Programs,
        settings: BatchSettings,
        param_shardings: Params | None,
        weight_dtype: Any,
        panel: int | None,
        steps_in_thread: bool,
        max_waiting: int,
    ) -> None:
        self._sizes, self._programs, self._settings = sizes, programs, settings
        self._param_shardings, self._weight_dtype, self._panel = param_shardings, weight_dtype, panel
        self._steps_in_thread = steps_in_thread
        self._params: Params | None = None
        self._policy_version = -1
        self._batch = Batch(programs, settings)
        self._futures: dict[Sample, asyncio.Future[Completion]] = {}  # what is awaited, wherever its sample stands
        self._watches: dict[Sample, _Watch] = {}
        self._task: asyncio.Task[None] | None = None
        # What the batch learns, and tells, between two steps: a step may be running in another thread.
        self._is_stepping = False
        self._arrived: list[Sample] = []
        self._gone: list[Sample] = []
        self._ended: list[tuple[Sample, Ending]] = []
        self._places = Places(settings.num_slots + max_waiting)  # in the batch and in its queue

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
        self._params = to_sampler_layout(
            self._sizes, params, self._weight_dtype, self._param_shardings, panel=self._panel, consumes=consumes
        )
        self._policy_version = policy_version

    def forget_prefixes(self) -> None:
        """Forgets what earlier requests have left in the cache, so that later ones do not depend on it.

        Raises ValueError while requests are in flight.
        """
        num_requests = len(self._futures) + self._places.num_waiting
        if num_requests or self._is_stepping:
            raise ValueError(f"{num_requests} requests in flight; await them first")
        self._exchange()
        self._batch.forget_prefixes()

    def check(self, request: GenerateRequest) -> None:
        """Raises `UserError` naming the field of a request that cannot be meant or cannot fit."""
        check_request(
            request,
            max_context=self._settings.max_context,
            max_positions=self._sizes.max_positions,
            vocab_size=self._sizes.vocab_size,
        )

    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of `request`. Cancelling the awaiting task frees its place in the batch.

        Beyond `num_slots + max_waiting` requests, the next ones wait here, in the order they came, and not in the
        batch's queue. Raises `UserError` naming the field of a request that cannot be meant or cannot fit.
        """
        async with self._in_flight(request) as sample:
            return await self._futures[sample]

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        """The completion of `request` as it comes, in one delta for each chunk of tokens, or for several if the reader
        is slow. Closing the stream, or cancelling who reads it, frees its place in the batch.

        Raises what `generate` raises.
        """
        async with self._in_flight(request) as sample:
            future, watch = self._futures[sample], _Watch()
            self._watches[sample] = watch
            future.add_done_callback(lambda _: watch.event.set())
            done, num_tokens, num_chars = Decoded(), 0, 0
            while True:
                await watch.event.wait()
                watch.event.clear()
                if future.done():
                    break
                start, num_tokens = num_tokens, watch.num_tokens
                if start == num_tokens:
                    continue
                text, done = decode_more(done, sample.tokens[:num_tokens], self._settings.decode_text)
                end = num_certain(text, request.stop_strings)
                new = slice(start, num_tokens)
                yield Delta(
                    tuple(sample.tokens[new]), tuple(sample.logprobs[new]), text[num_chars:end],
                    tuple(sample.raw_logprobs[new]), tuple(sample.kept_mass[new]),
                )  # fmt: skip
                num_chars = end
            whole, new = await future, slice(num_tokens, None)
            yield Delta(
                whole.tokens[new], whole.behaviour_logprobs[new], whole.text[num_chars:],
                whole.raw_logprobs[new], whole.kept_mass[new], whole,
            )  # fmt: skip

    @contextlib.asynccontextmanager
    async def _in_flight(self, request: GenerateRequest) -> AsyncGenerator[Sample]:
        """A sample that is waiting or in the batch until the end of the block, with a future of its completion."""
        if self._params is None:
            raise ValueError("a request came before load")
        self.check(request)
        self._batch.counts.held_back += self._places.are_taken
        await self._places.take()
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._task = loop.create_task(self._serve())
            self._task.add_done_callback(_look_at)  # else asyncio reports an interrupt as an error nobody saw
        elif self._task.get_loop() is not loop:
            self._places.give_back()
            raise ValueError("the engine is in use by another event loop")
        sample = Sample(request, lambda sample, ending: self._ended.append((sample, ending)))
        self._futures[sample] = loop.create_future()
        self._arrived.append(sample)
        self._batch.counts.requests += 1
        try:
            yield sample
        finally:
            self._gone.append(sample)
            del self._futures[sample]
            self._watches.pop(sample, None)
            self._places.give_back()

    def stats(self) -> dict[str, float]:
        """Metrics since the last `reset_stats`: counts, seconds and shares of the work done."""
        return {
            **self._batch.counts.metrics(self._settings.num_slots),
            "sampler/num_compilations": self.num_compilations,
        }

    def reset_stats(self) -> None:
        """Starts counting `stats` afresh."""
        self._batch.counts = Counts()

    async def _serve(self) -> None:
        """Runs steps until nobody waits."""
        try:
            await _let_others_run()  # so that all requests of this turn of the loop share the first step
            self._exchange()
            while not self._batch.is_empty:
                await self._step()
                await _let_others_run()
                self._exchange()
        except Exception as error:
            self._tell_everybody(error)
            self._start_anew()
        except asyncio.CancelledError:  # between two steps, as when the event loop ends
            self._tell_everybody(None)
            self._exchange()
            raise
        except BaseException:  # in the middle of a step
            self._tell_everybody(None)
            self._start_anew()
            raise

    def _exchange(self) -> None:
        """Between two steps: lets samples into the batch, and takes out those that nobody waits for."""
        for sample in self._arrived:
            self._batch.add(sample)
        for sample in self._gone:
            sample.is_ended = True
        self._arrived, self._gone = [], []
        self._batch.drop_ended()

    def _start_anew(self) -> None:
        self._arrived, self._gone, self._ended = [], [], []
        self._batch.start_anew()

    async def _step(self) -> None:
        """A step of the batch; then everybody hears of it."""
        assert self._params is not None
        self._is_stepping = True
        try:
            if self._steps_in_thread:
                loop = asyncio.get_running_loop()
                await _to_the_end(loop.run_in_executor(None, self._batch.step, self._params))
            else:
                self._batch.step(self._params)
        finally:
            self._is_stepping = False
            self._hand_out()

    def _hand_out(self) -> None:
        """Completes the samples that have ended, and lets streams know of tokens that have come to others."""
        for sample, ending in self._ended:
            future = self._futures.get(sample)
            if future is not None and not future.done():
                future.set_result(
                    Completion(
                        tokens=tuple(sample.tokens[: ending.num_tokens]),
                        behaviour_logprobs=tuple(sample.logprobs[: ending.num_tokens]),
                        raw_logprobs=tuple(sample.raw_logprobs[: ending.num_tokens]),
                        kept_mass=tuple(sample.kept_mass[: ending.num_tokens]),
                        text=ending.text,
                        finish_reason=ending.finish_reason,
                        policy_version=self._policy_version,
                    )
                )
        self._ended = []
        for sample, watch in self._watches.items():
            if not sample.is_ended and watch.num_tokens < len(sample.tokens):
                watch.num_tokens = len(sample.tokens)
                watch.event.set()

    def _tell_everybody(self, error: Exception | None) -> None:
        """Ends all requests with the error, or cancels them."""
        for sample, future in self._futures.items():
            sample.is_ended = True
            if future.done() or future.get_loop().is_closed():
                continue
            if error is None:
                future.cancel()
            else:
                future.set_exception(error)


def make_engine(
    sizes: DecoderSizes,
    *,
    num_slots: int,
    max_context: int,
    decode_chunk: int,
    prefill_tokens: int,
    compute_dtype: Any,
    decode_text: Callable[[Sequence[int]], str],
    page_tokens: int | None = None,
    cache_tokens: int | None = None,
    attention: str | Implementation = "auto",
    weight_dtype: Any = None,
    products: str = "auto",
    mesh: Mesh | None = None,
    steps_in_thread: bool = False,
    max_waiting: int | None = None,
) -> Engine:
    """An engine for one decoder, without parameters yet (`Engine.load`).

    Args:
        sizes: of the decoder; it must have a language head.
        num_slots: sequences decoded together at most.
        max_context: tokens of prompt and answer together.
        decode_chunk: tokens decoded between two looks at the queue.
        prefill_tokens: prompt tokens of one prefill call; longer prompts take several.
        compute_dtype: of activations, sums and cache.
        decode_text: ids to text, without special tokens.
        page_tokens: tokens of a page of the KV cache: what sharing and eviction come in; None: what `attention` likes.
        cache_tokens: tokens that the KV cache holds; None: `num_slots * max_context`.
        attention: how decoding reads the cache: `auto`, or one of `jaxsp.sampler.paged_attention.IMPLEMENTATIONS`.
        weight_dtype: of the weights; None: `compute_dtype`.
        products: what multiplies with the weights: `auto`, `cpu` or `xla` (`jaxsp.sampler.cpu_products`).
        mesh: local devices to shard over (`jaxsp.mesh`); None: the default device.
        steps_in_thread: whether the event loop runs on while the devices work. What joins which step then depends on
            the time that steps take: tokens stay the same, batches and the last bits may not.
        max_waiting: requests in the queue for a slot; further ones wait to be queued. None: 16 for each slot.

    Raises `UserError` naming the setting that is wrong, `UsageError` where the decoder does not divide over the mesh,
    or `attention` or `products` cannot run.
    """
    cache_tokens = num_slots * max_context if cache_tokens is None else cache_tokens
    _check_settings(
        sizes, num_slots=num_slots, max_context=max_context, decode_chunk=decode_chunk, prefill_tokens=prefill_tokens,
        page_tokens=page_tokens, cache_tokens=cache_tokens,
    )  # fmt: skip
    max_waiting = 16 * num_slots if max_waiting is None else max_waiting
    compute_dtype = jnp.dtype(compute_dtype)
    param_shardings, kv_sharding = None, None
    if mesh is not None:
        sizes = sampler_sizes(sizes, mesh)
        param_shardings, kv_sharding = sampler_shardings(sizes, mesh)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    chosen = choose_products(products, device, 1 if mesh is None else mesh.size, compute_dtype)
    if mesh is not None and chosen.panel is not None:  # one device: no axis of anything is split
        param_shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), param_shardings)
    implementation, page_tokens, _ = choose(
        attention, device, num_slots=num_slots, max_context=max_context, page_tokens=page_tokens,
        head_dim=sizes.head_dim, dtype=compute_dtype,
    )  # fmt: skip
    settings = BatchSettings(
        num_slots=num_slots, max_context=max_context, decode_chunk=decode_chunk, prefill_tokens=prefill_tokens,
        page_tokens=page_tokens, embed_dim=sizes.embed_dim, compute_dtype=compute_dtype, decode_text=decode_text,
        num_pages=-(-cache_tokens // page_tokens) + num_slots,  # each slot's last page is partly empty
    )  # fmt: skip
    run_experts = run_experts_on(mesh, device.platform, splits_tokens=False)
    programs = make_programs(
        sizes, compute_dtype, page_tokens, decode_chunk, kv_sharding, implementation,
        dataclasses.replace(chosen.products, run_experts=run_experts),
    )  # fmt: skip
    weight_dtype = compute_dtype if weight_dtype is None else jnp.dtype(weight_dtype)
    return Engine(sizes, programs, settings, param_shardings, weight_dtype, chosen.panel, steps_in_thread, max_waiting)


def _check_settings(sizes: DecoderSizes, *, max_context: int, cache_tokens: int, **settings: int | None) -> None:
    for name, value in {"max_context": max_context, **settings}.items():
        if value is not None and value < 1:
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


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


async def _let_others_run() -> None:
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)


async def _to_the_end(work: asyncio.Future[None]) -> None:
    """Awaits what runs in a thread, and so runs on also when who awaits it is cancelled; raises what it raised."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        work.result()
        raise
