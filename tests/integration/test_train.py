"""A whole run from a random model to a table, and what must hold of one step whatever is learned."""

import json
import math
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxsp.cli import main
from jaxsp.config import ModelConfig, RunConfig, load_config
from jaxsp.metrics import METRIC_NAME, EpisodeLog, MetricsWriter, read_metrics
from jaxsp.report import EvaluationLog
from jaxsp.run import discard_run_dir, make_run_dir
from jaxsp.task_pool import TaskPool, task_pool_path
from tests.integration.tiny_spice import (
    SUMS,
    TEACHING_STEPS,
    episodes,
    in_process,
    metrics,
    resume,
    saved,
    steps,
    tasks,
    train,
)

NO_EVALUATION = ("evaluation.questions=null", "evaluation.documents=null")
ONLY_SELF_PLAY = ("warm_start.conversations=null", *NO_EVALUATION)


def the_config_of(first_run: Path) -> Path:
    return first_run.parents[1] / "tiny.yaml"


def test_a_run_directory_holds_what_the_readme_says(first_run: Path) -> None:
    found = {path.name for path in first_run.iterdir()}
    assert found == {
        "config.yaml", "metrics.jsonl", "tb", "episodes", "tasks.sqlite", "evaluations.jsonl", "evaluations",
        "seconds.json", "checkpoints", "lock",
    }  # fmt: skip
    last = TEACHING_STEPS + 4
    every_second = [*range(2, TEACHING_STEPS + 1, 2), TEACHING_STEPS + 2, last]
    assert steps(first_run) == every_second
    config = load_config(first_run / "config.yaml")
    assert config == load_config(the_config_of(first_run), ["checkpoint.keep=100"])


def test_the_warm_start_teaches_and_self_play_goes_on_from_it(first_run: Path) -> None:
    rows = read_metrics(first_run)
    assert [row["step"] for row in rows] == list(range(1, TEACHING_STEPS + 5))
    taught, played = rows[:TEACHING_STEPS], rows[TEACHING_STEPS:]
    assert taught[0]["policy/loss"] > 20 * taught[-1]["policy/loss"]
    for row in taught:
        assert not any(name.startswith(("challenger/", "reasoner/", "sampler/")) for name in row)
    for row in played:
        assert row["challenger/valid_frac"] > 0 and row["sampler/num_sampled_tokens"] > 0
        assert row["time/rollout_s"] > 0 and row["time/update_s"] > 0 and row["time/sync_s"] > 0
        assert all(METRIC_NAME.fullmatch(name) for name in row if name not in ("step", "time_s"))
        assert row["mismatch/abs_max"] < 1e-4 and row["learner/skipped_updates"] == 0
    assert sum(row["policy/updates"] for row in played) == 4
    assert any(0 < row["challenger/valid_frac"] < 1 for row in played)
    assert any(row["reasoner/mixed_frac"] > 0 for row in played)


def test_tensorboard_shows_every_number_of_the_metrics(first_run: Path) -> None:
    rows = read_metrics(first_run)
    board = EventAccumulator(str(first_run / "tb"), size_guidance={"scalars": 0}).Reload()
    names = {name for row in rows for name in row} - {"step", "time_s"}
    evaluations = EvaluationLog(first_run).rows()
    in_evaluations = {f"evaluation/{name.replace(' ', '_')}_frac": name for name in evaluations[0]["rows"]}
    assert set(board.Tags()["scalars"]) == names | set(in_evaluations)
    for tag, name in in_evaluations.items():
        points = [(event.step, event.value) for event in board.Scalars(tag)]
        assert points == [(row["step"], pytest.approx(row["rows"][name]["mean"])) for row in evaluations]
    for name in names:
        points = [(event.step, event.value) for event in board.Scalars(name)]
        expected = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        assert [step for step, _ in points] == [step for step, _ in expected]
        np.testing.assert_allclose([x for _, x in points], [x for _, x in expected], rtol=1e-6, err_msg=name)


