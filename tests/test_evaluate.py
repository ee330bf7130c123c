"""Shares with their standard errors, and what questions and documents a policy is looked at with."""

import asyncio
import json
import math
from pathlib import Path

import pytest

from jaxsp.config import UserError
from jaxsp.evaluate import (
    Estimate,
    Question,
    estimate,
    evaluate_challenger,
    evaluate_reasoner,
    heldout_documents,
    read_questions,
)
from jaxsp.rollout.roles import Sampling
from jaxsp.tokenizer import load_tokenizer
from tests.tiny import GOLDEN, ScriptedGenerate, make_setting

SAMPLING = Sampling(max_tokens=200, temperature=1.0)
QUESTIONS = [
    Question("What is 2 + 3?", "5", "integer", "sums"),
    Question("What is 2 + 4?", "6", "integer", "sums"),
    Question("Which one? A) red B) two C) up D) sad", "A", "choice", "words"),
]


def write_lines(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def near(found: Estimate, mean: float, error: float, count: int) -> bool:
    return found.count == count and [found.mean, found.error] == pytest.approx([mean, error], nan_ok=True)


def test_mean_and_standard_error_by_hand() -> None:
    # Of 1, 0, 0, 1, 1: mean 0.6, variance 0.24, standard error of the mean sqrt(0.24 / 5)
    found = estimate([1, 0, 0, 1, 1])
    assert found.count == 5 and found.mean == pytest.approx(0.6)
    assert found.error == pytest.approx(math.sqrt(0.24 / 5))
    assert str(found) == " 60.0% ± 21.9"
    assert estimate([1, 1, 1]) == Estimate(1.0, 0.0, 3)


def test_too_few_values_have_no_error_and_none_have_no_mean() -> None:
    assert near(estimate([0.25]), 0.25, math.nan, 1) and str(estimate([0.25])) == " 25.0%"
    assert near(estimate([]), math.nan, math.nan, 0) and str(estimate([])) == "-"


def test_a_reasoner_is_counted_by_question_and_kind() -> None:
    # The first question is right in one of two samples, the second never, the third always.
    tries = {"2 + 3": ["\\boxed{5}", "\\boxed{4}"], "2 + 4": ["no box", "\\boxed{7}"], "Which": ["\\boxed{A}"] * 2}

    def reply(prompt: str, seed: int) -> str:
        return next(replies.pop(0) for text, replies in tries.items() if f"{text}" in prompt.split("user\n")[-1])

    generate = ScriptedGenerate(reply)
    report = asyncio.run(evaluate_reasoner(QUESTIONS, make_setting(generate), SAMPLING, num_samples=2, seed=7))
    assert list(report.kinds) == ["sums", "words"]
    assert near(report.kinds["sums"], 0.25, math.sqrt(0.0625 / 2), 2)
    assert near(report.kinds["words"], 1.0, math.nan, 1)
    # Each question counts once: the samples of one are not independent.
    assert near(report.overall, 0.5, math.sqrt((0.25 + 0.25) / 3 / 3), 3)
    assert report.status_fracs == {"no_answer": pytest.approx(1 / 6), "ok": pytest.approx(5 / 6)}
    assert report.truncated_frac == 0
    assert [question.text for question, _ in report.answers] == [q.text for q in QUESTIONS for _ in range(2)]
    assert len({request.seed for request in generate.requests}) == 6
    assert all(request.max_tokens == 200 and request.temperature == 1 for request in generate.requests)


def test_an_answer_that_is_cut_off_is_counted() -> None:
    generate = ScriptedGenerate(lambda prompt, seed: "5" * 300)
    report = asyncio.run(evaluate_reasoner(QUESTIONS[:1], make_setting(generate), SAMPLING, num_samples=1, seed=0))
    assert report.truncated_frac == 1 and report.overall.mean == 0


def test_the_same_seed_asks_the_same_whatever_else_is_asked() -> None:
    seeds = []
    for questions in (QUESTIONS, QUESTIONS[:1]):
        generate = ScriptedGenerate(lambda prompt, seed: "5")
        asyncio.run(evaluate_reasoner(questions, make_setting(generate), SAMPLING, num_samples=1, seed=3))
        seeds.append([request.seed for request in generate.requests])
    assert seeds[0][:1] == seeds[1]


def look(documents: list[str], replies: list[str], num_samples: int, **options):
    """A report on a challenger that says the type `number` and then the replies in turn."""
    replies = list(replies)

    def reply(prompt: str, seed: int) -> str:
        return "number" if "formula?" in prompt else replies.pop(0)

    setting = make_setting(ScriptedGenerate(reply))
    return asyncio.run(evaluate_challenger(documents, setting, SAMPLING, num_samples, False, seed=0, **options))


def test_a_challenger_is_counted_by_document_and_its_different_questions_without_an_error() -> None:
    documents = heldout_documents("embedded:quantities", load_tokenizer(GOLDEN / "tokenizer_qwen3_small"), 64)[:2]
    question = "Anna has 2 red cups and 3 blue cups. How many cups does Anna have in all?"
    right = f"Question: {question}\nAnswer: 5"
    wrong = "Question: Ben has 2 red cups and 3 blue cups. How many cups does Ben have in all?\nAnswer: 2"
    report = look(documents, [right, right, right, wrong, wrong, "I cannot.", "I cannot.", "I cannot."], 4)
    # By document: valid 4/4 and 1/4, right 3/4 and 0; the attempts of one document are not independent.
    assert near(report.valid, 0.625, math.sqrt(0.375**2 / 2), 2)
    assert report.right is not None and near(report.right, 0.375, math.sqrt(0.375**2 / 2), 2)
    assert near(report.distinct, 2 / 5, math.nan, 5)  # whatever the order, two different ones of five
    assert [row["reason"] for row in report.rows] == ["ok"] * 5 + ["not_in_format"] * 3
    assert [row["is_right"] for row in report.rows] == [True] * 3 + [False] * 5
    assert [row["document"] for row in report.rows] == [documents[0]] * 4 + [documents[1]] * 4


def test_questions_are_right_or_wrong_only_of_documents_whose_questions_can_be_read() -> None:
    tokenizer = load_tokenizer(GOLDEN / "tokenizer_qwen3_small")
    readable = heldout_documents("embedded:quantities", tokenizer, 64)[:1]
    others = [*heldout_documents("embedded:definitions", tokenizer, 64), "My own document of 2 and 3."]
    sum_of_two = "Question: Anna has 2 red cups and 3 blue cups. How many cups in all?\nAnswer: 5"
    report = look(others, [sum_of_two] * 20, 1)
    assert report.right is None and report.valid.mean == 1 and {row["is_right"] for row in report.rows} == {None}
    report = look([*others, *readable], [sum_of_two] * 20, 1)
    assert report.right is not None and near(report.right, 1.0, math.nan, 1)


def test_without_a_valid_question_there_is_no_share_of_different_ones() -> None:
    report = look(["A document."], ["I cannot."], 1)
    assert near(report.valid, 0.0, math.nan, 1) and near(report.distinct, math.nan, math.nan, 0)


def test_evaluations_tell_how_far_they_are() -> None:
    told: list[tuple[str, int, int]] = []

    def tell(activity: str, done: int, total: int) -> None:
        told.append((activity, done, total))

    look(["A document."], ["I cannot."] * 2, 2, on_progress=tell)
    setting = make_setting(ScriptedGenerate(lambda prompt, seed: "5"))
    asyncio.run(evaluate_reasoner(QUESTIONS, setting, SAMPLING, num_samples=1, seed=0, on_progress=tell))
    expected = [("evaluation: challenger", done, 4) for done in range(5)]
    assert told == expected + [("evaluation: reasoner", done, 3) for done in range(4)]


def test_questions_are_read_with_defaults_and_by_kind(tmp_path: Path) -> None:
    rows = [
        {"question": "What is 2 + 3?", "answer": 5},
        {"question": "x\u2028y?", "answer": "A", "answer_type": "choice", "kind": "words"},
    ]
    path = write_lines(tmp_path / "questions.jsonl", rows)
    (tmp_path / "questions.jsonl").write_text(
        (tmp_path / "questions.jsonl").read_text().replace("\\u2028", "\u2028") + "\n"
    )
    assert read_questions(path) == [
        Question("What is 2 + 3?", "5", "integer", "all"),
        Question("x\u2028y?", "A", "choice", "words"),
    ]
    every = read_questions("embedded")
    assert {question.kind for question in every} >= {"total", "left", "price", "more"}
    some = read_questions("embedded:left,total")
    assert some == [question for question in every if question.kind in ("left", "total")]


WRONG_QUESTIONS = [
    ('{"question": "a"}', r"questions\.jsonl:2: field `answer` is missing"),
    ('{"answer": "a"}', r"questions\.jsonl:2: field `question` is missing"),
    ("[1]", r"questions\.jsonl:2: not a JSON object"),
    ("{", r"questions\.jsonl:2: not a line of JSON"),
    ('{"question": 5, "answer": "a"}', r"questions\.jsonl:2: field `question` must be text, got 5"),
    ('{"question": "a", "answer": null}', r"questions\.jsonl:2: field `answer` must be text or a number, got null"),
    ('{"question": "a", "answer": [1]}', r"questions\.jsonl:2: field `answer` must be text or a number, got \[1\]"),
    ('{"question": "a", "answer": true}', r"questions\.jsonl:2: field `answer` must be text or a number, got true"),
    ('{"question": "a", "answer": 1, "kind": []}', r"questions\.jsonl:2: field `kind` must be text or a number, got"),
    ('{"question": "a", "answer": 1, "answer_type": ["integer"]}',
     r"questions\.jsonl:2: answer_type = \['integer'\] is not one of choice"),
    ('{"question": "a", "answer": 1, "answer_type": "number"}',
     r"questions\.jsonl:2: answer_type = 'number' is not one of choice, integer, expression, string"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), WRONG_QUESTIONS)
def test_a_wrong_question_is_named_by_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        read_questions(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_without_questions_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9\n")
    for path, message in (
        (str(tmp_path / "absent.jsonl"), r"absent\.jsonl cannot be read"),
        (str(tmp_path / "latin.jsonl"), r"latin\.jsonl:1: not a line of JSON"),
        (str(tmp_path), "cannot be read"),
        (str(tmp_path / "empty.jsonl"), r"empty\.jsonl holds no question"),
        ("embedded:cooking", "embedded:cooking: there is no kind cooking, but total, price, "),
        ("embedded:total,cooking", "there is no kind cooking, but total"),
    ):
        with pytest.raises(UserError, match=message):
            read_questions(path)


def test_heldout_documents_are_packaged_ones_or_the_first_of_a_corpus(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(GOLDEN / "tokenizer_qwen3_small")
    every = heldout_documents("embedded", tokenizer, 64)
    some = heldout_documents("embedded:quantities", tokenizer, 64)
    assert len(every) > len(some) == 24 and set(some) < set(every)
    with pytest.raises(UserError, match=r"evaluation\.documents = embedded:cooking: .* no topic 'cooking'"):
        heldout_documents("embedded:cooking", tokenizer, 64)

    texts = [f"Anna has {number} cups." for number in range(30)]
    path = write_lines(tmp_path / "corpus.jsonl", [{"text": text} for text in texts])
    found = heldout_documents(path, tokenizer, 64)
    assert len(found) == 24 and set(found) < set(texts)
    assert heldout_documents(path, tokenizer, 64) == found
    assert sorted(heldout_documents(path, tokenizer, 64, num_documents=50)) == sorted(texts)
    assert all(len(tokenizer.encode(text)) <= 4 for text in heldout_documents(path, tokenizer, 4))
