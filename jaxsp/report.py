"""What a run says at its end: evaluations before and after, each with its standard error, and where the time went."""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxsp.config import UserError
from jaxsp.evaluate import ChallengerReport, Estimate, ReasonerReport
from jaxsp.metrics import EpisodeLog, cannot_write, is_number, read_metrics, read_rows, write_atomically

FILE_NAME = "evaluations.jsonl"
SECONDS_NAME = "seconds.json"
"""Wall time per part of a run, over all its sittings, what a kill made it do again included."""


def read_seconds(run_dir: Path) -> dict[str, float]:
    """Seconds per part; {} where the run has not come to write any. Raises `UserError` for a damaged file."""
    path = run_dir / SECONDS_NAME
    try:
        return {str(part): float(value) for part, value in json.loads(path.read_bytes()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} does not hold the seconds of a run ({error}); delete it") from error


def write_seconds(run_dir: Path, seconds: Mapping[str, float]) -> None:
    """Replaces the file. Raises `UserError` if the disk refuses."""
    path = run_dir / SECONDS_NAME
    try:
        write_atomically(path, json.dumps(seconds).encode() + b"\n")
    except OSError as error:
        raise cannot_write(path, error) from error


class EvaluationLog:
    """The evaluations of a run: one JSON line per step in `evaluations.jsonl`, and the texts in `evaluations/`.

    A step is evaluated once. Its texts are answers (`answer_rows`) and the challenger's attempts, told apart by `role`.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        self._texts = EpisodeLog(run_dir, folder="evaluations")

    def rows(self) -> list[dict[str, Any]]:
        """`{"step": int, "rows": {name: {"mean", "error", "count"}}}` for each evaluation, in order; None is no value.

        A last line without its end, which a killed run leaves, is left out. Raises `UserError` for any other bad line
        and for a file that cannot be read.
        """
        return read_rows(self._path, _is_evaluation)

    def has(self, step: int) -> bool:
        return any(row["step"] == step for row in self.rows())

    def write(
        self, step: int, reasoner: ReasonerReport | None, challenger: ChallengerReport | None
    ) -> dict[str, float]:
        """Writes the texts, then appends the evaluation; returns its means, those that are numbers, as scalars."""
        estimates = _named_estimates(reasoner, challenger)
        answers = answer_rows(reasoner) if reasoner is not None else ()
        attempts = challenger.rows if challenger is not None else ()
        self._texts.write(
            step,
            [*({"role": "reasoner", **row} for row in answers), *({"role": "challenger", **row} for row in attempts)],
        )
        row = {"step": step, "rows": {name: _as_row(value) for name, value in estimates.items()}}
        self._replace([*self.rows(), row])
        tags = _metric_names(estimates)
        return {tags[name]: value.mean for name, value in estimates.items() if math.isfinite(value.mean)}

    def drop_after(self, step: int) -> None:
        """Forgets evaluations of later steps, which a resumed run makes anew."""
        if self._path.exists():
            self._replace([row for row in self.rows() if row["step"] <= step])
        self._texts.drop_after(step)

    def _replace(self, rows: Sequence[dict[str, Any]]) -> None:
        try:
            write_atomically(self._path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        except OSError as error:
            raise cannot_write(self._path, error) from error


def _metric_names(names: Iterable[str]) -> dict[str, str]:
    """`reasoner accuracy Year 7` -> `evaluation/reasoner_accuracy_year_7_frac`: kinds are the user's words.

    Where two names come out alike, the later ones get a number: `..._c_frac`, `..._c_2_frac`.
    """
    taken: dict[str, str] = {}
    for name in names:
        words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        numbered = itertools.chain([words], (f"{words}_{number}" for number in itertools.count(2)))
        tags = (f"evaluation/{each}_frac" for each in numbered)
        taken[next(tag for tag in tags if tag not in taken)] = name
    return {name: tag for tag, name in taken.items()}


def _as_row(value: Estimate) -> dict[str, float | None]:
    """The fields as JSON has them: None for NaN."""
    return {name: None if math.isnan(each) else each for name, each in dataclasses.asdict(value).items()}


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    """Whether `row` is of the form that `EvaluationLog.rows` tells."""
    estimates = row.get("rows")
    return isinstance(estimates, dict) and all(
        isinstance(each, dict)
        and type(each.get("count")) is int
        and all(name in each and (each[name] is None or is_number(each[name])) for name in ("mean", "error"))
        for each in estimates.values()
    )


def _has_rates(row: Mapping[str, Any]) -> bool:
    """Whether a row of metrics with sampled tokens has the seconds that they took."""
    seconds = ("sampler/prefill_s", "sampler/decode_s", "time/update_s")
    return not row.get("sampler/num_sampled_tokens") or all(is_number(row.get(name)) for name in seconds)


def _from_row(row: Mapping[str, Any] | None) -> Estimate:
    """What `_as_row` was given; of a row that is not there, no value."""
    if row is None:
        return Estimate(math.nan, math.nan, 0)
    mean, error = (math.nan if row[name] is None else row[name] for name in ("mean", "error"))
    return Estimate(mean, error, row["count"])


def _named_estimates(reasoner: ReasonerReport | None, challenger: ChallengerReport | None) -> dict[str, Estimate]:
    estimates: dict[str, Estimate] = {}
    if reasoner is not None:
        estimates["reasoner accuracy"] = reasoner.overall
        if len(reasoner.kinds) > 1:
            estimates |= {f"reasoner accuracy {kind}": value for kind, value in reasoner.kinds.items()}
    if challenger is not None:
        estimates["challenger valid"] = challenger.valid
        if challenger.right is not None:
            estimates["challenger right"] = challenger.right
        estimates["challenger distinct"] = challenger.distinct
    return estimates


def print_report(run_dir: Path, console: Console) -> None:
    """Prints the first and the last evaluation side by side, the sampler's rate and the seconds per part."""
    seconds = read_seconds(run_dir)
    evaluations = EvaluationLog(run_dir).rows()
    if evaluations:
        console.print(_evaluation_table(evaluations[0], evaluations[-1] if evaluations[1:] else None))
    else:
        console.print("no evaluation yet")
    table = Table(title="Time", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for part, value in seconds.items():
        table.add_row(part, f"{value:.0f}")
    table.add_row("total", f"{sum(seconds.values()):.0f}")
    console.print(table)
    rows = [row for row in read_metrics(run_dir, _has_rates) if row.get("sampler/num_sampled_tokens")]
    if rows:
        sampled = sum(row["sampler/num_sampled_tokens"] for row in rows)
        sampler_s = sum(row["sampler/prefill_s"] + row["sampler/decode_s"] for row in rows)
        stored = sum(row.get("learner/stored_tokens") or 0 for row in rows)
        separate = sum(
            (row.get("learner/stored_tokens") or 0) * (row.get("learner/sharing_ratio") or 0) for row in rows
        )
        update_s = sum(row["time/update_s"] for row in rows)
        console.print(
            f"self-play: {sampled / max(sampler_s, 1e-9):.0f} sampled tokens/s, {stored / max(update_s, 1e-9):.0f} "
            f"trained tokens/s that stand for {separate / max(update_s, 1e-9):.0f} without shared prefixes",
            highlight=False,
            soft_wrap=True,
        )


def print_reasoner(report: ReasonerReport, console: Console) -> None:
    """Prints accuracy per kind of question, and how the answers ended."""
    table = Table(title="Accuracy ± standard error", title_justify="left")
    for name in ("", "n", "accuracy"):
        table.add_column(name, justify="left" if not name else "right")
    for kind, value in report.kinds.items():
        table.add_row(kind, str(value.count), str(value))
    if len(report.kinds) > 1:
        table.add_section()
        table.add_row("all of them", str(report.overall.count), str(report.overall))
    console.print(table)
    statuses = ", ".join(f"{name} {share:.1%}" for name, share in report.status_fracs.items())
    console.print(f"verifier: {statuses}; cut off at the token limit: {report.truncated_frac:.1%}", highlight=False)


def reasoner_row(report: ReasonerReport) -> dict[str, Any]:
    """The same for machines: `overall` and `kinds` with `mean`, `error`, `count`; `status_fracs`; `truncated_frac`."""
    return {
        "overall": _as_row(report.overall),
        "kinds": {kind: _as_row(value) for kind, value in report.kinds.items()},
        "status_fracs": report.status_fracs,
        "truncated_frac": report.truncated_frac,
    }


def answer_rows(report: ReasonerReport) -> Iterator[dict[str, Any]]:
    """Every answer with its question and verdict, samples of one question side by side."""
    for question, answer in report.answers:
        completion = answer.call.completion
        yield {
            "question": question.text,
            "reference": question.answer,
            "answer_type": question.answer_type,
            "kind": question.kind,
            "response": completion.text,
            "finish_reason": completion.finish_reason,
            "num_tokens": len(completion.tokens),
            **dataclasses.asdict(answer.verdict),
        }


def _evaluation_table(before: dict[str, Any], after: dict[str, Any] | None) -> Table:
    """What is not in one of the evaluations, and the change that it takes part in, is `-`."""
    table = Table(title="Held-out evaluation, mean ± standard error", title_justify="left")
    table.add_column("")
    for name in ("n", "before", "after", "change"):
        table.add_column(name, justify="right")
    rows_after = {} if after is None else after["rows"]
    for name in {**before["rows"], **rows_after}:
        first, last = _from_row(before["rows"].get(name)), _from_row(rows_after.get(name))
        counts = dict.fromkeys(str(each.count) for each in (first, last) if each.count)
        table.add_row(name, ", ".join(counts) or "0", str(first), str(last), _change(first, last))
    table.caption = f"before: step {before['step']}, after: {'not yet' if after is None else f'step {after["step"]}'}"
    return table


def _change(first: Estimate, last: Estimate) -> str:
    """The difference of two independent means in points of a hundred, with its standard error."""
    difference, error = last.mean - first.mean, math.hypot(first.error, last.error)
    if math.isnan(difference):
        return "-"
    return f"{100 * difference:+5.1f}" + ("" if math.isnan(error) else f" ± {100 * error:4.1f}")
