"""Short documents about quantities. Each holds two facts of one step: one that adds, one that takes away.

A fact states both parts and the result, so a question about it can be checked against the document. Two facts of
different kinds in one document leave a challenger a choice: whichever kind the reasoner finds harder pays better.
"""

import random
import re
from dataclasses import dataclass

NAMES = [
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Emma",
    "Frank",
    "Gina",
    "Hugo",
    "Ivy",
    "Jack",
    "Lena",
    "Mark",
    "Nora",
    "Omar",
    "Paula",
    "Rosa",
    "Sam",
    "Tina",
    "Uma",
    "Viktor",
    "Wendy",
    "Yara",
]
THINGS = [
    "cups",
    "books",
    "stamps",
    "shells",
    "marbles",
    "cards",
    "pens",
    "coins",
    "buttons",
    "stones",
    "balls",
    "ribbons",
]
COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
GOODS = ["pen", "lemon", "ball", "cake", "brush", "comb", "lamp", "kite", "map", "rope", "candle", "melon"]
FILLERS = (
    "They live on the same street.",
    "It was a warm day in June.",
    "The market closes at noon.",
    "Everybody went home in the evening.",
    "The weather was fine.",
    "Their teacher wrote it all down.",
    "",
    "",
)
KINDS = ("total", "price", "left", "more")
ADDING = ("total", "price")


@dataclass(frozen=True)
class Fact:
    """`first` and `second` are the parts as stated and `result` what they make; `words` fills the templates."""

    kind: str
    first: int
    second: int
    result: int
    words: tuple[tuple[str, str], ...]


_STATEMENTS = {
    "total": (
        "{x} has {a} {p} {t} and {b} {q} {t}, so {x} has {c} {t} in all.",
        "There are {a} {p} {t} and {b} {q} {t} in the box of {x}, which makes {c} {t} in all.",
        "{x} found {a} {p} {t} in the morning and {b} {q} {t} in the afternoon, {c} {t} altogether.",
    ),
    "price": (
        "A {u} costs {a} dollars and a {v} costs {b} dollars, so both together cost {c} dollars.",
        "{x} bought a {u} for {a} dollars and a {v} for {b} dollars and paid {c} dollars in all.",
        "In the shop of {x}, a {u} costs {a} dollars and a {v} costs {b} dollars, and both together {c} dollars.",
    ),
    "left": (
        "{x} had {a} {t} and gave {b} of them to {y}, so {c} {t} are left.",
        "{x} had {a} {t} on Monday, lost {b} of them on the way to {y} and has {c} {t} left.",
        "Of the {a} {t} on the table, {x} took {b}, and {c} {t} are left.",
    ),
    "more": (
        "{x} is {a} years old and {y} is {b} years old, so {x} is {c} years older than {y}.",
        "{x} has {a} {t} and {y} has {b} {t}, so {x} has {c} more {t} than {y}.",
        "{x} walked {a} miles and {y} walked {b} miles, so {x} walked {c} miles more than {y}.",
    ),
}
_QUESTIONS = {
    "total": (
        "{x} has {a} {p} {t} and {b} {q} {t}. How many {t} does {x} have in all?",
        "There are {a} {p} {t} and {b} {q} {t} in the box of {x}. How many {t} are in the box in all?",
        "{x} found {a} {p} {t} in the morning and {b} {q} {t} in the afternoon. How many {t} is that altogether?",
    ),
    "price": (
        "A {u} costs {a} dollars and a {v} costs {b} dollars. How many dollars do both cost together?",
        "{x} bought a {u} for {a} dollars and a {v} for {b} dollars. How many dollars did {x} pay in all?",
        "In the shop of {x}, a {u} costs {a} dollars and a {v} costs {b} dollars. How many dollars do they cost "
        "together?",
    ),
    "left": (
        "{x} had {a} {t} and gave {b} of them to {y}. How many {t} are left?",
        "{x} had {a} {t} on Monday and lost {b} of them on the way to {y}. How many {t} does {x} have left?",
        "Of the {a} {t} on the table, {x} took {b}. How many {t} are left?",
    ),
    "more": (
        "{x} is {a} years old and {y} is {b} years old. How many years older is {x} than {y}?",
        "{x} has {a} {t} and {y} has {b} {t}. How many more {t} does {x} have than {y}?",
        "{x} walked {a} miles and {y} walked {b} miles. How many miles more did {x} walk than {y}?",
    ),
}


