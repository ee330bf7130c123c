"""What a request's body asks for. What is not understood and would change the answer is refused by its name."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Endpoint = Literal["completions", "chat"]

MAX_SAMPLES = 1024
"""Of one request (prompts times `n`), and of all that are being answered or wait."""


class RequestError(Exception):
    """A request that is refused, with what OpenAI's error object says of it."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


@dataclass(frozen=True)
class Asked:
    """A request to complete prompts.

    Attributes:
        prompts: texts or lists of token ids; for a chat one list of messages with `role` and `content`.
        max_tokens: None: the endpoint's default.
        num_samples: of each prompt.
        seed: None: any.
        has_echo: the prompt stands before its answer.
        has_logprobs: with the log-probability of each token.
        has_token_ids: with the ids of prompt and answer.
    """

    endpoint: Endpoint
    model: str
    prompts: tuple[Any, ...]
    max_tokens: int | None
    num_samples: int
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_strings: tuple[str, ...]
    min_tokens: int
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    has_echo: bool
    has_logprobs: bool
    has_token_ids: bool
    is_streamed: bool
    has_usage: bool
    """Of a stream: whether its last event holds the usage."""


def parse_request(body: Any, endpoint: Endpoint) -> Asked:
    """What `body`, the JSON of a request, asks for. A field that is null is as good as absent.

    Raises `RequestError` naming the field.
    """
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    readers = _COMMON | _OWN[endpoint]
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        if name in readers:
            values[name] = readers[name](name, value)
        elif name not in _ONLY:
            raise RequestError(
                f"{name}: this server knows no such field, and does not ignore what it does not know", name
            )
        elif value not in _ONLY[name]:
            raise RequestError(f"{name} is not supported: leave it out, or give {_ONLY[name][0]!r}", name)
    prompt = "prompt" if endpoint == "completions" else "messages"
    for name in ("model", prompt):
        if name not in values:
            raise RequestError(f"{name} is required", name)
    asked = Asked(
        endpoint=endpoint,
        model=values["model"],
        prompts=values[prompt],
        max_tokens=_one_of(values, "max_completion_tokens", "max_tokens"),
        num_samples=values.get("n", 1),
        seed=values.get("seed"),
        temperature=values.get("temperature", 1.0),
        top_k=values.get("top_k", 0),
        top_p=values.get("top_p", 1.0),
        min_p=values.get("min_p", 0.0),
        stop_strings=values.get("stop", ()),
        min_tokens=values.get("min_tokens", 0),
        repetition_penalty=values.get("repetition_penalty", 1.0),
        logit_bias=values.get("logit_bias", ()),
        has_echo=values.get("echo", False),
        has_logprobs=values.get("logprobs", False),
        has_token_ids=values.get("return_token_ids", False),
        is_streamed=values.get("stream", False),
        has_usage=values.get("stream_options", False),
    )
    _check_together(asked, values)
    return asked


def _check_together(asked: Asked, values: Mapping[str, Any]) -> None:
    if values.get("best_of", asked.num_samples) != asked.num_samples:
        raise RequestError("best_of is not supported: leave it out, or make it equal to n", "best_of")
    if "stream_options" in values and not asked.is_streamed:
        raise RequestError("stream_options is for requests with stream = true", "stream_options")
    if asked.has_echo and asked.has_logprobs:
        raise RequestError("echo: a prompt has no log-probabilities here; leave out echo or logprobs", "echo")
    num_samples = len(asked.prompts) * asked.num_samples
    if num_samples > MAX_SAMPLES:
        raise RequestError(f"n: {num_samples} samples in one request are more than {MAX_SAMPLES}", "n")


def _one_of(values: Mapping[str, Any], name: str, other: str) -> Any:
    if name in values and other in values and values[name] != values[other]:
        raise RequestError(f"{other} and {name} mean the same, and differ; give one of them", other)
    return values.get(name, values.get(other))


# Readers of one field: `(name, value) -> value`, or a RequestError ---------------------------------------------------


