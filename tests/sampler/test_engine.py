import asyncio
import dataclasses

import numpy as np
import pytest
from tiny_sampler import (
    assert_same_samples,
    generate_all,
    prompt,
    reference_logprobs,
    text_of,
    tiny_engine,
    tiny_params,
)

from jaxsp.config import UserError
from jaxsp.trajectory import GenerateRequest


def mixed_requests(count: int = 14) -> list[GenerateRequest]:
    """Requests of different lengths and settings, some with a common prompt."""
    options = [
        {}, {"temperature": 0.0}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
        {"temperature": 0.0, "top_p": 0.3}, {"temperature": 1.4, "top_k": 20, "top_p": 0.9},
    ]  # fmt: skip
    return [
        GenerateRequest(prompt(i // 2, 3 + 7 * (i // 2 % 5)), seed=i + 11, max_tokens=1 + 5 * i % 13, **options[i % 8])
        for i in range(count)
    ]


def test_tokens_and_logprobs_are_those_of_the_full_forward_pass():
    params = tiny_params()
    requests = mixed_requests()
    for request, completion in zip(requests, generate_all(tiny_engine(params), requests), strict=True):
        logprobs = reference_logprobs(params, request, completion.tokens)
        chosen = logprobs[np.arange(len(completion.tokens)), list(completion.tokens)]
        np.testing.assert_allclose(completion.behaviour_logprobs, chosen, atol=1e-5)
        if request.temperature == 0:
            assert completion.tokens == tuple(logprobs.argmax(-1).tolist())
        assert completion.finish_reason == "length"
        assert len(completion.tokens) == request.max_tokens
        assert completion.text == text_of(completion.tokens)
        assert completion.policy_version == 3


def test_a_sample_does_not_depend_on_its_batch_mates_their_order_or_the_shapes():
    requests = mixed_requests()
    together = generate_all(tiny_engine(num_slots=16), requests)
    assert_same_samples(generate_all(tiny_engine(), requests), together)
    assert_same_samples(generate_all(tiny_engine(), requests[::-1])[::-1], together)
    engine = tiny_engine()
    alone = [generate_all(engine, [request])[0] for request in requests]
    assert_same_samples(alone, together)


def test_the_same_submissions_give_the_same_bits():
    requests = mixed_requests()
    engine = tiny_engine()
    first = generate_all(engine, requests)
    assert generate_all(engine, requests) == first  # whatever an engine did before leaves no trace


def test_different_seeds_differ_and_temperature_1_is_not_greedy():
    greedy = GenerateRequest(prompt(0, 5), 0, 8, temperature=0.0)
    requests = [greedy, *(dataclasses.replace(greedy, seed=seed, temperature=1.0) for seed in range(6))]
    assert len({completion.tokens for completion in generate_all(tiny_engine(), requests)}) == 7


def test_a_prompt_in_chunks_gives_what_one_call_gives():
    requests = [GenerateRequest(prompt(5, 75), 1, 6), GenerateRequest(prompt(6, 9), 2, 6, temperature=0.0)]
    whole = generate_all(tiny_engine(), requests)
    assert_same_samples(generate_all(tiny_engine(prefill_tokens=16), requests), whole)


def test_identical_prompts_of_a_wave_are_computed_once():
    engine = tiny_engine(num_slots=16)  # more than the seven, so that they make one wave
    group = [GenerateRequest(prompt(1, 20), seed, 4) for seed in range(6)]
    generate_all(engine, [*group, GenerateRequest(prompt(2, 30), 0, 4)])
    stats = engine.stats()
    assert stats["sampler/num_prefill_tokens"] == 50
    assert stats["sampler/num_shared_prompt_tokens"] == 100
    assert stats["sampler/shared_prompt_frac"] == pytest.approx(2 / 3)
    assert stats["sampler/num_requests"] == 7
    assert stats["sampler/num_sampled_tokens"] == 28
    assert stats["sampler/num_decode_steps"] == 3  # the first token comes with the prefill
    engine.reset_stats()
    assert engine.stats()["sampler/num_requests"] == 0


def test_a_prefix_that_all_prompts_share_is_computed_once_also_for_later_waves():
    header = prompt(3, 37)
    requests = [GenerateRequest((*header, *prompt(10 + i, 3 + i)), i, 5, temperature=float(i % 2)) for i in range(6)]
    params = tiny_params()
    engine = tiny_engine(params, num_slots=2)  # so that the six come in several waves
    for request, completion in zip(requests, generate_all(engine, requests), strict=True):
        logprobs = reference_logprobs(params, request, completion.tokens)
        chosen = logprobs[np.arange(len(completion.tokens)), list(completion.tokens)]
        np.testing.assert_allclose(completion.behaviour_logprobs, chosen, atol=1e-5)
    # 32 of the 37 tokens, a multiple of 16, are computed once, and each prompt from there on.
    stats = engine.stats()
    assert stats["sampler/num_prefill_tokens"] == 32 + sum(len(request.tokens) - 32 for request in requests)
    num_prompt_tokens = sum(len(request.tokens) for request in requests)
    assert stats["sampler/num_shared_prompt_tokens"] == num_prompt_tokens - stats["sampler/num_prefill_tokens"]
    alone = [generate_all(engine, [request])[0] for request in requests]
    assert_same_samples(alone, generate_all(tiny_engine(params, num_slots=2), requests))


def test_no_setting_compiles_anything_anew():
    engine = tiny_engine()
    base = [GenerateRequest(prompt(i, 10), i, 6 + i) for i in range(6)]
    generate_all(engine, base)
    warm = engine.num_compilations
    options = [
        {"temperature": 0.31}, {"top_p": 0.77}, {"top_k": 9}, {"min_p": 0.2}, {"seed": 2**50}, {"temperature": 0.0},
        {"stop_ids": (4, 5, 6)}, {"stop_strings": ("999",)},
    ]  # fmt: skip
    for i, option in enumerate(options):
        generate_all(engine, [dataclasses.replace(request, **option) for request in base])
        others = [dataclasses.replace(request, max_tokens=6 + (r + i) % 6) for r, request in enumerate(base)]
        generate_all(engine, others)
        engine.load(tiny_params(i + 1), i)
    assert engine.num_compilations == warm


def test_shared_prefixes_of_any_length_meet_few_shapes():
    engine = tiny_engine(max_context=512)

    def wave(header: int) -> None:
        rests = (prompt(10 + i, 3 + i) for i in range(4))
        generate_all(engine, [GenerateRequest((*prompt(header, header), *rest), header, 3) for rest in rests])

    for header in (40, 60, 90, 120, 128):  # one for each bucket of prompts, and one in two chunks
        wave(header)
    warm = engine.num_compilations
    for header in range(32, 129, 8):
        wave(header)
    assert engine.num_compilations == warm


def test_numbers_that_are_not_finite_are_an_error_and_no_tokens():
    params = tiny_params()
    params["final_norm"]["scale"] = params["final_norm"]["scale"] * np.nan
    for num_tokens in (1, 3):
        with pytest.raises(UserError, match=r"not finite.*compute_dtype=float32"):
            generate_all(tiny_engine(params), [GenerateRequest(prompt(0, 5), 0, num_tokens)])


def test_a_stop_id_is_the_last_token_and_keeps_its_logprob():
    params = tiny_params()
    engine = tiny_engine(params)
    free = GenerateRequest(prompt(3, 6), 5, 12)
    tokens = generate_all(engine, [free])[0].tokens
    for place in (0, 1, 6):
        stopped = generate_all(engine, [dataclasses.replace(free, stop_ids=(159, tokens[place]))])[0]
        end = tokens.index(tokens[place]) + 1
        assert (stopped.tokens, stopped.finish_reason) == (tokens[:end], "stop")
        assert len(stopped.behaviour_logprobs) == end
        expected = reference_logprobs(params, free, stopped.tokens)[-1, stopped.tokens[-1]]
        assert stopped.behaviour_logprobs[-1] == pytest.approx(expected, abs=1e-5)


def test_the_id_used_for_padding_is_a_token_like_any_other():
    params = tiny_params()
    requests = [GenerateRequest((0, 0, *prompt(i, 3), 0), i, 30, temperature=3.0) for i in range(40)]
    completions = generate_all(tiny_engine(params), requests)
    assert sum(completion.tokens[:-1].count(0) for completion in completions) >= 2
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.tokens) == 30
        chosen = reference_logprobs(params, request, completion.tokens)[np.arange(30), list(completion.tokens)]
        np.testing.assert_allclose(completion.behaviour_logprobs, chosen, atol=1e-5)


def test_a_stop_string_across_tokens_cuts_tokens_after_it_and_text_before_it():
    engine = tiny_engine()
    free = GenerateRequest(prompt(4, 6), 8, 12)
    whole = generate_all(engine, [free])[0]
    for start, end in ((4, 8), (11, 13), (16, 20)):  # the second and third cross the border of two decode chunks
        string = whole.text[start:end]
        at = whole.text.find(string)
        stopped = generate_all(engine, [dataclasses.replace(free, stop_strings=("none", string))])[0]
        num_tokens = -(-(at + len(string)) // 3)
        assert stopped.tokens == whole.tokens[:num_tokens]
        assert len(stopped.behaviour_logprobs) == num_tokens
        assert (stopped.text, stopped.finish_reason) == (whole.text[:at], "stop")


def test_the_whole_context_can_be_used():
    engine = tiny_engine(max_context=40)
    completion = generate_all(engine, [GenerateRequest(prompt(0, 30), 0, 10)])[0]
    assert len(completion.tokens) == 10


SHORT_SHORT_LONG = ((5, 25), (5, 3), (290, 10))
"""Tokens of prompt and answer."""


def test_the_cache_grows_under_a_running_row_for_a_prompt_of_more_than_one_query_chunk():
    params = tiny_params()
    engine = tiny_engine(params, num_slots=2, max_context=512, prefill_tokens=512)
    requests = [GenerateRequest(prompt(i, length), i, count) for i, (length, count) in enumerate(SHORT_SHORT_LONG)]
    for request, completion in zip(requests, generate_all(engine, requests), strict=True):
        chosen = reference_logprobs(params, request, completion.tokens)
        chosen = chosen[np.arange(request.max_tokens), list(completion.tokens)]
        np.testing.assert_allclose(completion.behaviour_logprobs, chosen, atol=1e-5)


def test_more_requests_than_slots_all_finish_and_later_ones_join_a_running_batch():
    engine = tiny_engine(num_slots=4)
    requests = [GenerateRequest(prompt(i, 4 + i % 9), i, 1 + i * 7 % 10) for i in range(40)]
    finished: list[int] = []

    async def one(i: int) -> None:
        await asyncio.sleep(0 if i % 3 else 0.001 * i)
        first = await engine.generate(requests[i])
        second = await engine.generate(dataclasses.replace(requests[i], tokens=requests[i].tokens + first.tokens))
        assert len(second.tokens) == requests[i].max_tokens
        finished.append(i)

    async def everything() -> None:
        await asyncio.gather(*(one(i) for i in range(40)))
        await asyncio.sleep(0.1)
        assert asyncio.all_tasks() == {asyncio.current_task()}  # the engine leaves no task behind

    asyncio.run(everything())
    assert sorted(finished) == list(range(40))
    assert engine.stats()["sampler/num_sampled_tokens"] == 2 * sum(request.max_tokens for request in requests)


def test_a_request_made_on_a_completion_joins_the_next_step():
    engine = tiny_engine(num_slots=4)
    long = GenerateRequest(prompt(0, 5), 0, 24)
    short = GenerateRequest(prompt(1, 5), 1, 2)

    async def turns() -> None:
        for _ in range(4):
            await asyncio.create_task(engine.generate(short))

    async def both() -> None:
        await asyncio.gather(engine.generate(long), asyncio.gather(turns()))

    asyncio.run(both())
    assert engine.stats()["sampler/num_decode_steps"] == 23  # the short ones cost the long one no step


def test_cancelling_frees_the_slot():
    engine = tiny_engine(num_slots=1)

    async def run() -> None:
        running = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 5), 0, 100)))
        waiting = asyncio.create_task(engine.generate(GenerateRequest(prompt(1, 5), 0, 100)))
        while not engine.stats()["sampler/num_sampled_tokens"]:
            await asyncio.sleep(0)
        running.cancel()
        waiting.cancel()
        completion = await engine.generate(GenerateRequest(prompt(2, 5), 0, 3))
        assert len(completion.tokens) == 3
        assert running.cancelled() and waiting.cancelled()
        engine.load(tiny_params(), 4)

    asyncio.run(run())
    assert engine.stats()["sampler/num_sampled_tokens"] < 20


