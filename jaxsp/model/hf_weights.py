"""Weights in a Hugging Face directory: safetensors, one file or several, in and out."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxsp.config import UserError
from jaxsp.json_lines import read_object
from jaxsp.model.decoder import Params
from jaxsp.model.sizes import DecoderSizes, sizes_from_hf_config
from jaxsp.model.tensor_table import assemble, check_tensors, expected_tensors, rule_of, tensors_of
from jaxsp.tokenizer import export_gguf_tokenizer

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip

_READABLE = {"F64", "F32", "F16", "BF16"}
_RECOMPUTED = "rotary_emb.inv_freq"
"""Buffers that old Llama checkpoints carry and every reader computes itself."""

_EQUAL_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class TensorFiles:
    """What the headers of a directory's safetensors files say: tensor name to shape, and tensor name to file."""

    shapes: Mapping[str, tuple[int, ...]]
    files: Mapping[str, Path]

    def read(self, name: str, rows: slice, columns: slice) -> np.ndarray:
        """That part of a tensor, in the file's dtype. The file is opened for this read only, so that the pages of it
        that a read maps into memory do not add up."""
        with _open(self.files[name]) as file:
            part = file.get_slice(name)
            return part[rows] if len(self.shapes[name]) == 1 else part[rows, columns]


def load_hf_params(
    directory: Path, sizes: DecoderSizes, *, dtype: Any = np.float32, shardings: Params | None = None
) -> Params:
    """Parameters as `decoder.init_params` lays them out, cast to `dtype`, each shard read by itself (`assemble`).

    Raises `UserError` naming tensor and file if a tensor is missing, unknown, of another shape or type, or if the
    embeddings are tied and the directory holds an `lm_head.weight` that differs from them.
    """
    found = read_headers(directory)
    expected = expected_tensors(sizes, "hf")
    shapes = {name: shape for name, shape in found.shapes.items() if not name.endswith(_RECOMPUTED)}
    if sizes.has_tied_embeddings and "lm_head.weight" in shapes and "lm_head.weight" not in expected:
        _check_tied(found)
        del shapes["lm_head.weight"]
    check_tensors(expected, shapes, lambda name: found.files.get(name, directory))
    try:
        return assemble(sizes, "hf", found.read, dtype=dtype, shardings=shardings)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory}: cannot read the weights: {error}") from error


