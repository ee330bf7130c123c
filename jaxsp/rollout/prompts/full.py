"""The long prompts, for models that think before they answer and can hold to a JSON format.

Structure after SPICE (arXiv 2510.24684, appendix): a call that chooses the task type, one call per type that builds
the question in numbered steps and reports it as JSON, and a plain reasoner prompt. The wording is our own.
"""

import json
import re
from typing import Any

from jaxsp.rollout.prompts.proposal import AnswerType, Messages, Proposal, Rejection

_TYPE_INSTRUCTION = """\
Read the document and decide which kind of exam question it supports best.

Multiple choice fits when the document relates several ideas, when answering needs more than one step of inference or
a synthesis of distant parts, and when three wrong options could be written that a careless reader would believe.
Free form fits when there is one short answer that can be checked: a calculation that ends in an Integer, a formula or
a number in closed form (Expression), or one precise term or name of at most three words (String).

Exactly one of the two must be chosen. Reply with JSON only:
{"suitable_for_mcq": true or false, "suitable_for_free_form": true or false,
 "best_answer_type": "Integer" or "Expression" or "String" or null, "reason": "one sentence"}"""

_STEPS = """\
Work through these steps before you write the result.
1. List the facts, quantities and relations of the document that are not obvious, with short quotes.
2. Plan how to make a question hard: combine several of them, add a condition, ask for a consequence.
3. Write the question so that somebody who has never seen the document understands it. State every figure and
   definition that is needed. Never mention a text, passage, document, author, figure or table.
4. Aim at the level of a demanding university examination.
5. List the pieces of knowledge and the inferences that an answer takes.
6. {type_rules}
7. Solve the question yourself as a student would. If fewer than three steps or less than half a minute was needed,
   go back to step 2.
8. Check that the answer is unique, follows from the document, and has the required form.
"""

_CHOICE_RULES = """\
Write four options A to D of equal length, the same units and the same tone, one of them right. Let each wrong one
   come from a typical mistake."""
_FREE_RULES = {
    "integer": "The answer is one whole number, in digits, without a unit.",
    "expression": "The answer is one number or formula in closed form, in LaTeX, without words.",
    "string": "The answer is one term or name of at most three words.",
}

_CHOICE_FORMAT = """\
Think first. Then reply with one JSON object:
{"identified_answer": "", "answer_quote": [""], "hardening_process": "", "exam_question": "", "correct_answer": "",
 "multiple_choice_question": "the question followed by its options, each on a line: A) ... B) ... C) ... D) ...",
 "multiple_choice_correct": "A, B, C or D", "self_test_solution": "", "knowledge_and_reasoning_steps": "",
 "question_difficulty": ""}
If the document supports no such question, leave every field empty."""
_FREE_FORMAT = """\
Think first. Then reply with one JSON object:
{"identified_information": [""], "relevant_quotes": [""], "hardening_process": "", "question": "", "answer": "",
 "answer_type": "%s", "step_by_step_solution": "", "intermediate_results": "", "difficulty_level": "",
 "difficulty_justification": "", "solving_time_estimate": "", "required_concepts": "", "potential_errors": ""}
If the document supports no such question, leave every field empty."""

_REASONER = "{question}\n\nReason step by step and put the final answer in \\boxed{{}}."
# A backslash that JSON either refuses (`\sqrt`, `\(`) or would turn into a control character (`\frac`, `\beta`,
# `\times`, `\rho`): models write LaTeX into JSON without doubling its backslashes. Real escapes are group 1.
_LATEX_BACKSLASH = re.compile(r"\\(?:([\"\\/]|u[0-9A-Fa-f]{4}|[rt](?![a-z])|n(?!(?:abla|eq?|ot|otin|u)(?![a-z])))|)")
_TYPE_OF_NAME: dict[str, AnswerType] = {"integer": "integer", "expression": "expression", "string": "string"}


def _about(document: str, instruction: str) -> Messages:
    return [{"role": "user", "content": f"Document:\n{document}\n\n{instruction}"}]


def type_messages(document: str) -> Messages:
    return _about(document, _TYPE_INSTRUCTION)


def read_type(reply: str) -> AnswerType | Rejection:
    """The type that the reply's JSON chooses; exactly one of the two kinds must be true."""
    fields = first_json_object(reply)
    if fields is None:
        return Rejection("no_json")
    is_choice, is_free = fields.get("suitable_for_mcq"), fields.get("suitable_for_free_form")
    if not isinstance(is_choice, bool) or not isinstance(is_free, bool) or is_choice == is_free:
        return Rejection("no_type")
    if is_choice:
        return "choice"
    return _TYPE_OF_NAME.get(str(fields.get("best_answer_type")).lower()) or Rejection("no_type")


def question_messages(document: str, answer_type: AnswerType) -> Messages:
    if answer_type == "choice":
        return _about(document, _STEPS.format(type_rules=_CHOICE_RULES) + "\n" + _CHOICE_FORMAT)
    steps = _STEPS.format(type_rules=_FREE_RULES[answer_type])
    return _about(document, steps + "\n" + _FREE_FORMAT % answer_type.capitalize())


def read_question(reply: str, answer_type: AnswerType) -> Proposal | Rejection:
    """The question and answer in the reply's JSON, which must be of the type asked for."""
    fields = first_json_object(reply)
    if fields is None:
        return Rejection("no_json")
    names = (
        ("multiple_choice_question", "multiple_choice_correct") if answer_type == "choice" else ("question", "answer")
    )
    question, answer = (fields.get(name) for name in names)
    if not isinstance(question, str) or isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return Rejection("missing_field")
    if answer_type != "choice" and str(fields.get("answer_type") or answer_type).lower() != answer_type:
        return Rejection("wrong_type")
    return Proposal(question.strip(), str(answer).strip(), answer_type)


def reasoner_messages(question: str) -> Messages:
    return [{"role": "user", "content": _REASONER.format(question=question)}]


def first_json_object(reply: str) -> dict[str, Any] | None:
    """The first text in balanced braces, after any thinking, that parses as a JSON object; None if there is none.

    Backslashes of LaTeX need not be doubled. A number longer than Python reads does not parse; nesting deeper than it
    follows ends the search, which would else take quadratic time.
    """
    text = _LATEX_BACKSLASH.sub(lambda match: match[0] if match[1] else r"\\", reply.rsplit("</think>", 1)[-1])
    decoder = json.JSONDecoder(strict=False)
    start = text.find("{")
    while start >= 0:
        try:
            value, _ = decoder.raw_decode(text, start)
        except RecursionError:
            return None
        except ValueError:
            start = text.find("{", start + 1)
            continue
        return value if isinstance(value, dict) else None
    return None
