"""What a run says of itself, against values that were worked out by hand."""

import io
import json
from math import nan
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxsp.config import UserError
from jaxsp.evaluate import ChallengerReport, Estimate, Question, ReasonerReport
from jaxsp.metrics import EpisodeLog, MetricsWriter
from jaxsp.report import EvaluationLog, answer_rows, print_reasoner, print_report, reasoner_row, write_seconds
from jaxsp.rollout.roles import Answer, Call
from jaxsp.trajectory import Completion, FinishReason, GenerateRequest
from jaxsp.verifiers.math_answer import Verdict


def given(question: Question, reply: str, verdict: Verdict, finish_reason: FinishReason = "stop") -> Any:
    completion = Completion((5, 6, 7), (-0.1, -0.2, -0.3), reply, finish_reason, 4)
    return question, Answer(Call(GenerateRequest((1, 2), 0, 8), completion), verdict)


SUM, WORD = Question("2 + 3?", "5", "integer", "sums"), Question("Colour?", "red", "string", "words")
REASONER = ReasonerReport(
    kinds={"sums": Estimate(0.5, 0.25, 4), "words": Estimate(1.0, nan, 1)},
    overall=Estimate(0.6, 0.2, 5),
    answers=(
        given(SUM, r"\boxed{5}", Verdict(True, "ok", "5")),
        given(SUM, "no box", Verdict(False, "no_answer", None), "length"),
        given(WORD, r"\boxed{red}", Verdict(True, "ok", "red")),
        given(WORD, r"\boxed{red}", Verdict(True, "ok", "red")),
    ),
)
CHALLENGER = ChallengerReport(
    Estimate(0.5, 0.1, 24), Estimate(0.25, 0.05, 24), Estimate(1.0, nan, 12), ({"text": "Question: 2 + 3?"},)
)


