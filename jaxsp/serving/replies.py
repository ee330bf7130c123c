"""Samples as OpenAI's API shows them: whole, or a chunk at a time."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxsp.sampler.streaming import Decoded, Delta, decode_more, num_certain
from jaxsp.serving.asked import Asked
from jaxsp.tokenizer import Tokenizer

_OBJECTS = {"completions": ("text_completion", "text_completion"), "chat": ("chat.completion", "chat.completion.chunk")}
_ID_PREFIXES = {"completions": "cmpl", "chat": "chatcmpl"}


@dataclass(frozen=True, eq=False)
class TokenTexts:
    """What single tokens read, for the log-probabilities."""

    tokenizer: Tokenizer

    @functools.cached_property
    def _special_texts(self) -> dict[int, str]:
        return {token: text for text, token in self.tokenizer.special_ids.items()}

    @functools.cached_property
    def _before(self) -> list[int]:
        """Some tokenizers drop a space at a text's beginning; so a token is read behind this."""
        return self.tokenizer.encode("a")

    def text(self, token: int) -> str:
        """The token's own text. U+FFFD stands for a part of a character."""
        if token in self._special_texts:
            return self._special_texts[token]
        return self.tokenizer.decode([*self._before, token])[len(self.tokenizer.decode(self._before)) :]


@dataclass(eq=False)
class Choice:
    """One sample on its way out: `index` among its request's, after `prompt_tokens`.

    `before_reply` is what the assistant's words begin with in this chat format and is none of them. `echo` is the
    prompt's text where it was asked for.
    """

    asked: Asked
    texts: TokenTexts
    index: int
    prompt_tokens: Sequence[int]
    before_reply: str = ""
    echo: str = ""
    _tokens: list[int] = field(init=False, default_factory=list)
    _decoded: Decoded = field(init=False, default_factory=Decoded)
    _num_chars: int = field(init=False, default=0)
    """Where the next token's text begins."""

    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choice of a reply, by a delta that holds all of the sample."""
        assert delta.completion is not None
        text = self._words(delta)
        if self.asked.endpoint == "chat":
            content: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            content = {"text": self.echo + text}
        reply = {"index": self.index, **content, "logprobs": self._logprobs(delta)}
        if self.asked.has_token_ids:
            reply |= {"prompt_token_ids": list(self.prompt_tokens), "token_ids": list(delta.tokens)}
        return {**reply, "finish_reason": delta.completion.finish_reason}

    def opening(self) -> Iterator[dict[str, Any]]:
        """The choices of chunks that come before anything was sampled."""
        ids = {"prompt_token_ids": list(self.prompt_tokens)} if self.asked.has_token_ids else {}
        if self.asked.endpoint == "chat":
            delta = {"role": "assistant", "content": "", "refusal": None}
            yield {"index": self.index, "delta": delta, "logprobs": None, **ids, "finish_reason": None}
        elif self.echo or ids:
            yield {"index": self.index, "text": self.echo, "logprobs": None, **ids, "finish_reason": None}

    def chunks(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The choices of chunks for a delta; none where it has nothing to show."""
        text, logprobs = self._words(delta), self._logprobs(delta)
        ids = {"token_ids": list(delta.tokens)} if self.asked.has_token_ids else {}
        reason = None if delta.completion is None else delta.completion.finish_reason
        is_chat = self.asked.endpoint == "chat"
        has_more = bool(text) or (bool(delta.tokens) and (self.asked.has_logprobs or self.asked.has_token_ids))
        if is_chat and has_more:
            content = {"delta": {"content": text}}
            yield {"index": self.index, **content, "logprobs": logprobs, **ids, "finish_reason": None}
        if is_chat and reason is not None:
            yield {"index": self.index, "delta": {}, "logprobs": None, "finish_reason": reason}
        if not is_chat and (has_more or reason is not None):
            yield {"index": self.index, "text": text, "logprobs": logprobs, **ids, "finish_reason": reason}

    def _words(self, delta: Delta) -> str:
        text = delta.text.removeprefix(self.before_reply)
        self.before_reply = "" if delta.text else self.before_reply
        return text

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self.asked.has_logprobs:
            return None
        texts = [self.texts.text(token) for token in delta.tokens]
        if self.asked.endpoint == "completions":
            offsets = [self._offset_of(token) for token in delta.tokens]
            return {
                "tokens": texts,
                "token_logprobs": list(delta.behaviour_logprobs),
                "top_logprobs": None,
                "text_offset": offsets,
            }
        content = [
            {"token": text, "logprob": logprob, "bytes": _bytes_of(text), "top_logprobs": []}
            for text, logprob in zip(texts, delta.behaviour_logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _offset_of(self, token: int) -> int:
        """Characters of the answer before the next token, those that a stop string will cut away included."""
        offset = self._num_chars
        self._tokens.append(token)
        text, self._decoded = decode_more(self._decoded, self._tokens, self.texts.tokenizer.decode)
        self._num_chars = num_certain(text, ())
        return offset


def _bytes_of(text: str) -> list[int] | None:
    """The bytes of a token; None where it is only a part of a character, whose bytes the text does not say."""
    return None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())


def usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Tokens of all prompts, each counted once, and of all samples."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled,
    }  # fmt: skip


def envelope(asked: Asked, key: str, created: int, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A reply, or a chunk of one where the request is streamed."""
    return {
        "id": f"{_ID_PREFIXES[asked.endpoint]}-{key}",
        "object": _OBJECTS[asked.endpoint][asked.is_streamed],
        "created": created,
        "model": asked.model,
        "choices": choices,
        **more,
    }


def error(
    message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None
) -> Any:
    """OpenAI's error object."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
