"""An open run: its directory, the parts that play and learn, and the state that a checkpoint holds."""

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from jaxsp.checkpoint import Checkpointer
from jaxsp.config import RunConfig, UsageError, UserError, dump_config
from jaxsp.envs.documents import open_corpus
from jaxsp.evaluate import ANSWER_TYPES, Question, heldout_documents, read_questions
from jaxsp.inference import CONFIG_FILE
from jaxsp.learner.state import TrainState, init_state, state_shardings
from jaxsp.mesh import make_mesh, shardable, shardings
from jaxsp.methods import spice
from jaxsp.methods.phase import Method
from jaxsp.metrics import EpisodeLog, MetricsWriter, read_metrics
from jaxsp.model.decoder import Params, abstract_params, logical_axes
from jaxsp.model.source import load_params
from jaxsp.policy import TextSide, check_vocabulary, make_sampler, make_setting, open_text_side, sampler_mesh
from jaxsp.progress import Progress
from jaxsp.report import EvaluationLog, read_seconds, write_seconds
from jaxsp.rollout.prompts import PROMPTS
from jaxsp.rollout.roles import Setting
from jaxsp.sampler.engine import Engine
from jaxsp.task_pool import TaskPool, task_pool_path
from jaxsp.verifiers.process_pool import ProcessPool


