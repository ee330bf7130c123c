"""What a request's body may hold, and the field that a refusal names."""

from typing import Any

import pytest

from jaxsp.serving.asked import MAX_SAMPLES, Asked, RequestError, parse_request

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "Hello"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def test_what_is_not_said_is_openais_default() -> None:
    assert parse_request(COMPLETION, "completions") == Asked(
        endpoint="completions", model="m", prompts=("Hello",), max_tokens=None, num_samples=1, seed=None,
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, stop_strings=(), min_tokens=0,
        repetition_penalty=1.0, logit_bias=(), has_echo=False, has_logprobs=False,
        has_token_ids=False, is_streamed=False, has_usage=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3])),
     ([[1], "a"], ([1], "a"))],
)  # fmt: skip
def test_prompts_are_texts_or_token_ids(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert parse_request(COMPLETION | {"prompt": prompt}, "completions").prompts == prompts


def test_everything_can_be_said() -> None:
    said = {
        "max_tokens": 5, "n": 2, "seed": -3, "temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "min_tokens": 2,
        "repetition_penalty": 1.5, "logit_bias": {"7": -100}, "stop": ["a", "b"], "stream": True,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    asked = parse_request(COMPLETION | said | {"logprobs": 0, "best_of": 2}, "completions")
    assert (asked.max_tokens, asked.num_samples, asked.seed, asked.temperature) == (5, 2, -3, 0.0)
    assert (asked.top_p, asked.top_k, asked.min_p, asked.stop_strings) == (0.5, 4, 0.1, ("a", "b"))
    assert (asked.min_tokens, asked.repetition_penalty, asked.logit_bias) == (2, 1.5, ((7, -100.0),))
    assert asked.has_logprobs and asked.is_streamed and asked.has_usage and asked.has_token_ids and not asked.has_echo
    asked = parse_request(CHAT | said | {"logprobs": True, "top_logprobs": 0, "max_completion_tokens": 5}, "chat")
    assert asked.has_logprobs and asked.max_tokens == 5


def test_messages_may_come_in_parts_and_as_clients_send_them_back() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "tool", "content": "7", "tool_call_id": "call_1"},
    ]
    (found,) = parse_request(CHAT | {"messages": messages}, "chat").prompts
    assert found == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"}, {"role": "tool", "content": "7"},
    ]  # fmt: skip


def test_fields_that_change_nothing_are_let_through() -> None:
    nothing = {"user": "me", "metadata": {"a": "b"}, "frequency_penalty": 0.0, "seed": None,
               "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "unheard_of": None}  # fmt: skip
    assert parse_request(CHAT | nothing, "chat") == parse_request(CHAT, "chat")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (CHAT | {"messages": []}, "messages", "must be a list of at least one message"),
    (CHAT | {"messages": "Hello"}, "messages", "must be a list of at least one message"),
    (CHAT | {"messages": ["Hello"]}, "messages[0]", "an object with role and content"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", '"text"'),
    (CHAT | {"messages": [{"role": "user", "content": "a", "name": "Anna"}]}, "messages[0].name", "not supported"),
    (CHAT | {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "not supported"),
    (CHAT | {"logprobs": 1}, "logprobs", "must be true or false"),
    (CHAT | {"logprobs": True, "top_logprobs": 2}, "top_logprobs", "top_logprobs = 2"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools", "not supported"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "mean the same, and differ"),
    (CHAT | {"reasoning_effort": "low"}, "reasoning_effort", "knows no such field"),
    (CHAT | {"temprature": 1}, "temprature", "knows no such field"),
    (COMPLETION | {"logprobs": 1}, "logprobs", "logprobs = 1"),
    (COMPLETION | {"echo": True, "logprobs": 0}, "echo", "no log-probabilities"),
    (COMPLETION | {"prompt": []}, "prompt", "must be a text, a list of token ids"),
    (COMPLETION | {"prompt": ["a", 3]}, "prompt[1]", "a text or a list of token ids"),
    (COMPLETION | {"prompt": [[1, True]]}, "prompt[0]", "a text or a list of token ids"),
    (COMPLETION | {"best_of": 3}, "best_of", "equal to n"),
    (COMPLETION | {"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    (COMPLETION | {"logit_bias": {"a": 5}}, "logit_bias", "from token ids to numbers"),
    (COMPLETION | {"logit_bias": {"3": "5"}}, "logit_bias.3", "must be a number"),
    (COMPLETION | {"logit_bias": {"7" * 5000: 5}}, "logit_bias", "from token ids to numbers"),
    (COMPLETION | {"logit_bias": {"3": 10**400}}, "logit_bias.3", "must be a number"),
    (COMPLETION | {"temperature": 10**400}, "temperature", "must be a number"),
    (COMPLETION | {"min_tokens": -1}, "min_tokens", "whole number from 0"),
    (COMPLETION | {"suffix": "end"}, "suffix", "not supported"),
    (COMPLETION | {"max_tokens": 0}, "max_tokens", "whole number from 1"),
    (COMPLETION | {"max_tokens": 2.5}, "max_tokens", "whole number from 1"),
    (COMPLETION | {"n": True}, "n", "whole number from 1"),
    (COMPLETION | {"prompt": ["a"] * 3, "n": MAX_SAMPLES // 2}, "n", "more than"),
    (COMPLETION | {"seed": 2**64}, "seed", "whole number"),
    (COMPLETION | {"temperature": float("nan")}, "temperature", "must be a number"),
    (COMPLETION | {"top_p": "1"}, "top_p", "must be a number"),
    (COMPLETION | {"stop": ""}, "stop", "none of them empty"),
    (COMPLETION | {"stop": [1]}, "stop", "none of them empty"),
    (COMPLETION | {"stream": 1}, "stream", "must be true or false"),
    (COMPLETION | {"stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
    (COMPLETION | {"stream": True, "stream_options": {"a": 1}}, "stream_options.a", "knows no such field"),
    (COMPLETION | {"stream": True, "stream_options": []}, "stream_options", "must be an object"),
    (COMPLETION | {"model": 3}, "model", "must be a text"),
    ({"prompt": "a"}, "model", "required"),
    ({"model": "m"}, "prompt", "required"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda value: str(value)[-60:])
def test_what_cannot_be_meant_is_refused_by_its_name(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(body, "chat" if "messages" in body else "completions")
    assert caught.value.param == param and caught.value.status == 400
    assert message in str(caught.value) and param in str(caught.value)


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(RequestError, match="JSON object"):
        parse_request([], "chat")