def _wrong(name: str, wanted: str, value: Any) -> RequestError:
    shown = repr(value)
    return RequestError(f"{name} must be {wanted}, and is {shown if len(shown) < 80 else shown[:77] + '...'}", name)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a text", value)
    return value


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if not _is_whole(value) or not low <= value <= high:
            raise _wrong(name, f"a whole number from {low} to {high}", value)
        return value

    return read


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if _is_whole(value) or isinstance(value, float) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(name, "a number", value)
    return number


def _stop(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) and each for each in stops):
        raise _wrong(name, "a text or a list of texts, none of them empty", value)
    return tuple(stops)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping) or not all(re.fullmatch("[0-9]{1,9}", token) for token in value):
        raise _wrong(name, "an object from token ids to numbers", value)
    return tuple((int(token), _number(f"{name}.{token}", bias)) for token, bias in value.items())


def _chosen_logprobs(name: str, value: Any) -> bool:
    """`logprobs` of completions: how many likely tokens beside the chosen one."""
    if _whole(0, 2**31)(name, value) > 0:
        raise RequestError(
            f"{name} = {value}: the log-probabilities of other tokens than the chosen one are not kept; give 0", name
        )
    return True


def _no_others(name: str, value: Any) -> None:
    """`top_logprobs` of chats."""
    if value != 0:
        raise RequestError(f"{name} = {value!r}: only the chosen token's log-probability is kept; give 0", name)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, Mapping):
        raise _wrong(name, "an object", value)
    for each in value:
        if each not in ("include_usage", "include_obfuscation"):
            raise RequestError(f"{name}.{each}: this server knows no such field", f"{name}.{each}")
    return _boolean(f"{name}.include_usage", value.get("include_usage") or False)


def _prompts(name: str, value: Any) -> tuple[Any, ...]:
    prompts = [value] if isinstance(value, str) else value
    if isinstance(prompts, list) and prompts and all(map(_is_whole, prompts)):
        prompts = [prompts]
    if not isinstance(prompts, list) or not prompts:
        raise _wrong(name, "a text, a list of token ids, or a list of these", value)
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(map(_is_whole, prompt))):
            raise _wrong(f"{name}[{index}]", "a text or a list of token ids", prompt)
    return tuple(prompts)


def _messages(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a list of at least one message", value)
    return ([_message(f"{name}[{index}]", message) for index, message in enumerate(value)],)


def _message(place: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(place, "an object with role and content", message)
    for name, value in message.items():
        if name not in ("role", "content", "tool_call_id") and value not in (None, [], {}):
            raise RequestError(f"{place}.{name} is not supported", f"{place}.{name}")
    role, content = message.get("role"), message.get("content")
    if isinstance(content, list):
        content = "".join(_part(f"{place}.content[{index}]", part) for index, part in enumerate(content))
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(place: str, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _wrong(place, 'a part of type "text"', part)
    return part["text"]


_COUNT = _whole(1, 2**31 - 1)
_COMMON: dict[str, Callable[[str, Any], Any]] = {
    "model": _text,
    "max_tokens": _COUNT,
    "n": _whole(1, MAX_SAMPLES),
    "seed": _whole(-(2**63), 2**63 - 1),
    "temperature": _number,
    "top_p": _number,
    "top_k": _whole(0, 2**31 - 1),
    "min_p": _number,
    "stop": _stop,
    "min_tokens": _whole(0, 2**31 - 1),
    "repetition_penalty": _number,
    "logit_bias": _logit_bias,
    "stream": _boolean,
    "stream_options": _stream_options,
    "return_token_ids": _boolean,
}
_OWN: dict[Endpoint, dict[str, Callable[[str, Any], Any]]] = {
    "completions": {"prompt": _prompts, "echo": _boolean, "logprobs": _chosen_logprobs, "best_of": _COUNT},
    "chat": {
        "messages": _messages,
        "logprobs": _boolean,
        "top_logprobs": _no_others,
        "max_completion_tokens": _COUNT,
    },
}
_WITHOUT_EFFECT = frozenset(
    ["user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention",
     "prompt_cache_options", "parallel_tool_calls"]
)  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "suffix": ("",), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "verbosity": ("medium",), "store": (False,), "ignore_eos": (False,),
}  # fmt: skip
"""Fields that are known, with the only values that change nothing."""
