"""How good a fixed policy is: a reasoner on questions with references, a challenger on held-out documents."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxsp.config import UserError
from jaxsp.envs import corpus as embedded_corpus
from jaxsp.envs.corpus.quantities import solve
from jaxsp.envs.documents import open_corpus
from jaxsp.json_lines import read_json_lines, text_of
from jaxsp.rollout.prompts import Proposal
from jaxsp.rollout.prompts.proposal import AnswerType
from jaxsp.rollout.roles import Answer, OnProgress, Sampling, Setting, answer, ignore_progress, propose
from jaxsp.rollout.seeds import derive_seed
from jaxsp.tokenizer import Tokenizer

CORPUS_DIR = Path(str(embedded_corpus.__file__)).parent
ANSWER_TYPES: tuple[AnswerType, ...] = ("choice", "integer", "expression", "string")


@dataclass(frozen=True)
class Question:
    """A question with its reference answer; `kind` is the row of the report that it counts in."""

    text: str
    answer: str
    answer_type: AnswerType
    kind: str


@dataclass(frozen=True)
class Estimate:
    """A mean with the standard error of the mean over `count` values (population variance), and the count.

    NaN is no value: the mean of nothing, the error of one value or of a number that is no mean of independent ones.
    """

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "-"
        share = f"{100 * self.mean:5.1f}%"
        return share if math.isnan(self.error) else f"{share} ± {100 * self.error:4.1f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error, each NaN where there are too few values for it."""
    count = len(values)
    if not count:
        return Estimate(math.nan, math.nan, 0)
    mean = sum(values) / count
    error = math.sqrt(sum((value - mean) ** 2 for value in values)) / count
    return Estimate(mean, error if count > 1 else math.nan, count)


def read_questions(path: str) -> list[Question]:
    """Questions of a JSONL file: `question` and `answer`, and where given `answer_type` (integer) and `kind` (all).

    `embedded` is the packaged held-out set, `embedded:KIND,KIND` some kinds of it. Raises `UserError` naming the line.
    """
    name, _, kinds = path.partition(":")
    is_embedded = name == "embedded"
    kinds = kinds if is_embedded else ""
    file = CORPUS_DIR / "heldout.jsonl" if is_embedded else Path(path)
    questions = [_as_question(row, place) for place, row in read_json_lines(file, "questions file")]
    if not questions:
        raise UserError(f"questions file {file} holds no question")
    there = list(dict.fromkeys(question.kind for question in questions))
    wanted = kinds.split(",") if kinds else there
    if unknown := [kind for kind in wanted if kind not in there]:
        raise UserError(f"questions {path}: there is no kind {', '.join(unknown)}, but {', '.join(there)}")
    return [question for question in questions if question.kind in wanted]


def _as_question(row: dict[str, Any], place: str) -> Question:
    row = {"answer_type": "integer", "kind": "all", **row}
    text, kind = text_of(row, "question", place), text_of(row, "kind", place, may_be_number=True)
    answer = text_of(row, "answer", place, may_be_number=True)
    answer_type = row["answer_type"]
    if answer_type not in ANSWER_TYPES:
        raise UserError(f"{place}: answer_type = {answer_type!r} is not one of {', '.join(ANSWER_TYPES)}")
    return Question(text, answer, answer_type, kind)


@dataclass(frozen=True, eq=False)
class ReasonerReport:
    """Accuracy per kind; each question counts once, with the mean over its samples as its value."""

    kinds: dict[str, Estimate]
    overall: Estimate
    answers: tuple[tuple[Question, Answer], ...]

    @property
    def status_fracs(self) -> dict[str, float]:
        """The share of answers with each verifier status (`ok`, `no_answer`, `unparseable`, `timeout`)."""
        statuses = [given.verdict.status for _, given in self.answers]
        return {status: statuses.count(status) / len(statuses) for status in sorted(set(statuses))}

    @property
    def truncated_frac(self) -> float:
        """The share of answers that were cut off at the token limit."""
        return sum(given.call.completion.finish_reason == "length" for _, given in self.answers) / len(self.answers)


