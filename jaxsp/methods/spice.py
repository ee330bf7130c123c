"""SPICE (arXiv 2510.24684): one model, two roles, shared weights; a challenger with documents, a reasoner without.

The schedule is an optional warm start by imitation, then `num_steps` joint steps. A step plays as told in
`jaxsp/rollout/collect.py` and updates on both roles together, all log-probabilities computed before the first update.

Departures from the paper, in every run:
- Documents come in shuffled epochs, each once per epoch; the paper draws them uniformly.
- A step makes one update on all of its trajectories unless `learner.trajectories_per_update` says otherwise; the
  paper takes 128 to an update, which `configs/spice/qwen3_4b_base.yaml` sets.
- The prompts follow the structure of the paper's in our own words.

Choices where the paper is silent:
- Attempts are sampled in rounds of `spice.attempts_per_round`, and a round is finished though its first try is valid.
- Two documents that are asked the same question train the reasoner on it once in a step.
- Of a document with a valid attempt at least one is kept, even where the ratio of valid to invalid rounds to none.
- A challenger's trajectory is both its calls, type and question; both are trained on.
- A challenger's reply cut off by its token limit is never read and so invalid; a reasoner's is graded as it stands.
- A valid task follows the rules of `jaxsp/rollout/validity.py`. A verdict that times out pays the reasoner 0.
- A trajectory's sum over tokens is divided by its own role's token limit, or `learner.length_normaliser` for both.
- Sampler and learner are matched by a capped importance weight per token (`learner.importance_cap`), gradients are
  clipped to `learner.max_grad_norm`.

Departures that are off by default:
- `warm_start`: imitation of conversations in the challenger's format comes before self-play.
- `spice.prompts` = compact: one-line prompts for small models, with two worked examples for the reasoner.
- `spice.is_grounded_only`: an integer task's numbers must all stand in one sentence of the document.
- `spice.shares_answers`: tasks of a step with equal question, answer and type share one set of answers.
- `spice.tasks_per_document`, `spice.prefers_mixed_tasks`: several tasks of a document train the reasoner, or rather
  those of mixed outcome than a random one.
- `spice.unsolved_reward`: a question that nobody solves pays less than one that everybody solves. The paper's reward
  pays both alike, which lets a small challenger drift to questions without a right answer.
- `spice.repetition_penalty`: questions that a document's attempts have in common pay less.
- `spice.challenger_reward`, `spice.trains_challenger`, `spice.trains_reasoner`: other rewards and a fixed role, which
  are ablations of the paper but for `learnability_4p1mp` and a fixed reasoner.
- `learner.schedule`, `learner.warmup_updates`: a learning rate that rises at first, and falls to 0 at the end.
- `learner.optimizer`: another than AdamW.
- `learner.advantage`, `learner.objective`, `learner.aggregation`, `learner.importance`, `learner.overlong`,
  `learner.kl_coef`: other advantages and losses, a pull towards the policy at the phase's start.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxsp.config import LearnerConfig, RunConfig, SpiceConfig, UsageError
from jaxsp.envs.documents import Corpus
from jaxsp.learner.advantages import ADVANTAGES
from jaxsp.learner.optimizers import make_schedule
from jaxsp.methods.phase import Method, Phase, StepPlace
from jaxsp.rollout.collect import Played, SpiceRules, play_spice
from jaxsp.rollout.conversations import draw_conversations, imitation_segment, read_conversations
from jaxsp.rollout.rewards import SOLVE_RATE_REWARDS
from jaxsp.rollout.roles import Sampling, Setting
from jaxsp.trajectory import Group, Trajectory

TRUNCATED_ALARM_FRAC = 0.9
"""Above it a token limit is too low for the task rather than for some replies."""


def spice_rules(config: SpiceConfig) -> SpiceRules:
    """The rules of play; raises `UsageError` naming fields that leave no game."""
    num_tries = min(config.attempts_per_round, config.max_attempts)
    if num_tries < config.group_size:
        raise UsageError(
            f"spice.group_size = {config.group_size}: a document's group would have only {num_tries} attempts where "
            f"the first round holds a valid one; raise spice.attempts_per_round = {config.attempts_per_round} and "
            f"spice.max_attempts = {config.max_attempts} to at least the group's size, or lower that"
        )
    reward = SOLVE_RATE_REWARDS[config.challenger_reward]
    return SpiceRules(
        group_size=config.group_size,
        max_attempts=config.max_attempts,
        attempts_per_round=config.attempts_per_round,
        invalid_reward=config.invalid_reward,
        solve_rate_reward=lambda p: reward(p, config.variance_tau),
        challenger=Sampling(config.challenger_max_tokens, config.temperature),
        reasoner=Sampling(config.reasoner_max_tokens, config.temperature),
        is_grounded_only=config.is_grounded_only,
        tasks_per_document=config.tasks_per_document,
        shares_answers=config.shares_answers,
        prefers_mixed_tasks=config.prefers_mixed_tasks,
        unsolved_reward=config.unsolved_reward,
        repetition_penalty=config.repetition_penalty,
    )


def make_method(config: RunConfig, setting: Setting, corpus: Corpus, supervised) -> Method:
    """The schedule of a run. `supervised` renders a conversation as tokens and loss mask."""
    rules = spice_rules(config.spice)
    _check_held_out(config)
    trains = {"challenger": config.spice.trains_challenger, "reasoner": config.spice.trains_reasoner}
    trained_roles = {role for role, is_trained in trains.items() if is_trained}
    if not trained_roles:
        raise UsageError("spice.trains_challenger and spice.trains_reasoner are both false: nothing would be trained")
    told: set[str] = set()
    max_tokens = {"challenger": rules.challenger.max_tokens, "reasoner": rules.reasoner.max_tokens}
    for role in sorted(trained_roles):
        if config.learner.overlong == "penalise" and config.learner.overlong_buffer > max_tokens[role]:
            raise UsageError(
                f"learner.overlong_buffer = {config.learner.overlong_buffer} is more than an answer can have: "
                f"spice.{role}_max_tokens = {max_tokens[role]}; lower the buffer"
            )

    async def play(place: StepPlace) -> Played:
        """A step's play, with the groups that are trained on and the alarms that no step before has told."""
        documents = corpus.next_documents(config.spice.documents_per_step)
        played = await play_spice(
            [(document.document_id, document.text) for document in documents],
            setting,
            rules,
            seed=place.seed,
            step=place.step + 1,
            policy_version=place.step,
            on_progress=place.on_progress,
        )
        groups = tuple(group for group in played.groups if group.role in trained_roles)
        is_grouped = ADVANTAGES[config.learner.advantage].pool == "group"
        alarms = {
            kind: text for kind, text in alarms_of(groups, played.metrics, is_grouped).items() if kind not in told
        }
        told.update(alarms)
        return replace(played, groups=groups, alarms=tuple(alarms.values()))

    phases = [
        Phase(
            "spice",
            config.spice.num_steps,
            "reinforce",
            _learning_rate(config.learner, config.spice.num_steps),
            play,
            lambda group: config.learner.length_normaliser or max_tokens[group.role],
            lambda group: max_tokens[group.role],
        )
    ]
    if config.warm_start.conversations is not None and config.warm_start.num_steps:
        phases.insert(0, _warm_start(config, supervised))
    return Method(tuple(phases), corpus.state, corpus.restore)


