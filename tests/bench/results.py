"""From measurements to tables: medians, ratios, shares of the machine's limits. Pure functions on rows of JSON.

A row says which `engine` did which `workload` in which `repeat`, with what a worker replied: `tokens_per_s`, `seconds`,
`num_compilations`, `details`, or `error`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median
from typing import Any

from tests.bench.limits import limits
from tests.bench.workloads import Workload

OURS = "jaxsp"
MACHINE = "machine"

TARGETS = {"batch_1": 2.5, "batch_8": 2.5, "batch_32": 2.5, "groups": 4.0, "ragged": 4.0, "episodes": 5.0}
"""How many times the tokens/s of `transformers` are wanted."""
LIMIT_TARGETS = {"batch_1": ("bandwidth", 0.75), "batch_32": ("matrix", 0.70)}
"""Which share of which limit is wanted."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Speed:
    """Tokens/s of one engine on one workload, over its repeats."""

    best: float
    median: float
    num_repeats: int


def speed(rows: Sequence[Row], engine: str, workload: str) -> Speed | None:
    """None if nothing was measured."""
    values = [row["tokens_per_s"] for row in _rows(rows, engine, workload) if "tokens_per_s" in row]
    return Speed(max(values), median(values), len(values)) if values else None


def ratio(rows: Sequence[Row], engine: str, workload: str) -> float | None:
    """Our median over the engine's; None if either is missing."""
    ours, theirs = speed(rows, OURS, workload), speed(rows, engine, workload)
    return ours.median / theirs.median if ours and theirs else None


def late_compilations(rows: Sequence[Row], workload: str) -> int | None:
    """Programs that jaxsp compiled while it was measured. None if it was not."""
    counts = [row["num_compilations"] for row in _rows(rows, OURS, workload) if "num_compilations" in row]
    return counts[-1][1] - counts[0][0] if counts else None


def speed_table(rows: Sequence[Row], workloads: Sequence[Workload], peers: Sequence[str]) -> str:
    """One line a workload: tokens/s of everybody, how many times the peers' ours are, what was compiled meanwhile."""
    errors: list[str] = []

    def cell(engine: str, workload: Workload) -> str:
        found = speed(rows, engine, workload.name)
        if found:
            return f"{found.median:.1f} ({found.best:.1f}, {found.num_repeats})"
        error = next((row["error"] for row in _rows(rows, engine, workload.name) if "error" in row), None)
        if error is None:
            return "-"
        note = f"{engine}: {error}"
        if note not in errors:
            errors.append(note)
        return f"error {errors.index(note) + 1}"

    def times(peer: str, workload: Workload) -> str:
        found = ratio(rows, peer, workload.name)
        if found is None:
            return "-"
        target = TARGETS.get(workload.name) if peer == "transformers" else None
        return f"{found:.2f}x" if target is None else f"{found:.2f}x ({_verdict(found, target, f'{target:g}x')})"

    def compiled(workload: Workload) -> str:
        count = late_compilations(rows, workload.name)
        return "-" if count is None else str(count)

    header = ["workload", OURS, *peers, *(f"vs {peer}" for peer in peers), "compiled late"]
    lines = [
        [
            workload.title,
            *(cell(engine, workload) for engine in (OURS, *peers)),
            *(times(peer, workload) for peer in peers),
            compiled(workload),
        ]
        for workload in workloads
        if workload.temperature
    ]
    return "\n".join([table(header, lines), "", *(f"error {i + 1}: {note}" for i, note in enumerate(errors))]).rstrip()


