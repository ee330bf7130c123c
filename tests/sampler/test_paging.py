"""The engine when pages are scarce, shared and reused, against a sampler that has no cache at all."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sampler import assert_same_samples, generate_all, prompt, reference_sample, tiny_engine, tiny_params

from jaxsp.config import UserError
from jaxsp.sampler.engine import Engine
from jaxsp.trajectory import Completion, GenerateRequest

PARAMS = tiny_params()
SCARCE: dict[str, Any] = {"num_slots": 4, "max_context": 64, "page_tokens": 4, "cache_tokens": 64, "decode_chunk": 3}


def is_at_rest(engine: Engine) -> bool:
    """No page in use: what remains can be evicted."""
    engine.forget_prefixes()  # it refuses while a page is in use
    return engine._batch._pages.num_available == engine._batch._pages.num_pages


def test_when_pages_run_out_rows_are_computed_again_and_give_the_same_samples():
    requests = [GenerateRequest(prompt(i, 10 + i), i, 30, temperature=float(i % 2)) for i in range(8)]
    engine = tiny_engine(PARAMS, **SCARCE)
    completions = generate_all(engine, requests)
    assert engine.stats()["sampler/num_preemptions"] >= 3
    assert_same_samples(completions, [reference_sample(PARAMS, request) for request in requests])
    assert is_at_rest(engine)


def test_a_request_of_the_whole_cache_waits_for_its_turn_and_gets_it():
    engine = tiny_engine(PARAMS, **SCARCE)
    requests = [GenerateRequest(prompt(i, 50), i, 14) for i in range(3)]
    assert [len(completion.tokens) for completion in generate_all(engine, requests)] == [14] * 3
    assert is_at_rest(engine)
    with pytest.raises(UserError, match=r"sampler\.cache_tokens = 60 is below sampler\.max_context = 64"):
        tiny_engine(PARAMS, **{**SCARCE, "cache_tokens": 60})


def test_a_turn_finds_the_pages_of_the_turn_before_it():
    engine = tiny_engine(PARAMS, page_tokens=4, max_context=120)
    turns: list[tuple[GenerateRequest, Completion]] = []

    async def episode() -> None:
        tokens = prompt(1, 21)
        for turn in range(4):
            request = GenerateRequest(tokens, turn, 9)
            completion = await engine.generate(request)
            turns.append((request, completion))
            tokens = (*request.tokens, *completion.tokens, *prompt(turn, 5))
            await asyncio.sleep(0.01)  # the environment's latency

    asyncio.run(episode())
    assert_same_samples([found for _, found in turns], [reference_sample(PARAMS, request) for request, _ in turns])
    # Of 21 tokens nothing is there. Of the second turn's 35, the keys of 21 + 9 - 1 = 29 were computed: 7 full pages.
    # Of the third's 49, those of 43: 10 pages; of the fourth's 63, those of 57: 14 pages.
    assert engine.stats()["sampler/num_prefill_tokens"] == 21 + (35 - 28) + (49 - 40) + (63 - 56)
    assert engine.stats()["sampler/num_shared_prompt_tokens"] == 28 + 40 + 56


def test_new_weights_never_meet_old_pages():
    engine = tiny_engine(PARAMS, page_tokens=4)
    request = GenerateRequest(prompt(0, 30), 0, 5)
    generate_all(engine, [request])
    engine.load(tiny_params(1), 4)
    engine.reset_stats()
    assert_same_samples(generate_all(engine, [request]), [reference_sample(tiny_params(1), request)])
    assert engine.stats()["sampler/num_shared_prompt_tokens"] == 0


def test_prompts_with_one_header_compute_it_once_also_in_chunks():
    header = prompt(3, 40)
    requests = [GenerateRequest((*header, *prompt(10 + i, 3 + i)), i, 4) for i in range(4)]
    for prefill_tokens in (128, 16):
        engine = tiny_engine(PARAMS, page_tokens=8, prefill_tokens=prefill_tokens)
        assert_same_samples(generate_all(engine, requests), [reference_sample(PARAMS, r) for r in requests])
        assert engine.stats()["sampler/num_prefill_tokens"] == 40 + sum(len(r.tokens) - 40 for r in requests)


def test_a_long_prompt_does_not_hold_up_a_row_that_decodes():
    engine = tiny_engine(PARAMS, prefill_tokens=8, decode_chunk=2)
    order: list[str] = []

    async def one(name: str, request: GenerateRequest) -> None:
        await engine.generate(request)
        order.append(name)

    async def both() -> None:
        short = asyncio.create_task(one("short", GenerateRequest(prompt(0, 5), 0, 12)))
        while not engine.stats()["sampler/num_sampled_tokens"]:
            await asyncio.sleep(0)
        await asyncio.gather(short, one("long", GenerateRequest(prompt(1, 110), 1, 1)))

    asyncio.run(both())
    assert order == ["short", "long"]  # the long one takes 14 chunks of prefill, the short one 6 of decoding


EDITS = [
    {}, {}, {"repetition_penalty": 1.7}, {"logit_bias": ((7, 4.0), (9, -3.0)), "wants_raw": True}, {"min_tokens": 1},
    {"choices": ((5,), (6,), (159,)), "wants_raw": True},
]  # fmt: skip
REQUESTS = st.lists(
    st.builds(
        lambda header, tail, seed, max_tokens, temperature, top_k, stops, edits: GenerateRequest(
            (*prompt(header, 6 * header), *prompt(100 + tail, tail)), seed, max_tokens, temperature, top_k,
            stop_ids=tuple(range(stops)), stop_strings=("11",) * (stops % 2), **edits,
        ),
        st.integers(0, 3), st.integers(1, 20), st.integers(0, 3), st.integers(1, 24),
        st.sampled_from([0.0, 0.7, 1.0]), st.sampled_from([0, 3]), st.sampled_from([0, 1, 8]), st.sampled_from(EDITS),
    ),
    min_size=1, max_size=10,
)  # fmt: skip
ENGINES = {
    "auto": tiny_engine(PARAMS, **SCARCE),
    "xla": tiny_engine(PARAMS, attention="xla", products="xla", **SCARCE),
}


@pytest.mark.parametrize("kernels", ENGINES)
@given(REQUESTS, st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(0, 6), min_size=10, max_size=10))
@settings(max_examples=15, deadline=None)
def test_whatever_arrives_stops_or_is_cancelled_the_others_get_the_reference_samples(
    kernels, requests, cancelled, delays
):
    engine = ENGINES[kernels]

    async def one(index: int, request: GenerateRequest) -> Completion:
        for _ in range(20 * delays[index]):
            await asyncio.sleep(0)
        return await engine.generate(request)

    async def run() -> list[Completion | BaseException]:
        tasks = [asyncio.create_task(one(index, request)) for index, request in enumerate(requests)]
        for index in cancelled:
            for _ in range(30):
                await asyncio.sleep(0)
            if index < len(tasks):
                tasks[index].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return found

    for index, (request, found) in enumerate(zip(requests, asyncio.run(run()), strict=True)):
        if isinstance(found, asyncio.CancelledError):
            assert index in cancelled
        else:
            assert isinstance(found, Completion)
            assert_same_samples([found], [reference_sample(PARAMS, request)])
    assert is_at_rest(engine)


@pytest.mark.slow
def test_two_thousand_requests_leave_no_page_and_no_task():
    engine = tiny_engine(PARAMS, **SCARCE)
    generator = np.random.default_rng(0)

    async def one(index: int) -> int:
        request = GenerateRequest(prompt(index % 37, 3 + index % 29), index, 1 + index % 23)
        task = asyncio.create_task(engine.generate(request))
        if index % 11 == 0:
            for _ in range(int(generator.integers(200))):
                await asyncio.sleep(0)
            task.cancel()
        try:
            first = await task
        except asyncio.CancelledError:
            return 0
        again = dataclasses.replace(request, tokens=(*request.tokens, *first.tokens), max_tokens=5)
        return len((await engine.generate(again)).tokens)

    async def everything() -> list[int]:
        lengths = await asyncio.gather(*(one(index) for index in range(1150)))
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return lengths

    lengths = asyncio.run(everything())
    assert lengths.count(5) + lengths.count(0) == 1150 and engine.stats()["sampler/num_requests"] >= 2000
    assert is_at_rest(engine)