def test_episodes_tasks_and_metrics_of_a_step_tell_the_same(first_run: Path) -> None:
    every, all_tasks = episodes(first_run), {task.task_id: task for task in tasks(first_run)}
    rows = {row["step"]: row for row in read_metrics(first_run)}
    assert list(every) == list(range(TEACHING_STEPS + 1, TEACHING_STEPS + 5))
    assert {task.step for task in all_tasks.values()} == set(every)
    corpus, used = {f"sum{x}{y}" for x, y in SUMS}, set()
    for step, records in every.items():
        proposed = [record for record in records if record["role"] == "challenger"]
        answers = [record for record in records if record["role"] == "reasoner"]
        assert [record["task_id"] for record in proposed] == [t.task_id for t in all_tasks.values() if t.step == step]
        for record in proposed:
            task = all_tasks[record["task_id"]]
            assert task.policy_version == step - 1 and task.source == record["document"] in corpus
            assert (task.reason, task.solve_rate) == (record["reason"], record["solve_rate"])
            assert task.is_valid == (record["reason"] == "ok") and task.text in record["text"]
            own = [answer for answer in answers if answer["task_id"] == task.task_id]
            assert len(own) == (4 if task.is_valid and record["is_kept"] else 0)
            if task.solve_rate is not None:
                assert task.solve_rate == np.mean([answer["reward"] for answer in own])
                assert {answer["question"] for answer in own} == {task.text}
                assert {answer["reference"] for answer in own} == {task.answer}
                spread = task.solve_rate * (1 - task.solve_rate)
                assert record["reward"] == pytest.approx(math.exp(-((spread - 0.25) ** 2) / 0.02))
            else:
                assert record["reward"] == (-0.1 if record["is_kept"] else None)
        for answer in answers:
            is_right = answer["extracted"] == answer["reference"]
            assert answer["reward"] == float(is_right) and answer["reason"] in ("ok", "no_answer", "unparseable")
            assert 0 < answer["num_sampled_tokens"] <= 8 and answer["num_prompt_tokens"] > 20
        row = rows[step]
        paid = [record["reward"] for record in proposed if record["is_kept"]]
        assert row["challenger/reward_mean"] == pytest.approx(np.mean(paid))
        assert row["reasoner/accuracy_frac"] == pytest.approx(np.mean([answer["reward"] for answer in answers]))
        trained = [answer for answer in answers if answer["is_trained"]]
        assert {answer["task_id"] for answer in answers} >= {answer["task_id"] for answer in trained}
        assert len(trained) in (0, 4, 8)
        used |= {(answer["task_id"], step) for answer in trained}
    with sqlite3.connect(task_pool_path(first_run)) as database:
        assert set(database.execute("select task_id, step from uses")) == used != set()


def test_there_are_evaluations_before_after_and_in_between(first_run: Path, capsys) -> None:
    rows = EvaluationLog(first_run).rows()
    assert [row["step"] for row in rows] == [TEACHING_STEPS + done for done in (0, 2, 4)]
    kinds = [f"reasoner accuracy from {first}" for first, _ in SUMS]
    for row in rows:
        assert list(row["rows"]) == ["reasoner accuracy", *kinds, "challenger valid", "challenger distinct"]
        overall = row["rows"]["reasoner accuracy"]
        assert overall["count"] == 3 and row["rows"]["challenger valid"]["count"] == 3
        assert overall["mean"] == pytest.approx(np.mean([row["rows"][kind]["mean"] for kind in kinds]))
        texts = EpisodeLog(first_run, folder="evaluations").read(row["step"])
        right = [text["correct"] for text in texts if text["role"] == "reasoner"]
        assert len(right) == 3 and np.mean(right) == pytest.approx(overall["mean"])
        reasons = [text["reason"] for text in texts if text["role"] == "challenger"]
        assert len(reasons) == 6 and reasons.count("ok") / 6 == pytest.approx(row["rows"]["challenger valid"]["mean"])
    assert main(["report", str(first_run)]) == 0
    out = capsys.readouterr().out
    assert f"before: step {TEACHING_STEPS}, after: step {TEACHING_STEPS + 4}" in out
    assert "sampled tokens/s" in out and "evaluation" in out