def test_an_engine_outlives_an_interrupted_event_loop():
    engine = tiny_engine()

    async def interrupted() -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 5), 0, 100)))
        while not engine.stats()["sampler/num_sampled_tokens"]:
            await asyncio.sleep(0)
        assert not task.done()
        raise KeyError("the caller's mistake")

    with pytest.raises(KeyError):
        asyncio.run(interrupted())
    assert len(generate_all(engine, [GenerateRequest(prompt(0, 5), 0, 5)])[0].tokens) == 5


def test_an_error_within_a_step_reaches_every_caller_and_the_engine_goes_on():
    def decode_text(tokens) -> str:
        if 7 in tokens:
            raise RuntimeError("no text for 7")
        return text_of(tokens)

    engine = tiny_engine(decode_text=decode_text)
    free = GenerateRequest(prompt(4, 6), 8, 12)
    seven = next(
        dataclasses.replace(free, seed=seed)
        for seed in range(200)
        if 7 in generate_all(tiny_engine(), [dataclasses.replace(free, seed=seed)])[0].tokens
    )

    async def run():
        return await asyncio.gather(
            engine.generate(seven), engine.generate(dataclasses.replace(free, max_tokens=90)), return_exceptions=True
        )

    assert [str(result) for result in asyncio.run(run())] == ["no text for 7"] * 2
    assert len(generate_all(engine, [dataclasses.replace(free, max_tokens=2)])[0].tokens) == 2


