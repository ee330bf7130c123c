"""The program: for each phase, play, learn, hand the new weights to the sampler, write everything down.

Host processes start before JAX does. Every random draw follows from the run's seed and the names of who draws, and
one checkpoint holds all that changes, so a run that is killed and resumed ends with the same bits (on CPU).
"""

import asyncio
import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from jaxsp.checkpoint import RunLock
from jaxsp.config import RunConfig, UsageError
from jaxsp.evaluate import evaluate_challenger, evaluate_reasoner
from jaxsp.learner.learn import Packing, PolicyGradient, imitate, reinforce
from jaxsp.learner.objectives import OBJECTIVES
from jaxsp.learner.optimizers import make_optimizer
from jaxsp.learner.policy_loss import PolicyLoss
from jaxsp.learner.state import TrainState
from jaxsp.learner.update import make_logprobs_fn, make_update, make_warm_start_update
from jaxsp.mesh import initialize_distributed, num_parts, partition_spec
from jaxsp.methods.phase import Phase, StepPlace
from jaxsp.model.decoder import Params
from jaxsp.report import print_report
from jaxsp.rollout.collect import Played
from jaxsp.rollout.roles import Sampling
from jaxsp.run import Arrays, Run, begin_phase, open_run, restore_arrays, restore_params, save_checkpoint
from jaxsp.trajectory import Group
from jaxsp.verifiers.verify import make_verifier_pool

Learn = Callable[[TrainState, tuple[Group, ...]], tuple[TrainState, dict[str, float]]]


def train(config: RunConfig, run_dir: Path, *, is_resume: bool, console: Console) -> bool:
    """Runs the schedule of `config` in `run_dir`, from its newest checkpoint if `is_resume`; True if it got to the end.

    SIGTERM and the first Ctrl-C finish the step, save and stop. Raises `UserError` for what the user can mend.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(RunLock(run_dir))
        pool = stack.enter_context(make_verifier_pool(config.verifier.num_workers, config.verifier.timeout_s))
        if initialize_distributed() and jax.process_count() > 1:
            raise UsageError("training runs in one process: start it on one host, whose devices `mesh` describes")
        run = stack.enter_context(open_run(config, run_dir, pool, console, is_resume))
        schedule = ", ".join(f"{phase.num_steps} steps of {phase.name}" for phase in run.parts.method.phases)
        console.print(f"run directory: {run_dir}", highlight=False, soft_wrap=True)
        console.print(
            f"schedule: {schedule}; new shapes are compiled in the first steps", highlight=False, soft_wrap=True
        )
        should_stop = stack.enter_context(_stop_signals())
        is_done = asyncio.run(_run_schedule(run, should_stop))
    if is_done:
        print_report(run_dir, console)
    return is_done


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """A function that says whether SIGTERM or Ctrl-C came; a second Ctrl-C interrupts at once."""
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        received.append(number)
        # Past Python's own streams: a signal may come in the middle of what they write.
        os.write(2, b"\njaxsp: stopping after this step or evaluation; Ctrl-C (again) stops at once\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


async def _run_schedule(run: Run, should_stop: Callable[[], bool]) -> bool:
    """Every phase from where the run stands; False if it was asked to stop before the end."""
    arrays: Arrays | None = None
    first_step = 0
    for number, phase in enumerate(run.parts.method.phases):
        last_step = first_step + phase.num_steps
        is_last_phase = number == len(run.parts.method.phases) - 1
        if run.step < last_step or (is_last_phase and run.step == last_step):
            arrays, learn = _enter_phase(run, phase, None if arrays is None else arrays.state["params"], first_step)
            run.progress.phase(phase.name, phase.num_steps, done=run.step - first_step)
            while run.step < last_step or _is_evaluation_due(run, phase, run.step - first_step):
                if _is_evaluation_due(run, phase, run.step - first_step) and not should_stop():
                    await _evaluate(run)
                if run.step < last_step and not should_stop():
                    arrays = await _one_step(run, phase, learn, arrays, run.step - first_step)
                is_regular = run.step == last_step or run.step % run.config.checkpoint.every_steps == 0
                if run.step and (is_regular or should_stop()):
                    with run.measure("checkpoint"):
                        save_checkpoint(run, arrays)
                run.write_seconds()
                is_over = run.step == last_step and not _is_evaluation_due(run, phase, phase.num_steps)
                if should_stop() and not (is_last_phase and is_over):
                    return False
        first_step = last_step
    return True


async def _one_step(run: Run, phase: Phase, learn: Learn, arrays: Arrays, step_in_phase: int) -> Arrays:
    """Plays, learns, and hands the weights on; then writes the step's records."""
    start_s = time.monotonic()
    seconds_before = dict(run.seconds)
    run.parts.engine.reset_stats()
    run.parts.engine.forget_prefixes()  # an evaluation's, which a resumed run does not make again
    with run.measure("rollout"):
        played = await phase.play(StepPlace(run.step, step_in_phase, run.config.seed, run.progress.activity))
    with run.measure("update"):
        run.progress.activity("update", 0, 1)
        state, learned = learn(arrays.state, played.groups)
    with run.measure("sync"):
        run.parts.engine.load(state["params"], policy_version=run.step + 1)
    run.checkpointer.check()
    run.step += 1
    with run.tasks.transaction():
        run.tasks.add(played.tasks)
        run.tasks.record_uses(played.trained_task_ids, run.step)
    for alarm in played.alarms:
        run.progress.log(f"warning: {alarm}")
    if played.episodes:
        run.episodes.write(run.step, played.episodes)
    times = {
        f"time/{part}_s": run.seconds[part] - seconds_before.get(part, 0.0) for part in ("rollout", "update", "sync")
    }
    sampled = run.parts.engine.stats() if played.episodes else {}
    run.metrics.write(run.step, {**played.metrics, **learned, **sampled, **times})
    run.progress.advance(time.monotonic() - start_s, **_shown(played, learned))
    return Arrays(state, arrays.reference)