def read_headers(directory: Path) -> TensorFiles:
    """Every tensor of the files that `model.safetensors.index.json` lists, or else of `model.safetensors`."""
    index_path = directory / INDEX_NAME
    if index_path.exists():
        try:
            weight_map = read_object(index_path.read_bytes(), str(index_path), "readable as JSON")["weight_map"]
            names = sorted(set(weight_map.values()))
            if any(Path(name).name != name for name in names):
                raise ValueError("it names files of other directories")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{index_path}: not an index of safetensors files: {error!r}") from error
    elif (directory / SINGLE_NAME).exists():
        weight_map, names = {}, [SINGLE_NAME]
    else:
        has_pickle = any(directory.glob("pytorch_model*.bin"))
        hint = "; pytorch_model.bin is not read: save the model with safe_serialization=True" if has_pickle else ""
        raise UserError(f"{directory}: holds neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
    shapes, files = {}, {}
    for path in (directory / name for name in names):
        if not path.exists():
            raise UserError(f"{path}: is missing, and {index_path.name} lists it; fetch the model again")
        if not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read: Permission denied")
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 -- a safetensors file is no mapping
                if name in files:
                    raise UserError(f"{path}: tensor {name} is also in {files[name].name}")
                part = file.get_slice(name)
                if part.get_dtype() not in _READABLE and not name.endswith(_RECOMPUTED):
                    raise UserError(f"{path}: tensor {name} is {part.get_dtype()}, not one of {sorted(_READABLE)}")
                shapes[name], files[name] = tuple(part.get_shape()), path
    for name, file_name in weight_map.items():
        if name not in files or files[name].name != file_name:
            raise UserError(f"{directory / file_name}: tensor {name} is missing, and {index_path.name} lists it there")
    return TensorFiles(shapes, files)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from error


def _check_tied(found: TensorFiles) -> None:
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    is_equal = found.shapes[head] == found.shapes.get(table)
    for start in range(0, found.shapes[head][0], _EQUAL_CHUNK_ROWS):
        rows = slice(start, min(start + _EQUAL_CHUNK_ROWS, found.shapes[head][0]))
        if not (is_equal and np.array_equal(found.read(head, rows, slice(None)), found.read(table, rows, slice(None)))):
            is_equal = False
            break
    if not is_equal:
        raise UserError(
            f"{found.files[head]}: {head} differs from {table}, and config.json says tie_word_embeddings = true; "
            "set it to false if the model has a head of its own"
        )


def export_hf(
    params: Params,
    sizes: DecoderSizes,
    config: Mapping[str, Any],
    directory: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    tokenizer_from: Path | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_shard_bytes: int = 2 * 2**30,
) -> None:
    """Writes a directory that `transformers` and `load_hf_params` read.

    It holds `config.json` (all attributes of `config`, with the dtype written), `generation_config.json`, one
    `model.safetensors` or several files with an index, the tokenizer files of `tokenizer_from` (a model directory, or
    a GGUF file, whose vocabulary is written as `tokenizer.json`), and `extra_files` (name -> text). Tied embeddings
    stay tied: there is then no `lm_head.weight`. Everything is written beside `directory` first and renamed at the
    end, so an interrupted export leaves no half model.

    Args:
        params: stacked layers; every shard on devices of this process.
        max_shard_bytes: size of a file, and of the host memory used; one tensor may exceed it.

    Raises `UserError` if `directory` exists and is not empty, or cannot be written (say, a full disk).
    """
    if sizes_from_hf_config(config) != sizes:
        raise ValueError("the config to export does not describe these sizes")
    directory = Path(directory)
    check_new_directory(directory)
    part = directory.with_name(directory.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)  # what an interrupted export left
        part.mkdir(parents=True)
        _write_json(part / "config.json", _with_dtype(config, dtype))
        _write_tensors(params, sizes, part, bfloat16 if dtype == "bfloat16" else np.float32, max_shard_bytes)
        if tokenizer_from is not None:
            _copy_tokenizer(Path(tokenizer_from), part)
        if not (part / "generation_config.json").exists():
            names = ("bos_token_id", "eos_token_id", "pad_token_id")
            _write_json(part / "generation_config.json", {n: config[n] for n in names if config.get(n) is not None})
        for name, text in (extra_files or {}).items():
            (part / name).write_text(text, encoding="utf-8")
        part.replace(directory)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise UserError(f"{directory}: cannot write the model: {error}; free space or name another --out") from error


def check_new_directory(directory: Path) -> None:
    """Raises `UserError` if something is there already: nobody's files are overwritten."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists and is not an empty directory; export to a new one")


def _write_tensors(params: Params, sizes: DecoderSizes, directory: Path, dtype: Any, max_shard_bytes: int) -> None:
    """All tensors in one file, or in several of at most `max_shard_bytes` with their index."""
    shapes = expected_tensors(sizes, "hf")
    shards: list[list[str]] = [[]]
    used = 0
    for name, shape in shapes.items():
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if shards[-1] and used + num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += num_bytes
    total = sum(int(np.prod(shape)) for shape in shapes.values()) * np.dtype(dtype).itemsize
    tensors = _file_tensors(params, sizes, dtype)
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = SINGLE_NAME if len(shards) == 1 else f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        held = dict(next(tensors) for _ in names)
        assert list(held) == names
        save_file(held, directory / file_name, metadata={"format": "pt"})
        shutil.copymode(directory / "config.json", directory / file_name)  # it makes files that only the owner reads
        weight_map |= dict.fromkeys(names, file_name)
    if len(shards) > 1:
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _file_tensors(params: Params, sizes: DecoderSizes, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and array of every tensor in the order of `expected_tensors`, one layer on the host at a time."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        rule = rule_of(path)
        stacks = [(0, size) for size in leaf.shape]
        for place, name in tensors_of(rule, sizes, "hf", stacks):
            if not any(place[1:]):  # an expert's tensors follow one another: fetch those of a layer together
                layer = np.asarray(leaf[place[0]] if place else leaf)
            yield name, rule.to_file(layer[place[1:]].astype(dtype, copy=False))


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """`config` with the dtype of the weights, where it named one (`torch_dtype` until transformers 4, then `dtype`)."""
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    return {**config, **dict.fromkeys(names, dtype)}


def _copy_tokenizer(source: Path, directory: Path) -> None:
    if source.is_file():
        export_gguf_tokenizer(source, directory)
        return
    for name in (*TOKENIZER_NAMES, "generation_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, directory / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
