"""The server as the `openai` client sees it: the same samples as `jaxsp sample`, whole and streamed."""

import asyncio
import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import openai
import pytest

from jaxsp.inference import Input, SampleOptions, sample
from jaxsp.trajectory import Completion, GenerateRequest
from tests.serving.conftest import Served, running

HELLO: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]
IDS = {"return_token_ids": True}


def expected(
    served: Served, *prompts: Input, seed: int = 3, num_samples: int = 1, **options: Any
) -> list[tuple[GenerateRequest, Completion]]:
    """What `jaxsp sample` draws."""
    drawn: list[tuple[GenerateRequest, Completion]] = []
    fields = {
        "max_tokens": 20,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "stop_strings": (),
    } | options
    sample(
        served.model,
        prompts,
        SampleOptions(seed=seed, num_samples=num_samples, is_chat=False, **fields),
        lambda request, completion: drawn.append((request, completion)),
    )
    return drawn


def text_prompt(text: str) -> Input:
    return Input("here", "prompt", text)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_completions_are_those_of_jaxsp_sample_with_their_logprobs_and_usage(served: Served) -> None:
    drawn = expected(served, text_prompt("one two"), text_prompt("three"), num_samples=2)
    reply = served.client.completions.create(
        model="tiny", prompt=["one two", "three"], seed=3, n=2, max_tokens=20, logprobs=0, extra_body=IDS
    )
    assert reply.object == "text_completion" and reply.model == "tiny" and reply.id.startswith("cmpl-")
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    special = served.service.text.tokenizer.special_ids
    for choice, (request, completion) in zip(reply.choices, drawn, strict=True):
        assert (choice.text, choice.finish_reason) == (completion.text, completion.finish_reason)
        extra = choice.model_extra or {}
        assert extra["token_ids"] == list(completion.tokens) and extra["prompt_token_ids"] == list(request.tokens)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(completion.behaviour_logprobs, abs=1e-5)
        assert choice.logprobs.tokens is not None and choice.logprobs.text_offset is not None
        assert len(choice.logprobs.tokens) == len(completion.tokens) == len(choice.logprobs.text_offset)
        before = ""
        for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
            is_part = "\ufffd" in before + token  # of a character: where that begins
            assert token in special or is_part or choice.text.startswith(token, offset)
            before = token
    num_prompt = len(drawn[0][0].tokens) + len(drawn[2][0].tokens)
    num_sampled = sum(len(completion.tokens) for _, completion in drawn)
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (num_prompt, num_sampled)
    assert reply.usage.total_tokens == num_prompt + num_sampled


def test_token_ids_are_a_prompt_and_a_seed_of_its_own_is_drawn_where_none_is_given(served: Served) -> None:
    ((_, completion),) = expected(served, Input("here", "tokens", [7, 8, 9]))
    reply = served.client.completions.create(model="tiny", prompt=[7, 8, 9], seed=3, max_tokens=20)
    assert reply.choices[0].text == completion.text
    texts = {served.client.completions.create(model="tiny", prompt=[7, 8, 9]).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_sampling_options_are_those_of_the_sampler(served: Served) -> None:
    options = {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.05}
    ((_, completion),) = expected(served, text_prompt("one two"), **options)
    extra = {name: options[name] for name in ("top_k", "min_p")}
    reply = served.client.completions.create(
        model="tiny", prompt="one two", seed=3, max_tokens=20, temperature=0.8, top_p=0.9, extra_body=extra
    )
    assert reply.choices[0].text == completion.text
    greedy = expected(served, text_prompt("one two"), temperature=0.0, seed=8)[0][1]
    reply = served.client.completions.create(model="tiny", prompt="one two", max_tokens=20, temperature=0)
    assert reply.choices[0].text == greedy.text


def test_scores_are_changed_as_asked(served: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "one two", "max_tokens": 6, "temperature": 0}
    more: dict[str, Any] = {"return_token_ids": True, "repetition_penalty": 1e6, "min_tokens": 3}
    reply = served.client.completions.create(**ask, logit_bias={"70": 10_000}, extra_body=IDS)
    assert (reply.choices[0].model_extra or {})["token_ids"] == [70] * 6
    reply = served.client.completions.create(**ask, extra_body=more)
    ids = (reply.choices[0].model_extra or {})["token_ids"]
    assert len(set(ids)) == len(ids) >= 3


def test_a_chat_is_rendered_answered_and_scored(served: Served) -> None:
    drawn = expected(served, Input("here", "messages", HELLO), num_samples=2)
    reply = served.client.chat.completions.create(
        model="tiny", messages=HELLO, seed=3, n=2, max_completion_tokens=20, logprobs=True, extra_body=IDS
    )
    assert reply.object == "chat.completion" and reply.id.startswith("chatcmpl-")
    for choice, (request, completion) in zip(reply.choices, drawn, strict=True):
        assert choice.message.role == "assistant" and choice.message.content == completion.text
        assert choice.finish_reason == completion.finish_reason
        assert (choice.model_extra or {})["prompt_token_ids"] == list(request.tokens)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        logprobs = [each.logprob for each in choice.logprobs.content]
        assert logprobs == pytest.approx(completion.behaviour_logprobs, abs=1e-5)
        for each in choice.logprobs.content:
            assert each.top_logprobs == [] and (each.bytes is None) == ("\ufffd" in each.token)
    # Without a limit an answer may fill the context.
    whole = served.client.chat.completions.create(model="tiny", messages=HELLO, seed=3, temperature=2.0)
    assert whole.usage is not None
    assert whole.choices[0].finish_reason == "stop" or whole.usage.total_tokens == 256


def test_a_stop_string_is_cut_from_text_and_stream(served: Served) -> None:
    ((_, free),) = expected(served, text_prompt("one two"))
    stop = free.text[8:11]
    ((_, stopped),) = expected(served, text_prompt("one two"), stop_strings=(stop,))
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": "one two",
        "seed": 3,
        "max_tokens": 20,
        "stop": [stop, "never there"],
    }
    choice = served.client.completions.create(**ask).choices[0]
    assert (choice.text, choice.finish_reason) == (stopped.text, "stop") and stop not in choice.text
    pieces = [chunk.choices[0].text for chunk in served.client.completions.create(**ask, stream=True)]
    assert "".join(pieces) == stopped.text


