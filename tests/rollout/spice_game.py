"""A small game of SPICE with scripted players, and what tests ask of a step that was played."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxsp.rollout.collect import Played, SpiceRules, play_spice
from jaxsp.rollout.rewards import gaussian_variance
from jaxsp.rollout.roles import Sampling, Setting
from tests.tiny import ScriptedGenerate, make_setting

ASKS_TYPE = "Number, word, choice or formula?"
INVALID = "I cannot think of one."
Script = Callable[[str, int], str]


@dataclass(frozen=True)
class Cups:
    """A document of one sum, with the question and answer that it is good for."""

    first: int
    second: int

    @property
    def document(self) -> str:
        return f"Anna has {self.first} red cups and {self.second} blue cups, so Anna has {self.answer} cups in all."

    @property
    def question(self) -> str:
        return f"Anna has {self.first} red cups and {self.second} blue cups. How many cups does Anna have in all?"

    @property
    def answer(self) -> int:
        return self.first + self.second

    @property
    def reply(self) -> str:
        return f"Question: {self.question}\nAnswer: {self.answer}"

    @property
    def solution(self) -> str:
        return worked(self.first, self.second, self.answer)


def worked(first: int, second: int, result: int) -> str:
    """A reasoner's reply in the form of the compact prompt's examples."""
    return f"{first} + {second} = \\boxed{{{result}}}"


def asked_question(prompt: str) -> str:
    """The question of a compact reasoner prompt, which stands after its worked examples."""
    return prompt.rsplit("user\n", 1)[1].removesuffix("assistant\n")


@dataclass
class Game:
    """A script. A document's question calls get its `attempts` in turn, the last again and again.

    The first `num_right[question]` tries at a question are right and all later ones wrong (by default, all right).
    """

    attempts: dict[str, list[str]]
    num_right: dict[str, int] = field(default_factory=dict)
    times: Counter = field(default_factory=Counter)

    def __call__(self, prompt: str, seed: int) -> str:
        document = next((document for document in self.attempts if document in prompt), None)
        if document is None:
            question = asked_question(prompt)
            self.times[question] += 1
            first, second = [int(word) for word in question.split() if word.isdigit()]
            is_right = self.times[question] <= self.num_right.get(question, 10**6)
            return worked(first, second, first + second if is_right else 0)
        if ASKS_TYPE in prompt:
            return "number"
        replies = self.attempts[document]
        self.times[document] += 1
        return replies[min(self.times[document], len(replies)) - 1]


def rules_of(**changes) -> SpiceRules:
    fields = {
        "group_size": 4,
        "max_attempts": 4,
        "attempts_per_round": 4,
        "invalid_reward": -0.1,
        "solve_rate_reward": lambda p: gaussian_variance(p, 0.01),
        "challenger": Sampling(300, 1.0),
        "reasoner": Sampling(100, 0.9),
    }
    return SpiceRules(**{**fields, **changes})


def play(script: Script, documents: Sequence[str], *, delay_s=lambda: 0.0, **options) -> Played:
    """`play_in` a setting whose sampler follows `script`."""
    return play_in(make_setting(ScriptedGenerate(script, delay_s, policy_version=17)), documents, **options)


def play_in(setting: Setting, documents: Sequence[str], *, seed: int = 0, step: int = 3, **rules) -> Played:
    """One step on documents with the ids id-0, id-1 and so on; `rules` replace those of `rules_of`."""
    return asyncio.run(
        play_spice(
            [(f"id-{index}", text) for index, text in enumerate(documents)],
            setting,
            rules_of(**rules),
            seed=seed,
            step=step,
            policy_version=17,
        )
    )


def by_role(played: Played, role: str):
    return [group for group in played.groups if group.role == role]


def rewards_of(played: Played, role: str) -> list[list[float]]:
    return [group.rewards.tolist() for group in by_role(played, role)]


def plain(played: Played):
    """`Played` as values that compare by content."""
    segments = [
        [segment.tokens.tolist(), segment.loss_mask.tolist(), segment.behaviour_logprobs.tolist(), segment.turns]
        for group in played.groups
        for trajectory in group.trajectories
        for segment in trajectory.segments
    ]
    groups = [
        (group.group_id, group.role, [(t.role, t.reward, t.status, t.text) for t in group.trajectories])
        for group in played.groups
    ]
    return groups, segments, played.tasks, played.episodes, played.metrics


def all_segments(played: Played):
    return [(t, segment) for group in played.groups for t in group.trajectories for segment in t.segments]
