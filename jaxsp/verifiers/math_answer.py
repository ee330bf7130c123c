r"""Checks integers and expressions: the last `\boxed{...}` of a response against a reference, by Math-Verify.

`quick_math` settles plain integers in the calling process; `check_math` and `is_parseable_expression` may hang on
input such as `9^{9^{9^9}}` and therefore belong into a `ProcessPool`. Math-Verify's own alarm signals are off: they
work in main threads only and cannot stop a computation that holds the interpreter lock.

What counts as equal is what Math-Verify 0.9 says, with the reference as its gold side (the comparison is not
symmetric: the answer `x=5` matches the reference `5`, and the answer `(1,2)` the reference `1<x<2`, not the reverse).
Worth knowing: units are dropped (`5 cm` matches `5 m`), `50\%` matches both `0.5` and `50`, decimals are compared
after rounding to 6 places when one side is a decimal, sets ignore order and tuples do not. `_clean` mends what
Math-Verify would read as another number.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any, Literal

VerdictStatus = Literal["ok", "no_answer", "unparseable", "timeout"]


@dataclass(frozen=True)
class Verdict:
    """What a verifier says of one response.

    Attributes:
        correct: whether the answer matches the reference; only ever True with status `ok`.
        status: `ok`: compared; `no_answer`: no box, or an empty one; `unparseable`: the answer or the reference is not
            of the kind asked for; `timeout`: the comparison used up its time or its worker's memory.
        extracted: the text in the last box, None for `no_answer`.
    """

    correct: bool
    status: VerdictStatus
    extracted: str | None


@dataclass(frozen=True)
class _Box:
    """Where a complete box stands in its text, and the span of its content."""

    start: int
    end: int
    content: tuple[int, int]


NO_ANSWER = Verdict(False, "no_answer", None)

# A box's opening, an escape, or a brace. `\\boxed` is what a model writes that escapes its own backslashes.
_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\\\(?!boxed|fbox)|\\[{}]|[{}]")
_PLAIN_INTEGER = re.compile(r"-?[0-9]{1,18}")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:(?:\s|\\[,;: ]|~|,|\{,\})[0-9]{3})+(?:\.[0-9]+)?")
_THOUSANDS_GAP = re.compile(r"\s|\\[,;: ]|~|,|\{,\}")
_PHRASE = re.compile(r"[A-Za-z\s]*[A-Za-z]{4}[A-Za-z\s]*")
_SCIENTIFIC = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)")
_MIXED = re.compile(r"(-?)([0-9]+)\s+([0-9]+)\s*/\s*([0-9]+)")
_ADJACENT_NUMBERS = re.compile(r"[0-9](?:\s|\\[,;: ]|~)+[0-9]")
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_PLAIN = str.maketrans(
    {
        "²": "^{2}",
        "³": "^{3}",
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{NO-BREAK SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
    }
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`, stripped; None where there is none.

    Braces are balanced and escaped ones (`\{`) skipped. A box that is all there is in another one is the answer
    (`\boxed{\boxed{3}}` gives `3`). A box that never closes is not an answer. Time is linear in the text.
    """
    last: _Box | None = None
    open_groups: list[tuple[re.Match[str], _Box | None]] = []  # each with the box that was the last when it opened
    for token in _TOKEN.finditer(text):
        if token.group().endswith("{") and not token.group().startswith("\\{"):
            open_groups.append((token, last))
        elif token.group() == "}" and open_groups:
            opening, before = open_groups.pop()
            if opening.group() == "{":
                continue
            start, end = opening.end(), token.start()
            if last is not None and last is not before:
                outside = text[start : last.start] + text[last.end : end]
                start, end = (start, end) if outside.strip() else last.content
            last = _Box(opening.start(), token.end(), (start, end))
    return None if last is None else text[slice(*last.content)].strip()


def quick_math(reference: str, response: str) -> Verdict | None:
    """The verdict that `check_math` would give, where it needs no algebra: no answer, or two plain integers."""
    extracted = last_boxed(response)
    if not extracted:
        return NO_ANSWER
    gold, answer = _clean(_unboxed(reference)), _clean(extracted)
    if _PLAIN_INTEGER.fullmatch(gold) and _PLAIN_INTEGER.fullmatch(answer):
        return Verdict(int(gold) == int(answer), "ok", extracted)
    return None


def check_math(reference: str, response: str) -> Verdict:
    """Compares the last box of `response` with `reference` by Math-Verify. Slow, and may never return: see the module.

    What does not parse is still correct where both sides are the same text, and words are compared as text.
    """
    extracted = last_boxed(response)
    if not extracted:
        return NO_ANSWER
    gold, answer = _clean(_unboxed(reference)), _clean(extracted)
    if _PHRASE.fullmatch(gold) and _PHRASE.fullmatch(answer):
        # Words would be read as products of their letters, and `north` would equal `thorn`.
        return Verdict(gold.casefold().split() == answer.casefold().split(), "ok", extracted)
    gold_parsed, answer_parsed = _parse(gold), _parse(answer)
    if not gold_parsed or not answer_parsed:
        is_same = bool(gold) and gold == answer
        return Verdict(is_same, "ok" if is_same else "unparseable", extracted)
    from math_verify import verify

    is_equal = verify(gold_parsed, answer_parsed, timeout_seconds=None)
    return Verdict(bool(is_equal), "ok", extracted)


def is_parseable_expression(text: str) -> bool:
    """Whether Math-Verify reads `text` as mathematics. Slow, and may never return: see the module."""
    return bool(_parse(_clean(_unboxed(text))))


def warm_up() -> None:
    """Spends the seconds that a process's first comparison takes: imports, grammars and caches."""
    for reference, answer in (("x^2+2x+1", "(x+1)^2"), (r"\sqrt{2}", "1.4"), ("1<x<2", "(1,2)"), ("x=1", "x=2")):
        check_math(reference, rf"\boxed{{{answer}}}")


def _unboxed(text: str) -> str:
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def _clean(text: str) -> str:
    r"""`text` without delimiters and final punctuation, with numbers written as Math-Verify reads them.

    Left alone, Math-Verify reads `1 000` as 1 x 0, `12 34` as 12 + 34, `3 1/2` as (3 + 1)/2 and `1e3` as 1 x e x 3.
    Thousands groups are joined, mixed and scientific numbers spelt out; see `_parse` for other adjacent numbers.
    """
    text = text.translate(_PLAIN).strip()
    text = text.rstrip(".,;:") if not text.endswith("\\,") else text
    for opening, closing in _DELIMITERS:
        inner = text[len(opening) : -len(closing)]
        if len(text) > len(opening + closing) and text == opening + inner + closing and opening not in inner:
            text = inner.strip().rstrip(".,;:")
    if _THOUSANDS.fullmatch(text):
        return _THOUSANDS_GAP.sub("", text)
    if (mixed := _MIXED.fullmatch(text)) is not None:
        return rf"{mixed[1]}({mixed[2]}+\frac{{{mixed[3]}}}{{{mixed[4]}}})"
    if (scientific := _SCIENTIFIC.fullmatch(text)) is not None:
        return rf"{scientific[1]}\cdot 10^{{{scientific[2]}}}"
    return text


def _parse(text: str) -> list[Any]:
    """Math-Verify's reading of a cleaned answer; empty where it has none."""
    if not text or _ADJACENT_NUMBERS.search(text):
        return []
    # Here and not above: sympy and the LaTeX grammar take a second to import, which only workers should spend.
    from math_verify import parse

    # Its warning that timeouts are off would be repeated by every worker; the deadline is the pool's business.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse(rf"\boxed{{{text}}}", fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
