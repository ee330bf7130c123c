"""Messages -> tokens: one append-only renderer for every chat format, and the loss mask of conversations.

A stream only grows: what was sampled stays as the ids that were sampled, and `next_turn` gives the ids that follow it.
Nothing is rendered twice. Two consequences where a model's own template re-renders its history instead:

* Qwen3's template drops `<think>...</think>` from earlier turns. Here they stay, and so does the empty block that
  `thinking="off"` supplies.
* A reply is a stretch of its own behind "assistant\\n". A template encodes both together, which differs where the reply
  begins with white space that merges with the line break.

Messages are `{"role": "system" | "user" | "assistant" | "tool", "content": str}`. In all but the assistant's, neither
control tokens nor tags such as `<think>` and `</tool_response>` are more than text. The `plain` format marks its turns
by words alone, which a message can imitate.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Literal

from jaxsp.config import UsageError, UserError
from jaxsp.tokenizer import Tokenizer

Kind = Literal["qwen3", "chatml", "llama3", "plain"]
Thinking = Literal["on", "off", "absent"]
Message = Mapping[str, str]

ROLES = ("system", "user", "assistant", "tool")

PLAIN_PREAMBLE = (
    "Below is a conversation. The User asks, and the Assistant works out the answer with care and then states it."
)
"""What the `plain` format begins with where there is no system message."""


@dataclass(frozen=True)
class _Part:
    """`text` is part of a stretch of text, the `control` token's text, or a whole `reply` of the assistant."""

    text: str
    kind: Literal["text", "control", "reply"] = "text"
    is_trained: bool = False


def _control(text: str) -> _Part:
    return _Part(text, "control")


@dataclass(frozen=True)
class _Format:
    """One chat format. `end` is the control token that closes a turn; None: the tokenizer's end of text."""

    needs: tuple[str, ...]
    begin: tuple[_Part, ...]
    turn: Callable[[str, Sequence[str]], list[_Part]]
    """Parts of one turn that is not the assistant's, given its role and its content (several for merged tools)."""
    generation: tuple[_Part, ...]
    before_reply: str
    end: str | None
    after_end: str
    other_stops: tuple[str, ...]
    merges_tools: bool = False


def _chatml_turn(role: str, contents: Sequence[str]) -> list[_Part]:
    return [_control("<|im_start|>"), _Part(f"{role}\n{contents[0]}"), _control("<|im_end|>"), _Part("\n")]


def _qwen3_turn(role: str, contents: Sequence[str]) -> list[_Part]:
    if role != "tool":
        return _chatml_turn(role, contents)
    parts = [_control("<|im_start|>"), _Part("user")]
    for content in contents:
        parts += [_Part("\n"), _control("<tool_response>"), _Part(f"\n{content}\n"), _control("</tool_response>")]
    return [*parts, _control("<|im_end|>"), _Part("\n")]


def _llama3_header(role: str) -> list[_Part]:
    name = "ipython" if role == "tool" else role  # the name that Llama 3.1 gives to what tools return
    return [_control("<|start_header_id|>"), _Part(name), _control("<|end_header_id|>"), _Part("\n\n")]


def _llama3_turn(role: str, contents: Sequence[str]) -> list[_Part]:
    return [*_llama3_header(role), _Part(contents[0].strip()), _control("<|eot_id|>")]


def _plain_turn(role: str, contents: Sequence[str]) -> list[_Part]:
    return [_Part(f"{contents[0]}\n\n" if role == "system" else f"{role.capitalize()}: {contents[0]}\n")]


_CHATML = _Format(
    needs=("<|im_start|>", "<|im_end|>"),
    begin=(),
    turn=_chatml_turn,
    generation=(_control("<|im_start|>"), _Part("assistant\n")),
    before_reply="",
    end="<|im_end|>",
    after_end="\n",
    other_stops=("<|endoftext|>",),
)
_FORMATS: dict[Kind, _Format] = {
    "chatml": _CHATML,
    "qwen3": replace(_CHATML, turn=_qwen3_turn, merges_tools=True),
    # Without the dates that the templates of Llama 3.1 and later write before the system message.
    "llama3": _Format(
        needs=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        begin=(_control("<|begin_of_text|>"),),
        turn=_llama3_turn,
        generation=tuple(_llama3_header("assistant")),
        before_reply="",
        end="<|eot_id|>",
        after_end="",
        other_stops=("<|end_of_text|>", "<|eom_id|>"),
    ),
    "plain": _Format(
        needs=(),
        begin=(),
        turn=_plain_turn,
        generation=(_Part("Assistant:"),),
        before_reply=" ",
        end=None,
        after_end="\n",
        other_stops=("<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>"),
    ),
}
_EMPTY_THINK = (_control("<think>"), _Part("\n\n"), _control("</think>"), _Part("\n\n"))


