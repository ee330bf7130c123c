r"""Checks multiple-choice answers by letter."""

import re

from jaxsp.verifiers.math_answer import NO_ANSWER, Verdict, last_boxed

_COMMAND = re.compile(r"\\[A-Za-z]+")
_CAPITAL = re.compile("(?<![A-Za-z])[A-D](?![A-Za-z'\N{RIGHT SINGLE QUOTATION MARK}])")
_LOWER_CASE = re.compile(r"[^A-Za-z]*([a-d])[^A-Za-z]*|[^A-Za-z]*([a-d])[).:].*", re.DOTALL)


def choice_letter(text: str) -> str | None:
    r"""The first letter A to D that stands alone in `text`; None where there is none.

    Letters inside words and LaTeX commands do not count (`\textbf{(C)}`, `Answer: C` and `C. Berlin` are all C). A
    lower-case letter counts only at the front of an option (`b`, `(b)`, `b) Berlin`), for `a` is also an article.
    """
    text = _COMMAND.sub(" ", text)
    if (capital := _CAPITAL.search(text)) is not None:
        return capital.group()
    lower_case = _LOWER_CASE.fullmatch(text)
    return (lower_case[1] or lower_case[2]).upper() if lower_case is not None else None


def check_choice(reference: str, response: str) -> Verdict:
    r"""Whether the letter in the last `\boxed{...}` of `response` is the reference's letter.

    `unparseable` where the box, or the reference, holds no such letter.
    """
    extracted = last_boxed(response)
    if not extracted:
        return NO_ANSWER
    boxed_reference = last_boxed(reference)
    gold = choice_letter(reference if boxed_reference is None else boxed_reference)
    answer = choice_letter(extracted)
    if gold is None or answer is None:
        return Verdict(False, "unparseable", extracted)
    return Verdict(gold == answer, "ok", extracted)