def test_a_completions_stream_is_the_reply_in_pieces(served: Served) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["one two", [7, 8, 9]],
        "seed": 3,
        "n": 2,
        "max_tokens": 20,
        "extra_body": IDS,
    }
    variants: list[dict[str, Any]] = [{"logprobs": 0}, {"echo": True}]
    for more in variants:
        whole = served.client.completions.create(**ask, **more)
        chunks = list(
            served.client.completions.create(**ask, **more, stream=True, stream_options={"include_usage": True})
        )
        assert len({chunk.id for chunk in chunks}) == 1 and chunks[-1].choices == []
        assert chunks[-1].usage == whole.usage and not any(chunk.usage for chunk in chunks[:-1])
        for choice in whole.choices:
            own = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
            assert len(own) >= 3  # 8 tokens at a time
            assert "".join(each.text for each in own) == choice.text
            assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
            ids = [token for each in own for token in (each.model_extra or {}).get("token_ids", [])]
            assert ids == (choice.model_extra or {})["token_ids"]
            if choice.logprobs is not None:
                for name in ("tokens", "token_logprobs", "text_offset"):
                    parts = [getattr(each.logprobs, name) for each in own if each.logprobs is not None]
                    assert [*itertools.chain(*parts)] == getattr(choice.logprobs, name)
            else:
                assert choice.text.startswith(("one two", served.service.text.tokenizer.decode([7, 8, 9])))


