"""Weights and config in a GGUF file, dequantised to what `transformers` would compute with.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Block formats are decoded by the `gguf` package.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from jaxsp.config import UserError
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes
from jaxsp.model.tensor_table import assemble, check_tensors, expected_tensors

_READABLE = {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"}

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_ROPE_FREQS = "rope_freqs.weight"

# Metadata below the architecture's name that is read, and what must hold of the rest.
_READ = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "rope.freq_base", "rope.dimension_count", "rope.scaling.original_context_length",
}  # fmt: skip
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "rope.scaling.type": ("none",),
    "rope.scaling.finetuned": (True, False),
    "expert_count": (0,),
    "expert_used_count": (0,),
}

# Llama 3.1 and later were all released with these, and with factors 8 or 32.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


@dataclass(frozen=True)
class GgufTensor:
    """`shape` as in a Hugging Face file, slowest axis first; `offset` in bytes from the start of the file."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """float32 `[stop - start, columns]` of a matrix, or `[stop - start]` of a vector."""
        tensor = self.tensors[name]
        if len(tensor.shape) == 1:
            return self._decode(tensor, 0, tensor.num_bytes)[start:stop]
        row_bytes = tensor.num_bytes // tensor.shape[0]
        return self._decode(tensor, start * row_bytes, (stop - start) * row_bytes).reshape(stop - start, -1)

    def _decode(self, tensor: GgufTensor, start: int, num_bytes: int) -> np.ndarray:
        # Read, not mapped: mapped pages would stay in this process's memory until the file is closed.
        raw = np.fromfile(self.path, np.uint8, count=num_bytes, offset=tensor.offset + start)
        if raw.size != num_bytes:
            raise OSError(f"{self.path} ends early")
        return dequantize(raw, tensor.kind)


def read_gguf(path: Path) -> GgufFile:
    """The metadata (without long arrays: the vocabulary is the tokenizer's) and the tensors' places.

    Raises `UserError` if the file is no GGUF file, is cut short or is one part of several.
    """
    stat = path.stat()
    return _read_gguf(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)
def _read_gguf(path: Path, _mtime_ns: int, _num_bytes: int) -> GgufFile:
    """Parsing takes seconds where the vocabulary is large, and a start needs the config and then the weights."""
    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise UserError(f"{path}: not a whole GGUF file: {error}") from error
    metadata = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("tokenizer.") or len(field.data) == 1
    }
    if metadata.get("split.count", 0) > 1:
        raise UserError(
            f"{path}: is part of {metadata['split.count']}; merge the parts with `llama-gguf-split --merge`"
        )
    tensors = {
        tensor.name: GgufTensor(
            tensor.tensor_type, tuple(reversed(tensor.shape.tolist())), tensor.data_offset, tensor.n_bytes
        )
        for tensor in reader.tensors
    }
    return GgufFile(path, metadata, tensors)


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The Hugging Face `config.json` that this file's metadata and tensors amount to.

    Raises `UserError` naming the metadata key that is missing or that would change the numbers in a way the decoder
    does not implement.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise UserError(f"{file.path}: general.architecture = {architecture!r} is not implemented (only {known})")
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): v for name, v in file.metadata.items() if name.startswith(prefix)}
    for name, value in own.items():
        if name not in _READ and value not in _MUST_BE.get(name, ()):
            raise UserError(f"{file.path}: {prefix}{name} = {value!r} is not implemented; it may change the numbers")

    def number(name: str) -> Any:
        if isinstance(own.get(name), bool) or not isinstance(own.get(name), int | float):
            raise UserError(
                f"{file.path}: {prefix}{name} = {own.get(name)!r} is not a number, and the decoder needs it"
            )
        return own[name]

    num_heads = number("attention.head_count")
    has_key_length = "attention.key_length" in own
    head_dim = number("attention.key_length") if has_key_length else number("embedding_length") // num_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise UserError(f"{file.path}: {prefix}{name} = {own[name]} differs from the head size {head_dim}")
    if "token_embd.weight" not in file.tensors:
        raise UserError(f"{file.path}: tensor token_embd.weight is missing")
    theta = _shortest(number("rope.freq_base"))
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": number("attention.head_count_kv") if "attention.head_count_kv" in own else num_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "max_position_embeddings": number("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": "float32",
    }
    if _ROPE_FREQS in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, theta, head_dim, own)
    return config | _special_ids(file.metadata)


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "padding")}
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    found = {"bos_token_id": ids["bos"], "pad_token_id": ids["padding"]}
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return {name: value for name, value in found.items() if value is not None}


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: metadata says 9.999999747378752e-06 where the config said 1e-05."""
    return float(str(np.float32(value)))


def _llama3_scaling(file: GgufFile, theta: float, head_dim: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling` from the divisors of the frequencies, which is all that the file keeps of llama3 scaling.

    The longest wavelength is divided by the whole factor; the rest follows from the parameters of the Llama releases,
    and is refused if it does not.
    """
    shape = file.tensors[_ROPE_FREQS].shape
    if shape != (head_dim // 2,):
        raise UserError(f"{file.path}: tensor {_ROPE_FREQS} has shape {list(shape)}, not [{head_dim // 2}]")
    divisors = file.rows(_ROPE_FREQS, 0, head_dim // 2)
    original = own.get("rope.scaling.original_context_length", _LLAMA3_ORIGINAL)
    factor = float(divisors.max())
    turns = original / (2 * math.pi) * theta ** (-np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0.0, 1.0)
    if not np.allclose(divisors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-4):
        raise UserError(
            f"{file.path}: {_ROPE_FREQS} is not llama3 scaling over {original} positions; other rope scaling is not "
            "implemented"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": original,
    }


def load_gguf_params(
    path: Path, sizes: DecoderSizes, *, dtype: Any = np.float32, shardings: Params | None = None
) -> Params:
    """Parameters as `decoder.init_params` lays them out, dequantised to float32 and cast to `dtype` (`assemble`).

    Raises `UserError` naming the tensor if one is missing, unknown, of another shape, or of a type that is not read.
    """
    file = read_gguf(path)
    for name, tensor in file.tensors.items():
        if tensor.kind.name not in _READABLE:
            raise UserError(f"{path}: tensor {name} is {tensor.kind.name}, not one of {sorted(_READABLE)}")
    shapes = {name: tensor.shape for name, tensor in file.tensors.items() if name != _ROPE_FREQS}
    check_tensors(expected_tensors(sizes, "gguf"), shapes, lambda _: path)

    def read(name: str, rows: slice, columns: slice) -> np.ndarray:
        part = file.rows(name, rows.start, rows.stop)
        if sizes.model_type == "llama" and (".attn_q." in name or ".attn_k." in name):
            part = _split_halves(part, sizes.head_dim)
        return part if part.ndim == 1 else part[:, columns]

    try:
        return assemble(sizes, "gguf", read, dtype=dtype, shardings=shardings)
    except OSError as error:
        raise UserError(f"{path}: cannot read the weights: {error}") from error


def _split_halves(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Query or key rows of whole heads, reordered from rotated pairs (2i, 2i + 1) to pairs (i, i + H/2).

    GGUF's llama architecture rotates neighbours, and its converter interleaves the two halves of each head for it.
    """
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)
