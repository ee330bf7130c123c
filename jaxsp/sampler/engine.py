"""Continuous batching on the caller's event loop: requests join and leave a running batch between two device steps.

Device work runs in the loop's own thread, and between two steps (`jaxsp/sampler/batch.py`) the loop runs on, so whoever
got a completion can submit the next request in time for the next step.

Given the same order of submissions between steps, everything is reproducible bit for bit: batches, shapes and tokens.
A sample itself depends on its request alone. Its numbers may differ in the last bits from batch to batch, since
products of other shapes sum in another order; a token changes only where two candidates tie within that rounding.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.sampler.batch import Batch, BatchSettings, Sample
from jaxsp.sampler.paged_attention import Implementation, choose
from jaxsp.sampler.programs import Programs, make_programs
from jaxsp.sampler.scheduler import Counts, Ending, check_request
from jaxsp.sampler.weight_sync import sampler_shardings, sampler_sizes, to_sampler_layout
from jaxsp.trajectory import Completion, GenerateRequest

_LOOP_TURNS = 16
"""Turns of the event loop between steps: enough for a completion to pass through a few tasks, gathers and queues."""


class Engine:
    """Samples from one set of parameters at a time; `make_engine` makes it, `load` gives it parameters.

    Use it from one event loop at a time. It keeps no task alive while no request is in flight.
    """

    def __init__(
        self, sizes: DecoderSizes, programs: Programs, settings: BatchSettings, param_shardings: Params | None
    ) -> None:
        self._sizes, self._programs, self._settings = sizes, programs, settings
        self._param_shardings = param_shardings
        self._params: Params | None = None
        self._policy_version = -1
        self._batch = Batch(programs, settings)
        self._futures: dict[Sample, asyncio.Future[Completion]] = {}  # what is awaited, wherever its sample stands
        self._task: asyncio.Task[None] | None = None

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
            params,
            self._settings.compute_dtype,
            self._param_shardings,
            num_kv_heads=self._sizes.num_kv_heads,
            consumes=consumes,
        )
        self._policy_version = policy_version

    def forget_prefixes(self) -> None:
        """Forgets what earlier requests have left in the cache, so that later ones do not depend on it.

        Raises ValueError while requests are in flight.
        """
        if self._futures:
            raise ValueError(f"{len(self._futures)} requests in flight; await them first")
        self._batch.forget_prefixes()

    async def generate(self, request: GenerateRequest) -> Completion:
        """The completion of `request`. Cancelling the awaiting task frees its place in the batch.

        Raises `UserError` naming the field of a request that cannot be meant or cannot fit.
        """
        if self._params is None:
            raise ValueError("generate was called before load")
        check_request(
            request,
            max_context=self._settings.max_context,
            max_positions=self._sizes.max_positions,
            vocab_size=self._sizes.vocab_size,
        )
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or self._task.get_loop().is_closed():
            self._task = loop.create_task(self._serve())
            self._task.add_done_callback(_look_at)  # else asyncio reports an interrupt as an error nobody saw
        elif self._task.get_loop() is not loop:
            raise ValueError("the engine is in use by another event loop")
        sample = Sample(request, self._complete)
        self._futures[sample] = loop.create_future()
        self._batch.add(sample)
        self._batch.counts.requests += 1
        try:
            return await self._futures[sample]
        finally:
            sample.is_ended = True
            del self._futures[sample]

    def _complete(self, sample: Sample, ending: Ending) -> None:
        if not self._futures[sample].done():
            self._futures[sample].set_result(
                Completion(
                    tokens=tuple(sample.tokens[: ending.num_tokens]),
                    behaviour_logprobs=tuple(sample.logprobs[: ending.num_tokens]),
                    text=ending.text,
                    finish_reason=ending.finish_reason,
                    policy_version=self._policy_version,
                )
            )

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
        assert self._params is not None
        try:
            await _let_others_run()  # so that all requests of this turn of the loop share the first step
            self._batch.drop_ended()
            while not self._batch.is_empty:
                self._batch.step(self._params)
                await _let_others_run()
                self._batch.drop_ended()
        except Exception as error:
            self._tell_everybody(error)
            self._batch.start_anew()
        except asyncio.CancelledError:  # between two steps, as when the event loop ends
            self._tell_everybody(None)
            self._batch.drop_ended()
            raise
        except BaseException:  # in the middle of a step
            self._tell_everybody(None)
            self._batch.start_anew()
            raise

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
        page_tokens: tokens of a page of the KV cache: what sharing and eviction come in; None: what `attention` likes.
        cache_tokens: tokens that the KV cache holds; None: `num_slots * max_context`.
        attention: how decoding reads the cache: `auto`, or one of `jaxsp.sampler.paged_attention.IMPLEMENTATIONS`.
        mesh: local devices to shard over (`jaxsp.mesh`); None: the default device.

    Raises `UserError` naming the setting that is wrong, `UsageError` where the decoder does not divide over the mesh,
    or `attention` cannot run.
    """
    cache_tokens = num_slots * max_context if cache_tokens is None else cache_tokens
    named = {
        "num_slots": num_slots, "max_context": max_context, "decode_chunk": decode_chunk,
        "prefill_tokens": prefill_tokens, "page_tokens": page_tokens,
    }  # fmt: skip
    for name, value in named.items():
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
    compute_dtype = jnp.dtype(compute_dtype)
    param_shardings, kv_sharding = None, None
    if mesh is not None:
        sizes = sampler_sizes(sizes, mesh)
        param_shardings, kv_sharding = sampler_shardings(sizes, mesh)
    implementation, page_tokens = choose(
        attention, jax.devices()[0] if mesh is None else mesh.devices.flat[0], num_slots=num_slots,
        max_context=max_context, page_tokens=page_tokens, head_dim=sizes.head_dim, dtype=compute_dtype,
    )  # fmt: skip
    settings = BatchSettings(
        num_slots=num_slots,
        max_context=max_context,
        decode_chunk=decode_chunk,
        prefill_tokens=prefill_tokens,
        page_tokens=page_tokens,
        num_pages=-(-cache_tokens // page_tokens) + num_slots,  # each slot's last page is partly empty
        embed_dim=sizes.embed_dim,
        compute_dtype=compute_dtype,
        decode_text=decode_text,
    )
    programs = make_programs(sizes, compute_dtype, page_tokens, decode_chunk, kv_sharding, implementation)
    return Engine(sizes, programs, settings, param_shardings)


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


async def _let_others_run() -> None:
    for _ in range(_LOOP_TURNS):
        await asyncio.sleep(0)
