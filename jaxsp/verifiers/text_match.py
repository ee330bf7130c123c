r"""Checks string answers by exact match after a fixed normalisation."""

import re
import unicodedata

from jaxsp.verifiers.math_answer import NO_ANSWER, Verdict, last_boxed

_TEXT_COMMAND = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|emph|mbox|mathrm|mathbf|mathit|mathsf|operatorname)\s*\{([^{}]*)\}"
)
_LATEX_SPACE = re.compile(r"\\[,;:! ]|~|\\quad\b|\\qquad\b")
_ESCAPED = re.compile(r"\\([%$&#_{}])")
_ARTICLE = re.compile(r"(?:the|an|a) (?=.)")
_EDGES = ".,;:!?\"'`*_ "
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ("$", "$"), (r"\(", r"\)"))
_QUOTES = {
    "\N{LEFT SINGLE QUOTATION MARK}": "'",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": '"',
    "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
}
_DASHES = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-")
_SAME = str.maketrans(_QUOTES | _DASHES)


def normalise_text(text: str) -> str:
    r"""`text` in the form in which two string answers are compared.

    In this order: `\text{...}` and its relatives unwrapped, LaTeX spaces and escapes resolved, Unicode NFKC,
    typographic quotes and dashes made plain, case folded, white space collapsed, punctuation and enclosing brackets
    stripped from both ends (inner punctuation, `+`, `-`, `%` and `#` stay: `C++` is not `C`), and one leading article
    dropped (`The Nile` is `Nile`). Inner articles, accents and word order count.
    """
    before = None
    while before != text:
        before, text = text, _TEXT_COMMAND.sub(r"\1", text)
    text = _ESCAPED.sub(r"\1", _LATEX_SPACE.sub(" ", text))
    text = unicodedata.normalize("NFKC", text).translate(_SAME).casefold()
    text = _strip_edges(" ".join(text.split()))
    return _strip_edges(_ARTICLE.sub("", text, count=1) if _ARTICLE.match(text) else text)


def check_text(reference: str, response: str) -> Verdict:
    r"""Whether the last `\boxed{...}` of `response` equals the reference after `normalise_text`.

    A box in which nothing but punctuation stands is `no_answer`; such a reference is `unparseable`.
    """
    extracted = last_boxed(response)
    if not extracted or not (answer := normalise_text(extracted)):
        return NO_ANSWER
    boxed_reference = last_boxed(reference)
    gold = normalise_text(reference if boxed_reference is None else boxed_reference)
    if not gold:
        return Verdict(False, "unparseable", extracted)
    return Verdict(gold == answer, "ok", extracted)


def _strip_edges(text: str) -> str:
    before = None
    while before != text:
        before, text = text, text.strip(_EDGES)
        for opening, closing in _PAIRS:
            if len(text) >= len(opening + closing) and text.startswith(opening) and text.endswith(closing):
                text = text[len(opening) : -len(closing)]
    return text
