"""One step of SPICE on the host: documents in, groups of trajectories, tasks and episode records out.

SPICE (arXiv 2510.24684), section 3 and algorithm 1:
1. per document, up to N challenger attempts until one is valid;
2. of those, G challenger trajectories that keep the ratio of valid to invalid;
3. per valid one, G answers of the reasoner, which does not see the document;
4. the challenger is paid by the variance of those answers, an invalid attempt a constant; the reasoner by being right;
5. one valid task per document, drawn at random, trains the reasoner on the answers already sampled.

A trajectory's group is its document (challenger) or its task (reasoner).
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxsp.rollout.prompts import Proposal, Rejection
from jaxsp.rollout.roles import Answer, Attempt, Sampling, Setting, answer, propose
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
    """Questions with the same text share one set of G answers."""
    prefers_mixed_tasks: bool = False
    """Draw the reasoner's tasks from those answered sometimes right and sometimes wrong, where there are any."""

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
    episodes: list[dict[str, Any]]
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class _Solved:
    """A kept attempt of a document, and the answers to it if it is valid."""

    document: int
    attempt: Attempt
    answers: tuple[Answer, ...]

    @property
    def solve_rate(self) -> float:
        return sum(answer.verdict.correct for answer in self.answers) / len(self.answers)


OnProgress = Callable[[str, int, int], None]


async def play_spice(
    documents: Sequence[tuple[str, str]],
    setting: Setting,
    rules: SpiceRules,
    *,
    seed: int,
    step: int,
    policy_version: int,
    on_progress: OnProgress = lambda activity, done, total: None,
) -> Played:
    """Plays the step number `step` (the first is 1) on `documents`, pairs of id and text.

    Depends on its arguments and the policy alone.
    """
    attempts = await attempt_until_valid(documents, setting, rules, seed=seed, step=step, on_progress=on_progress)
    kept = [
        _Solved(index, attempt, ())
        for index, tries in enumerate(attempts)
        for attempt in keep_ratio(tries, rules.group_size, random.Random(derive_seed(seed, step, "keep", index)))
    ]
    solved = await _answer_valid(kept, setting, rules, seed=seed, step=step, on_progress=on_progress)
    trained = _draw_reasoner_tasks(solved, len(documents), rules, seed=seed, step=step)
    tasks = tuple(_as_task(item, position, documents, step, policy_version) for position, item in enumerate(solved))
    groups = (
        *_challenger_groups(solved, len(documents), rules, step),
        *(_reasoner_group(solved[position], f"{step}/task{position}") for position in trained),
    )
    return Played(groups, tasks, _episodes(solved, tasks, rules, set(trained)), _metrics(solved, attempts, rules))