def test_at_learning_rate_0_nothing_moves_and_sampler_and_learner_agree(game: Path, capsys) -> None:
    run_dir, out = train(capsys, game, *ONLY_SELF_PLAY, "learner.learning_rate=0", "spice.num_steps=3")
    assert "no evaluation yet" in out
    rows = read_metrics(run_dir)
    num_updates = 0
    for row in rows:
        num_updates += row["policy/updates"]
        if row["policy/updates"]:
            assert abs(row["policy/ratio_mean"] - 1) < 1e-6 and abs(row["policy/ratio_max"] - 1) < 1e-6
            assert row["policy/first_ratio_deviation_max"] < 1e-6
            assert row["policy/clipped_frac"] == 0 and row["policy/importance_capped_frac"] == 0
            # The largest is that of an improbable token, whose logits are far apart.
            assert row["mismatch/abs_mean"] < 1e-6 and row["mismatch/abs_max"] < 3e-5
            assert row["policy/grad_norm"] > 0 and row["policy/update_norm"] == 0
    assert num_updates >= 2
    first, _ = saved(run_dir, 2)
    last, _ = saved(run_dir, 3)
    for name, array in last.items():
        if name.startswith("['state']['params']"):
            assert array.tobytes() == first[name].tobytes()


def test_with_a_kl_term_the_policy_starts_at_its_reference_and_leaves_it(game: Path, capsys) -> None:
    settings = ("learner.kl_coef=0.1", "warm_start.num_steps=1", "warm_start.learning_rate=1e-3", *NO_EVALUATION)
    run_dir, _ = train(capsys, game, *settings, "learner.learning_rate=0.01", "spice.num_steps=3")
    divergence = [row["policy/kl"] for row in read_metrics(run_dir)[1:]]
    assert abs(divergence[0]) < 1e-9
    assert divergence[1] > 1e-6 and divergence[2] > 1e-6
    arrays, _ = saved(run_dir, 4)
    embed, reference = arrays["['state']['params']['embed']"], arrays["['reference']['embed']"]
    assert 0 < np.abs(embed - reference).max() < 0.1
    earlier, _ = saved(run_dir, 2)
    assert earlier["['reference']['embed']"].tobytes() == reference.tobytes()


def test_several_updates_of_a_step_share_its_samples(game: Path, capsys) -> None:
    settings = ("learner.trajectories_per_update=4", "learner.learning_rate=0.01", "spice.num_steps=2")
    run_dir, _ = train(capsys, game, *ONLY_SELF_PLAY, *settings)
    rows = [row for row in read_metrics(run_dir) if row["policy/updates"]]
    assert any(row["policy/updates"] >= 2 for row in rows)
    # The later updates have moved away from the policy that sampled, while the sampler agrees with the old one.
    assert any(row["policy/ratio_max"] > 1.01 for row in rows)
    assert all(row["mismatch/abs_mean"] < 1e-6 and row["mismatch/abs_max"] < 3e-5 for row in rows)
    arrays, _ = saved(run_dir)
    assert arrays["['state']['step']"] == sum(row["policy/updates"] for row in rows)


def test_a_step_without_any_advantage_leaves_the_whole_state_as_it_was(game: Path, capsys) -> None:
    # Nothing that is asked can be valid, so that all attempts are worth the same.
    settings = ("spice.challenger_max_tokens=1", "spice.num_steps=2", "checkpoint.every_steps=1")
    run_dir, _ = train(capsys, game, *ONLY_SELF_PLAY, *settings)
    for row in read_metrics(run_dir):
        assert row["policy/updates"] == 0 and row["learner/zero_advantage_frac"] == 1
        assert row["challenger/rejected_truncated_frac"] == 1 and row["challenger/attempts_mean"] == 8
    first, _ = saved(run_dir, 1)
    last, _ = saved(run_dir, 2)
    assert all(last[name].tobytes() == array.tobytes() for name, array in first.items())
    assert first["['state']['step']"] == 0
    assert [task.reason for task in tasks(run_dir)] == ["truncated"] * 2 * 2 * 8


