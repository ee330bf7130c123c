"""What fits and what bandwidth allows, against sizes added up by hand."""

import json
from pathlib import Path

import pytest

from jaxsp.config import UsageError
from jaxsp.model.sizes import sizes_from_hf_config
from jaxsp.sampler.capacity import TARGETS, Target, capacity, markdown_table

HERE = Path(__file__).parent
MODELS = {
    name: sizes_from_hf_config(json.loads((HERE / f"{name}.json").read_text())) for name in ("Qwen3-4B", "Qwen3-8B")
}


def layer_weights(embed: int, mlp: int) -> int:
    return 2 * (embed * 128 * (32 + 8 + 8 + 32) + 3 * embed * mlp) + 4 * (2 * embed + 2 * 128)


def test_a_step_reads_the_weights_once_and_each_row_s_keys_and_values() -> None:
    target = Target("one", 1, 100 * 10**9, 2e12)
    found = capacity(MODELS["Qwen3-4B"], target, num_rows=10, context=999)
    assert found.token_bytes == 2 * 36 * 8 * 128 * 2 == 147_456
    assert found.weight_bytes == 36 * layer_weights(2560, 9728) + 2 * 151_936 * 2560 + 4 * 2560
    assert found.num_tokens == (100 * 10**9 * 7 // 8 - found.weight_bytes) // 147_456
    assert found.step_bytes == found.weight_bytes + 10 * 1000 * 147_456
    assert found.tokens_per_s == pytest.approx(10 * 2e12 / found.step_bytes)


def test_an_embedding_apart_from_the_head_is_kept_but_not_read() -> None:
    found = capacity(MODELS["Qwen3-8B"], Target("one", 1, 100 * 10**9, 2e12), num_rows=0)
    table = 2 * 151_936 * 4096
    assert found.weight_bytes == 36 * layer_weights(4096, 12_288) + 2 * table + 4 * 4096
    assert found.step_bytes == found.weight_bytes - table


def test_devices_share_weights_and_cache_and_copy_what_they_cannot_split() -> None:
    four, sixteen = (capacity(MODELS["Qwen3-4B"], Target("", num_devices, 10**11, 1e12)) for num_devices in (4, 16))
    assert four.token_bytes == 147_456 // 4
    assert sixteen.token_bytes == 147_456 // 8  # one of the 8 heads, on two devices each
    with pytest.raises(UsageError, match=r"kv_heads = 8 cannot be split or copied evenly over mesh\.tensor = 12"):
        capacity(MODELS["Qwen3-4B"], Target("", 12, 10**11, 1e12))
    with pytest.raises(ValueError, match="leave no memory"):
        capacity(MODELS["Qwen3-4B"], Target("", 1, 8 * 10**9, 1e12))


def test_the_table_in_the_readme_is_the_one_that_is_computed() -> None:
    assert markdown_table(MODELS) in (HERE.parents[1] / "jaxsp/sampler/README.md").read_text()
    assert len(TARGETS) * len(MODELS) == markdown_table(MODELS).count("\n") - 1