async def evaluate_reasoner(
    questions: Sequence[Question],
    setting: Setting,
    sampling: Sampling,
    num_samples: int,
    seed: int,
    on_progress: OnProgress = ignore_progress,
) -> ReasonerReport:
    """Asks every question `num_samples` times, without any document."""
    asked = [question for question in questions for _ in range(num_samples)]
    proposals = [Proposal(question.text, question.answer, question.answer_type) for question in asked]
    seeds = [derive_seed(seed, "evaluate", index) for index in range(len(asked))]
    on_count = functools.partial(on_progress, "evaluation: reasoner")
    answers = await answer(setting, proposals, seeds, sampling, on_count)
    scores = [float(given.verdict.correct) for given in answers]
    means = _means(scores, num_samples)
    kinds = {
        kind: estimate([mean for question, mean in zip(questions, means, strict=True) if question.kind == kind])
        for kind in dict.fromkeys(question.kind for question in questions)
    }
    return ReasonerReport(kinds, estimate(means), tuple(zip(asked, answers, strict=True)))


def heldout_documents(path: str, tokenizer: Tokenizer, max_segment_tokens: int, num_documents: int = 24) -> list[str]:
    """Texts for looking at a challenger: all of the packaged held-out set (`embedded`, `embedded:TOPIC`), else the
    first `num_documents` of a corpus in a fixed order."""
    name, _, topic = path.partition(":")
    if name == "embedded":
        texts = [row["text"] for row in _packaged_documents() if not topic or row["topic"] == topic]
        if not texts:
            raise UserError(f"evaluation.documents = {path}: the embedded corpus has no topic {topic!r}")
        return texts
    corpus = open_corpus(path, seed=0, max_segment_tokens=max_segment_tokens, encode=tokenizer.encode)
    return [document.text for document in corpus.next_documents(min(num_documents, corpus.num_documents))]


def _packaged_documents() -> list[dict[str, Any]]:
    return [row for _, row in read_json_lines(CORPUS_DIR / "heldout_documents.jsonl", "packaged file")]


def _can_be_solved(document: dict[str, Any]) -> bool:
    return all(str(solve(question)) == answer for question, answer, _ in document["questions"])


def _means(values: Sequence[float], size: int) -> list[float]:
    """The mean of each `size` values in turn."""
    return [sum(values[start : start + size]) / size for start in range(0, len(values), size)]


@dataclass(frozen=True, eq=False)
class ChallengerReport:
    """`valid` and `right` are shares of the attempts: a document counts once, with the mean over its attempts.

    `right`: a valid integer question whose answer is what `jaxsp.envs.corpus.quantities.solve` reads from its words,
    of the packaged documents whose own questions it reads; None where there is no such document.
    `distinct`: the number of different valid questions by the number of valid ones, which is its count. It has no
    standard error.
    """

    valid: Estimate
    right: Estimate | None
    distinct: Estimate
    rows: tuple[dict[str, Any], ...]
    """An attempt each; `is_right` is None where `right` does not count it."""


async def evaluate_challenger(
    documents: Sequence[str],
    setting: Setting,
    sampling: Sampling,
    num_samples: int,
    is_grounded_only: bool,
    seed: int,
    on_progress: OnProgress = ignore_progress,
) -> ChallengerReport:
    """Lets the challenger make `num_samples` attempts at each document; nobody answers them."""
    texts = [document for document in documents for _ in range(num_samples)]
    seeds = [derive_seed(seed, "look", index) for index in range(len(texts))]
    on_count = functools.partial(on_progress, "evaluation: challenger")
    attempts = await propose(setting, texts, seeds, sampling, is_grounded_only, on_count)
    solvable = {document["text"] for document in _packaged_documents() if _can_be_solved(document)}
    rows, questions = [], []
    for document, attempt in zip(texts, attempts, strict=True):
        outcome = attempt.outcome
        is_right = None
        if document in solvable:
            is_right = isinstance(outcome, Proposal) and _is_right(outcome)
        if isinstance(outcome, Proposal):
            questions.append(outcome.question)
        reason = "ok" if isinstance(outcome, Proposal) else outcome.reason
        rows.append({"document": document, "text": attempt.text, "reason": reason, "is_right": is_right})
    right = [float(row["is_right"]) for row in rows if row["is_right"] is not None]
    return ChallengerReport(
        valid=estimate(_means([row["reason"] == "ok" for row in rows], num_samples)),
        right=estimate(_means(right, num_samples)) if right else None,
        distinct=Estimate(len(set(questions)) / len(questions) if questions else math.nan, math.nan, len(questions)),
        rows=tuple(rows),
    )


def _is_right(proposal: Proposal) -> bool:
    return proposal.answer_type == "integer" and str(solve(proposal.question)) == proposal.answer