def test_new_weights_change_the_sample_and_the_policy_version():
    engine = tiny_engine(tiny_params(0))
    request = GenerateRequest(prompt(0, 8), 0, 8)
    old = generate_all(engine, [request])[0]
    engine.load(tiny_params(1), 4)
    new = generate_all(engine, [request])[0]
    assert (old.policy_version, new.policy_version) == (3, 4)
    assert old.tokens != new.tokens
    assert_same_samples([new], generate_all(tiny_engine(tiny_params(1)), [request]))


def test_weights_cannot_change_under_a_running_request():
    engine = tiny_engine()

    async def run() -> None:
        task = asyncio.create_task(engine.generate(GenerateRequest(prompt(0, 5), 0, 9)))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="1 requests in flight"):
            engine.load(tiny_params(1), 4)
        assert (await task).policy_version == 3
        engine.load(tiny_params(1), 4)

    asyncio.run(run())


def test_what_cannot_be_meant_is_refused_before_it_waits():
    engine = tiny_engine()
    with pytest.raises(UserError, match=r"sampler\.max_context = 128"):
        generate_all(engine, [GenerateRequest(prompt(0, 100), 0, 29)])
    with pytest.raises(UserError, match="top_p"):
        generate_all(engine, [GenerateRequest(prompt(0, 5), 0, 5, top_p=0.0)])
    with pytest.raises(UserError, match=r"sampler\.num_slots"):
        tiny_engine(num_slots=0)
    with pytest.raises(UserError, match=r"sampler\.max_context = 4096 exceeds the 1024 positions"):
        tiny_engine(max_context=4096)
    with pytest.raises(UserError, match=r"exceeds the 1024 positions the model was made for.*; shorten .* max_tokens$"):
        generate_all(tiny_engine(max_context=1024), [GenerateRequest(prompt(0, 1000), 0, 29)])