def _learning_rate(learner: LearnerConfig, num_steps: int) -> float | Callable[[Any], Any]:
    """A number, or a function of the number of updates; raises `UsageError` where that is not the number of steps.

    So it does where the warm-up leaves nothing to the schedule.
    """
    if learner.schedule != "constant" and learner.trajectories_per_update and learner.schedule_updates is None:
        raise UsageError(
            f"learner.schedule = {learner.schedule} needs one update a step: set learner.trajectories_per_update to 0, "
            "learner.schedule to constant, or learner.schedule_updates to the number of updates"
        )
    num_updates = learner.schedule_updates or num_steps
    if learner.schedule != "constant" and learner.warmup_updates >= num_updates > 0:
        raise UsageError(
            f"learner.warmup_updates = {learner.warmup_updates} must be less than the {num_updates} updates of the "
            "schedule (learner.schedule_updates, or else spice.num_steps)"
        )
    return make_schedule(
        learner.schedule, learner.learning_rate, warmup=learner.warmup_updates, num_updates=num_updates
    )


def _check_held_out(config: RunConfig) -> None:
    """The embedded corpus has held-out documents of its own; any other has to bring them."""
    path = config.evaluation.documents
    if path is None or path.partition(":")[0] == "embedded":
        return
    if Path(path).resolve() == Path(config.corpus.path).resolve():
        raise UsageError(
            f"evaluation.documents = {path} is the corpus that the run trains on (corpus.path): name held-out documents"
        )


def alarms_of(groups: Sequence[Group], metrics: dict[str, float], is_grouped: bool = True) -> dict[str, str]:
    """What is wrong with a step that no single number of it shows to be an error: a text for each kind.

    `is_grouped` says that rewards are compared within their group alone.
    """
    alarms = {
        role: f"{metrics[name]:.0%} of the {role}'s replies were cut off: raise spice.{role}_max_tokens ({name})"
        for role in ("challenger", "reasoner")
        if metrics[name := f"{role}/truncated_frac"] > TRUNCATED_ALARM_FRAC
    }
    if metrics["challenger/valid_frac"] == 0:
        reasons = sorted(name for name in metrics if name.startswith("challenger/rejected_"))
        shares = ", ".join(
            f"{name.removeprefix('challenger/rejected_').removesuffix('_frac')} {metrics[name]:.0%}" for name in reasons
        )
        alarms["valid"] = (
            f"no attempt of the challenger was valid ({shares}); a small model needs a warm start "
            "(warm_start.conversations=embedded warm_start.num_steps=8) and spice.prompts=compact"
        )
    if is_grouped and groups and all(np.ptp(group.rewards) == 0 for group in groups):
        alarms["variance"] = "all rewards of each group are equal: nothing to learn from (learner/zero_advantage_frac)"
    return alarms


def _warm_start(config: RunConfig, supervised) -> Phase:
    warm_start = config.warm_start
    assert warm_start.conversations is not None
    conversations = read_conversations(warm_start.conversations)
    return Phase(
        "warm_start",
        warm_start.num_steps,
        "imitate",
        optax.linear_schedule(warm_start.learning_rate, 0.0, warm_start.num_steps),
        functools.partial(_play_conversations, conversations, warm_start.batch_size, supervised),
    )


async def _play_conversations(
    conversations: Sequence[list[dict[str, str]]], batch_size: int, supervised, place: StepPlace
) -> Played:
    """A batch of conversations as one group; nothing is sampled and nothing rewarded."""
    batch = draw_conversations(conversations, batch_size, place.step_in_phase, place.seed)
    trajectories = tuple(
        Trajectory("teacher", (imitation_segment(messages, supervised),), reward=0.0) for messages in batch
    )
    return Played((Group(f"{place.step + 1}/conversations", "teacher", trajectories),), (), [], {})