@dataclass(frozen=True)
class Renderer:
    """A tokenizer with a chat format; made by `make_renderer`.

    Attributes:
        kind: the format, never "auto".
        stop_ids: ids that end a reply; the first is the one a reply is closed with.
        stop_strings: texts that show that a base model goes on with the user's turn.
        default_system: the system message put before a conversation that brings none; None puts none.
    """

    tokenizer: Tokenizer
    kind: Kind
    thinking: Thinking
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...] = ()
    default_system: str | None = field(default=None, repr=False)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The whole conversation and the start of the assistant's next turn."""
        return tuple(self._encode([*self._conversation(messages), *self._generation()], is_start=True)[0])

    def next_turn(self, messages: Sequence[Message], last_token: int | None) -> tuple[int, ...]:
        """What follows a sampled turn: its closing, `messages`, and the start of the assistant's next turn.

        `last_token` is the last one sampled, None if there was none. A turn that did not end with `stop_ids[0]`
        (cut at its length, ended by a stop string or by another stop id) is closed with it here.
        """
        _check_messages(messages)
        parts = [_Part(_FORMATS[self.kind].after_end), *self._turns(messages), *self._generation()]
        closing = () if last_token == self.stop_ids[0] else (self.stop_ids[0],)
        return (*closing, *self._encode(parts, is_start=False)[0])

    @property
    def before_reply(self) -> str:
        """What a sampled reply begins with that is not the assistant's words: `prompt` puts it before them."""
        return _FORMATS[self.kind].before_reply

    def supervised(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """The whole conversation, and where the loss is: on the assistant's words and the id that ends its turn.

        The tokens are those that `prompt` and sampling give: what the prompt supplies, an empty think block
        included, is not trained on.
        """
        return self._encode(self._conversation(messages), is_start=True)

    def _conversation(self, messages: Sequence[Message]) -> list[_Part]:
        _check_messages(messages)
        if self.default_system is not None and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self.default_system}, *messages]
        return [*_FORMATS[self.kind].begin, *self._turns(messages)]

    def _turns(self, messages: Sequence[Message]) -> list[_Part]:
        chat_format = _FORMATS[self.kind]
        parts = []
        for role, run in groupby(messages, key=lambda message: message["role"]):
            contents = [message["content"] for message in run]
            if role == "assistant":
                parts += [part for content in contents for part in self._assistant_turn(content)]
            elif role == "tool" and chat_format.merges_tools:
                parts += chat_format.turn(role, contents)
            else:
                parts += [part for content in contents for part in chat_format.turn(role, [content])]
        return parts

    def _assistant_turn(self, content: str) -> list[_Part]:
        chat_format = _FORMATS[self.kind]
        if self.thinking == "off":
            content = content.removeprefix("".join(part.text for part in _EMPTY_THINK))
        if self.kind == "llama3":
            content = content.strip()
        reply = _Part(chat_format.before_reply + content, "reply", is_trained=True)
        return [*self._generation(), reply, _Part("", "control", is_trained=True), _Part(chat_format.after_end)]

    def _generation(self) -> tuple[_Part, ...]:
        return _FORMATS[self.kind].generation + (_EMPTY_THINK if self.thinking == "off" else ())

    def _encode(self, parts: Iterable[_Part], *, is_start: bool) -> tuple[list[int], list[bool]]:
        """Tokens and loss mask. Neighbouring texts are encoded as one: only control tokens and replies cut a text."""
        bos_id = self.tokenizer.bos_id if self.kind == "plain" and is_start else None
        tokens = [] if bos_id is None else [bos_id]
        loss_mask = [False] * len(tokens)
        num_before_text = len(tokens)
        for (kind, is_trained), run in groupby(self._resolved(parts), key=lambda part: (part.kind, part.is_trained)):
            texts = [part.text for part in run]
            if kind == "control":
                new = [self._control_id(text) for text in texts]
            else:
                is_first = is_start and len(tokens) == num_before_text
                new = self.tokenizer.encode_part("".join(texts), is_start=is_first, has_markup=kind == "reply")
            tokens += new
            loss_mask += [is_trained] * len(new)
        return tokens, loss_mask

    def _resolved(self, parts: Iterable[_Part]) -> Iterable[_Part]:
        """`parts` without the empty texts, and with tags that this vocabulary has no token for as text."""
        for part in parts:
            if part.kind == "control" and part.text and self.tokenizer.special_id(part.text) is None:
                yield _Part(part.text)
            elif part.text or part.kind == "control":
                yield part

    def _control_id(self, text: str) -> int:
        """The id of a control token; the empty text stands for the one that closes a turn."""
        token = self.tokenizer.special_id(text) if text else self.stop_ids[0]
        assert token is not None
        return token


