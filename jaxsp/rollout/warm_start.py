"""Writes the embedded warm-start conversations: `python -m jaxsp.rollout.warm_start`.

In each, a challenger reads a training document of the embedded corpus and replies in the compact format: to the type
call with a word, to the question call with two lines. No conversation shows a reasoner's answer.
"""

import random
from pathlib import Path

from jaxsp.envs import corpus
from jaxsp.envs.corpus.generate import NUM_QUANTITY_DOCUMENTS, quantity_documents, to_jsonl
from jaxsp.rollout.prompts import compact

NUM_DOCUMENTS = 192


def conversations(documents: list[dict], seed: int = 8) -> list[dict]:
    """`{"messages": [...]}` rows, a question call and a type call in turn, for documents drawn without repeats."""
    rng, rows = random.Random(seed), []
    for document in rng.sample(documents, NUM_DOCUMENTS):
        text, answer, answer_type = rng.choice(document["questions"])
        for prompt, reply in (
            (compact.question_messages(document["text"], answer_type), compact.format_question(text, answer)),
            (compact.type_messages(document["text"]), compact.TYPE_WORDS[answer_type]),
        ):
            rows.append({"messages": [*prompt, {"role": "assistant", "content": reply}]})
    return rows


def embedded_conversations() -> list[dict]:
    """The rows of `warm_start.jsonl`, made from the quantity documents of the training corpus."""
    return conversations(quantity_documents("quantities", 1, NUM_QUANTITY_DOCUMENTS, is_held_out=False))


if __name__ == "__main__":
    path = Path(str(corpus.__file__)).parent / "warm_start.jsonl"
    path.write_text(to_jsonl(embedded_conversations()))
    print(f"{path.name}: {len(path.read_text().splitlines())} lines")
