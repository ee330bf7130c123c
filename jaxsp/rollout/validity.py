"""When a proposed task may be used, rule by rule, each rejection with a short reason that is counted.

SPICE (arXiv 2510.24684) asks for a correctly formatted and parseable task; the rules below spell that out.
"""

import re
from collections import Counter

from jaxsp.rollout.prompts import Proposal

_REFERS_TO_SOURCE = re.compile(
    r"\b(the|this|given|above) (text|passage|document|article|story|paragraph|author|excerpt)\b|\baccording to the\b",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"-?[0-9]{1,15}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them; neither UTF-8 nor SQLite can hold them
_NUMBER = re.compile(r"\d+")
_OPTIONS = [re.compile(rf"(?<![A-Za-z]){letter}[).:]") for letter in "ABCDE"]
MAX_QUESTION_CHARACTERS = 4000
MAX_STRING_WORDS = 3


def rejection_reason(proposal: Proposal, document: str, is_grounded_only: bool) -> str | None:
    """The first rule that `proposal` breaks, or None. Whether an expression parses is asked of the verifier, not here.

    With `is_grounded_only`, a question with an integer answer must hold at least two numbers, and its numbers with
    the answer must all come from the document, each no more often than it stands there. For documents that state the
    parts and the result of a relation this nearly implies that the answer is right.
    """
    question, answer = proposal.question, proposal.answer
    if not question:
        return "empty_question"
    if not answer:
        return "empty_answer"
    if _SURROGATE.search(question + answer):
        return "not_unicode"
    if len(question) > MAX_QUESTION_CHARACTERS:
        return "too_long"
    if _REFERS_TO_SOURCE.search(question):
        return "refers_to_source"
    return _TYPE_RULES[proposal.answer_type](question, answer) or (
        _grounding_reason(proposal, document) if is_grounded_only and proposal.answer_type == "integer" else None
    )


def _choice_reason(question: str, answer: str) -> str | None:
    if answer not in {"A", "B", "C", "D"}:
        return "not_a_letter"
    has = [pattern.search(question) is not None for pattern in _OPTIONS]
    return None if all(has[:4]) and not has[4] else "not_four_options"


def _integer_reason(question: str, answer: str) -> str | None:
    return None if _INTEGER.fullmatch(answer) else "not_an_integer"


def _string_reason(question: str, answer: str) -> str | None:
    return None if len(answer.split()) <= MAX_STRING_WORDS else "too_many_words"


def _expression_reason(question: str, answer: str) -> str | None:
    return None


_TYPE_RULES = {
    "choice": _choice_reason,
    "integer": _integer_reason,
    "string": _string_reason,
    "expression": _expression_reason,
}


def _grounding_reason(proposal: Proposal, document: str) -> str | None:
    asked = _NUMBER.findall(proposal.question)
    if not proposal.question.endswith("?"):
        return "not_a_question"
    if len(asked) < 2:
        return "too_few_numbers"
    used = Counter([*asked, *_NUMBER.findall(proposal.answer)])
    return None if used <= Counter(_NUMBER.findall(document)) else "not_grounded"