def printed(call, *arguments: Any) -> str:
    output = io.StringIO()
    call(*arguments, Console(file=output, width=140))
    return output.getvalue()


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in `text`, without their lines."""
    rows = [line.replace("┃", "│").strip("│").split("│") for line in text.splitlines() if line.startswith(("│", "┃"))]
    return [[cell.strip() for cell in row] for row in rows]


def test_before_and_after_stand_side_by_side_with_the_error_of_their_difference(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    log.write(3, REASONER, CHALLENGER)
    log.write(5, REASONER, CHALLENGER)
    after = ReasonerReport({}, Estimate(0.9, 0.15, 5), ())
    log.write(7, after, ChallengerReport(Estimate(0.8, 0.0, 24), CHALLENGER.right, Estimate(0.9, nan, 20), ()))
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"policy/loss": 1.0, "time/update_s": 100.0})  # no self-play, so in no rate
        for step in (4, 5):
            metrics.write(step, {
                "sampler/num_sampled_tokens": 300, "sampler/prefill_s": 0.5, "sampler/decode_s": 1.5,
                "learner/stored_tokens": 100, "learner/sharing_ratio": step - 2, "time/update_s": 0.5,
            })  # fmt: skip
    write_seconds(tmp_path, {"load": 1.6, "rollout": 60.2})
    out = printed(print_report, tmp_path)
    assert cells(out) == [
        ["", "n", "before", "after", "change"],
        ["reasoner accuracy", "5", "60.0% ± 20.0", "90.0% ± 15.0", "+30.0 ± 25.0"],
        ["reasoner accuracy sums", "4", "50.0% ± 25.0", "-", "-"],
        ["reasoner accuracy words", "1", "100.0%", "-", "-"],
        ["challenger valid", "24", "50.0% ± 10.0", "80.0% ±  0.0", "+30.0 ± 10.0"],
        ["challenger right", "24", "25.0% ±  5.0", "25.0% ±  5.0", "+0.0 ±  7.1"],
        ["challenger distinct", "12, 20", "100.0%", "90.0%", "-10.0"],
        ["part", "seconds"],
        ["load", "2"],
        ["rollout", "60"],
        ["total", "62"],
    ]
    assert "before: step 3, after: step 7" in out
    # 600 tokens in 4 s; 200 stored tokens in 1 s, which are 100 * 2 + 100 * 3 where nothing is shared
    assert "self-play: 150 sampled tokens/s, 200 trained tokens/s that stand for 500 without shared prefixes" in out


def test_a_run_without_evaluation_says_so(tmp_path: Path) -> None:
    out = printed(print_report, tmp_path)
    assert "no evaluation yet" in out and "self-play" not in out


def test_a_single_evaluation_has_no_after(tmp_path: Path) -> None:
    EvaluationLog(tmp_path).write(0, REASONER, None)
    out = printed(print_report, tmp_path)
    assert cells(out)[1] == ["reasoner accuracy", "5", "60.0% ± 20.0", "-", "-"]
    assert "before: step 0, after: not yet" in out


def test_what_only_a_later_evaluation_has_stands_on_its_side(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    log.write(0, None, ChallengerReport(Estimate(0.0, 0.0, 24), None, Estimate(nan, nan, 0), ()))
    log.write(2, REASONER, CHALLENGER)
    assert cells(printed(print_report, tmp_path))[1:4] == [
        ["challenger valid", "24", "0.0% ±  0.0", "50.0% ± 10.0", "+50.0 ± 10.0"],
        ["challenger distinct", "12", "-", "100.0%", "-"],
        ["reasoner accuracy", "5", "-", "60.0% ± 20.0", "-"],
    ]


def test_kinds_that_read_alike_keep_curves_of_their_own(tmp_path: Path) -> None:
    kinds = {kind: Estimate(share, 0.1, 4) for kind, share in (("C++", 0.1), ("C#", 0.2), ("C 2", 0.3), ("C", 0.4))}
    scalars = EvaluationLog(tmp_path).write(0, ReasonerReport(kinds, Estimate(0.25, 0.1, 16), ()), None)
    assert scalars == {
        "evaluation/reasoner_accuracy_frac": 0.25,
        "evaluation/reasoner_accuracy_c_frac": 0.1,
        "evaluation/reasoner_accuracy_c_2_frac": 0.2,
        "evaluation/reasoner_accuracy_c_2_2_frac": 0.3,
        "evaluation/reasoner_accuracy_c_3_frac": 0.4,
    }


def test_no_value_is_null_in_the_file_and_no_scalar(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    nothing = ChallengerReport(Estimate(0.0, 0.0, 24), None, Estimate(nan, nan, 0), ())
    assert log.write(0, None, nothing) == {"evaluation/challenger_valid_frac": 0.0}
    assert log.rows()[0]["rows"]["challenger distinct"] == {"mean": None, "error": None, "count": 0}
    assert "NaN" not in (tmp_path / "evaluations.jsonl").read_text()


def test_evaluations_are_one_line_a_step_and_go_where_a_run_is_resumed(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path)
    log.drop_after(0)
    assert log.rows() == [] and not log.has(3) and not (tmp_path / "evaluations.jsonl").exists()
    single = ReasonerReport({"all": Estimate(0.5, 0.1, 4)}, Estimate(0.5, 0.1, 4), ())
    assert log.write(3, single, None) == {"evaluation/reasoner_accuracy_frac": 0.5}
    assert log.write(6, None, CHALLENGER) == {
        "evaluation/challenger_valid_frac": 0.5,
        "evaluation/challenger_right_frac": 0.25,
        "evaluation/challenger_distinct_frac": 1.0,
    }
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert lines[0] == {"step": 3, "rows": {"reasoner accuracy": {"mean": 0.5, "error": 0.1, "count": 4}}}
    assert log.rows() == lines and log.has(3) and log.has(6) and not log.has(4)
    texts = EpisodeLog(tmp_path, folder="evaluations")
    assert texts.read(3) == [] and texts.read(6) == [{"role": "challenger", "text": "Question: 2 + 3?"}]
    log.drop_after(5)
    assert log.rows() == lines[:1] and not texts.path(6).exists()
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"step": 6')  # a kill in the middle of a line
    assert log.rows() == lines[:1]
    (tmp_path / "evaluations.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"evaluations\.jsonl:1 is not a row of this file; mend or delete that line"):
        log.rows()


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 1}',
        '{"step": 1, "rows": 3}',
        '{"step": 1, "rows": {"a": 3}}',
        '{"step": 1, "rows": {"a": {"mean": 0.5, "error": null}}}',
        '{"step": 1, "rows": {"a": {"mean": "half", "error": null, "count": 3}}}',
        '{"step": 1, "rows": {"a": {"mean": 0.5, "error": null, "count": "3"}}}',
        '{"step": 1, "rows": {"a": {"mean": 1e400, "error": null, "count": 3}}}',
    ],
)
def test_an_evaluation_that_cannot_be_printed_is_named(tmp_path: Path, line: str) -> None:
    EvaluationLog(tmp_path).write(0, REASONER, CHALLENGER)
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=r"evaluations\.jsonl:2 is not a row of this file; mend or delete that line"):
        printed(print_report, tmp_path)


@pytest.mark.parametrize("rest", ["", ', "sampler/prefill_s": null, "sampler/decode_s": 1, "time/update_s": 1'])
def test_self_play_without_its_seconds_is_named(tmp_path: Path, rest: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 3, "sampler/num_sampled_tokens": 3{rest}}}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1 is not a row of this file; mend or delete that line"):
        printed(print_report, tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"load": {10**400}}}', '{"load": "long"}', "[]"], ids=range(4))
def test_seconds_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "seconds.json").write_text(text)
    with pytest.raises(UserError, match=r"seconds\.json does not hold the seconds of a run"):
        printed(print_report, tmp_path)


def test_a_reasoners_table_names_kinds_and_how_answers_ended() -> None:
    out = printed(print_reasoner, REASONER)
    assert cells(out) == [
        ["", "n", "accuracy"],
        ["sums", "4", "50.0% ± 25.0"],
        ["words", "1", "100.0%"],
        ["all of them", "5", "60.0% ± 20.0"],
    ]
    assert "verifier: no_answer 25.0%, ok 75.0%; cut off at the token limit: 25.0%" in out
    assert reasoner_row(REASONER) == {
        "overall": {"mean": 0.6, "error": 0.2, "count": 5},
        "kinds": {
            "sums": {"mean": 0.5, "error": 0.25, "count": 4},
            "words": {"mean": 1.0, "error": None, "count": 1},
        },
        "status_fracs": {"no_answer": 0.25, "ok": 0.75},
        "truncated_frac": 0.25,
    }


def test_every_answer_is_written_with_its_verdict() -> None:
    rows = list(answer_rows(REASONER))
    assert len(rows) == 4
    assert rows[1] == {
        "question": "2 + 3?", "reference": "5", "answer_type": "integer", "kind": "sums", "response": "no box",
        "finish_reason": "length", "num_tokens": 3, "correct": False, "status": "no_answer", "extracted": None,
    }  # fmt: skip