def make_run_dir(config: RunConfig, name: str) -> Path:
    """A new directory `runs_dir/NAME-DATE-TIME` that holds the resolved config. Raises `UserError` if it cannot be."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 100))):
        run_dir = Path(config.runs_dir) / f"{name}-{stamp}{suffix}"
        try:
            run_dir.mkdir(parents=True)
            (run_dir / CONFIG_FILE).write_text(dump_config(config))
            return run_dir
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"runs_dir = {config.runs_dir}: cannot make {run_dir}: {error.strerror}") from error
    raise UserError(f"runs_dir = {config.runs_dir} holds too many runs of this second")


def discard_run_dir(run_dir: Path) -> None:
    """Deletes a directory that `make_run_dir` made for a run that came to no evaluation and no step."""
    results = ("metrics.jsonl", "evaluations.jsonl", "evaluations/*", "episodes/*")
    if not any(path.stat().st_size for name in results for path in run_dir.glob(name)):
        shutil.rmtree(run_dir, ignore_errors=True)


@dataclass(frozen=True, eq=False)
class Parts:
    """What a config names, opened and found to fit together; no weights are read and nothing is written."""

    text: TextSide
    mesh: jax.sharding.Mesh
    sampler_mesh: jax.sharding.Mesh
    param_shardings: Params
    engine: Engine
    setting: Setting
    method: Method
    questions: list[Question]
    """What the reasoner is evaluated on; nothing where the config names none."""
    documents: list[str]
    """What the challenger is evaluated on; likewise."""


def open_parts(config: RunConfig, pool: ProcessPool) -> Parts:
    """Opens everything that play and learning need. Raises `UserError` naming the field or file that is wrong."""
    if config.mesh.context != 1:
        raise UsageError(f"mesh.context = {config.mesh.context}: nothing is split over it yet; set it to 1")
    text = open_text_side(config.model)
    sizes = text.source.sizes
    if config.mesh.expert != 1 and sizes.moe is None:
        raise UsageError(f"mesh.expert = {config.mesh.expert}: the model has no experts to split over it; set it to 1")
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.context, config.mesh.expert, config.mesh.tensor)
    axes = logical_axes(sizes)
    jax.tree.map(lambda shape, names: shardable(mesh, names, shape.shape), abstract_params(sizes), axes)
    decoding = sampler_mesh(mesh, sizes)
    engine = make_sampler(sizes, text.tokenizer, config.sampler, config.model.compute_dtype, decoding)
    setting = make_setting(text, engine.generate, PROMPTS[config.spice.prompts], pool)
    max_segment_tokens = config.corpus.max_segment_tokens
    corpus = open_corpus(
        config.corpus.path, seed=config.seed, max_segment_tokens=max_segment_tokens, encode=text.tokenizer.encode
    )
    method = spice.make_method(config, setting, corpus, text.renderer.supervised)
    ask, show = config.evaluation.questions, config.evaluation.documents
    questions = read_questions(ask) if ask is not None else []
    documents = heldout_documents(show, text.tokenizer, max_segment_tokens) if show is not None else []
    _check_lengths(config, text, questions, documents)
    return Parts(text, mesh, decoding, shardings(mesh, axes), engine, setting, method, questions, documents)


_SLACK_TOKENS = 8
"""What a text may take more inside a prompt than on its own, where it merges with its neighbours in another way."""


def _check_lengths(config: RunConfig, text: TextSide, questions: Sequence[Question], documents: Sequence[str]) -> None:
    """Raises `UsageError` if a prompt and its reply can be longer than a slot of the sampler or a row of the learner.

    A document has at most `corpus.max_segment_tokens`, and a question no more than the challenger's reply.
    """
    game, prompts = config.spice, PROMPTS[config.spice.prompts]
    segment = f"corpus.max_segment_tokens = {config.corpus.max_segment_tokens}"
    reply = f"spice.challenger_max_tokens = {game.challenger_max_tokens}"
    answer = f"spice.reasoner_max_tokens = {game.reasoner_max_tokens}"

    def about(document: str) -> int:
        calls = [prompts.type_messages(document), *(prompts.question_messages(document, t) for t in ANSWER_TYPES)]
        return max(len(text.renderer.prompt(messages)) for messages in calls)

    def ask(question: str) -> int:
        return len(text.renderer.prompt(prompts.reasoner_messages(question)))

    # What it is about, the tokens of its prompt, of the reply, what both are made of, and whether it is trained on
    longest = [
        ("an attempt of the challenger", about("") + config.corpus.max_segment_tokens + _SLACK_TOKENS,
         game.challenger_max_tokens, f"{segment}, {reply}", game.trains_challenger),
        ("an answer of the reasoner", ask("") + game.challenger_max_tokens + _SLACK_TOKENS,
         game.reasoner_max_tokens, f"{reply} for the question, {answer}", game.trains_reasoner),
        ("an answer to evaluation.questions", max((ask(question.text) for question in questions), default=0),
         game.reasoner_max_tokens, answer, False),
        ("an attempt at evaluation.documents", max(map(about, documents), default=0),
         game.challenger_max_tokens, reply, False),
    ]  # fmt: skip
    problems = []
    for what, num_prompt, num_reply, fields, is_trained in longest:
        limits = {"sampler.max_context": config.sampler.max_context}
        if is_trained:
            limits["learner.row_tokens"] = config.learner.row_tokens
        total = num_prompt + num_reply
        short = " and ".join(f"{name} = {limit}" for name, limit in limits.items() if limit < total)
        if short and num_prompt:
            problems.append(f"{what} can take {total} tokens with its prompt ({fields}), more than {short}")
    if problems:
        raise UsageError(f"{'; '.join(problems)}: raise what is exceeded or lower what it is made of")


@dataclass(eq=False)
class Run:
    """The parts of an open run, and the little of it that changes from step to step."""

    config: RunConfig
    run_dir: Path
    parts: Parts
    checkpointer: Checkpointer
    metrics: MetricsWriter
    episodes: EpisodeLog
    tasks: TaskPool
    evaluations: EvaluationLog
    progress: Progress
    console: Console
    step: int = 0
    """Steps done, over all phases."""
    baselines: dict[str, float] = field(default_factory=dict)
    """The roles' moving baselines (`learner.advantage` = role_ema)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall time per part, over all sittings of the run."""

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Adds the wall time of the block to `seconds[part]`."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - start_s

    def write_seconds(self) -> None:
        """Keeps `seconds` on disk, for reports and for the next sitting."""
        write_seconds(self.run_dir, self.seconds)


