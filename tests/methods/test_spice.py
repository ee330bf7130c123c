"""The schedule of SPICE: what it refuses before a run, whom it trains, and what it warns of."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxsp.config import CorpusConfig, EvaluationConfig, LearnerConfig, ModelConfig, RunConfig, SpiceConfig, UsageError
from jaxsp.envs.documents import open_corpus
from jaxsp.methods.phase import StepPlace
from jaxsp.methods.spice import alarms_of, make_method, spice_rules
from jaxsp.rollout.collect import Played
from jaxsp.trajectory import Group, Segment, Trajectory
from tests.rollout.spice_game import INVALID, Cups, Game
from tests.tiny import ScriptedGenerate, make_setting


def test_a_group_that_a_round_cannot_fill_is_refused_with_the_three_fields() -> None:
    for changes in ({"attempts_per_round": 4}, {"max_attempts": 4}):
        fields: dict[str, Any] = {"group_size": 8, "attempts_per_round": 8, "max_attempts": 16}
        config = SpiceConfig(**{**fields, **changes})
        with pytest.raises(UsageError, match=r"spice\.group_size = 8.* only 4 ") as caught:
            spice_rules(config)
        for name in ("attempts_per_round", "max_attempts"):
            assert f"spice.{name} = {getattr(config, name)}" in str(caught.value)
    assert spice_rules(SpiceConfig(group_size=4, attempts_per_round=4, max_attempts=4)).group_size == 4


def played_steps(tmp_path: Path, game: Game, documents: list[str], num_steps: int, **spice: Any) -> list[Played]:
    """The first steps of a run whose sampler follows the game."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    fields: dict[str, Any] = {"group_size": 4, "attempts_per_round": 4, "max_attempts": 4, "prompts": "compact"}
    limits = {"documents_per_step": len(documents), "challenger_max_tokens": 300, "reasoner_max_tokens": 100}
    config = RunConfig(model=ModelConfig("none"), spice=SpiceConfig(**{**fields, **limits, **spice}))
    corpus = open_corpus(path, seed=0, max_segment_tokens=100, encode=str.split)  # pyright: ignore[reportArgumentType]
    (phase,) = make_method(config, make_setting(ScriptedGenerate(game)), corpus, None).phases

    async def play() -> list[Played]:
        return [await phase.play(StepPlace(step, step, 0, lambda *told: None)) for step in range(num_steps)]

    return asyncio.run(play())


