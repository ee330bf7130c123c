"""The verbs of `jaxsp`: each reads its arguments and calls what does the work.

The work's modules are imported by the verb that needs them, so that `--help` and mistakes answer at once.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxsp.config import RunConfig, UsageError, UserError

if TYPE_CHECKING:
    from jaxsp.inference import FoundModel
    from jaxsp.sampler.streaming import Delta
    from jaxsp.scoring import Scores
    from jaxsp.trajectory import Completion, GenerateRequest

_CACHE_DIR = "JAX_COMPILATION_CACHE_DIR"


def _set_up_jax(platform: str | None = None) -> None:
    """Keeps compiled programs on disk between calls, unless the user's environment says where or that not."""
    import jax

    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if _CACHE_DIR in os.environ:
        return
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "jaxsp", "jax")
    try:
        directory = directory.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # no home, or none that can be written: then everything is compiled anew
    if os.access(directory, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def _train(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxsp.config import load_config

    console = Console()
    if arguments.resume is not None:
        if arguments.config is not None:
            raise UsageError("--resume takes the run's own config: give no config file or overrides beside it")
        from jaxsp.inference import read_run_config

        run_dir = Path(arguments.resume)
        config = read_run_config(run_dir)
    elif not arguments.config:
        raise UsageError("train needs a config file, or --resume RUN_DIR")
    else:
        config = load_config(arguments.config, arguments.overrides)
        run_dir = None
    _set_up_jax()
    if arguments.dry_run:
        from jaxsp.describe import describe

        describe(config, console)
        return 0
    from jaxsp.run import discard_run_dir, make_run_dir
    from jaxsp.train import train

    is_resume = run_dir is not None
    run_dir = run_dir or make_run_dir(config, Path(str(arguments.config)).stem)
    try:
        is_done = train(config, run_dir, is_resume=is_resume, console=console)
    except (Exception, KeyboardInterrupt) as error:
        if not is_resume:
            discard_run_dir(run_dir)
        if isinstance(error, KeyboardInterrupt) and run_dir.exists():
            print(f"\njaxsp: go on with: {_program()} train --resume {shlex.quote(str(run_dir))}", file=sys.stderr)
        raise
    _print_next(config, run_dir, is_done, console.print)
    return 0


def _print_next(config: RunConfig, run_dir: Path, is_done: bool, write: Callable[..., None]) -> None:
    lines = ["", f"run directory: {run_dir}"]
    program, run, export = _program(), shlex.quote(str(run_dir)), shlex.quote(str(run_dir / "export"))
    if is_done:
        evaluation = config.evaluation
        options = f"--questions {shlex.quote(evaluation.questions or 'embedded')}"
        if evaluation.num_samples > 1:
            options += f" --num-samples {evaluation.num_samples}"
        if evaluation.temperature:
            options += f" --temperature {evaluation.temperature}"
        lines += [
            "next:",
            f"  {program} report {run}",
            f"  {program} eval {run} {options}",
            f"  {program} export {run} --out {export}",
            f"  {program} sample {export} --chat --prompt 'Anna had 9 cups and gave away 4. How many are left?'",
            f"  tensorboard --logdir {shlex.quote(str(run_dir / 'tb'))}  (after pip install tensorboard)",
        ]
    else:
        lines += ["stopped before the end; go on with:", f"  {program} train --resume {run}"]
    for line in lines:
        write(line, highlight=False, soft_wrap=True)


def _program() -> str:
    """How the user can call this program: `jaxsp`, or the path it was called by where that would not be found."""
    called = Path(sys.argv[0])
    return shlex.quote(str(called)) if called.name == "jaxsp" and shutil.which("jaxsp") is None else "jaxsp"


def _find_model(arguments: argparse.Namespace) -> "FoundModel":
    from jaxsp.inference import find_model

    return find_model(
        arguments.model,
        compute_dtype=arguments.dtype,
        renderer=arguments.renderer,
        thinking=arguments.thinking,
        weight_dtype=getattr(arguments, "weight_dtype", None),  # of verbs that sample
    )


def _options[T](kind: type[T], arguments: argparse.Namespace) -> T:
    """A dataclass of options, whose fields are named as the verb's arguments are."""
    return kind(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(kind)})  # pyright: ignore[reportArgumentType]


def _print_json(row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)


def _evaluate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxsp.evaluate import evaluate_reasoner, read_questions
    from jaxsp.inference import open_engine, read_run_config
    from jaxsp.policy import make_setting, open_text_side
    from jaxsp.progress import counted
    from jaxsp.report import answer_rows, print_reasoner, reasoner_row
    from jaxsp.rollout.prompts import PROMPTS
    from jaxsp.rollout.roles import Sampling
    from jaxsp.verifiers.verify import make_verifier_pool

    _set_up_jax()
    questions = read_questions(arguments.questions)
    model = _find_model(arguments)
    text = open_text_side(model.config, model.source)
    own = None if model.run_dir is None else read_run_config(model.run_dir).spice
    prompts = arguments.prompts or ("full" if own is None else own.prompts)
    max_tokens = arguments.max_tokens or (512 if own is None else own.reasoner_max_tokens)
    sampling = Sampling(max_tokens, arguments.temperature)
    with contextlib.ExitStack() as stack:
        output = None if arguments.output is None else stack.enter_context(_open_output(arguments.output))
        pool = stack.enter_context(make_verifier_pool(arguments.workers, arguments.timeout))  # before JAX's devices
        asked = [PROMPTS[prompts].reasoner_messages(question.text) for question in questions]
        lengths = [len(text.renderer.prompt(messages)) + max_tokens for messages in asked]
        engine = open_engine(model, text.tokenizer, lengths * arguments.num_samples)
        generate = stack.enter_context(counted(engine.generate, len(questions) * arguments.num_samples))
        setting = make_setting(text, generate, PROMPTS[prompts], pool)
        report = asyncio.run(evaluate_reasoner(questions, setting, sampling, arguments.num_samples, arguments.seed))
        if output is not None:
            output.writelines(json.dumps(row) + "\n" for row in answer_rows(report))
    if arguments.json:
        _print_json({"model": arguments.model, "num_samples": arguments.num_samples, **reasoner_row(report)})
    else:
        print_reasoner(report, Console())
    return 0


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf


@contextlib.contextmanager
def _open_output(path: str) -> Iterator[TextIO]:
    """What to write the file to, opened at once: hours of work should not end at a directory that is not there.

    It takes the place of a file that is there already only when the work is done.
    """
    partial = Path(f"{path}.part")
    try:
        if not path or Path(path).is_dir():
            raise UserError(f"--output {path!r} names no file")
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield file
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _export(arguments: argparse.Namespace) -> int:
    from jaxsp.inference import export_run

    _set_up_jax("cpu")  # a copy needs no accelerator, which may be busy with the run
    step = export_run(Path(arguments.run_dir), Path(arguments.out), arguments.step, arguments.dtype)
    print(f"wrote step {step} to {arguments.out}")
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    from jaxsp.inference import Input, SampleOptions, read_inputs, sample, stream_sample

    _set_up_jax()
    if arguments.prompts is None:
        prompts = [Input("--prompt", "prompt", arguments.prompt)]
    else:
        prompts = read_inputs(arguments.prompts, ("prompt", "messages", "tokens"))
    options = _options(SampleOptions, arguments)
    if options.wants_raw and not arguments.json:
        raise UsageError("--raw adds to the lines of --json; add that too")
    if arguments.stream:
        if len(prompts) * options.num_samples > 1:
            raise UsageError("--stream prints one sample while it is made: give one prompt, and no --num-samples")
        print_json_delta = functools.partial(_print_json_delta, wants_raw=options.wants_raw)
        stream_sample(_find_model(arguments), prompts[0], options, print_json_delta if arguments.json else _print_delta)
        return 0
    places = iter([(prompt.place, number + 1) for prompt in prompts for number in range(options.num_samples)])

    def write(request: "GenerateRequest", completion: "Completion") -> None:
        """Prints a sample, under its place where there are several."""
        place, number = next(places)
        if arguments.json:
            row = _drawn_row(completion, completion.finish_reason, options.wants_raw)
            _print_json({"prompt_tokens": list(request.tokens), **row})
            return
        if len(prompts) * options.num_samples > 1:
            print(f"--- {place}, sample {number}: {len(completion.tokens)} tokens, {completion.finish_reason}")
        print(completion.text, flush=True)

    sample(_find_model(arguments), prompts, options, write)
    return 0


def _drawn_row(drawn: "Completion | Delta", finish_reason: str | None, wants_raw: bool) -> dict[str, Any]:
    raw = {"raw_logprobs": list(drawn.raw_logprobs), "kept_mass": list(drawn.kept_mass)} if wants_raw else {}
    return {
        "tokens": list(drawn.tokens),
        "logprobs": list(drawn.behaviour_logprobs),
        "text": drawn.text,
        "finish_reason": finish_reason,
        **raw,
    }


def _print_delta(delta: "Delta") -> None:
    print(delta.text, end="" if delta.completion is None else "\n", flush=True)


def _print_json_delta(delta: "Delta", wants_raw: bool) -> None:
    finish_reason = None if delta.completion is None else delta.completion.finish_reason
    _print_json(_drawn_row(delta, finish_reason, wants_raw))


def _chat(arguments: argparse.Namespace) -> int:
    from jaxsp.terminal_chat import ChatOptions, Terminal, chat

    _set_up_jax()
    chat(_find_model(arguments), _options(ChatOptions, arguments), Terminal.standard())
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from jaxsp.serving.server import ServerOptions, serve
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise UserError(f"jaxsp serve needs {error.name}, which is not there: pip install 'jaxsp[serve]'") from error

    _set_up_jax()
    serve(_find_model(arguments), arguments.model, _options(ServerOptions, arguments))
    return 0


def _score(arguments: argparse.Namespace) -> int:
    from jaxsp.inference import read_inputs
    from jaxsp.scoring import score

    _set_up_jax()
    inputs = read_inputs(arguments.input, ("tokens", "text"))
    places = iter(inputs)

    def write(scores: "Scores") -> None:
        place = next(places).place
        if arguments.json:
            row = {"tokens": list(scores.tokens), "logprobs": scores.logprobs}
            _print_json(row if scores.score is None else {**row, "score": scores.score})
        elif scores.logprobs is None:
            print(f"{place}: {len(scores.tokens)} tokens, score {scores.score}", flush=True)
        else:
            logprobs = [logprob for logprob in scores.logprobs if logprob is not None]  # the first token has none
            total, count = math.fsum(logprobs), len(logprobs)
            each = f", {total / count:.4f} each, perplexity {_exp(-total / count):.4g}" if count else ""
            print(f"{place}: {len(scores.tokens)} tokens, log-probability {total:.4f}{each}", flush=True)

    score(_find_model(arguments), inputs, write)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from jaxsp.verifiers.verify import run_verify

    rows: list[dict[str, Any]] = []

    def write(row: dict[str, Any]) -> None:
        rows.append(row)
        if arguments.json:
            _print_json(row)
        else:
            extracted = "" if row["extracted"] is None else f"  {row['extracted']}"
            print(f"{'right' if row['correct'] else 'wrong'}  {row['status']:<12}{extracted}", flush=True)

    run_verify(arguments.kind, arguments.input, write, num_workers=arguments.workers, timeout_s=arguments.timeout)
    if not rows:
        raise UserError(f"--input {arguments.input} is empty; give lines with reference and response")
    if not arguments.json:
        num_right = sum(row["correct"] for row in rows)
        print(f"{num_right} of {len(rows)} right ({num_right / len(rows):.1%})")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxsp.inference import read_run_config
    from jaxsp.report import print_report

    run_dir = Path(arguments.run_dir)
    read_run_config(run_dir)
    print_report(run_dir, Console())
    return 0


VERBS = {
    "train": _train,
    "eval": _evaluate,
    "sample": _sample,
    "chat": _chat,
    "serve": _serve,
    "score": _score,
    "verify": _verify,
    "export": _export,
    "report": _report,
}