SHOWS_ITS_SAMPLER = """
# Prints how the sampler's weights and its cache are split over the devices.
import sys
from jaxsp.cli import main
from jaxsp.sampler.batch import Batch
from jaxsp.sampler.engine import Engine

load, step = Engine.load, Batch.step

def axes(array):
    return {name: size for name, size in array.sharding.mesh.shape.items() if size > 1}

def load_and_show(self, *arguments, **options):
    load(self, *arguments, **options)
    kernel = self._params["layers"][0]["k"]["kernel"]
    embed_dim, heads, _ = kernel.sharding.shard_shape(kernel.shape)
    whole = "embedding whole" if embed_dim == kernel.shape[0] else "embedding split"
    print(f"sampler weights on {axes(kernel)}: {heads} of {kernel.shape[1]} key heads, {whole}")

def step_and_show(self, params):
    step(self, params)
    keys = self._cache[0][0]
    print(f"sampler cache on {axes(keys)}: {keys.sharding.shard_shape(keys.shape)[1]} of {keys.shape[1]} key heads")

Engine.load, Batch.step = load_and_show, step_and_show
sys.exit(main())
"""


@pytest.mark.parametrize(
    "mesh",
    [("mesh.fsdp=2", "mesh.tensor=2"), pytest.param(("mesh.data=2", "mesh.fsdp=2"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_on_four_devices_a_run_is_the_same_within_rounding(
    game: Path, tmp_path: Path, capsys, mesh: tuple[str, str]
) -> None:
    settings = (*NO_EVALUATION, "warm_start.num_steps=1", "warm_start.learning_rate=1e-3", "spice.num_steps=2")
    flags = "--xla_force_host_platform_device_count=4"
    arguments = ("train", game, *settings, *mesh, f"runs_dir={tmp_path}")
    done = in_process(SHOWS_ITS_SAMPLER, *arguments, XLA_FLAGS=flags)
    assert done.returncode == 0, done.stderr[-3000:]
    # Four devices divide the query heads; each holds a copy of the one of two key heads that it reads, at every step.
    shown = [line for line in done.stdout.splitlines() if line.startswith("sampler ")]
    assert set(shown) == {
        "sampler weights on {'tensor': 4}: 1 of 4 key heads, embedding whole",
        "sampler cache on {'tensor': 4}: 1 of 4 key heads",
    }
    (sharded,) = tmp_path.iterdir()
    alone, _ = train(capsys, game, *settings)
    for row, expected in zip(metrics(sharded), metrics(alone), strict=True):
        assert list(row) == list(expected)
        # Rows are packed for four devices, or two.
        names = [name for name in row if name not in ("learner/padding_frac", "learner/stored_tokens",
                                                      "learner/sharing_ratio")]  # fmt: skip
        values, others = (np.array([each[name] for name in names], float) for each in (row, expected))
        np.testing.assert_allclose(values, others, atol=1e-4)
    assert episodes(sharded) == episodes(alone)


WRONG = [
    (["model.name={tmp}/absent"], 1, "{tmp}/absent: no such model"),
    (["corpus.path={tmp}/absent.jsonl"], 1, "corpus {tmp}/absent.jsonl does not exist"),
    (["evaluation.questions={tmp}/absent.jsonl"], 1, "questions file {tmp}/absent.jsonl cannot be read"),
    (["evaluation.documents=embedded:cooking"], 1, "evaluation.documents = embedded:cooking"),
    (["warm_start.conversations={tmp}/absent.jsonl"], 1, "warm_start.conversations: {tmp}/absent.jsonl"),
    (["mesh.tensor=3"], 2, "mesh.tensor = 3"),
    (["sampler.max_context=100"], 2, "more than sampler.max_context = 100"),
    (["learner.row_tokens=40"], 2, "more than learner.row_tokens = 40"),
    (["sampler.max_context=2048"], 2, "sampler.max_context = 2048 is more than the 1024 positions that the model"),
    (["spice.trains_challenger=false", "spice.trains_reasoner=false"], 2, "nothing would be trained"),
]


@pytest.mark.parametrize(("overrides", "status", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_run_that_cannot_begin_is_one_line_and_leaves_no_directory(
    game: Path, tmp_path: Path, capsys, overrides: list[str], status: int, message: str
) -> None:
    runs = tmp_path / "runs"
    filled = [override.format(tmp=tmp_path) for override in overrides]
    assert main(["train", str(game), f"runs_dir={runs}", *filled]) == status
    err = capsys.readouterr().err
    assert err.startswith("jaxsp: ") and err.count("\n") == 1 and message.format(tmp=tmp_path) in err
    assert list(runs.iterdir()) == []


def test_a_run_that_has_come_to_an_evaluation_keeps_its_directory(tmp_path: Path) -> None:
    config = RunConfig(ModelConfig("m"), runs_dir=str(tmp_path))
    empty, evaluated = make_run_dir(config, "a"), make_run_dir(config, "b")
    for run_dir in (empty, evaluated):
        with MetricsWriter(run_dir), TaskPool(task_pool_path(run_dir)):
            pass
    EvaluationLog(evaluated).write(0, None, None)
    discard_run_dir(empty)
    discard_run_dir(evaluated)
    assert list(tmp_path.iterdir()) == [evaluated]


def test_a_runs_directory_that_cannot_be_made_is_one_line(game: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["train", str(game), f"runs_dir={tmp_path / 'file'}"]) == 1
    assert capsys.readouterr().err.startswith(f"jaxsp: runs_dir = {tmp_path / 'file'}: cannot make ")


FILLS_THE_DISK = """
import resource, signal, sys
from jaxsp import run
from jaxsp.cli import main

save, limits = run.save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

def save_on_a_full_disk(opened, arrays):
    if opened.step == 4:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    save(opened, arrays)

import jaxsp.train
jaxsp.train.save_checkpoint = save_on_a_full_disk
sys.exit(main())
"""


def test_a_disk_that_gets_full_is_one_line_and_the_run_goes_on_from_the_checkpoint_before(
    game: Path, tmp_path: Path, capsys
) -> None:
    settings = (*ONLY_SELF_PLAY, "spice.num_steps=5")
    done = in_process(FILLS_THE_DISK, "train", game, *settings, f"runs_dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.startswith("jaxsp: no space left for a checkpoint in ") and done.stderr.count("\n") == 1
    assert "checkpoint 4 needs up to 0.000" in done.stderr and "complete ones: [2]" in done.stderr
    (run_dir,) = tmp_path.iterdir()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step_000002"]
    resume(capsys, run_dir)
    assert steps(run_dir) == [4, 5]
    assert [row["step"] for row in read_metrics(run_dir)] == [1, 2, 3, 4, 5]
    assert list(episodes(run_dir)) == [1, 2, 3, 4, 5]


def test_a_finished_run_can_be_used_by_every_verb(first_run: Path, tmp_path: Path, capsys) -> None:
    questions = first_run.parents[1] / "questions.jsonl"
    arguments = ["eval", str(first_run), "--questions", str(questions)]  # prompts and lengths are the run's
    assert main([*arguments, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["overall"]
    # The same greedy answers as at the end of training
    assert reported == EvaluationLog(first_run).rows()[-1]["rows"]["reasoner accuracy"]
    assert main(["export", str(first_run), "--out", str(tmp_path / "export"), "--dtype", "float32"]) == 0
    capsys.readouterr()
    arguments = ["eval", str(tmp_path / "export"), *arguments[2:], "--prompts", "compact", "--max-tokens", "8"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["overall"] == reported
