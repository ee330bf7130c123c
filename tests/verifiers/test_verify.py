import asyncio
import json
import time

import psutil
import pytest

from jaxsp.config import UsageError, UserError
from jaxsp.verifiers.math_answer import Verdict
from jaxsp.verifiers.verify import (
    ANSWER_KINDS,
    KINDS,
    answer_kind,
    is_valid_expression,
    make_verifier_pool,
    run_verify,
    verify,
)

TOWER = "9^{9^{9^9}}"


def run_lines(tmp_path, kind, lines, **options):
    path = tmp_path / "in.jsonl"
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    rows = []
    run_verify(kind, path, rows.append, **({"num_workers": 2, "timeout_s": 5.0} | options))
    return rows


def test_a_power_tower_costs_its_deadline_while_twenty_other_checks_finish():
    async def play(pool):
        begin = time.monotonic()
        hung = asyncio.ensure_future(verify(pool, "math", "1", rf"\boxed{{{TOWER}}}"))
        others = [verify(pool, "math", "x+1", rf"\boxed{{1+x+{i}}}") for i in range(20)]
        verdicts = await asyncio.gather(*others)
        was_running = not hung.done()
        return verdicts, was_running, await hung, time.monotonic() - begin

    with make_verifier_pool(2, timeout_s=3.0) as pool:
        verdicts, was_running, hung, seconds = asyncio.run(play(pool))
        assert [verdict.correct for verdict in verdicts] == [True] + [False] * 19
        assert was_running
        assert hung == Verdict(False, "timeout", TOWER)
        assert seconds < 10
        assert pool.counts()["timeout"] == 1


def test_every_kind_goes_through_one_entry():
    async def play(pool):
        return [
            await verify(pool, "math", "1/2", r"\boxed{0.5}"),
            await verify(pool, "math", "12", r"\boxed{12}"),
            await verify(pool, "choice", "B", r"\boxed{B}"),
            await verify(pool, "text", "the Nile", r"\boxed{nile}"),
            await verify(pool, "math", "12", "12"),
            await is_valid_expression(pool, "x^2"),
            await is_valid_expression(pool, r"\frac{"),
        ]

    with make_verifier_pool(1, timeout_s=5.0) as pool:
        ok = [Verdict(True, "ok", extracted) for extracted in ("0.5", "12", "B", "nile")]
        assert asyncio.run(play(pool)) == [*ok, Verdict(False, "no_answer", None), True, False]
        assert pool.counts()["ok"] == 3  # what needs no algebra takes no worker


def test_a_check_whose_worker_keeps_being_killed_is_not_a_plain_wrong_answer():
    async def play(pool):
        check = asyncio.ensure_future(verify(pool, "math", "1", rf"\boxed{{{TOWER}}}"))
        while not check.done():
            await asyncio.sleep(0.2)
            for worker in psutil.Process().children():
                worker.kill()
        return check.result()

    with make_verifier_pool(1, timeout_s=60.0) as pool:
        assert asyncio.run(play(pool)) == Verdict(False, "timeout", TOWER)
        assert pool.counts()["died"] == 1


def test_answer_types_have_kinds():
    assert {answer_type: answer_kind(answer_type) for answer_type in ANSWER_KINDS} == {
        "integer": "math",
        "expression": "math",
        "string": "text",
        "choice": "choice",
    }
    assert set(ANSWER_KINDS.values()) == set(KINDS)
    with pytest.raises(ValueError, match="must be one of"):
        answer_kind("float")


def test_a_file_is_checked_in_its_order(tmp_path):
    lines = [{"reference": "1", "response": rf"\boxed{{{TOWER}}}"}]
    lines += [{"reference": "x+1", "response": rf"\boxed{{1+x+{i}}}"} for i in range(8)]
    lines += ["\n", {"reference": 7, "response": r"\boxed{7}", "more": None}]
    lines += [{"reference": "7", "response": "7"}, {"reference": "7", "response": r"\boxed{?}"}]
    rows = run_lines(tmp_path, "math", lines, timeout_s=1.0)
    assert rows[0] == {"correct": False, "status": "timeout", "extracted": TOWER}
    assert [row["correct"] for row in rows[1:9]] == [True] + [False] * 7
    assert rows[9:] == [
        {"correct": True, "status": "ok", "extracted": "7"},
        {"correct": False, "status": "no_answer", "extracted": None},
        {"correct": False, "status": "unparseable", "extracted": "?"},
    ]


def test_choices_and_texts_are_checked_from_files_too(tmp_path):
    assert run_lines(tmp_path, "choice", [{"reference": "C", "response": r"\boxed{(C)}"}])[0]["correct"]
    assert run_lines(tmp_path, "text", [{"reference": "a cat", "response": r"\boxed{Cat}"}])[0]["correct"]
    assert run_lines(tmp_path, "text", []) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"response": "x"}\n', "in.jsonl:2: field `reference` is missing"),
        ('{"reference": "x"}\n', "in.jsonl:2: field `response` is missing"),
        ('{"reference": "x", "response": 5}\n', "in.jsonl:2: field `response` must be text, got 5"),
        ('{"reference": null, "response": "x"}\n', "in.jsonl:2: field `reference` must be text or a number, got null"),
        ('{"reference": true, "response": "x"}\n', "in.jsonl:2: field `reference` must be text or a number, got true"),
        ("[]\n", "in.jsonl:2: not a JSON object"),
        ("{\n", "in.jsonl:2: not a line of JSON"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_written(tmp_path, line, message):
    path = tmp_path / "in.jsonl"
    path.write_text('{"reference": "1", "response": "x"}\n' + line)
    rows = []
    with pytest.raises(UserError) as error:
        run_verify("math", path, rows.append, num_workers=1, timeout_s=1.0)
    assert message in str(error.value) and rows == []


def test_impossible_arguments_are_usage_errors(tmp_path):
    with pytest.raises(UsageError, match="--kind must be one of math, choice, text"):
        run_lines(tmp_path, "code", [])
    with pytest.raises(UsageError, match="workers"):
        run_lines(tmp_path, "math", [], num_workers=0)
    with pytest.raises(UsageError, match="--timeout"):
        run_lines(tmp_path, "math", [], timeout_s=0)
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read"):
        run_verify("math", tmp_path / "none.jsonl", print, num_workers=1, timeout_s=1.0)