def limit_table(rows: Sequence[Row], workloads: Sequence[Workload], config: Mapping[str, Any]) -> str:
    """How near we are to what the machine allows, where both were measured."""
    lines = []
    for workload in workloads:
        measured, ours = machine_numbers(rows, workload.name), speed(rows, OURS, workload.name)
        decode = decode_speed(rows, workload)
        if not measured or ours is None or decode is None:
            continue
        prompt, outputs = len(workload.requests[0].prompt), workload.requests[0].num_outputs
        found = limits(config, len(workload.requests), prompt + (outputs + 1) / 2, measured)
        kind, target = LIMIT_TARGETS.get(workload.name, ("", 0.0))
        for name in _LIMITS if len(workload.requests) > 1 else _MEMORY_LIMITS:
            limit = getattr(found, name)
            share = f"{decode / limit:.0%}"
            if name == kind:
                share += f" ({_verdict(decode / limit, target, f'{target:.0%}')})"
            texts = [
                workload.title,
                _LIMITS[name].format(**_describe(measured)),
                f"{limit:.1f}",
                f"{decode:.1f}",
                share,
            ]
            lines.append([*texts, f"{ours.median / limit:.0%}"])
    header = ["workload", "limit", "tokens/s", "jaxsp decoding", "share", "end to end"]
    return table(header, lines) if lines else "no limits: the machine or jaxsp was not measured"


def machine_numbers(rows: Sequence[Row], workload: str) -> dict[str, float]:
    """Medians of what `machine_worker` measured beside a workload; {} if it did not."""
    found = [row["details"] for row in _rows(rows, MACHINE, workload) if row.get("details")]
    return {name: median(each[name] for each in found) for name in found[0]} if found else {}


def decode_speed(rows: Sequence[Row], workload: Workload) -> float | None:
    """Median of our tokens/s while decoding: without prefill, which gives the first token of each request."""
    num_tokens = workload.num_outputs - len(workload.requests)
    details = [row["details"] for row in _rows(rows, OURS, workload.name) if row.get("details")]
    return median(num_tokens / each["sampler/decode_s"] for each in details) if details else None


def growth(rows: Sequence[Row], workloads: Sequence[Workload]) -> str:
    """One line: whether our tokens/s grow with the batch."""
    found = [(len(each.requests), speed(rows, OURS, each.name)) for each in workloads if each.is_uniform]
    speeds = [(size, each.median) for size, each in found if each]
    if len(speeds) < 2:
        return "growth with the batch: not measured"
    grows = all(one[1] < other[1] for one, other in pairwise(speeds))
    numbers = ", ".join(f"{size}: {value:.1f}" for size, value in speeds)
    return f"tokens/s by batch: {numbers}; they {'grow' if grows else 'DO NOT GROW'} throughout"


def agreement(rows: Sequence[Row], workload: str = "greedy") -> str:
    """One line: how far every engine's greedy tokens are ours, which says that all have the same weights."""
    found = [row for row in rows if row["workload"] == workload and "tokens" in row]
    tokens = {row["engine"]: list(chain.from_iterable(row["tokens"])) for row in found}
    if OURS not in tokens:
        return "greedy tokens: not compared"
    ours = tokens.pop(OURS)
    same = [f"{engine} {_common(ours, theirs)} of {len(ours)}" for engine, theirs in tokens.items()]
    return "first greedy tokens equal to ours: " + (", ".join(same) or "nobody to compare with")


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown that reads as a table on a terminal too; all columns but the first are aligned to the right."""
    widths = [max(len(row[column]) for row in [header, *lines]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        return f"| {' | '.join([cells[0].ljust(widths[0]), *padded[1:]])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(header), f"|{rule}|", *map(line, lines)])


_LIMITS = {
    "bandwidth": "memory, copied or updated in place ({moved:.1f} GB/s)",
    "read": "memory, read ({read:.1f} GB/s)",
    "matrix": "products of its shapes ({products:.0f} GFLOP/s)",
    "square": "large square products ({square:.0f} GFLOP/s)",
}

_MEMORY_LIMITS = ("bandwidth", "read")  # a product with one row is nothing but reading


def _describe(measured: Mapping[str, float]) -> dict[str, float]:
    return {
        "moved": max(value for name, value in measured.items() if name.startswith(("copy", "update"))) / 1e9,
        "read": max(value for name, value in measured.items() if name.startswith("read")) / 1e9,
        "products": measured["products_flops_per_s"] / 1e9,
        "square": measured["square_flops_per_s"] / 1e9,
    }


def _verdict(value: float, target: float, text: str) -> str:
    return f"{'reaches' if value >= target else 'MISSES'} {text}"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _rows(rows: Sequence[Row], engine: str, workload: str) -> list[Row]:
    return [row for row in rows if row["engine"] == engine and row["workload"] == workload]