async def attempt_until_valid(
    documents: Sequence[tuple[str, str]],
    setting: Setting,
    rules: SpiceRules,
    *,
    seed: int,
    step: int,
    on_progress: OnProgress = lambda activity, done, total: None,
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
        on_progress("challenger", 0, len(waiting))
        made = await propose(
            setting,
            [documents[index][1] for index, _ in waiting],
            [derive_seed(seed, step, "challenger", index, number) for index, number in waiting],
            rules.challenger,
            rules.is_grounded_only,
        )
        for (index, _), attempt in zip(waiting, made, strict=True):
            attempts[index].append(attempt)
        on_progress("challenger", len(waiting), len(waiting))


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


async def _answer_valid(
    kept: list[_Solved], setting: Setting, rules: SpiceRules, *, seed: int, step: int, on_progress: OnProgress
) -> list[_Solved]:
    """The kept attempts, the valid ones with their G answers."""
    keys: list[Any] = []  # one for each set of answers: the question where sets are shared, else the place
    asked: dict[Any, Proposal] = {}
    for position, item in enumerate(kept):
        proposal = item.attempt.outcome
        key = None
        if isinstance(proposal, Proposal):
            key = (proposal.question, proposal.answer) if rules.shares_answers else position
            asked.setdefault(key, proposal)
        keys.append(key)
    proposals = [proposal for proposal in asked.values() for _ in range(rules.group_size)]
    seeds = [
        derive_seed(seed, step, "reasoner", number, sample)
        for number in range(len(asked))
        for sample in range(rules.group_size)
    ]
    on_progress("reasoner", 0, len(proposals))
    flat = await answer(setting, proposals, seeds, rules.reasoner)
    on_progress("reasoner", len(proposals), len(proposals))
    sets = {
        key: tuple(flat[number * rules.group_size : (number + 1) * rules.group_size])
        for number, key in enumerate(asked)
    }
    return [
        _Solved(item.document, item.attempt, () if key is None else sets[key])
        for item, key in zip(kept, keys, strict=True)
    ]


def _draw_reasoner_tasks(
    solved: list[_Solved], num_documents: int, rules: SpiceRules, *, seed: int, step: int
) -> list[int]:
    """Positions of the tasks that train the reasoner: for each document a random draw, no text twice."""
    trained: list[int] = []
    for document in range(num_documents):
        rng = random.Random(derive_seed(seed, step, "draw", document))
        choices = [position for position, item in enumerate(solved) if item.document == document and item.answers]
        rng.shuffle(choices)
        if rules.prefers_mixed_tasks:
            choices.sort(key=lambda position: not 0 < solved[position].solve_rate < 1)
        drawn: dict[str, int] = {}
        for position in choices:
            drawn.setdefault(_proposal(solved[position]).question, position)
        trained += list(drawn.values())[: rules.tasks_per_document]
    return trained


def _proposal(item: _Solved) -> Proposal:
    assert isinstance(item.attempt.outcome, Proposal)
    return item.attempt.outcome


def _challenger_reward(item: _Solved, rules: SpiceRules) -> float:
    return rules.solve_rate_reward(item.solve_rate) if item.answers else rules.invalid_reward


def _challenger_groups(solved: list[_Solved], num_documents: int, rules: SpiceRules, step: int) -> list[Group]:
    groups = []
    for document in range(num_documents):
        trajectories = tuple(
            Trajectory(
                role="challenger",
                segments=tuple(call.segment for call in item.attempt.calls),
                reward=_challenger_reward(item, rules),
                status="ok" if item.answers else _invalid_status(item.attempt),
                reward_parts={"solve_rate": item.solve_rate} if item.answers else {},
                text=item.attempt.text,
            )
            for item in solved
            if item.document == document
        )
        if trajectories:
            groups.append(Group(f"{step}/document{document}", "challenger", trajectories))
    return groups


def _invalid_status(attempt: Attempt) -> Status:
    return "truncated" if attempt.calls[-1].completion.finish_reason == "length" else "invalid"


def _answer_status(given: Answer) -> Status:
    if given.call.completion.finish_reason == "length":
        return "truncated"
    return "timeout" if given.verdict.status == "timeout" else "ok"


def _reasoner_group(item: _Solved, group_id: str) -> Group:
    trajectories = tuple(
        Trajectory(
            role="reasoner",
            segments=(given.call.segment,),
            reward=float(given.verdict.correct),
            status=_answer_status(given),
            text=given.call.completion.text,
        )
        for given in item.answers
    )
    return Group(group_id, "reasoner", trajectories)


def _as_task(
    item: _Solved, position: int, documents: Sequence[tuple[str, str]], step: int, policy_version: int
) -> Task:
    outcome = item.attempt.outcome
    is_valid = isinstance(outcome, Proposal)
    return Task(
        task_id=f"{step}/task{position}",
        text=outcome.question if is_valid else item.attempt.text,
        answer=outcome.answer if is_valid else "",
        answer_type=outcome.answer_type if is_valid else "",
        role="challenger",
        step=step,
        policy_version=policy_version,
        source=documents[item.document][0],
        is_valid=is_valid,
        reason="ok" if is_valid else outcome.reason,
        solve_rate=item.solve_rate if item.answers else None,
    )


def _episodes(solved: list[_Solved], tasks: Sequence[Task], rules: SpiceRules, trained: set[int]) -> list[dict]:
    """One record per trajectory, for `episodes/*.jsonl.gz`: texts, token counts, reward and reason."""
    rows: list[dict[str, Any]] = []
    for position, (item, task) in enumerate(zip(solved, tasks, strict=True)):
        completions = [call.completion for call in item.attempt.calls]
        rows.append({
            "role": "challenger", "task_id": task.task_id, "document": task.source, "text": item.attempt.text,
            "num_prompt_tokens": sum(len(call.request.tokens) for call in item.attempt.calls),
            "num_sampled_tokens": sum(len(completion.tokens) for completion in completions),
            "finish_reason": completions[-1].finish_reason, "reward": _challenger_reward(item, rules),
            "reason": task.reason, "solve_rate": task.solve_rate,
        })  # fmt: skip
        for given in item.answers:
            rows.append({
                "role": "reasoner", "task_id": task.task_id, "question": task.text, "reference": task.answer,
                "text": given.call.completion.text, "num_prompt_tokens": len(given.call.request.tokens),
                "num_sampled_tokens": len(given.call.completion.tokens),
                "finish_reason": given.call.completion.finish_reason, "reward": float(given.verdict.correct),
                "reason": given.verdict.status, "extracted": given.verdict.extracted,
                "is_trained": position in trained,
            })  # fmt: skip
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _metrics(solved: list[_Solved], attempts: list[list[Attempt]], rules: SpiceRules) -> dict[str, float]:
    every = [attempt for tries in attempts for attempt in tries]
    answered = [item for item in solved if item.answers]
    answers = [given for item in answered for given in item.answers]
    rejected = Counter(attempt.outcome.reason for attempt in every if isinstance(attempt.outcome, Rejection))
    return {
        "challenger/valid_frac": _mean([isinstance(attempt.outcome, Proposal) for attempt in every]),
        "challenger/reward_mean": _mean([_challenger_reward(item, rules) for item in solved]),
        "challenger/attempts_mean": _mean([len(tries) for tries in attempts]),
        "challenger/distinct_frac": len({_proposal(item).question for item in answered}) / max(len(answered), 1),
        "challenger/tokens_mean": _mean([sum(len(c.completion.tokens) for c in a.calls) for a in every]),
        **{f"challenger/rejected_{reason}_frac": count / len(every) for reason, count in sorted(rejected.items())},
        "reasoner/accuracy_frac": _mean([given.verdict.correct for given in answers]),
        "reasoner/mixed_frac": _mean([0 < item.solve_rate < 1 for item in answered]),
        "reasoner/tokens_mean": _mean([len(given.call.completion.tokens) for given in answers]),
        "reasoner/no_answer_frac": _mean([given.verdict.status == "no_answer" for given in answers]),
        "verifier/timeout_frac": _mean([given.verdict.status == "timeout" for given in answers]),
        "episode/truncated_frac": _mean([given.call.completion.finish_reason == "length" for given in answers]),
    }
