"""One entry for all kinds of answers: a reference and a response in, a `Verdict` out."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxsp.config import UsageError
from jaxsp.json_lines import read_json_lines, text_of
from jaxsp.verifiers.choice import check_choice
from jaxsp.verifiers.math_answer import Verdict, check_math, is_parseable_expression, last_boxed, quick_math
from jaxsp.verifiers.process_pool import ProcessPool
from jaxsp.verifiers.text_match import check_text
from jaxsp.verifiers.worker import Outcome

VerifierKind = Literal["math", "choice", "text"]
AnswerType = Literal["integer", "expression", "string", "choice"]


@dataclass(frozen=True)
class Kind:
    """How answers of a kind are checked: `quick` in the calling process, and `slow` in a worker where it gives None."""

    quick: Callable[[str, str], Verdict | None]
    slow: Callable[[str, str], Verdict] | None = None


KINDS: dict[str, Kind] = {
    "math": Kind(quick_math, slow=check_math),
    "choice": Kind(check_choice),
    "text": Kind(check_text),
}

ANSWER_KINDS: dict[str, VerifierKind] = {
    "integer": "math",
    "expression": "math",
    "string": "text",
    "choice": "choice",
}


def answer_kind(answer_type: str) -> VerifierKind:
    """The kind of verifier for a task's answer type; ValueError where there is none."""
    if answer_type not in ANSWER_KINDS:
        raise ValueError(f"answer type must be one of {', '.join(ANSWER_KINDS)}, got {answer_type!r}")
    return ANSWER_KINDS[answer_type]


def make_verifier_pool(num_workers: int, timeout_s: float, **options: Any) -> ProcessPool:
    """A pool, not yet started, whose workers are warm before their first call. Start it before JAX."""
    return ProcessPool(num_workers, timeout_s=timeout_s, preload=("jaxsp.verifiers.math_answer:warm_up",), **options)


async def verify(pool: ProcessPool, kind: str, reference: str, response: str) -> Verdict:
    r"""Whether the last `\boxed{...}` of `response` answers `reference`, within the pool's deadline.

    Choices, texts and plain integers are settled at once, in this process.
    """
    row = KINDS[kind]
    if (verdict := row.quick(reference, response)) is not None:
        return verdict
    assert row.slow is not None
    return _verdict(await pool.call(row.slow, reference, response), response)


async def is_valid_expression(pool: ProcessPool, text: str) -> bool:
    """Whether `text` parses as mathematics within the pool's deadline; what hangs is not valid."""
    outcome = await pool.call(is_parseable_expression, text)
    return outcome.status == "ok" and outcome.value


def run_verify(
    kind: str, input_path: str | Path, write: Callable[[dict[str, Any]], None], *, num_workers: int, timeout_s: float
) -> None:
    """Checks every line of a JSONL file and calls `write` with `correct`, `status`, `extracted`, in the file's order.

    A line holds `reference` (text, or a number) and `response` (text); blank lines are skipped. The whole file is read
    before the first verdict, so a bad line (`UserError` naming `file:line` and the field) leaves no half output.
    Workers start only where a line needs one.
    """
    if kind not in KINDS:
        raise UsageError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if num_workers < 1:
        raise UsageError(f"the number of verifier workers must be at least 1, got {num_workers}")
    if timeout_s <= 0:
        raise UsageError(f"--timeout must be a positive number of seconds, got {timeout_s:g}")
    checks = KINDS[kind]
    pairs = [
        (text_of(row, "reference", place, may_be_number=True), text_of(row, "response", place))
        for place, row in read_json_lines(input_path, "--input")
    ]
    with contextlib.ExitStack() as stack:
        pool: ProcessPool | None = None
        pending: list[tuple[str, Verdict | Future[Outcome]]] = []
        for reference, response in pairs:
            result: Verdict | Future[Outcome] | None = checks.quick(reference, response)
            if result is None:
                assert checks.slow is not None
                pool = pool or stack.enter_context(make_verifier_pool(num_workers, timeout_s))
                result = pool.submit(checks.slow, reference, response)
            pending.append((response, result))
        for response, result in pending:
            write(asdict(result if isinstance(result, Verdict) else _verdict(result.result(), response)))


def _verdict(outcome: Outcome, response: str) -> Verdict:
    """A worker's outcome as a verdict: a failed check is never a plain wrong answer."""
    if outcome.status == "ok":
        return outcome.value
    # `died` is nearly always the memory limit, the same appetite that otherwise ends in a timeout.
    status = "unparseable" if outcome.status == "error" else "timeout"
    return Verdict(False, status, last_boxed(response))
