"""A run that ends at any place goes on to the same bits as one that never ended.

One run of three steps of warm start and four of self-play is the reference, with checkpoints at steps 2, 3 (the
phase's end), 4, 6 and 7, and evaluations at steps 3, 5 and 7.
"""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxsp.cli import main
from jaxsp.metrics import read_metrics
from jaxsp.report import EvaluationLog
from tests.integration.tiny_spice import (
    assert_same_runs,
    episodes,
    in_process,
    metrics,
    resume,
    saved,
    steps,
    tasks,
    train,
)

SETTINGS = ("warm_start.num_steps=3", "warm_start.learning_rate=1e-3", "spice.num_steps=4", "evaluation.every_steps=2")

STOPS_ITSELF = """
# Sends itself SIGNAL at the CALL-th return from OWNER.METHOD, when the checkpoint of STEP (0: none) is on the disk.
import importlib, os, pathlib, signal, sys, time
from jaxsp.cli import main

number, owner, method, call, step, run_dir = sys.argv[1:7]
module, name = owner.rsplit(".", 1)
owner = getattr(importlib.import_module(module), name)
original, calls = getattr(owner, method), 0

def is_saved():
    return step == "0" or any(pathlib.Path(run_dir).glob(f"**/checkpoints/step_{int(step):06d}"))

def stopped(*arguments, **options):
    global calls
    result = original(*arguments, **options)
    calls += 1
    if calls == int(call):
        deadline = time.monotonic() + 60
        while not is_saved() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), getattr(signal, number))
    return result

setattr(owner, method, stopped)
sys.exit(main(["train", *sys.argv[7:]]))
"""


@pytest.fixture(scope="module")
def printed() -> io.StringIO:
    """What the run that never ended has printed."""
    return io.StringIO()


