"""Writes small GGUF files, the llama ones with query and key rows interleaved as llama.cpp's converter does."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from model_forward import GOLDEN
from safetensors.numpy import load_file

from jaxsp.model.sizes import sizes_from_hf_config
from jaxsp.model.tensor_table import TENSORS


def write_gguf(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray], kinds: dict[str, str]) -> Path:
    """`tensors` are float arrays, quantised to `kinds[name]` (default F32), or uint8 rows of ready blocks."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for name, value in metadata.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if name != "general.architecture":
            (writer.add_array if isinstance(value, list) else add[type(value)])(name, value)
    for name, array in tensors.items():
        kind = GGMLQuantizationType[kinds.get(name, "F32")]
        writer.add_tensor(name, array if array.dtype == np.uint8 else quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """GGUF metadata of a Hugging Face config, with a vocabulary that is only as long as it must be."""
    sizes = sizes_from_hf_config(config)
    own = {
        "block_count": sizes.num_layers,
        "context_length": sizes.max_positions,
        "embedding_length": sizes.embed_dim,
        "feed_forward_length": sizes.mlp_dim,
        "attention.head_count": sizes.num_heads,
        "attention.head_count_kv": sizes.num_kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "attention.layer_norm_rms_epsilon": sizes.rms_eps,
        "rope.freq_base": sizes.rope.theta,
    }
    if sizes.model_type == "llama":
        own |= {"rope.dimension_count": sizes.head_dim, "vocab_size": sizes.vocab_size}
    return {
        "general.architecture": sizes.model_type,
        **{f"{sizes.model_type}.{name}": value for name, value in own.items()},
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(sizes.vocab_size)],
        "tokenizer.ggml.eos_token_id": 1,
    }


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i and row i + H/2 of each head side by side."""
    heads = np.split(rows, num_heads)
    half = len(heads[0]) // 2
    return np.concatenate([head[[i // 2 + half * (i % 2) for i in range(2 * half)]] for head in heads])


def golden_as_gguf(
    name: str,
    path: Path,
    kinds: dict[str, str] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """A golden model's weights in a GGUF file; `extra` tensors and `metadata` are added, or replace one."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    sizes = sizes_from_hf_config(config)
    names = {
        rule.name("hf", layer): rule.name("gguf", layer)
        for rule in TENSORS
        if rule.gguf
        for layer in range(sizes.num_layers)
    }
    tensors = {}
    for hf_name, array in load_file(GOLDEN / name / "model.safetensors").items():
        if sizes.model_type == "llama" and (".q_proj." in hf_name or ".k_proj." in hf_name):
            array = interleaved(array, sizes.num_heads if ".q_proj." in hf_name else sizes.num_kv_heads)
        tensors[names[hf_name]] = array
    return write_gguf(path, metadata_of(config) | (metadata or {}), tensors | (extra or {}), kinds or {})