def make_renderer(
    tokenizer: Tokenizer,
    kind: Kind | Literal["auto"] = "auto",
    thinking: Thinking = "absent",
    *,
    eos_ids: Sequence[int] = (),
    default_system: str | None = "auto",
) -> Renderer:
    """The renderer of a chat format for this tokenizer.

    Args:
        kind: "auto" goes by the special tokens the vocabulary holds; one with none of a chat format's gets "plain".
        thinking: for Qwen3. "on" adds nothing and lets the model think; "off" supplies an empty think block in the
            prompt; "absent" is for models that know no such block (the 2507 instruct models, base models).
        eos_ids: what the model's config or generation config calls end of sequence: they stop a reply too.
        default_system: what stands in for a missing system message. "auto": what the model's own template puts there
            (SmolLM2's and Qwen2.5's put a sentence, Qwen3's and Llama-3's nothing), for "plain" `PLAIN_PREAMBLE`.

    Raises `UsageError` that names `model.renderer` or `model.thinking` if the tokenizer does not fit them.
    """
    resolved = _detect(tokenizer) if kind == "auto" else kind
    chat_format = _FORMATS[resolved]
    missing = [token for token in chat_format.needs if tokenizer.special_id(token) is None]
    if missing:
        raise UsageError(f"model.renderer = {kind} needs the tokens {', '.join(missing)}, which this tokenizer lacks")
    if thinking != "absent" and resolved != "qwen3":
        raise UsageError(
            f"model.thinking = {thinking} is for the qwen3 renderer, and this one is {resolved}: use absent"
        )
    ends = [tokenizer.special_id(chat_format.end)] if chat_format.end is not None else []
    ends += [*eos_ids, tokenizer.eos_id, *map(tokenizer.special_id, chat_format.other_stops)]
    stop_ids = tuple(dict.fromkeys(token for token in ends if token is not None))
    if not stop_ids:
        raise UsageError(f"model.renderer = {kind}: neither the tokenizer nor the model's config names an end of text")
    if default_system == "auto":
        default_system = PLAIN_PREAMBLE if resolved == "plain" else _template_system(tokenizer.chat_template)
    stop_strings = ("\nUser:",) if resolved == "plain" else ()
    return Renderer(tokenizer, resolved, thinking, stop_ids, stop_strings, default_system)


def _detect(tokenizer: Tokenizer) -> Kind:
    has = {kind: all(token in tokenizer.special_ids for token in _FORMATS[kind].needs) for kind in _FORMATS}
    if has["chatml"] and has["llama3"]:
        raise UsageError(
            "model.renderer = auto is ambiguous: this tokenizer has the tokens of chatml and of llama3; set one of them"
        )
    if has["chatml"]:
        return "chatml" if tokenizer.special_id("<think>") is None else "qwen3"
    return "llama3" if has["llama3"] else "plain"


def _template_system(template: str | None) -> str | None:
    """The system message that a ChatML template spells out for conversations that bring none."""
    # A quote or brace would mean that the text is put together from the messages.
    found = re.search(r"<\|im_start\|>system\n([^'\"{}<]+)<\|im_end\|>", (template or "").replace("\\n", "\n"))
    return found[1] if found else None


def _check_messages(messages: Sequence[Message]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"messages[{index}] must have role and content, and is {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"messages[{index}].role is {role!r}; it must be one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"messages[{index}].content must be a text, and is {type(content).__name__}")
