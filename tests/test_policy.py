"""A model opened for use: what its parts must have in common."""

from pathlib import Path

import numpy as np
import pytest

from jaxsp.config import ModelConfig, UsageError
from jaxsp.policy import check_vocabulary, open_text_side
from tests.tiny import write_tiny_model


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused_and_one_with_fewer_is_not(tmp_path: Path) -> None:
    text = open_text_side(ModelConfig(str(write_tiny_model(tmp_path / "model"))))
    num_tokens = text.tokenizer.vocab_size
    assert 1 < num_tokens < text.source.sizes.vocab_size
    for num_rows in (num_tokens, text.source.sizes.vocab_size):
        check_vocabulary(text, {"embed": np.zeros((num_rows, 2))})
    message = f"the tokenizer has {num_tokens} tokens, the model embeds only {num_tokens - 1}"
    with pytest.raises(UsageError, match=message):
        check_vocabulary(text, {"embed": np.zeros((num_tokens - 1, 2))})