def test_the_learning_rate_stays_or_falls_in_a_line_to_nothing_at_the_last_step(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A document.")
    corpus = open_corpus(tmp_path, seed=0, max_segment_tokens=100, encode=str.split)  # pyright: ignore[reportArgumentType]

    def learning_rate(num_steps: int, **learner: Any) -> Any:
        config = RunConfig(
            model=ModelConfig("none"), spice=SpiceConfig(num_steps=num_steps),
            learner=LearnerConfig(learning_rate=4e-5, **learner),
        )  # fmt: skip
        (phase,) = make_method(config, make_setting(ScriptedGenerate(lambda prompt, seed: "")), corpus, None).phases
        return phase.learning_rate

    assert learning_rate(8) == 4e-5
    falling = learning_rate(8, schedule="linear")
    np.testing.assert_allclose([falling(n) for n in (0, 2, 6, 7, 8)], [4e-5, 3e-5, 1e-5, 5e-6, 0.0], rtol=1e-6)
    with pytest.raises(UsageError, match=r"learner\.schedule = linear needs one update a step"):
        learning_rate(8, schedule="linear", trajectories_per_update=4)
    falling = learning_rate(8, schedule="linear", trajectories_per_update=4, schedule_updates=16)
    np.testing.assert_allclose([falling(n) for n in (0, 4, 16)], [4e-5, 3e-5, 0.0], rtol=1e-6)


def test_a_role_that_is_not_trained_gives_no_groups_and_uses_no_task(tmp_path: Path) -> None:
    cups = Cups(3, 4)
    for role, other in (("challenger", "reasoner"), ("reasoner", "challenger")):
        game = Game({cups.document: [cups.reply]}, {cups.question: 6})
        (played,) = played_steps(tmp_path, game, [cups.document], 1, **{f"trains_{other}": False})
        assert {group.role for group in played.groups} == {role}
        assert len(played.trained_task_ids) == (role == "reasoner") and len(played.tasks) == 4


def test_the_same_alarm_is_raised_once(tmp_path: Path) -> None:
    cups = Cups(3, 4)
    first, second = played_steps(tmp_path, Game({cups.document: [INVALID]}), [cups.document], 2)
    assert ["was valid" in first.alarms[0], "nothing to learn from" in first.alarms[1]] == [True, True]
    assert second.alarms == ()
    game = Game({cups.document: [cups.reply, INVALID]}, {cups.question: 1})
    assert [played.alarms for played in played_steps(tmp_path, game, [cups.document], 1)] == [()]


def group(*rewards: float) -> Group:
    segment = Segment(np.array([1, 2]), np.array([False, True]), np.zeros(2), ())
    return Group("g", "reasoner", tuple(Trajectory("reasoner", (segment,), reward) for reward in rewards))


def test_alarms_are_for_replies_that_are_nearly_all_cut_off_and_for_rewards_without_any_difference() -> None:
    fine = {
        "challenger/truncated_frac": 0.9, "reasoner/truncated_frac": float("nan"), "challenger/valid_frac": 0.1,
    }  # fmt: skip
    assert alarms_of([group(1, 1), group(0, 1)], fine) == {} and alarms_of([], fine) == {}
    assert list(alarms_of([group(1, 1), group(0, 0)], fine)) == ["variance"]
    assert alarms_of([group(1, 1), group(0, 0)], fine, is_grouped=False) == {}, "rewards of groups are compared"
    for role in ("challenger", "reasoner"):
        alarms = alarms_of([group(0, 1)], {**fine, f"{role}/truncated_frac": 0.95})
        assert list(alarms) == [role] and f"spice.{role}_max_tokens" in alarms[role] and "95%" in alarms[role]
    rejected = {"challenger/rejected_truncated_frac": 0.75, "challenger/rejected_no_type_frac": 0.25}
    alarms = alarms_of([group(0, 1)], {**fine, **rejected, "challenger/valid_frac": 0.0})
    assert list(alarms) == ["valid"] and "(no_type 25%, truncated 75%)" in alarms["valid"]


def test_the_corpus_that_is_trained_on_is_not_held_out(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "One."}\n')
    path = str(tmp_path / "corpus.jsonl")
    corpus = open_corpus(path, seed=0, max_segment_tokens=9, encode=str.split)  # pyright: ignore[reportArgumentType]
    setting = make_setting(ScriptedGenerate(lambda prompt, seed: ""))
    config = RunConfig(model=ModelConfig("none"), corpus=CorpusConfig(path))
    for documents in (path, f"{tmp_path}/../{tmp_path.name}/corpus.jsonl"):
        evaluation = EvaluationConfig(documents=documents)
        with pytest.raises(UsageError, match=r"^evaluation\.documents = .* trains on \(corpus\.path\)"):
            make_method(dataclasses.replace(config, evaluation=evaluation), setting, corpus, None)
    embedded = dataclasses.replace(
        config, corpus=CorpusConfig("embedded"), evaluation=EvaluationConfig(documents="embedded")
    )
    make_method(embedded, setting, corpus, None)  # of the packaged corpus other documents are held out


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (
            {"overlong": "penalise", "overlong_buffer": 1025},
            r"^learner\.overlong_buffer = 1025 .* spice\.challenger_max_tokens = 1024",
        ),
        ({"schedule": "linear", "warmup_updates": 640}, r"^learner\.warmup_updates = 640 must be less than the 640"),
        ({"schedule": "cosine", "warmup_updates": 9, "schedule_updates": 9}, r"must be less than the 9 updates"),
    ],
)
def test_settings_of_the_learner_that_do_not_fit_the_game_are_named(learner, message: str) -> None:
    corpus = open_corpus("embedded", seed=0, max_segment_tokens=99, encode=str.split)  # pyright: ignore[reportArgumentType]
    setting = make_setting(ScriptedGenerate(lambda prompt, seed: ""))
    config = RunConfig(model=ModelConfig("none"), learner=LearnerConfig(**learner))
    with pytest.raises(UsageError, match=message):
        make_method(config, setting, corpus, None)
