"""How good a fixed policy is: a reasoner on questions with references, a challenger on held-out documents."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxsp.config import UserError
from jaxsp.envs import corpus as embedded_corpus
from jaxsp.envs.corpus.quantities import solve
from jaxsp.envs.documents import open_corpus
from jaxsp.rollout.prompts import Proposal
from jaxsp.rollout.prompts.proposal import AnswerType
from jaxsp.rollout.roles import Answer, Sampling, Setting, answer, propose
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
    """A mean with the standard error of the mean over `count` values (population variance), and the count."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        return f"{100 * self.mean:5.1f}% ± {100 * self.error:4.1f}"


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error; of nothing, zeros with count 0."""
    count = len(values)
    if not count:
        return Estimate(0.0, 0.0, 0)
    mean = sum(values) / count
    return Estimate(mean, math.sqrt(sum((value - mean) ** 2 for value in values)) / count, count)


def read_questions(path: str) -> list[Question]:
    """Questions of a JSONL file: `question` and `answer`, and where given `answer_type` (integer) and `kind` (all).

    `embedded` is the packaged held-out set, `embedded:KIND,KIND` some kinds of it. Raises `UserError` naming the line.
    """
    name, _, kinds = path.partition(":")
    is_embedded = name == "embedded"
    kinds = kinds if is_embedded else ""
    file = CORPUS_DIR / "heldout.jsonl" if is_embedded else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would cut inside JSON strings at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"questions file {file} cannot be read: {error}") from error
    questions = [_read_question(line, f"{file}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise UserError(f"questions file {file} holds no question")
    there = list(dict.fromkeys(question.kind for question in questions))
    wanted = kinds.split(",") if kinds else there
    if unknown := [kind for kind in wanted if kind not in there]:
        raise UserError(f"questions {path}: there is no kind {', '.join(unknown)}, but {', '.join(there)}")
    return [question for question in questions if question.kind in wanted]


def _read_question(line: str, place: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: not a JSON object: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object")
    for field in ("question", "answer"):
        if field not in row:
            raise UserError(f"{place}: field {field!r} is missing")
    answer_type = row.get("answer_type", "integer")
    if answer_type not in ANSWER_TYPES:
        raise UserError(f"{place}: answer_type = {answer_type!r} is not one of {', '.join(ANSWER_TYPES)}")
    return Question(str(row["question"]), str(row["answer"]), answer_type, str(row.get("kind", "all")))


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
    questions: Sequence[Question], setting: Setting, sampling: Sampling, num_samples: int, seed: int
) -> ReasonerReport:
    """Asks every question `num_samples` times, without any document."""
    asked = [question for question in questions for _ in range(num_samples)]
    proposals = [Proposal(question.text, question.answer, question.answer_type) for question in asked]
    seeds = [derive_seed(seed, "evaluate", index) for index in range(len(asked))]
    answers = await answer(setting, proposals, seeds, sampling)
    scores = [float(given.verdict.correct) for given in answers]
    means = [sum(scores[i : i + num_samples]) / num_samples for i in range(0, len(scores), num_samples)]
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
        rows = [json.loads(line) for line in (CORPUS_DIR / "heldout_documents.jsonl").read_text().splitlines()]
        texts = [row["text"] for row in rows if not topic or row["topic"] == topic]
        if not texts:
            raise UserError(f"evaluation.documents = {path}: the embedded corpus has no topic {topic!r}")
        return texts
    corpus = open_corpus(path, seed=0, max_segment_tokens=max_segment_tokens, encode=tokenizer.encode)
    return [document.text for document in corpus.next_documents(min(num_documents, corpus.num_documents))]


@dataclass(frozen=True, eq=False)
class ChallengerReport:
    """`valid`, `right` and `distinct` are shares: of all attempts, of all attempts, of the valid questions.

    `right`: a valid integer question whose answer is what `jaxsp.envs.corpus.quantities.solve` reads from its words.
    """

    valid: Estimate
    right: Estimate
    distinct: Estimate
    rows: tuple[dict[str, Any], ...]


async def evaluate_challenger(
    documents: Sequence[str],
    setting: Setting,
    sampling: Sampling,
    num_samples: int,
    is_grounded_only: bool,
    seed: int,
) -> ChallengerReport:
    """Lets the challenger make `num_samples` attempts at each document; nobody answers them."""
    texts = [document for document in documents for _ in range(num_samples)]
    seeds = [derive_seed(seed, "look", index) for index in range(len(texts))]
    attempts = await propose(setting, texts, seeds, sampling, is_grounded_only)
    rows = []
    for document, attempt in zip(texts, attempts, strict=True):
        outcome = attempt.outcome
        is_valid = isinstance(outcome, Proposal)
        is_right = is_valid and outcome.answer_type == "integer" and str(solve(outcome.question)) == outcome.answer
        reason = "ok" if is_valid else outcome.reason
        rows.append({"document": document, "text": attempt.text, "reason": reason, "is_right": is_right})
    questions = [attempt.outcome.question for attempt in attempts if isinstance(attempt.outcome, Proposal)]
    seen: set[str] = set()
    is_new = [not (question in seen or seen.add(question)) for question in questions]
    return ChallengerReport(
        valid=estimate([row["reason"] == "ok" for row in rows]),
        right=estimate([row["is_right"] for row in rows]),
        distinct=estimate(is_new),
        rows=tuple(rows),
    )
