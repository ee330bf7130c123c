import json

import jax
import numpy as np
import pytest
from gguf_file import golden_as_gguf, metadata_of, write_gguf
from model_forward import GOLDEN, full_logits

from jaxsp.config import UserError
from jaxsp.model.gguf_weights import GgufFile, config_from_gguf, load_gguf_params, read_gguf
from jaxsp.model.hf_weights import export_hf
from jaxsp.model.rope import inverse_frequencies
from jaxsp.model.sizes import Llama3Scaling, Rope, sizes_from_hf_config
from jaxsp.model.source import load_params, open_model, tokenizer_path
from jaxsp.tokenizer import load_tokenizer

CONFIG = json.loads((GOLDEN / "llama_bias/config.json").read_text())
TABLE = {"token_embd.weight": np.zeros((64, 32), np.float32)}


@pytest.mark.parametrize("name", ["qwen3_tied", "qwen3_untied", "llama_bias"])
def test_a_model_written_as_gguf_loads_as_the_same_parameters_and_sizes(name, tmp_path):
    found, expected = open_model(str(golden_as_gguf(name, tmp_path / "m.gguf"))), open_model(str(GOLDEN / name))
    assert found.sizes == expected.sizes and found.eos_ids == (1,)
    jax.tree.map(np.testing.assert_array_equal, load_params(found), load_params(expected))


def test_llama3_scaling_in_a_gguf_gives_the_logits_of_transformers(tmp_path):
    expected = np.load(GOLDEN / "llama3_scaled/expected.npz")
    plain = inverse_frequencies(Rope(10_000.0), 8)
    scaled = inverse_frequencies(Rope(10_000.0, Llama3Scaling(32.0, 1.0, 4.0, 32)), 8)
    path = golden_as_gguf("llama3_scaled", tmp_path / "m.gguf", extra={"rope_freqs.weight": plain / scaled})
    with pytest.raises(UserError, match=r"rope_freqs\.weight is not llama3 scaling over 8192 positions"):
        open_model(str(path))
    file = read_gguf(path)
    metadata = {**file.metadata, "llama.rope.scaling.original_context_length": 32}
    config = config_from_gguf(GgufFile(path, metadata, file.tensors))
    sizes = sizes_from_hf_config(config)
    assert sizes == open_model(str(GOLDEN / "llama3_scaled")).sizes
    found = full_logits(sizes, load_gguf_params(path, sizes), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], atol=1e-4)


def test_scaling_of_the_llama_3_2_release_is_recovered(tmp_path):
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    divisors = inverse_frequencies(Rope(5e5), 64) / inverse_frequencies(Rope(5e5, scaling), 64)
    config = CONFIG | {"head_dim": 64, "rope_parameters": {"rope_theta": 5e5}}
    path = write_gguf(tmp_path / "m.gguf", metadata_of(config), TABLE | {"rope_freqs.weight": divisors}, {})
    assert open_model(str(path)).sizes.rope == Rope(5e5, scaling)


def test_float32_metadata_become_the_decimals_they_were_made_of(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata_of(CONFIG), TABLE, {})
    config = open_model(str(path)).config
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10_000.0)


def test_ends_of_turn_count_as_ends(tmp_path):
    metadata = metadata_of(CONFIG) | {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": 0}
    source = open_model(str(write_gguf(tmp_path / "m.gguf", metadata, TABLE, {})))
    assert source.eos_ids == (1, 5) and source.config["bos_token_id"] == 0


def test_an_export_of_a_gguf_model_has_its_weights_and_its_vocabulary(tmp_path):
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "<|end|>", "b", "ab", *(f"t{i}" for i in range(4, 64))],
        "tokenizer.ggml.token_type": [1, 3, *[1] * 62],
        "tokenizer.ggml.merges": ["a b"],
    }
    source = open_model(str(golden_as_gguf("llama_bias", tmp_path / "m.gguf", metadata=vocabulary)))
    params = load_params(source)
    export_hf(params, source.sizes, source.config, tmp_path / "out", tokenizer_from=tokenizer_path(source))
    exported = open_model(str(tmp_path / "out"))
    assert (exported.sizes, exported.eos_ids) == (source.sizes, source.eos_ids)
    jax.tree.map(np.testing.assert_array_equal, load_params(exported), params)
    tokenizer = load_tokenizer(tokenizer_path(exported))
    assert tokenizer.encode("abba") == load_tokenizer(tokenizer_path(source)).encode("abba") == [3, 2, 0]
    assert tokenizer.special_id("<|end|>") == 1


