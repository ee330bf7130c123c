"""Writes the embedded corpus: `python -m jaxsp.envs.corpus.generate`.

Everything follows from the word lists beside this file and fixed seeds, so the committed files can be made again to
the byte. `documents.jsonl` is what challengers read in training; `heldout_documents.jsonl` and `heldout.jsonl`
(questions with references, per kind) use number pairs, definitions and relations that no training document has.
"""

import json
import random
from pathlib import Path

from jaxsp.envs.corpus.definitions import DEFINITIONS, RELATION_QUESTIONS, RELATIONS
from jaxsp.envs.corpus.quantities import ADDING, KINDS, make_document, make_fact, number_pairs, question

NUM_QUANTITY_DOCUMENTS = 320
NUM_OTHER_DOCUMENTS = 48
NUM_HELDOUT_PER_QUANTITY_KIND = 36
NUM_HELDOUT_PER_OTHER_KIND = 26

TAKING = {"quantities": "left", "comparisons": "more"}
"""What takes away in the documents of each of these topics."""


def quantity_documents(topic: str, seed: int, count: int, is_held_out: bool) -> list[dict]:
    """Documents of two facts, one of each adding kind in turn and one of the topic's taking kind, in both orders."""
    rng, pairs, rows = random.Random(seed), number_pairs(is_held_out), []
    for index in range(count):
        kinds = ADDING[index % len(ADDING)], TAKING[topic]
        kinds = kinds if rng.random() < 0.5 else (kinds[1], kinds[0])
        text, facts = make_document(rng, pairs, kinds)
        asked = [question(fact) for fact in facts]
        rows.append({"topic": topic, "text": text, "questions": [[q, str(a), "integer"] for q, a in asked]})
    return rows


def _is_held_out(index: int) -> bool:
    return index % 6 == 5


def definition_documents(seed: int, count: int, is_held_out: bool) -> list[dict]:
    """Documents of two definitions of one topic (held out: one, of the sixth word of a topic)."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        entries = DEFINITIONS[rng.choice(sorted(DEFINITIONS))]
        usable = [entry for i, entry in enumerate(entries) if _is_held_out(i) == is_held_out]
        chosen = rng.sample(usable, min(2, len(usable)))
        text = " ".join(f"{_article(term).capitalize()} is {meaning}." for term, meaning in chosen)
        asked = [[f"What do we call {meaning}?", term, "string"] for term, meaning in chosen]
        rows.append({"topic": "definitions", "text": text, "questions": asked})
    return rows


def relation_documents(seed: int, count: int, is_held_out: bool) -> list[dict]:
    """Documents of two relations of one sort (held out: one, the sixth of a sort), asked as multiple choice.

    The wrong options are answers of the same sort, held-out ones among them.
    """
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        pattern = rng.choice(sorted(RELATIONS))
        entries = RELATIONS[pattern]
        usable = [entry for i, entry in enumerate(entries) if _is_held_out(i) == is_held_out]
        chosen = rng.sample(usable, min(2, len(usable)))
        sentences = [pattern.format(a=a, b=b) for a, b in chosen]
        asked = []
        for a, b in chosen:
            others = rng.sample([other for _, other in entries if other != b], 3)
            options = rng.sample([b, *others], 4)
            listed = " ".join(f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True))
            asked.append([f"{RELATION_QUESTIONS[pattern].format(a=a)} {listed}", "ABCD"[options.index(b)], "choice"])
        rows.append({"topic": "relations", "text": " ".join(s[0].upper() + s[1:] + "." for s in sentences),
                     "questions": asked})  # fmt: skip
    return rows


def _article(word: str) -> str:
    return (
        word if word in {"snow", "rain", "fog", "thunder", "wind", "ice"} else f"a{'n' * (word[0] in 'aeiou')} {word}"
    )


def heldout_questions(seed: int) -> list[dict]:
    """Questions with references: each quantity kind equally often, every held-out definition once, and the held-out
    relation of each sort with its options in several orders."""
    rng, pairs, rows = random.Random(seed), number_pairs(is_held_out=True), []
    seen: set[str] = set()
    for kind in KINDS:
        while sum(row["kind"] == kind for row in rows) < NUM_HELDOUT_PER_QUANTITY_KIND:
            text, answer = question(make_fact(kind, rng, pairs, rng.randrange(3)))
            if text not in seen:
                seen.add(text)
                rows.append({"question": text, "answer": str(answer), "answer_type": "integer", "kind": kind})
    for kind, documents in (
        ("definition", definition_documents(seed + 1, 60, True)),
        ("relation", relation_documents(seed + 2, 60, True)),
    ):
        for text, answer, answer_type in (asked for document in documents for asked in document["questions"]):
            if text not in seen and sum(row["kind"] == kind for row in rows) < NUM_HELDOUT_PER_OTHER_KIND:
                seen.add(text)
                rows.append({"question": text, "answer": answer, "answer_type": answer_type, "kind": kind})
    return rows


def embedded_files() -> dict[str, list[dict]]:
    """File name to rows, for every file of the embedded corpus."""
    return {
        "documents.jsonl": _numbered("train", [
            *quantity_documents("quantities", 1, NUM_QUANTITY_DOCUMENTS, is_held_out=False),
            *quantity_documents("comparisons", 9, NUM_OTHER_DOCUMENTS, is_held_out=False),
            *definition_documents(3, NUM_OTHER_DOCUMENTS, is_held_out=False),
            *relation_documents(4, NUM_OTHER_DOCUMENTS, is_held_out=False),
        ]),
        "heldout_documents.jsonl": _numbered("heldout", [
            *quantity_documents("quantities", 2, 24, is_held_out=True),
            *quantity_documents("comparisons", 10, 8, is_held_out=True),
            *definition_documents(5, 8, is_held_out=True),
            *relation_documents(6, 8, is_held_out=True),
        ]),
        "heldout.jsonl": heldout_questions(7),
    }  # fmt: skip


def _numbered(prefix: str, rows: list[dict]) -> list[dict]:
    """The rows with an id each; a text that came before is left out."""
    distinct = {row["text"]: row for row in reversed(rows)}
    kept = [row for row in rows if distinct[row["text"]] is row]
    return [{"id": f"{prefix}-{index:04d}", **row} for index, row in enumerate(kept)]


def to_jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    for file_name, file_rows in embedded_files().items():
        (Path(__file__).parent / file_name).write_text(to_jsonl(file_rows))
        print(f"{file_name}: {len(file_rows)} lines")