def test_a_chat_stream_is_the_reply_in_pieces(served: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 3, "n": 2, "max_tokens": 20, "logprobs": True}
    whole = served.client.chat.completions.create(**ask)
    chunks = list(served.client.chat.completions.create(**ask, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in (chunk.model_fields_set or ()) for chunk in chunks)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant" and own[0].delta.content == ""
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert [each.finish_reason for each in own] == [None] * (len(own) - 1) + [choice.finish_reason]
        assert choice.logprobs is not None
        parts = [each.logprobs.content or [] for each in own if each.logprobs is not None]
        assert [*itertools.chain(*parts)] == choice.logprobs.content


def test_the_asynchronous_client_streams_many_at_once(served: Served) -> None:
    prompts = [f"number {i}" for i in range(10)]
    alone = [completion.text for i in range(10) for _, completion in expected(served, text_prompt(prompts[i]), seed=i)]

    async def everything() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:

            async def one(index: int) -> str:
                ask: dict[str, Any] = {"model": "tiny", "prompt": prompts[index], "seed": index, "max_tokens": 20}
                if index % 2:
                    return (await client.completions.create(**ask)).choices[0].text
                stream = await client.completions.create(**ask, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*map(one, range(10)))

    assert asyncio.run(everything()) == alone


def test_leaving_frees_the_slots(served: Served) -> None:
    engine, service = served.service.engine, served.service
    wait_until(lambda: service.num_in_flight == 0)
    engine.reset_stats()
    ask: dict[str, Any] = {"model": "tiny", "prompt": "one two", "n": 60, "max_tokens": 200}
    with served.client.completions.create(**ask, stream=True) as stream:
        next(iter(stream))
        assert service.num_in_flight == 60
    wait_until(lambda: service.num_in_flight == 0)
    with pytest.raises(openai.APITimeoutError):
        served.client.with_options(timeout=0.1).completions.create(**ask)
    wait_until(lambda: service.num_in_flight == 0)
    assert served.client.completions.create(model="tiny", prompt="one two", max_tokens=3).choices[0].text
    assert engine.stats()["sampler/num_sampled_tokens"] < 60 * 100


def test_the_one_model_is_listed_and_the_server_is_well(served: Served) -> None:
    (card,) = served.client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("tiny", "model", "jaxsp")
    assert (card.model_extra or {})["max_model_len"] == 256
    assert served.client.models.retrieve("tiny") == card
    with urllib.request.urlopen(f"{served.url}/health") as response:
        assert json.load(response)["status"] == "ok"


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "model", "there is no model 'other' here, only 'tiny'"),
    ({"prompt": [7] * 256}, 400, "prompt", "the 256 tokens of prompt, without an answer, are more than the 256 that"),
    ({"prompt": [7] * 250, "max_tokens": 10}, 400, "max_tokens", "the 250 tokens of prompt and max_tokens = 10 are"),
    ({"prompt": [7, 640]}, 400, "prompt", "id 640 is outside the model's vocabulary of 640"),
    ({"prompt": ""}, 400, "prompt", "the prompt is empty"),
    ({"top_p": 0}, 400, "top_p", "top_p = 0.0 is not between"),
    ({"temperature": -1}, 400, "temperature", "temperature = -1.0 is neither 0 (greedy)"),
    ({"logit_bias": {"640": 1}}, 400, "logit_bias", "id 640 is outside the model's vocabulary"),
    ({"extra_body": {"min_tokens": 30}}, 400, "min_tokens", "min_tokens = 30 is not between"),
    ({"logprobs": 2}, 400, "logprobs", "logprobs = 2"),
    ({"stream": True, "max_tokens": 1000}, 400, "max_tokens", "are more than the 256"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "status", "param", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_refusal_is_openais_error_object(
    served: Served, change: dict[str, Any], status: int, param: str, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        served.client.completions.create(**{"model": "tiny", "prompt": "one two", **change})
    error = caught.value
    assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error")
    assert message in error.message
    assert error.code == {"model": "model_not_found"}.get(param, error.code)
    assert ("more than the 256" in message) <= (error.code == "context_length_exceeded")


def test_a_chat_that_cannot_be_meant_is_refused(served: Served) -> None:
    refused: list[tuple[list[Any], str]] = [
        ([{"role": "nobody", "content": "a"}], "messages[0].role is 'nobody'"),
        ([{"role": "user"}], "messages[0].content must be a text"),
        ([{"role": "user", "content": "word " * 300}], "tokens of messages, without an answer, are more than the 256"),
    ]
    for messages, message in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            served.client.chat.completions.create(model="tiny", messages=messages)
        assert caught.value.param == "messages" and message in caught.value.message


def raw(url: str, body: bytes | None, **headers: str) -> tuple[int, Any]:
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    return caught.value.code, json.load(caught.value)["error"]


def test_what_is_no_request_is_an_error_object_too(served: Served) -> None:
    url = f"{served.url}/v1/completions"
    status, error = raw(url, b"{'a'", content_type="application/json")
    assert status == 400 and "the body is not JSON" in error["message"]
    assert raw(url, b"[" * 100_000, content_type="application/json")[0] == 400
    assert raw(url, b"[]", content_type="application/json")[1]["message"] == "the body must be a JSON object"
    status, error = raw(url, b"{}")
    assert status == 415 and "Content-Type: application/json" in error["message"]
    status, error = raw(url, b" " * (17 * 2**20), content_type="application/json")
    assert status == 413 and "longer than" in error["message"]
    assert raw(f"{served.url}/v1/nothing", None)[0] == 404
    assert raw(url, None)[0] == 405
    status, error = raw(url, b'{"model": "\\ud800", "prompt": "a"}', content_type="application/json")
    assert status == 404 and error["code"] == "model_not_found"


def test_an_api_key_must_be_shown(served: Served) -> None:
    with running(served.service, "sesame") as url:
        for key, is_right in (("sesame", True), ("open", False)):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if is_right:
                    assert client.models.list().data[0].id == "tiny"
                else:
                    for call in (client.models.list, lambda: client.completions.create(model="tiny", prompt="a")):
                        with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
                            call()
        with urllib.request.urlopen(f"{url}/health") as response:
            assert response.status == 200


def test_more_than_can_wait_is_told_to_come_again(served: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "one two", "n": 1000, "max_tokens": 200}
    with served.client.completions.create(**ask, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="come again later"):
            served.client.completions.create(**ask)
    wait_until(lambda: served.service.num_in_flight == 0)