@contextlib.contextmanager
def open_run(config: RunConfig, run_dir: Path, pool: ProcessPool, console: Console, is_resume: bool) -> Iterator[Run]:
    """Opens every part of a run; on resume, goes to its newest checkpoint and drops what was written after it.

    Raises `UserError` naming the field or file that is wrong, before anything is changed on disk.
    """
    parts = open_parts(config, pool)
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(Checkpointer(run_dir / "checkpoints", keep=config.checkpoint.keep))
        step = (checkpointer.latest_step() or 0) if is_resume else 0
        manifest = checkpointer.read_manifest(step) if step else None
        if manifest is not None:
            parts.method.restore(manifest["method"])
        tasks = stack.enter_context(TaskPool(task_pool_path(run_dir)))
        episodes, evaluations = EpisodeLog(run_dir), EvaluationLog(run_dir)
        seconds, _, _ = read_seconds(run_dir), read_metrics(run_dir), evaluations.rows()  # all of them, or nothing goes
        if is_resume:
            tasks.drop_after(step)
            episodes.drop_after(step)
            evaluations.drop_after(step)
        total = sum(phase.num_steps for phase in parts.method.phases)
        yield Run(
            config=config, run_dir=run_dir, parts=parts, checkpointer=checkpointer,
            metrics=stack.enter_context(MetricsWriter(run_dir, resume_step=step if is_resume else None)),
            episodes=episodes, tasks=tasks, evaluations=evaluations,
            progress=stack.enter_context(Progress(total, "run", start_step=step, console=console)),
            console=console, step=step, baselines=dict((manifest or {}).get("baselines", {})), seconds=seconds,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Arrays:
    """What a run keeps on the device between steps. `reference` is the policy at the phase's start, if KL needs it."""

    state: TrainState
    reference: Params | None

    def tree(self) -> dict[str, Any]:
        return {"state": self.state, "reference": self.reference or {}}


def begin_phase(
    run: Run, optimizer: optax.GradientTransformation, params: Params | None, has_reference: bool
) -> Arrays:
    """Fresh optimizer state around `params`, which are loaded from the model where there are none yet."""
    if params is None:
        params = load_params(run.parts.text.source, dtype=jnp.float32, shardings=run.parts.param_shardings)
        check_vocabulary(run.parts.text, params)
    reference = jax.tree.map(jnp.copy, params) if has_reference else None
    return Arrays(init_state(params, optimizer, run.parts.param_shardings), reference)


def restore_arrays(run: Run, optimizer: optax.GradientTransformation, has_reference: bool) -> Arrays:
    """The arrays of the checkpoint at the run's step, on the run's mesh."""
    abstract = abstract_arrays(run.parts.text.source.sizes, optimizer, run.parts.param_shardings, has_reference)
    tree, _ = run.checkpointer.restore(run.step, abstract)
    return Arrays(tree["state"], tree["reference"] or None)


def restore_params(run: Run) -> Params:
    """The parameters alone of the checkpoint at the run's step, whatever optimizer they were saved with."""
    abstract = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        abstract_params(run.parts.text.source.sizes),
        run.parts.param_shardings,
    )
    return run.checkpointer.restore_part(run.step, ("state", "params"), abstract)


def abstract_arrays(
    sizes: Any, optimizer: optax.GradientTransformation, param_shardings: Params, has_reference: bool
) -> dict[str, Any]:
    """`Arrays.tree()` as shapes with shardings."""
    params = abstract_params(sizes)
    state = {
        "params": params,
        "opt_state": jax.eval_shape(optimizer.init, params),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    tree = {"state": state, "reference": params if has_reference else {}}
    placed = {
        "state": state_shardings(optimizer, params, param_shardings),
        "reference": param_shardings if has_reference else {},
    }
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), tree, placed
    )


def save_checkpoint(run: Run, arrays: Arrays) -> None:
    """Begins to save everything that the run needs to go on, unless this step is saved already."""
    manifest = {"method": run.parts.method.state(), "baselines": run.baselines}
    run.checkpointer.save(run.step, arrays.tree(), manifest)