@pytest.fixture(scope="module")
def whole(game: Path, printed: io.StringIO, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that never ended. Evaluations keep the rhythm of self-play, though it begins at an odd step."""
    runs = tmp_path_factory.mktemp("whole")
    with contextlib.redirect_stdout(printed):
        assert main(["train", str(game), *SETTINGS, f"runs_dir={runs}"]) == 0
    (run_dir,) = runs.iterdir()
    assert steps(run_dir) == [6, 7]
    assert [row["step"] for row in EvaluationLog(run_dir).rows()] == [3, 5, 7]
    assert sum(row["policy/updates"] for row in read_metrics(run_dir)[3:]) >= 3  # there is something to lose
    return run_dir


def stop_at(
    game: Path, runs: Path, number: str, method: str, call: int, step: int
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The directory of a run that got a signal, and how its process ended."""
    owner, _, method = method.rpartition(".")
    arguments = (number, owner, method, str(call), str(step), runs, game, *SETTINGS, f"runs_dir={runs}")
    done = in_process(STOPS_ITSELF, *arguments)
    found = list(runs.iterdir())
    assert len(found) == 1, done.stderr[-3000:]
    return found[0], done


KILLED = {
    # When the n-th call has returned and the checkpoint of a step is complete
    "before its first checkpoint": ("jaxsp.metrics.MetricsWriter.write", 1, 0),
    "in the warm start": ("jaxsp.metrics.MetricsWriter.write", 3, 2),
    "between the phases": ("jaxsp.report.EvaluationLog.write", 1, 3),
    "in a step of self-play": ("jaxsp.metrics.EpisodeLog.write", 3, 4),
    "before the last evaluation": ("jaxsp.metrics.MetricsWriter.write", 7, 6),
}


SLOW = {"before its first checkpoint", "before the last evaluation"}
PLACES = [pytest.param(place, marks=[pytest.mark.slow] if place in SLOW else []) for place in KILLED]


@pytest.mark.parametrize("place", PLACES)
def test_a_killed_run_goes_on_to_the_same_bits(game: Path, whole: Path, tmp_path: Path, capsys, place: str) -> None:
    method, call, step = KILLED[place]
    run_dir, done = stop_at(game, tmp_path, "SIGKILL", method, call, step)
    assert done.returncode == -9, done.stderr[-3000:]
    assert (steps(run_dir) or [0])[-1] == step
    assert metrics(run_dir) == metrics(whole)[: len(read_metrics(run_dir))]
    if place == "in a step of self-play":  # step 5 has left tasks and episodes and nothing else
        assert [row["step"] for row in read_metrics(run_dir)][-1] == 4
        assert list(episodes(run_dir)) == [4, 5] and tasks(run_dir)[-1].step == 5
    out, err = resume(capsys, run_dir)
    assert err == "" and "before: step 3, after: step 7" in out
    assert_same_runs(run_dir, whole)


STOPPED = {
    # When the n-th call has returned: the step that it ends at, and the evaluations there are
    "in self-play": ("jaxsp.metrics.EpisodeLog.write", 3, 5, [3]),
    "at the end of the warm start": ("jaxsp.sampler.engine.Engine.load", 4, 3, []),
    "in an evaluation": ("jaxsp.report.EvaluationLog.write", 2, 5, [3, 5]),
    "in the last step": ("jaxsp.metrics.MetricsWriter.write", 7, 7, [3, 5]),
}


@pytest.mark.parametrize("place", STOPPED)
def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(
    game: Path, whole: Path, tmp_path: Path, capsys, place: str
) -> None:
    method, call, step, evaluated = STOPPED[place]
    run_dir, done = stop_at(game, tmp_path, "SIGTERM", method, call, 0)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.strip() == "jaxsp: stopping after this step or evaluation; Ctrl-C (again) stops at once"
    assert "stopped before the end; go on with:" in done.stdout
    assert f"jaxsp train --resume {run_dir}" in done.stdout
    assert steps(run_dir)[-1] == step and read_metrics(run_dir)[-1]["step"] == step
    assert [row["step"] for row in EvaluationLog(run_dir).rows()] == evaluated
    resume(capsys, run_dir)
    assert steps(run_dir) == [6, 7]
    assert_same_runs(run_dir, whole)


OTHER_LEARNER = (
    "learner.objective=gspo", "learner.clip_low=0.01", "learner.clip_high=0.01", "learner.advantage=role_ema",
    "learner.kl_coef=0.1", "learner.kl_in=reward", "learner.kl_estimator=k1", "learner.importance=sequence",
    "learner.overlong=penalise", "learner.overlong_buffer=4", "learner.trajectories_per_update=4",
    "learner.optimizer=muon", "learner.learning_rate=0.01", "learner.schedule=cosine", "learner.warmup_updates=1",
    "learner.schedule_updates=12", "warm_start.conversations=null", "spice.num_steps=3", "checkpoint.every_steps=1",
    "checkpoint.keep=3", "evaluation.questions=null", "evaluation.documents=null",
)  # fmt: skip


def test_a_run_with_other_objectives_goes_on_to_the_same_bits(game: Path, tmp_path: Path, capsys) -> None:
    uninterrupted, _ = train(capsys, game, *OTHER_LEARNER, f"runs_dir={tmp_path / 'runs'}")
    rows = read_metrics(uninterrupted)
    assert max(row["policy/updates"] for row in rows) > 1 and all(row["policy/kl"] >= 0 for row in rows)
    assert rows[-1]["learner/kl_penalty_mean"] != 0 and rows[-1]["learner/skipped_updates"] == 0
    baselines = [saved(uninterrupted, step)[1]["baselines"] for step in (1, 2, 3)]
    assert set(baselines[0]) == {"challenger", "reasoner"} and baselines[0] != baselines[1] != baselines[2]
    run_dir = shutil.copytree(uninterrupted, tmp_path / "run")
    for step in (2, 3):
        shutil.rmtree(run_dir / "checkpoints" / f"step_{step:06d}")
    resume(capsys, run_dir)
    assert_same_runs(run_dir, uninterrupted)


def test_a_report_is_the_table_that_the_run_printed_once_more(whole: Path, printed: io.StringIO, capsys) -> None:
    assert main(["report", str(whole)]) == 0
    table = capsys.readouterr().out
    assert "evaluation" in table and "checkpoint" in table and table in printed.getvalue()


def test_a_finished_run_prints_its_table_and_trains_nothing(whole: Path, tmp_path: Path, capsys) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    out, err = resume(capsys, run_dir)
    assert err == "" and "before: step 3, after: step 7" in out and f"jaxsp report {run_dir}" in out
    assert_same_runs(run_dir, whole)
    assert (run_dir / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_what_a_power_cut_leaves_of_a_line_is_left_out(whole: Path, tmp_path: Path, capsys) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 7, "ro')
    resume(capsys, run_dir)
    assert_same_runs(run_dir, whole)


def test_a_run_belongs_to_one_process(whole: Path, tmp_path: Path, capsys) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    program = """
import sys
from jaxsp.checkpoint import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(run_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        _, err = resume(capsys, run_dir, status=1)
        holder.communicate("")
    expected = rf"jaxsp: run directory {re.escape(str(run_dir))} is in use by pid {holder.pid} on \S+; wait for it.*\n"
    assert re.fullmatch(expected, err)
    assert_same_runs(run_dir, whole)


def damage_arrays(run_dir: Path) -> None:
    files = [path for path in (run_dir / "checkpoints" / "step_000007" / "arrays").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def manifest_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "step_000007" / "manifest" / "metadata"


def damage_manifest(run_dir: Path) -> None:
    manifest_of(run_dir).write_text("{")


def another_format(run_dir: Path) -> None:
    manifest = manifest_of(run_dir)
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format_version": 9}))


def another_corpus(run_dir: Path) -> None:
    config = run_dir / "config.yaml"
    config.write_text(config.read_text().replace("max_segment_tokens: 64", "max_segment_tokens: 63"))


DAMAGES = {
    "arrays": (damage_arrays, 1, r"checkpoint .*step_000007 is damaged \(.*\); delete it to go on from step 6"),
    "manifest": (damage_manifest, 1, r"checkpoint .*step_000007 is damaged \(its manifest .*\); delete it to go on"),
    "format": (another_format, 1, r"has format 9, this program reads format 1; resume with the version that wrote it"),
    "corpus": (another_corpus, 1, r"corpus: the saved position is for max_segment_tokens = 64, this run has 63"),
    "config": (lambda run_dir: (run_dir / "config.yaml").unlink(), 1, r"is no run directory: it has no config\.yaml"),
    "yaml": (lambda run_dir: (run_dir / "config.yaml").write_text("a: ["), 2, r"config\.yaml is not readable YAML"),
    "metrics": (lambda run_dir: (run_dir / "metrics.jsonl").write_text("x\n"), 1, r"metrics\.jsonl:1 is not a row"),
    "seconds": (lambda run_dir: (run_dir / "seconds.json").write_text("[]"), 1, r"seconds\.json does not hold the s"),
    "tasks": (lambda run_dir: (run_dir / "tasks.sqlite").write_bytes(b"x" * 9000), 1, r"tasks\.sqlite is not a task"),
    "evaluations": (lambda run_dir: (run_dir / "evaluations.jsonl").write_text("x\n"), 1, r"evaluations\.jsonl:1 is"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_damaged_is_named_in_one_line(whole: Path, tmp_path: Path, capfd, what: str) -> None:
    damage, status, message = DAMAGES[what]
    run_dir = shutil.copytree(whole, tmp_path / "run")
    damage(run_dir)
    _, err = resume(capfd, run_dir, status)
    assert err.startswith("jaxsp: ") and err.count("\n") == 1 and re.search(message, err)
    if what == "arrays":  # what the message says helps
        shutil.rmtree(run_dir / "checkpoints" / "step_000007")
        resume(capfd, run_dir)
        assert_same_runs(run_dir, whole)


@pytest.mark.parametrize("what", ["metrics", "evaluations", "seconds"])
def test_where_one_file_is_damaged_nothing_is_dropped_from_the_others(
    whole: Path, tmp_path: Path, capfd, what: str
) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints" / "step_000007")
    DAMAGES[what][0](run_dir)
    names = [path for path in run_dir.rglob("*") if path.suffix in (".jsonl", ".gz", ".json")]
    before = {path: path.read_bytes() for path in names}
    resume(capfd, run_dir, status=1)
    assert {path: path.read_bytes() for path in names} == before
    assert tasks(run_dir) == tasks(whole)


def test_without_any_checkpoint_left_the_run_begins_anew(whole: Path, tmp_path: Path, capsys) -> None:
    run_dir = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    resume(capsys, run_dir)
    assert_same_runs(run_dir, whole)
