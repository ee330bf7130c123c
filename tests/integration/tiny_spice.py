"""A game of SPICE that a model of 36 thousand parameters learns in two seconds, and runs of it.

The warm start teaches the compact format from scratch: a challenger that asks sums, at times in no format, and a
reasoner that is right about half of the time, so that steps of self-play have valid and invalid attempts and groups
of mixed outcome.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxsp.checkpoint import Checkpointer
from jaxsp.cli import main
from jaxsp.config import RunConfig
from jaxsp.inference import read_run_config
from jaxsp.learner.optimizers import make_optimizer
from jaxsp.mesh import make_mesh, shardings
from jaxsp.metrics import EpisodeLog, read_metrics
from jaxsp.model.decoder import logical_axes
from jaxsp.model.source import open_model
from jaxsp.report import EvaluationLog
from jaxsp.rollout.prompts import compact
from jaxsp.run import abstract_arrays
from jaxsp.task_pool import TaskPool, task_pool_path
from jaxsp.trajectory import Task

SUMS = ((2, 3), (4, 1), (5, 2))
TEACHING_STEPS = 60
RUN_MAIN = "import sys; from jaxsp.cli import main; sys.exit(main())"


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations() -> list[dict[str, Any]]:
    """What the warm start imitates."""
    rows = []
    for first, second in SUMS:
        document = f"{first} and {second} make {first + second}."
        calls = [(compact.type_messages(document), word) for word in ("number", "number", "number", "hm")]
        for x, y in SUMS:
            asked = compact.format_question(f"What is {x} + {y}?", str(x + y))
            calls.append((compact.question_messages(document, "integer"), asked))
        reasoner = compact.reasoner_messages(f"What is {first} + {second}?")
        calls += [(reasoner, f"\\boxed{{{answer}}}") for answer in (first + second, first + second, first, second)]
        rows += [{"messages": [*asked, {"role": "assistant", "content": reply}]} for asked, reply in calls]
    return rows


def write_game(directory: Path, model: Path) -> Path:
    """The corpus, the conversations, the questions and `tiny.yaml`, a config of 60 + 4 steps; returns its path."""
    documents = [{"id": f"sum{x}{y}", "text": f"{x} and {y} make {x + y}."} for x, y in SUMS]
    corpus = write_lines(directory / "corpus.jsonl", documents)
    heldout = write_lines(directory / "heldout.jsonl", documents)
    taught = write_lines(directory / "conversations.jsonl", conversations())
    asked = [{"question": f"What is {x} + {y}?", "answer": str(x + y), "kind": f"from {x}"} for x, y in SUMS]
    questions = write_lines(directory / "questions.jsonl", asked)
    path = directory / "tiny.yaml"
    # Short rows, few slots and one bucket of prompts: few programs to compile.
    path.write_text(f"""\
runs_dir: {directory / "runs"}
model:
  name: {model}
  compute_dtype: float32
  system_prompt: null
corpus:
  path: {corpus}
  max_segment_tokens: 64
warm_start:
  conversations: {taught}
  num_steps: {TEACHING_STEPS}
  batch_size: 33
  learning_rate: 0.01
spice:
  num_steps: 4
  documents_per_step: 2
  group_size: 4
  attempts_per_round: 4
  max_attempts: 8
  prompts: compact
  challenger_max_tokens: 32
  reasoner_max_tokens: 8
learner:
  learning_rate: 0.001
  row_tokens: 192
sampler:
  num_slots: 4
  max_context: 192
  prefill_tokens: 192
evaluation:
  questions: {questions}
  documents: {heldout}
  every_steps: 2
  challenger_samples: 2
verifier:
  num_workers: 1
checkpoint:
  every_steps: 2
  keep: 2
""")
    return path


def train(capsys: Any, config: Path, *overrides: str, status: int = 0) -> tuple[Path, str]:
    """Runs `jaxsp train` here; the new run's directory, and what it printed."""
    assert main(["train", str(config), *overrides]) == status
    out = capsys.readouterr().out
    found = re.search(r"run directory: (.+)", out)
    assert found is not None
    return Path(found[1]), out


def resume(capsys: Any, run_dir: Path, status: int = 0) -> tuple[str, str]:
    """Runs `jaxsp train --resume` here; what it printed to standard output and error."""
    assert main(["train", "--resume", str(run_dir)]) == status
    captured = capsys.readouterr()
    return captured.out, captured.err


def in_process(program: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `program` with the command line `arguments` in a Python of its own, at the repository's root."""
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )


def steps(run_dir: Path) -> list[int]:
    with Checkpointer(run_dir / "checkpoints", is_read_only=True) as checkpointer:
        return checkpointer.steps()


def saved(run_dir: Path, step: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Every array of a checkpoint (None: the newest) by its place in the tree, and the manifest."""
    config = read_run_config(run_dir)
    sizes = open_model(config.model.name).sizes
    placed = shardings(make_mesh(1, 1, 1, 1, 1, jax.devices()[:1]), logical_axes(sizes))
    with Checkpointer(run_dir / "checkpoints", is_read_only=True) as checkpointer:
        step = checkpointer.steps()[-1] if step is None else step
        is_self_play = step > _num_warm_start_steps(config)
        has_number = is_self_play and config.learner.schedule == "constant" and not config.learner.warmup_updates
        learning_rate = config.learner.learning_rate if has_number else lambda count: 0.0 * count
        has_reference = is_self_play and config.learner.kl_coef > 0
        optimizer = make_optimizer(learning_rate, config.learner.optimizer)
        tree, manifest = checkpointer.restore(step, abstract_arrays(sizes, optimizer, placed, has_reference))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, manifest


def _num_warm_start_steps(config: RunConfig) -> int:
    return config.warm_start.num_steps if config.warm_start.conversations else 0


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` without what the clock and earlier work of the process have a part in."""
    return [
        {name: value for name, value in row.items() if not name.endswith(("_s", "num_compilations"))}
        for row in read_metrics(run_dir)
    ]


def episodes(run_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Every step's episodes."""
    log = EpisodeLog(run_dir)
    numbers = (int(path.name[5:11]) for path in sorted((run_dir / "episodes").glob("*.jsonl.gz")))
    return {step: log.read(step) for step in numbers}


def tasks(run_dir: Path) -> list[Task]:
    with TaskPool(task_pool_path(run_dir)) as pool:
        return pool.tasks()


def assert_same_runs(found: Path, expected: Path) -> None:
    """The same bits: parameters, optimizer state, metrics, episodes, tasks, evaluations and place in the corpus."""
    assert steps(found) == steps(expected)
    arrays, manifest = saved(found)
    expected_arrays, expected_manifest = saved(expected)
    assert list(arrays) == list(expected_arrays)
    for name, array in arrays.items():
        assert array.tobytes() == expected_arrays[name].tobytes(), name
    assert manifest == expected_manifest
    assert metrics(found) == metrics(expected)
    assert episodes(found) == episodes(expected)
    assert tasks(found) == tasks(expected)
    assert EvaluationLog(found).rows() == EvaluationLog(expected).rows()