def number_pairs(is_held_out: bool) -> dict[str, list[tuple[int, int]]]:
    """The pairs of parts for facts that add and that take away; one in five is held out, never seen in training."""
    every = {
        "add": [(a, b) for a in range(2, 10) for b in range(2, 10) if a != b],
        "take": [(a, b) for a in range(4, 15) for b in range(2, 10) if a - b >= 2 and a - b != b],
    }
    chosen = {}
    for name, pairs in every.items():
        # A sum and its mirror image are one fact: both are held out or neither.
        unordered = sorted({(min(pair), max(pair)) for pair in pairs})
        held_out = set(unordered[3::5])
        chosen[name] = [pair for pair in pairs if ((min(pair), max(pair)) in held_out) == is_held_out]
    return chosen


def make_fact(kind: str, rng: random.Random, pairs: dict[str, list[tuple[int, int]]], variant: int) -> Fact:
    """A fact whose three numbers differ, so that a question's numbers say which of them it uses."""
    first, second = rng.choice(pairs["add" if kind in ADDING else "take"])
    x, y = rng.sample(NAMES, 2)
    p, q = rng.sample(COLOURS, 2)
    u, v = rng.sample(GOODS, 2)
    words = {"x": x, "y": y, "p": p, "q": q, "u": u, "v": v, "t": rng.choice(THINGS), "variant": str(variant)}
    result = first + second if kind in ADDING else first - second
    return Fact(kind, first, second, result, tuple(words.items()))


def _fill(templates: tuple[str, ...], fact: Fact) -> str:
    words = dict(fact.words)
    return templates[int(words["variant"])].format(**words, a=fact.first, b=fact.second, c=fact.result)


def statement(fact: Fact) -> str:
    return _fill(_STATEMENTS[fact.kind], fact)


def question(fact: Fact) -> tuple[str, int]:
    """A self-contained question about the fact, and its answer."""
    return _fill(_QUESTIONS[fact.kind], fact), fact.result


def make_document(
    rng: random.Random, pairs: dict[str, list[tuple[int, int]]], kinds: tuple[str, str]
) -> tuple[str, tuple[Fact, Fact]]:
    """A document of two facts about different people whose six numbers do not clash, and a filler sentence."""
    while True:
        facts = tuple(make_fact(kind, rng, pairs, rng.randrange(3)) for kind in kinds)
        names = [dict(fact.words)[key] for fact in facts for key in ("x", "y")]
        numbers = [n for fact in facts for n in (fact.first, fact.second, fact.result)]
        if len(set(names)) == 4 and len(set(numbers)) == 6:
            break
    text = " ".join([*map(statement, facts), rng.choice(FILLERS)]).strip()
    return text, (facts[0], facts[1])


_ADD_WORDS = re.compile(r"\b(in all|altogether|together|in total|total|both|at first|sum|overall|combined)\b")
_TAKE_WORDS = re.compile(r"\b(left|more|older|younger|fewer|less|remain|remaining|farther|further|longer|difference)\b")

_REST_WORDS = re.compile(r"\b(left|remain|remaining)\b")


_HOLDING = re.compile(
    r"how many (?P<thing>\w+) (?:are (?:there )?in the box(?: of (?P<box>\w+))?"
    r"|does (?P<who>\w+) (?:now |still )?have(?: now)?)\?$"
)


def _asks_for_holding(told: str, asked: str) -> tuple[bool, bool]:
    """Whether `asked` is what somebody holds, without a word of adding or taking away: the sum of two parts of one
    thing that is `told`, or what its holder kept of it."""
    match = _HOLDING.search(asked)
    if match is None:
        return False, False
    thing, box, who = match["thing"], match["box"], match["who"]
    is_holder = told.startswith(f"{who} ") if who else box is None or f"box of {box}" in told
    num_parts = len(re.findall(rf"\d+ (?:\w+ )?{thing}\b", told))
    is_taken = re.search(r"\b(gave|lost|took)\b", told) is not None
    return is_holder and num_parts == 2 and not is_taken, is_holder and who is not None and num_parts == 1 and is_taken


def solve(text: str) -> int | None:
    """The answer to a one-step question in the manner of this corpus, read from its words; None if it has none.

    The last sentence says what is asked: a word of adding or of taking away, applied to the two numbers of the text, or
    what somebody holds. It reports how many of a challenger's questions are right. No reward uses it.
    """
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    *told, asked = re.split(r"(?<=[.!])\s+", text.strip().lower())
    adds, takes = bool(_ADD_WORDS.search(asked)), bool(_TAKE_WORDS.search(asked))
    if not adds and not takes:
        adds, takes = _asks_for_holding(" ".join(told), asked)
    if len(numbers) != 2 or adds == takes or not asked.endswith("?"):
        return None
    if _REST_WORDS.search(asked) and numbers[0] < numbers[1]:
        return None  # more was taken than there was
    return sum(numbers) if adds else abs(numbers[0] - numbers[1])
