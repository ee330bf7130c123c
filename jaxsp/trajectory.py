"""What play produces, as plain numpy: requests and completions, turns, trajectories, groups, tasks.

The chain is `Turn` -> `Segment` -> `Trajectory` -> `Group`. Nothing here knows of JAX, so rollouts, environments and
verifiers run in processes that hold no device.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxsp.token_trie import Choices, make_trie

FinishReason = Literal["stop", "length"]
"""`stop`: a stop id was sampled (it is the last token) or a stop string completed. `length`: max_tokens was reached."""

Status = Literal["ok", "truncated", "invalid", "timeout", "died"]
"""How an episode ended for one role. Failures of the world are data: counted, never silently a wrong answer."""


@dataclass(frozen=True)
class GenerateRequest:
    """One sample to draw from the policy.

    `temperature == 0` is greedy, whatever `top_k`, `top_p` and `min_p` say. `top_k == 0`, `top_p == 1` and
    `min_p == 0` switch the truncations off. The sample depends on `tokens`, `seed` and the settings here alone.
    What changes scores comes first (penalty, bias, `min_tokens`, `choices`), then temperature, then the truncations.
    """

    tokens: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop id can be drawn, and no stop string counts, before so many tokens are there."""
    repetition_penalty: float = 1.0
    """Scores of tokens that stand in the prompt or were sampled are divided by it where they are positive, multiplied
    where negative (Keskar et al. 2019, arXiv 1909.05858, section 4.1)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """`(token, what is added to its score)`."""
    choices: Choices = ()
    """The sample is one of these continuations, where there are any; none may begin another one."""
    wants_raw: bool = False
    """Fills the completion's `raw_logprobs` and `kept_mass`."""


@dataclass(frozen=True)
class Completion:
    """What was sampled for a request.

    Attributes:
        tokens: sampled ids, the stop id included. After a stop string: up to the token that completed it.
        behaviour_logprobs: log-probability of each token under the very distribution it was drawn from
            (tempered and truncated); under temperature 0, of the untempered distribution.
        raw_logprobs: under the model's own distribution, before anything the request asks for; () unless wanted.
        kept_mass: the probability, in the tempered distribution, of what the truncations kept; () unless wanted.
            Times it, the probability of a token is that of the distribution that was not truncated.
        text: the decoded tokens without special tokens, cut before the stop string.
        finish_reason: see `FinishReason`.
        policy_version: the step whose parameters sampled these tokens.
    """

    tokens: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    text: str
    finish_reason: FinishReason
    policy_version: int
    raw_logprobs: tuple[float, ...] = ()
    kept_mass: tuple[float, ...] = ()


Generate = Callable[[GenerateRequest], Awaitable[Completion]]
"""The seam between play and the sampler: rollouts await this and do not know how or where sampling runs."""


@dataclass(frozen=True)
class Turn:
    """A span of a segment: `tokens[start:end]` was either observed or sampled."""

    kind: Literal["observation", "sampled"]
    start: int
    end: int
    finish_reason: FinishReason | None = None
    policy_version: int | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """An append-only token stream with the targets that the policy is trained on.

    Example: the prompt `[5, 6]` answered by the sampled `[7, 2]`, where 2 ends the sequence::

        Segment(tokens=[5, 6, 7, 2], loss_mask=[F, F, T, T], behaviour_logprobs=[0, 0, -0.7, -0.1],
                turns=(Turn("observation", 0, 2), Turn("sampled", 2, 4, "stop", 0)), temperature=1.0)

    `loss_mask[t]` says that token `t` is a target; its log-probability comes from the logits at `t - 1`, divided by
    `temperature`. `behaviour_logprobs` holds 0 where `loss_mask` is False, and those zeros never enter a result.
    `allowed_tokens` names, for a target drawn from few tokens instead of the whole vocabulary, its index and these: its
    log-probability is among them.
    """

    tokens: np.ndarray  # int32 [L]
    loss_mask: np.ndarray  # bool [L]
    behaviour_logprobs: np.ndarray  # float32 [L]
    turns: tuple[Turn, ...]
    temperature: float = 1.0
    allowed_tokens: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.loss_mask) == len(self.behaviour_logprobs):
            raise ValueError(
                f"tokens, loss_mask and behaviour_logprobs differ in length: "
                f"{len(self.tokens)}, {len(self.loss_mask)}, {len(self.behaviour_logprobs)}"
            )
        if len(self.loss_mask) and self.loss_mask[0]:
            raise ValueError("the first token of a segment has no logits before it and cannot be a target")


