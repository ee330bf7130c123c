"""The seats of SPICE: a challenger that reads a document and proposes a task, a reasoner that answers without it."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxsp.rollout.prompts import PromptSet, Proposal, Rejection
from jaxsp.rollout.seeds import derive_seed
from jaxsp.rollout.validity import rejection_reason
from jaxsp.trajectory import Completion, Generate, GenerateRequest, Segment, segment_from_completion
from jaxsp.verifiers.math_answer import Verdict


class RendersChat(Protocol):
    """What play needs of a chat renderer."""

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def stop_strings(self) -> tuple[str, ...]: ...

    def prompt(self, messages: list[dict[str, str]]) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Setting:
    """What play needs from outside: the sampler, the chat format, the prompts, the verifiers.

    `check(proposal, reply)` compares a reasoner's reply with the proposal's answer; `parses(expression)` says whether
    an answer reads as an expression.
    """

    generate: Generate
    renderer: RendersChat
    prompts: PromptSet
    check: Callable[[Proposal, str], Awaitable[Verdict]]
    parses: Callable[[str], Awaitable[bool]]


@dataclass(frozen=True)
class Sampling:
    """How a role's replies are drawn."""

    max_tokens: int
    temperature: float


@dataclass(frozen=True, eq=False)
class Call:
    """One request and what came back."""

    request: GenerateRequest
    completion: Completion

    @property
    def segment(self) -> Segment:
        return segment_from_completion(self.request, self.completion)


@dataclass(frozen=True, eq=False)
class Attempt:
    """A challenger's episode: the type call, the question call if the first could be read, and what they gave."""

    calls: tuple[Call, ...]
    outcome: Proposal | Rejection

    @property
    def text(self) -> str:
        return "\n".join(call.completion.text for call in self.calls)


@dataclass(frozen=True, eq=False)
class Answer:
    """A reasoner's episode: its reply and the verdict on it."""

    call: Call
    verdict: Verdict


OnProgress = Callable[[str, int, int], None]
"""Told what is going on, how much of it is done, and of how much."""
OnCount = Callable[[int, int], None]
"""Told how many calls are done, and of how many."""


def ignore_progress(activity: str, done: int, total: int) -> None:
    """An `OnProgress` for nobody."""


def _count_up(on_count: OnCount, total: int) -> Callable[[], None]:
    """Tells `on_count` that nothing is done yet; each call of what it returns, that one more is."""
    done = itertools.count(1)
    on_count(0, total)
    return lambda: on_count(next(done), total)


async def _call(
    setting: Setting, messages: list[dict[str, str]], sampling: Sampling, seed: int, one_more: Callable[[], None]
) -> Call:
    request = GenerateRequest(
        tokens=setting.renderer.prompt(messages),
        seed=seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_ids=setting.renderer.stop_ids,
        stop_strings=setting.renderer.stop_strings,
    )
    completion = await setting.generate(request)
    one_more()
    return Call(request, completion)


async def propose(
    setting: Setting,
    documents: Sequence[str],
    seeds: Sequence[int],
    sampling: Sampling,
    is_grounded_only: bool,
    on_count: OnCount = lambda done, total: None,
) -> list[Attempt]:
    """One attempt for each document and seed, in order. Its two calls draw with seeds of their own.

    All type calls finish before the first question call starts, so what is sampled together does not depend on the
    timing of other processes and a run can be repeated to the bit.
    """
    prompts = setting.prompts
    one_more = _count_up(on_count, 2 * len(documents))
    type_calls = await asyncio.gather(
        *(
            _call(setting, prompts.type_messages(document), sampling, derive_seed(seed, "type"), one_more)
            for document, seed in zip(documents, seeds, strict=True)
        )
    )

    async def ask(document: str, seed: int, type_call: Call) -> Attempt:
        answer_type = _readable(type_call, prompts.read_type)
        if isinstance(answer_type, Rejection):
            one_more()  # its question is never asked for
            return Attempt((type_call,), answer_type)
        messages = prompts.question_messages(document, answer_type)
        call = await _call(setting, messages, sampling, derive_seed(seed, "question"), one_more)
        proposal = _readable(call, lambda reply: prompts.read_question(reply, answer_type))
        if isinstance(proposal, Proposal) and (reason := rejection_reason(proposal, document, is_grounded_only)):
            proposal = Rejection(reason)
        return Attempt((type_call, call), proposal)

    attempts = await asyncio.gather(*(ask(*each) for each in zip(documents, seeds, type_calls, strict=True)))
    return list(await asyncio.gather(*(_reject_unparseable(setting, attempt) for attempt in attempts)))


def _readable[T](call: Call, read: Callable[[str], T | Rejection]) -> T | Rejection:
    """A reply cut off by its token limit is never read: half an answer can look like a whole one."""
    return Rejection("truncated") if call.completion.finish_reason == "length" else read(call.completion.text)


async def _reject_unparseable(setting: Setting, attempt: Attempt) -> Attempt:
    proposal = attempt.outcome
    if not isinstance(proposal, Proposal) or proposal.answer_type != "expression":
        return attempt
    return attempt if await setting.parses(proposal.answer) else Attempt(attempt.calls, Rejection("not_an_expression"))


async def answer(
    setting: Setting,
    proposals: Sequence[Proposal],
    seeds: Sequence[int],
    sampling: Sampling,
    on_count: OnCount = lambda done, total: None,
) -> list[Answer]:
    """One answer for each proposal and seed, in order. The prompt is made from the question alone."""
    prompts = setting.prompts
    one_more = _count_up(on_count, len(proposals))
    calls = await asyncio.gather(
        *(
            _call(setting, prompts.reasoner_messages(proposal.question), sampling, seed, one_more)
            for proposal, seed in zip(proposals, seeds, strict=True)
        )
    )
    verdicts = await asyncio.gather(
        *(setting.check(proposal, call.completion.text) for proposal, call in zip(proposals, calls, strict=True))
    )
    return [Answer(*each) for each in zip(calls, verdicts, strict=True)]
