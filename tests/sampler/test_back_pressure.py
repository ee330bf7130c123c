"""More requests than the queue has places for."""

import asyncio
import dataclasses

import pytest
from tiny_sampler import assert_same_samples, generate_all, prompt, tiny_engine, tiny_params

from jaxsp.sampler.engine import Engine
from jaxsp.trajectory import GenerateRequest

PARAMS = tiny_params()
REQUESTS = [GenerateRequest(prompt(i, 6 + i % 5), i, 3 + i % 7) for i in range(24)]


def small_engine() -> Engine:
    return tiny_engine(PARAMS, num_slots=2, max_waiting=3)


def test_a_full_queue_holds_requests_back_in_their_order_and_changes_no_sample():
    engine = small_engine()
    found, most = [], 0

    async def one(request: GenerateRequest) -> None:
        nonlocal most
        completion = await engine.generate(request)
        most = max(most, len(engine._futures) + 1)
        found.append((request, completion))

    async def everything() -> None:
        await asyncio.gather(*map(one, REQUESTS))

    asyncio.run(everything())
    assert most <= 5 and engine.stats()["sampler/num_held_back"] == 19
    by_seed = sorted(found, key=lambda pair: pair[0].seed)
    assert_same_samples([pair[1] for pair in by_seed], generate_all(tiny_engine(PARAMS), REQUESTS))
    one_length = [dataclasses.replace(request, max_tokens=4) for request in REQUESTS]
    found.clear()

    async def of_one_length() -> None:
        await asyncio.gather(*map(one, one_length))

    asyncio.run(of_one_length())
    assert [request.seed for request, _ in found] == list(range(24))


def test_cancelling_those_held_back_or_let_in_loses_no_place():
    engine = small_engine()

    async def run() -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
        for _ in range(4):
            await asyncio.sleep(0)
        for task in tasks[:4] + tasks[10:20]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 14
        await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    assert engine._places.num_taken == engine._places.num_waiting == 0
    assert len(generate_all(engine, REQUESTS)) == 24


def test_an_error_reaches_those_in_the_batch_and_the_held_back_go_on():
    engine = small_engine()
    step, num_steps = engine._batch.step, 0

    def fails_once(params) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 1:
            raise RuntimeError("the device is gone")
        step(params)

    engine._batch.step = fails_once

    async def run() -> list:
        return await asyncio.gather(*map(engine.generate, REQUESTS), return_exceptions=True)

    results = asyncio.run(run())
    assert [isinstance(result, RuntimeError) for result in results] == [True] * 5 + [False] * 19
    assert engine._places.num_taken == 0


def test_weights_cannot_change_while_requests_are_held_back():
    engine = small_engine()

    async def run() -> None:
        tasks = [asyncio.create_task(engine.generate(request)) for request in REQUESTS]
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="24 requests in flight"):
            engine.load(PARAMS, 4)
        await asyncio.gather(*tasks)

    asyncio.run(run())
