"""One step of SPICE on the host: documents in, groups of trajectories, tasks and episode records out.

SPICE (arXiv 2510.24684), section 3 and algorithm 1:
1. per document, up to N challenger attempts until one is valid;
2. of those, G challenger trajectories that keep the ratio of valid to invalid (the others are only recorded);
3. per valid one, G answers of the reasoner, which does not see the document;
4. the challenger is paid by the variance of those answers, an invalid attempt a constant; the reasoner by being right;
5. one valid task per document, drawn at random, trains the reasoner on the answers already sampled.

A trajectory's group is its document (challenger) or its task (reasoner).
"""

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxsp.rollout.prompts import Proposal, Rejection
from jaxsp.rollout.roles import (
    Answer,
    Attempt,
    OnProgress,
    Sampling,
    Setting,
    answer,
    ignore_progress,
    propose,
)
from jaxsp.rollout.seeds import derive_seed
from jaxsp.trajectory import Group, Status, Task, Trajectory


@dataclass(frozen=True)
class SpiceRules:
    """The numbers of the game; see `jaxsp.config.SpiceConfig` for each."""

    group_size: int
    max_attempts: int
    attempts_per_round: int
    invalid_reward: float
    solve_rate_reward: Callable[[float], float]
    challenger: Sampling
    reasoner: Sampling
    is_grounded_only: bool = False
    tasks_per_document: int = 1
    shares_answers: bool = False
    """Tasks with equal question, answer and answer type share one set of G answers."""
    prefers_mixed_tasks: bool = False
    """Draw the reasoner's tasks from those answered sometimes right and sometimes wrong, where there are any."""
    repetition_penalty: float = 0.0
    unsolved_reward: float | None = None
    """The challenger's for a task that no answer solves; None: what its solve rate of 0 pays."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ValueError(
                f"group_size must be at least 2 to have a solve rate and a baseline, got {self.group_size}"
            )


@dataclass(frozen=True, eq=False)
class Played:
    """What one step of play gives the learner and the records."""

    groups: tuple[Group, ...]
    tasks: tuple[Task, ...]
    """Every attempt, also those that were not kept."""
    episodes: list[dict[str, Any]]
    metrics: dict[str, float]
    alarms: tuple[str, ...] = ()
    """What the user should be told of this step."""

    @property
    def trained_task_ids(self) -> tuple[str, ...]:
        """The tasks that train the reasoner."""
        return tuple(group.group_id for group in self.groups if group.role == "reasoner")


@dataclass(frozen=True, eq=False)
class _Try:
    """An attempt, and the answers to it if it is valid and kept.

    Attributes:
        position: its place among all attempts of the step.
        answers_at: the position of the first try with these answers, which is another one where answers are shared.
        num_alike: other tries of its document that were answered and ask the same question.
    """

    position: int
    document: int
    attempt: Attempt
    is_kept: bool
    answers: tuple[Answer, ...] = ()
    answers_at: int | None = None
    num_alike: int = 0

    @property
    def proposal(self) -> Proposal | None:
        return self.attempt.outcome if isinstance(self.attempt.outcome, Proposal) else None

    @property
    def question(self) -> str:
        assert self.proposal is not None
        return self.proposal.question

    @property
    def solve_rate(self) -> float | None:
        return _mean([given.verdict.correct for given in self.answers]) if self.answers else None

    @property
    def is_mixed(self) -> bool:
        return self.solve_rate is not None and 0 < self.solve_rate < 1

    @property
    def has_own_answers(self) -> bool:
        """True for one try of each set of answers, so that shared ones count once."""
        return self.answers_at == self.position


async def play_spice(
    documents: Sequence[tuple[str, str]],
    setting: Setting,
    rules: SpiceRules,
    *,
    seed: int,
    step: int,
    policy_version: int,
    on_progress: OnProgress = ignore_progress,
) -> Played:
    """Plays the step number `step` (the first is 1) on `documents`, pairs of id and text.

    Depends on its arguments and the policy alone.
    """
    attempts = await attempt_until_valid(documents, setting, rules, seed=seed, step=step, on_progress=on_progress)
    tries = _mark_kept(attempts, rules, seed=seed, step=step)
    tries = await _answer_valid(tries, setting, rules, seed=seed, step=step, on_progress=on_progress)
    by_document: list[list[_Try]] = [[] for _ in documents]
    for each in tries:
        by_document[each.document].append(each)
    trained = _draw_reasoner_tasks(by_document, rules, seed=seed, step=step)
    tasks = tuple(_as_task(each, documents, step, policy_version) for each in tries)
    groups = (
        *(_challenger_group(own, rules, f"{step}/document{number}") for number, own in enumerate(by_document) if own),
        *(_reasoner_group(each, tasks[each.position].task_id) for each in trained),
    )
    return Played(groups, tasks, _episodes(tries, tasks, rules, trained), _metrics(tries, len(documents), rules))


async def attempt_until_valid(
    documents: Sequence[tuple[str, str]],
    setting: Setting,
    rules: SpiceRules,
    *,
    seed: int,
    step: int,
    on_progress: OnProgress = ignore_progress,
) -> list[list[Attempt]]:
    """The attempts of each document: rounds of `attempts_per_round` until one is valid or `max_attempts` are made."""
    attempts: list[list[Attempt]] = [[] for _ in documents]
    while True:
        waiting = [
            (index, len(tries) + offset)
            for index, tries in enumerate(attempts)
            if not any(isinstance(attempt.outcome, Proposal) for attempt in tries)
            for offset in range(min(rules.attempts_per_round, rules.max_attempts - len(tries)))
        ]
        if not waiting:
            return attempts
        made = await propose(
            setting,
            [documents[index][1] for index, _ in waiting],
            [derive_seed(seed, step, "challenger", index, number) for index, number in waiting],
            rules.challenger,
            rules.is_grounded_only,
            functools.partial(on_progress, "challenger"),
        )
        for (index, _), attempt in zip(waiting, made, strict=True):
            attempts[index].append(attempt)


def keep_ratio(attempts: Sequence[Attempt], group_size: int, rng: random.Random) -> list[Attempt]:
    """At most `group_size` of the attempts, with their ratio of valid to invalid as nearly as whole numbers allow.

    At least one valid attempt is kept if there is one: the document's task would be lost otherwise.
    """
    valid = [attempt for attempt in attempts if isinstance(attempt.outcome, Proposal)]
    invalid = [attempt for attempt in attempts if isinstance(attempt.outcome, Rejection)]
    size = min(group_size, len(attempts))
    num_valid = round(size * len(valid) / len(attempts))
    num_valid = min(max(num_valid, bool(valid), size - len(invalid)), len(valid))
    chosen = {id(attempt) for attempt in rng.sample(valid, num_valid) + rng.sample(invalid, size - num_valid)}
    return [attempt for attempt in attempts if id(attempt) in chosen]


def _mark_kept(attempts: Sequence[Sequence[Attempt]], rules: SpiceRules, *, seed: int, step: int) -> list[_Try]:
    """All attempts of all documents in order, at most G of each document marked as kept."""
    tries: list[_Try] = []
    for document, made in enumerate(attempts):
        kept = keep_ratio(made, rules.group_size, random.Random(derive_seed(seed, step, "keep", document)))
        kept_ids = set(map(id, kept))
        for attempt in made:
            tries.append(_Try(len(tries), document, attempt, id(attempt) in kept_ids))
    return tries


async def _answer_valid(
    tries: list[_Try], setting: Setting, rules: SpiceRules, *, seed: int, step: int, on_progress: OnProgress
) -> list[_Try]:
    """The tries, those that are valid and kept with their G answers."""
    first: dict[Any, _Try] = {}  # of each set of answers; its key is the proposal where sets are shared
    for each in tries:
        if each.is_kept and each.proposal is not None:
            first.setdefault(each.proposal if rules.shares_answers else each.position, each)
    flat = await answer(
        setting,
        [each.proposal for each in first.values() if each.proposal for _ in range(rules.group_size)],
        [
            derive_seed(seed, step, "reasoner", number, sample)
            for number in range(len(first))
            for sample in range(rules.group_size)
        ],
        rules.reasoner,
        functools.partial(on_progress, "reasoner"),
    )
    sets = {
        key: (tuple(flat[number * rules.group_size : (number + 1) * rules.group_size]), each.position)
        for number, (key, each) in enumerate(first.items())
    }
    asked = Counter((each.document, each.question) for each in tries if each.is_kept and each.proposal is not None)
    answered = []
    for each in tries:
        key = each.proposal if rules.shares_answers else each.position
        if each.is_kept and key in sets:
            answers, answers_at = sets[key]
            num_alike = asked[each.document, each.question] - 1
            answered.append(replace(each, answers=answers, answers_at=answers_at, num_alike=num_alike))
        else:
            answered.append(each)
    return answered


def _draw_reasoner_tasks(
    by_document: Sequence[Sequence[_Try]], rules: SpiceRules, *, seed: int, step: int
) -> list[_Try]:
    """The tasks that train the reasoner: for each document a random draw, no question twice in the step."""
    trained: dict[str, _Try] = {}
    for document, tries in enumerate(by_document):
        choices = [each for each in tries if each.answers]
        random.Random(derive_seed(seed, step, "draw", document)).shuffle(choices)
        if rules.prefers_mixed_tasks:
            choices.sort(key=lambda each: not each.is_mixed)
        num_drawn = 0
        for each in choices:
            if num_drawn < rules.tasks_per_document and each.question not in trained:
                trained[each.question] = each
                num_drawn += 1
    return list(trained.values())


def _challenger_reward(each: _Try, rules: SpiceRules) -> float | None:
    """None for a try that was not kept."""
    if not each.is_kept:
        return None
    if each.solve_rate is None:
        return rules.invalid_reward
    if each.solve_rate == 0 and rules.unsolved_reward is not None:
        return rules.unsolved_reward
    repeated = each.num_alike / (rules.group_size - 1)
    return rules.solve_rate_reward(each.solve_rate) - rules.repetition_penalty * repeated


def _challenger_group(tries: Sequence[_Try], rules: SpiceRules, group_id: str) -> Group:
    trajectories = tuple(
        Trajectory(
            role="challenger",
            segments=tuple(call.segment for call in each.attempt.calls),
            reward=reward,
            status=_attempt_status(each.attempt),
            text=each.attempt.text,
        )
        for each in tries
        if (reward := _challenger_reward(each, rules)) is not None
    )
    return Group(group_id, "challenger", trajectories)


def _attempt_status(attempt: Attempt) -> Status:
    if isinstance(attempt.outcome, Proposal):
        return "ok"
    return "truncated" if attempt.calls[-1].completion.finish_reason == "length" else "invalid"


def _answer_status(given: Answer) -> Status:
    if given.verdict.status == "timeout":
        return "timeout"
    return "truncated" if given.call.completion.finish_reason == "length" else "ok"


def _reasoner_group(each: _Try, group_id: str) -> Group:
    trajectories = tuple(
        Trajectory(
            role="reasoner",
            segments=(given.call.segment,),
            reward=float(given.verdict.correct),
            status=_answer_status(given),
            text=given.call.completion.text,
        )
        for given in each.answers
    )
    return Group(group_id, "reasoner", trajectories)


def _as_task(each: _Try, documents: Sequence[tuple[str, str]], step: int, policy_version: int) -> Task:
    outcome = each.attempt.outcome
    is_valid = isinstance(outcome, Proposal)
    return Task(
        task_id=f"{step}/task{each.position}",
        text=outcome.question if is_valid else each.attempt.text,
        answer=outcome.answer if is_valid else "",
        answer_type=outcome.answer_type if is_valid else "",
        role="challenger",
        step=step,
        policy_version=policy_version,
        source=documents[each.document][0],
        is_valid=is_valid,
        reason="ok" if is_valid else outcome.reason,
        solve_rate=each.solve_rate,
    )


def _episodes(
    tries: Sequence[_Try], tasks: Sequence[Task], rules: SpiceRules, trained: Sequence[_Try]
) -> list[dict[str, Any]]:
    """One record per attempt and per answer, for `episodes/*.jsonl.gz`: texts, token counts, reward and reason.

    Answers follow the attempt that they were sampled for; `answers_of` of another one that shares them names its task.
    """
    rows: list[dict[str, Any]] = []
    trained_sets = {each.answers_at for each in trained}
    for each, task in zip(tries, tasks, strict=True):
        completions = [call.completion for call in each.attempt.calls]
        rows.append({
            "role": "challenger", "task_id": task.task_id, "document": task.source, "text": each.attempt.text,
            "num_prompt_tokens": sum(len(call.request.tokens) for call in each.attempt.calls),
            "num_sampled_tokens": sum(len(completion.tokens) for completion in completions),
            "finish_reason": completions[-1].finish_reason, "is_kept": each.is_kept,
            "reward": _challenger_reward(each, rules), "reason": task.reason, "solve_rate": task.solve_rate,
            "answers_of": None if each.answers_at is None else tasks[each.answers_at].task_id,
        })  # fmt: skip
        for given in each.answers if each.has_own_answers else ():
            rows.append({
                "role": "reasoner", "task_id": task.task_id, "question": task.text, "reference": task.answer,
                "text": given.call.completion.text, "num_prompt_tokens": len(given.call.request.tokens),
                "num_sampled_tokens": len(given.call.completion.tokens),
                "finish_reason": given.call.completion.finish_reason, "reward": float(given.verdict.correct),
                "reason": given.verdict.status, "extracted": given.verdict.extracted,
                "is_trained": each.position in trained_sets,
            })  # fmt: skip
    return rows


def _mean(values: Sequence[float]) -> float:
    """NaN, which is no value, of nothing."""
    return sum(values) / len(values) if values else math.nan


def _metrics(tries: Sequence[_Try], num_documents: int, rules: SpiceRules) -> dict[str, float]:
    """Of the challenger's attempts, kept or not, and the reasoner's answers, each once however many tasks share it."""
    rewards = [reward for each in tries if (reward := _challenger_reward(each, rules)) is not None]
    questions = [each.question for each in tries if each.answers]
    answered = [each for each in tries if each.has_own_answers]
    answers = [given for each in answered for given in each.answers]
    made = [_attempt_status(each.attempt) for each in tries]
    given_statuses = [_answer_status(given) for given in answers]
    rejected = Counter(each.attempt.outcome.reason for each in tries if isinstance(each.attempt.outcome, Rejection))
    return {
        "challenger/valid_frac": _mean([status == "ok" for status in made]),
        "challenger/reward_mean": _mean(rewards),
        "challenger/attempts_mean": len(tries) / num_documents if num_documents else math.nan,
        "challenger/distinct_frac": len(set(questions)) / len(questions) if questions else math.nan,
        "challenger/tokens_mean": _mean([sum(len(c.completion.tokens) for c in t.attempt.calls) for t in tries]),
        "challenger/truncated_frac": _mean([status == "truncated" for status in made]),
        **{f"challenger/rejected_{reason}_frac": count / len(tries) for reason, count in sorted(rejected.items())},
        "reasoner/accuracy_frac": _mean([given.verdict.correct for given in answers]),
        "reasoner/mixed_frac": _mean([each.is_mixed for each in answered]),
        "reasoner/tokens_mean": _mean([len(given.call.completion.tokens) for given in answers]),
        "reasoner/no_answer_frac": _mean([given.verdict.status == "no_answer" for given in answers]),
        "reasoner/truncated_frac": _mean([status == "truncated" for status in given_statuses]),
        "reasoner/timeout_frac": _mean([status == "timeout" for status in given_statuses]),
    }
