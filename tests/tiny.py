"""Fakes that many tests share: a chat renderer of bytes, a sampler that follows a script, and a setting of both."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxsp.rollout.prompts import PROMPTS, Proposal
from jaxsp.rollout.roles import Setting
from jaxsp.trajectory import Completion, Generate, GenerateRequest
from jaxsp.verifiers.math_answer import Verdict, is_parseable_expression
from jaxsp.verifiers.verify import ANSWER_KINDS, KINDS

END = 256
"""The id that ends a byte reply; 257 opens a message and 258 closes it."""
_OPEN, _CLOSE = 257, 258


@dataclass(frozen=True)
class ByteRenderer:
    """Tokens are the bytes of the text; the ids from `END` on are control tokens and decode to nothing."""

    stop_ids: tuple[int, ...] = (END,)
    stop_strings: tuple[str, ...] = ()

    def prompt(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The conversation and the opening of the assistant's turn."""
        turns = [(_OPEN, *f"{turn['role']}\n{turn['content']}".encode(), _CLOSE) for turn in messages]
        return (*(token for turn in turns for token in turn), _OPEN, *b"assistant\n")


def encode_bytes(text: str) -> list[int]:
    return list(text.encode())


def decode_bytes(tokens) -> str:
    """The text of the bytes among `tokens`."""
    return bytes(int(token) for token in tokens if token < END).decode(errors="replace")


@dataclass
class ScriptedGenerate:
    """A `jaxsp.trajectory.Generate` that replies `script(prompt, seed)`, and keeps the requests in `requests`.

    Attributes:
        script: from the decoded prompt and the request's seed to the text of the reply. What exceeds the request's
            `max_tokens`, the closing id included, is cut, and the reply ends with `length`.
        delay_s: how long each answer is held back; called once per request.
    """

    script: Callable[[str, int], str]
    delay_s: Callable[[], float] = lambda: 0.0
    policy_version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)

    async def __call__(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        reply = self.script(decode_bytes(request.tokens), request.seed)
        await asyncio.sleep(self.delay_s())
        whole = (*reply.encode(), END)
        tokens = whole[: request.max_tokens]
        return Completion(
            tokens=tokens,
            behaviour_logprobs=tuple(-1.0 - position / 1024 for position in range(len(tokens))),
            text=decode_bytes(tokens),
            finish_reason="stop" if tokens == whole else "length",
            policy_version=self.policy_version,
        )


async def check_here(proposal: Proposal, reply: str) -> Verdict:
    """The real verifiers, in this process: for references and replies that cannot hang."""
    kind = KINDS[ANSWER_KINDS[proposal.answer_type]]
    verdict = kind.quick(proposal.answer, reply)
    if verdict is None:
        assert kind.slow is not None
        verdict = kind.slow(proposal.answer, reply)
    return verdict


async def parses_here(text: str) -> bool:
    return is_parseable_expression(text)


def make_setting(generate: Generate, prompts: str = "compact", **changes: Any) -> Setting:
    """A setting of the fakes and the real prompts and verifiers; `changes` replace its fields."""
    fields = {
        "generate": generate,
        "renderer": ByteRenderer(),
        "encode": encode_bytes,
        "prompts": PROMPTS[prompts],
        "check": check_here,
        "parses": parses_here,
    }
    return Setting(**{**fields, **changes})