# Decoding by the formulas of ggml's block formats, one value at a time.


def half(block, offset):
    return float(np.frombuffer(block[offset : offset + 2].tobytes(), np.float16)[0])


def signed(byte):
    return int(byte) - 256 if byte > 127 else int(byte)


def nibble(block, offset, i):
    """Value i of 32: the first 16 in the low halves of 16 bytes, the others in the high halves."""
    return int(block[offset + i % 16]) >> (4 * (i // 16)) & 15


def fifth_bit(block, offset, i):
    return (int.from_bytes(block[offset : offset + 4].tobytes(), "little") >> i & 1) << 4


def scale_and_min(block, group):
    """The 6-bit scale and minimum of group 0..7 of a Q4_K or Q5_K block."""
    packed = [int(byte) for byte in block[4:16]]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    return (
        packed[group + 4] & 15 | packed[group - 4] >> 6 << 4,
        packed[group + 4] >> 4 | packed[group] >> 6 << 4,
    )


def q4_k(block, i):
    scale, minimum = scale_and_min(block, i // 32)
    quant = int(block[16 + i // 64 * 32 + i % 32]) >> (4 * (i // 32 % 2)) & 15
    return half(block, 0) * scale * quant - half(block, 2) * minimum


def q5_k(block, i):
    scale, minimum = scale_and_min(block, i // 32)
    quant = int(block[48 + i // 64 * 32 + i % 32]) >> (4 * (i // 32 % 2)) & 15
    quant |= (int(block[16 + i % 32]) >> (i // 32) & 1) << 4
    return half(block, 0) * scale * quant - half(block, 2) * minimum


def q6_k(block, i):
    part, inside = i // 128, i % 128
    low = int(block[64 * part + inside % 64]) >> (4 * (inside // 64)) & 15
    high = int(block[128 + 32 * part + inside % 32]) >> (2 * (inside // 32)) & 3
    return half(block, 208) * signed(block[192 + i // 16]) * ((low | high << 4) - 32)


# kind -> (values in a block, bytes in a block, where its half-precision numbers stand, value i of a block)
FORMATS = {
    "F16": (1, 2, (0,), lambda block, i: half(block, 0)),
    "BF16": (1, 2, (), lambda block, i: float(np.frombuffer(b"\0\0" + block.tobytes(), np.float32)[0])),
    "Q8_0": (32, 34, (0,), lambda block, i: half(block, 0) * signed(block[2 + i])),
    "Q4_0": (32, 18, (0,), lambda block, i: half(block, 0) * (nibble(block, 2, i) - 8)),
    "Q4_1": (32, 20, (0, 2), lambda block, i: half(block, 0) * nibble(block, 4, i) + half(block, 2)),
    "Q5_0": (32, 22, (0,), lambda block, i: half(block, 0) * ((nibble(block, 6, i) | fifth_bit(block, 2, i)) - 16)),
    "Q5_1": (
        32,
        24,
        (0, 2),
        lambda block, i: half(block, 0) * (nibble(block, 8, i) | fifth_bit(block, 4, i)) + half(block, 2),
    ),
    "Q4_K": (256, 144, (0, 2), q4_k),
    "Q5_K": (256, 176, (0, 2), q5_k),
    "Q6_K": (256, 210, (208,), q6_k),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_decoded_by_their_format(kind, tmp_path):
    block_values, block_bytes, halves, value = FORMATS[kind]
    rng = np.random.default_rng(sum(kind.encode()))
    blocks = rng.integers(0, 128 if kind == "BF16" else 256, (3, 512 // block_values, block_bytes), dtype=np.uint8)
    for offset in halves:
        numbers = rng.normal(size=blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = numbers[..., None].view(np.uint8)
    data = blocks.reshape(3, -1)
    if kind == "F16":
        data = data.view(np.float16)
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, {"t": data}, {"t": kind})
    found = read_gguf(path).rows("t", 1, 3)
    expected = [[value(block, i) for block in row for i in range(block_values)] for row in blocks[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0"])
def test_a_quantised_model_stays_close_to_the_one_it_was_made_of(kind, tmp_path):
    kinds = {f"blk.{i}.attn_{x}.weight": kind for i in range(2) for x in ("q", "k", "v", "output")}
    params = load_params(open_model(str(golden_as_gguf("llama_bias", tmp_path / "m.gguf", kinds))))
    exact = load_params(open_model(str(GOLDEN / "llama_bias")))
    for name in ("q", "k", "v", "o"):
        found, expected = params["layers"][name]["kernel"], exact["layers"][name]["kernel"]
        assert 0 < np.abs(found - expected).max() < 0.02
    np.testing.assert_array_equal(params["layers"]["up"]["kernel"], exact["layers"]["up"]["kernel"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture = 'gemma3'"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
        ({"llama.attention.sliding_window": 512}, "llama.attention.sliding_window = 512"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length = 16 differs from the head size 8"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count = 4 differs"),
        ({"llama.attention.head_count_kv": [2, 4]}, "llama.attention.head_count_kv = [2, 4] is not a number"),
        ({"llama.rope.freq_base": None}, "llama.rope.freq_base = None is not a number"),
        ({"split.count": 2}, "is part of 2; merge the parts"),
    ],
)
def test_metadata_that_would_change_the_numbers_are_refused_by_name(change, message, tmp_path):
    metadata = {name: value for name, value in (metadata_of(CONFIG) | change).items() if value is not None}
    path = write_gguf(tmp_path / "m.gguf", metadata, TABLE, {})
    with pytest.raises(UserError) as caught:
        open_model(str(path))
    assert message in str(caught.value) and str(path) in str(caught.value)


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path):
    def message(name, array, kinds=None):
        path = golden_as_gguf("llama_bias", tmp_path / "m.gguf", kinds, {name: array})
        with pytest.raises(UserError) as caught:
            load_params(open_model(str(path)))
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "tensor blk.2.attn_q.weight [1] belongs to no part" in message("blk.2.attn_q.weight", np.zeros(1))
    assert "tensor blk.0.ffn_up.weight has shape [3, 32], the config" in message(
        "blk.0.ffn_up.weight", np.zeros((3, 32))
    )
    blocks = np.zeros((32, 66), np.uint8)
    found = message("blk.0.attn_q.weight", blocks, {"blk.0.attn_q.weight": "TQ2_0"})
    assert "tensor blk.0.attn_q.weight is TQ2_0" in found
    assert "rope_freqs.weight is not llama3 scaling" in message("rope_freqs.weight", np.full(4, 3.0))
    assert "rope_freqs.weight has shape [3]" in message("rope_freqs.weight", np.ones(3))


def test_files_that_are_not_whole_are_refused(tmp_path):
    path = golden_as_gguf("llama_bias", tmp_path / "m.gguf")
    whole = path.read_bytes()
    for content in (b"", b"GGUF", whole[:100], whole[: len(whole) // 2], b"not a model" * 100):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"m\.gguf: not a whole GGUF file"):
            open_model(str(path))


def test_a_missing_embedding_table_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", metadata_of(CONFIG), {"x": np.zeros(1, np.float32)}, {})
    with pytest.raises(UserError, match=r"token_embd\.weight is missing"):
        open_model(str(path))
