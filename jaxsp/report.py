"""What a run says at its end: evaluations before and after, each with its standard error, and where the time went."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxsp.evaluate import ChallengerReport, Estimate, ReasonerReport
from jaxsp.metrics import read_metrics

FILE_NAME = "evaluations.jsonl"


class EvaluationLog:
    """The evaluations of a run, one JSON line per step in `evaluations.jsonl`; a step is evaluated once."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME

    def rows(self) -> list[dict[str, Any]]:
        """`{"step": int, "rows": {name: {"mean", "error", "count"}}}` for each evaluation, in order."""
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines() if line.strip()]

    def has(self, step: int) -> bool:
        return any(row["step"] == step for row in self.rows())

    def write(
        self, step: int, reasoner: ReasonerReport | None, challenger: ChallengerReport | None
    ) -> dict[str, float]:
        """Appends the evaluation and returns its means as scalars for the metrics."""
        estimates = _named_estimates(reasoner, challenger)
        row = {"step": step, "rows": {name: dataclasses.asdict(value) for name, value in estimates.items()}}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return {f"evaluation/{name.replace(' ', '_')}_frac": value.mean for name, value in estimates.items()}

    def drop_after(self, step: int) -> None:
        """Forgets evaluations of later steps, which a resumed run makes anew."""
        kept = [row for row in self.rows() if row["step"] <= step]
        if self._path.exists():
            self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _named_estimates(reasoner: ReasonerReport | None, challenger: ChallengerReport | None) -> dict[str, Estimate]:
    estimates: dict[str, Estimate] = {}
    if reasoner is not None:
        estimates["reasoner accuracy"] = reasoner.overall
        if len(reasoner.kinds) > 1:
            estimates |= {f"reasoner accuracy {kind}": value for kind, value in reasoner.kinds.items()}
    if challenger is not None:
        estimates["challenger valid"] = challenger.valid
        estimates["challenger right"] = challenger.right
        estimates["challenger distinct"] = challenger.distinct
    return estimates


def print_report(run_dir: Path, seconds: Mapping[str, float], console: Console) -> None:
    """Prints the first and the last evaluation side by side, the sampler's rate and the seconds per part."""
    evaluations = EvaluationLog(run_dir).rows()
    if evaluations:
        console.print(_evaluation_table(evaluations[0], evaluations[-1]))
    table = Table(title="Time", title_justify="left")
    table.add_column("part")
    table.add_column("seconds", justify="right")
    for part, value in seconds.items():
        table.add_row(part, f"{value:.0f}")
    table.add_row("total", f"{sum(seconds.values()):.0f}")
    console.print(table)
    rows = [row for row in read_metrics(run_dir) if row.get("sampler/num_sampled_tokens")]
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
        )


def _evaluation_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    table = Table(title="Held-out evaluation, mean ± standard error", title_justify="left")
    table.add_column("")
    for name in ("n", "before", "after", "change"):
        table.add_column(name, justify="right")
    for name, values in before["rows"].items():
        first, last = Estimate(**values), Estimate(**after["rows"].get(name, values))
        error = (first.error**2 + last.error**2) ** 0.5
        change = f"{100 * (last.mean - first.mean):+5.1f} ± {100 * error:4.1f}"
        table.add_row(name, str(first.count), str(first), str(last), change)
    table.caption = f"before: step {before['step']}, after: step {after['step']}"
    return table