def _shown(played: Played, learned: dict[str, float]) -> dict[str, float]:
    names = {"valid": "challenger/valid_frac", "reward": "challenger/reward_mean", "accuracy": "reasoner/accuracy_frac"}
    shown = {label: played.metrics[name] for label, name in names.items() if name in played.metrics}
    return shown or {"loss": learned.get("policy/loss", 0.0)}


def _enter_phase(run: Run, phase: Phase, params: Params | None, first_step: int) -> tuple[Arrays, Learn]:
    """The arrays at the run's place in `phase`, loaded into the sampler, and the function that learns in it.

    They are handed on from the phase before (`params`), restored from the checkpoint, or fresh from the model.
    """
    learner = run.config.learner
    optimizer = make_optimizer(
        phase.learning_rate,
        learner.optimizer,
        beta1=learner.beta1,
        beta2=learner.beta2,
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
    )
    has_reference = phase.objective == "reinforce" and learner.kl_coef > 0
    run.progress.activity("weights", 0, 1)
    with run.measure("load"):
        if params is None and run.step > first_step:
            arrays = restore_arrays(run, optimizer, has_reference)
        elif params is None and run.step:  # at the end of the phase before: its weights, and a fresh optimizer
            arrays = begin_phase(run, optimizer, restore_params(run), has_reference)
        else:
            arrays = begin_phase(run, optimizer, params, has_reference)
        run.parts.engine.load(arrays.state["params"], policy_version=run.step)
    return arrays, _make_learn(run, phase, optimizer, arrays.reference)


def _make_learn(run: Run, phase: Phase, optimizer: optax.GradientTransformation, reference: Params | None) -> Learn:
    learner, mesh = run.config.learner, run.parts.mesh
    common = {
        "compute_dtype": jnp.dtype(run.config.model.compute_dtype),
        "logits_chunk": learner.logits_chunk,
        "param_shardings": run.parts.param_shardings,
        "batch_sharding": jax.sharding.NamedSharding(mesh, partition_spec((None, "batch"))),
    }
    packing = Packing(learner.row_tokens, learner.rows_per_microbatch, row_multiple=num_parts(mesh, "batch"))
    sizes = run.parts.text.source.sizes
    if phase.objective == "imitate":
        return functools.partial(imitate, make_warm_start_update(sizes, optimizer, **common), packing)
    policy_loss = PolicyLoss(
        objective=learner.objective,
        clip_low=learner.clip_low,
        clip_high=learner.clip_high,
        importance=learner.importance,
        importance_cap=learner.importance_cap,
        importance_low=learner.importance_low,
        importance_high=learner.importance_high,
        kl_coef=learner.kl_coef if learner.kl_in == "loss" else 0.0,
        kl_estimator=learner.kl_estimator,
    )
    update = make_update(sizes, optimizer, policy_loss, **common)
    aggregation = OBJECTIVES[learner.objective].aggregation if learner.aggregation == "auto" else learner.aggregation
    parts = PolicyGradient(
        update,
        make_logprobs_fn(sizes, **common),
        packing,
        learner.advantage,
        learner.trajectories_per_update,
        run.config.seed,
        reference,
        aggregation=aggregation,
        overlong=learner.overlong,
        overlong_buffer=learner.overlong_buffer,
        kl_reward_coef=learner.kl_coef if learner.kl_in == "reward" else 0.0,
        kl_estimator=learner.kl_estimator,
        ema_decay=learner.ema_decay,
        baselines=run.baselines,
    )
    return lambda state, groups: reinforce(parts, state, groups, phase.normaliser, phase.max_tokens)


def _is_evaluation_due(run: Run, phase: Phase, num_done: int) -> bool:
    """Once before and after self-play, and every `evaluation.every_steps` of its steps; `num_done` are done."""
    every = run.config.evaluation.every_steps
    is_place = num_done in (0, phase.num_steps) or (every > 0 and num_done % every == 0)
    is_wanted = phase.objective == "reinforce" and bool(run.parts.questions or run.parts.documents)
    return is_wanted and is_place and not run.evaluations.has(run.step)


async def _evaluate(run: Run) -> None:
    """Evaluates both roles as the config says, and writes down what came out."""
    config, seed, parts = run.config.evaluation, run.config.seed, run.parts
    parts.engine.forget_prefixes()
    with run.measure("evaluation"):
        reasoner = challenger = None
        if parts.questions:
            sampling = Sampling(run.config.spice.reasoner_max_tokens, config.temperature)
            reasoner = await evaluate_reasoner(
                parts.questions, parts.setting, sampling, config.num_samples, seed, run.progress.activity
            )
        if parts.documents:
            challenger = await evaluate_challenger(
                parts.documents,
                parts.setting,
                Sampling(run.config.spice.challenger_max_tokens, run.config.spice.temperature),
                config.challenger_samples,
                run.config.spice.is_grounded_only,
                seed,
                run.progress.activity,
            )
        scalars = run.evaluations.write(run.step, reasoner, challenger)
        run.metrics.plot(run.step, scalars)
    shown = ", ".join(
        f"{name.removeprefix('evaluation/').removesuffix('_frac')} {v:.0%}" for name, v in scalars.items()
    )
    run.progress.log(f"evaluation at step {run.step}: {shown}")
