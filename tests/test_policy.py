"""A model opened for use: what its parts must have in common."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jaxsp.config import ModelConfig, UsageError
from jaxsp.model.sizes import sizes_from_hf_config
from jaxsp.policy import check_vocabulary, open_text_side, sampler_parts
from tests.tiny import tiny_config, write_tiny_model


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused_and_one_with_fewer_is_not(tmp_path: Path) -> None:
    text = open_text_side(ModelConfig(str(write_tiny_model(tmp_path / "model"))))
    num_tokens = text.tokenizer.vocab_size
    assert 1 < num_tokens < text.source.sizes.vocab_size
    for num_rows in (num_tokens, text.source.sizes.vocab_size):
        check_vocabulary(text, {"embed": np.zeros((num_rows, 2))})
    message = f"the tokenizer has {num_tokens} tokens, the model embeds only {num_tokens - 1}"
    with pytest.raises(UsageError, match=message):
        check_vocabulary(text, {"embed": np.zeros((num_tokens - 1, 2))})


@pytest.mark.parametrize(
    ("num_devices", "num_heads", "num_kv_heads", "parts"),
    [(1, 4, 2, 1), (8, 32, 8, 8), (16, 32, 8, 16), (8, 8, 2, 8), (6, 32, 8, 2), (4, 24, 6, 2), (8, 9, 3, 1)],
)
def test_the_sampler_is_split_as_far_as_heads_divide_and_kv_heads_divide_or_are_copied(
    num_devices: int, num_heads: int, num_kv_heads: int, parts: int
) -> None:
    sizes = dataclasses.replace(
        sizes_from_hf_config(tiny_config()), num_heads=num_heads, num_kv_heads=num_kv_heads, vocab_size=640
    )
    assert sampler_parts(num_devices, sizes) == parts
    narrow = dataclasses.replace(sizes, vocab_size=641)
    assert sampler_parts(num_devices, narrow) == 1