def segment_from_completion(request: GenerateRequest, completion: Completion) -> Segment:
    """One segment of one turn: the request's tokens observed, the completion's tokens sampled and trained on.

    The learner's log-probabilities are of the whole vocabulary, or of what the request's `choices` left. Where the
    request truncated the distribution, the completion's `kept_mass` gives the behaviour's log-probabilities before
    that; without it, or where scores were changed in a way that the learner cannot follow, this raises ValueError
    naming the field.
    """
    _check_trainable(request, completion)
    num_prompt, num_sampled = len(request.tokens), len(completion.tokens)
    end = num_prompt + num_sampled
    behaviour_logprobs = np.asarray(completion.behaviour_logprobs, np.float32)
    if completion.kept_mass:
        behaviour_logprobs = behaviour_logprobs + np.log(np.asarray(completion.kept_mass, np.float32))
    allowed = make_trie(request.choices).allowed_along(completion.tokens) if request.choices else []
    return Segment(
        tokens=np.asarray(request.tokens + completion.tokens, np.int32),
        loss_mask=np.arange(end) >= num_prompt,
        behaviour_logprobs=np.concatenate([np.zeros(num_prompt, np.float32), behaviour_logprobs]),
        turns=(
            Turn("observation", 0, num_prompt),
            Turn("sampled", num_prompt, end, completion.finish_reason, completion.policy_version),
        ),
        temperature=request.temperature,
        allowed_tokens=tuple(enumerate(allowed, start=num_prompt)),
    )


def _check_trainable(request: GenerateRequest, completion: Completion) -> None:
    truncations = (
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0} if request.temperature > 0 and not completion.kept_mass else {}
    )
    for name, off in truncations.items():
        if (value := getattr(request, name)) != off:
            raise ValueError(
                f"{name} = {value} renormalises behaviour_logprobs: train on samples with {name} = {off}, or with "
                "wants_raw = True, which tells the kept mass"
            )
    for name, off in (("min_tokens", 0), ("repetition_penalty", 1.0), ("logit_bias", ())):
        if (value := getattr(request, name)) != off:
            raise ValueError(f"{name} = {value} changes the distribution: train on samples with {name} = {off}")


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One role's turns in one episode, with its reward.

    `text` is a view of the sampled tokens, never re-encoded.
    """

    role: str
    segments: tuple[Segment, ...]
    reward: float
    status: Status = "ok"
    text: str = ""


@dataclass(frozen=True, eq=False)
class Group:
    """Trajectories that share a baseline: tries at one task, or one role of one game. Any number of them.

    Groups are told apart by `group_id`, which is unique within a step, never by their place in an array. `kind` is the
    kind of task, where a role has several and each is to have statistics of its own.
    """

    group_id: str
    role: str
    trajectories: tuple[Trajectory, ...]
    kind: str = ""

    @property
    def rewards(self) -> np.ndarray:
        """float64 `[G]`."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)


@dataclass(frozen=True)
class Task:
    """A question somebody proposed, with what is needed to check an answer and to know where it came from."""

    task_id: str
    text: str
    answer: str
    answer_type: str
    role: str
    step: int
    """In which it was proposed; the first is 1."""
    policy_version: int
    source: str
    """Document, seed or file it was made from."""
    is_valid: bool
    reason: str
    """`ok`, or the rule that rejected it."""
    solve_rate: float | None = None
