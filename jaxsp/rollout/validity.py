"""When a proposed task may be used, rule by rule, each rejection with a short reason that is counted.

SPICE (arXiv 2510.24684) asks for a correctly formatted and parseable task; the rules below spell that out.
"""

import re
from collections import Counter

from jaxsp.rollout.prompts import Proposal

_POINTING = r"(?:provided|following|above|below|given|attached|preceding|previous|accompanying|aforementioned)"
_SOURCE = r"(?:texts?|passages?|documents?|articles?|story|stories|paragraphs?|excerpts?|authors?(?! of\b))"
_REPORT = r"(?:study|studies|reports?|research|sources?|data|information|sections?|chapters?|figures?|tables?)"
_PICTURE = r"(?:figures?|tables?)"
_REFERS_TO_SOURCE = re.compile(
    rf"\b(?:(?:the|this|that|these|those)(?: {_POINTING}){{0,2}}|given|above|following) {_SOURCE}\b"
    rf"|\baccording to (?:the|this|that|these|those)(?: [\w-]+){{0,2}} {_REPORT}\b"
    # A table is a piece of furniture too.
    rf"|\b(?:the|this|these)(?: {_POINTING}){{1,2}} {_PICTURE}\b|\b{_PICTURE} (?:above|below|shows?|lists?)\b"
    rf"|\bin (?:the |this |these )?{_PICTURE}\b",
    re.IGNORECASE,
)
_INTEGER = re.compile(r"-?[0-9]{1,15}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them; neither UTF-8 nor SQLite can hold them
_NUMBER = re.compile(r"\d+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# Ways to mark options A to E, those that each begin a line first. An option has text after its mark.
_OPTION_MARKS = [
    [re.compile(rf"{before}{letter}{re.escape(after)}(?=\s*\S)", re.MULTILINE) for letter in "ABCDE"]
    for before in (r"^[^\w\n]*", r"(?<![A-Za-z])")
    for after in ").:"
]
MAX_QUESTION_CHARACTERS = 4000
MAX_STRING_WORDS = 3


def rejection_reason(proposal: Proposal, document: str, is_grounded_only: bool) -> str | None:
    """The first rule that `proposal` breaks, or None. Whether an expression parses is asked of the verifier, not here.

    With `is_grounded_only`, a question with an integer answer must hold at least two numbers, and its numbers with
    the answer must all come from one sentence of the document, each no more often than it stands there. For sentences
    that state the parts and the result of a relation this nearly implies that the answer is right.
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
    if _REFERS_TO_SOURCE.search(" ".join(question.split())):
        return "refers_to_source"
    return _TYPE_RULES[proposal.answer_type](question, answer) or (
        _grounding_reason(proposal, document) if is_grounded_only and proposal.answer_type == "integer" else None
    )


def _choice_reason(question: str, answer: str) -> str | None:
    if answer not in {"A", "B", "C", "D"}:
        return "not_a_letter"
    return None if _num_options(question) == 4 else "not_four_options"


def _num_options(question: str) -> int:
    """How many options are listed from A on, 0 for fewer than four.

    One counts only behind the one before and marked in the same way, so `vitamin E.` in the words of a question or of
    an option is no fifth option.
    """
    for marks in _OPTION_MARKS:
        count = position = 0
        while count < len(marks) and (match := marks[count].search(question, position)):
            count, position = count + 1, match.end()
        if count >= 4:
            return count
    return 0


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
    sentences = _SENTENCE_END.split(document)
    is_grounded = any(used <= Counter(_NUMBER.findall(sentence)) for sentence in sentences)
    return None if is_grounded else "not_grounded"
