"""The vocabulary in a GGUF file, as the libraries that tokenize take it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jaxsp.config import UserError
from jaxsp.gguf_metadata import read_gguf_metadata

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TYPE_CONTROL, _TYPE_USER_DEFINED, _TYPE_BYTE = 3, 4, 6


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _split_smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@dataclass(frozen=True)
class _ByteLevel:
    """How the byte-level tokenizers of one `tokenizer.ggml.pre` cut text; `adds_bos` unless the file says otherwise."""

    split: Callable[[], pre_tokenizers.PreTokenizer]
    is_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_BYTE_LEVEL = {
    "smollm": _ByteLevel(_split_smollm),
    "qwen2": _ByteLevel(lambda: _split(_QWEN2_SPLIT), is_nfc=True),
    "llama-bpe": _ByteLevel(lambda: _split(_LLAMA3_SPLIT), ignores_merges=True, adds_bos=True),
}


def read_vocabulary(path: Path) -> dict[str, Any]:
    """The metadata by their names below `tokenizer.ggml.`, with `add_bos_token` also where the file is silent.

    Its `model` is `gpt2`, for `byte_level_tokenizer`, or `llama`, for `sentencepiece_model`. Raises `UserError` for
    any other, and what `read_gguf_metadata` raises.
    """
    metadata = read_gguf_metadata(path)
    fields = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind = fields.get("model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"tokenizer: {path} has tokenizer.ggml.model = {kind!r}; supported are 'gpt2' and 'llama'")
    if kind == "gpt2" and fields.get("pre") not in _BYTE_LEVEL:
        raise UserError(
            f"tokenizer: {path} has tokenizer.ggml.pre = {fields.get('pre')!r}; supported are {sorted(_BYTE_LEVEL)}"
        )
    adds_bos = True if kind == "llama" else _BYTE_LEVEL[fields["pre"]].adds_bos
    return {"add_bos_token": adds_bos, **fields}


def byte_level_tokenizer(fields: dict[str, Any]) -> tokenizers.Tokenizer:
    """Cuts text as `tokenizer.ggml.pre` says; it puts no special token before or behind a text."""
    form = _BYTE_LEVEL[fields["pre"]]
    texts, types = fields["tokens"], fields["token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=form.ignores_merges))  # pyright: ignore[reportArgumentType]
    if form.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = form.split()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, is_special in ((_TYPE_CONTROL, True), (_TYPE_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(text, normalized=False, special=is_special)
                for text, found in zip(texts, types, strict=True)
                if found == kind
            ]
        )
    return tokenizer


def sentencepiece_model(fields: dict[str, Any]) -> bytes:
    """A SentencePiece `ModelProto`, serialized."""
    from sentencepiece import sentencepiece_model_pb2  # loads protobuf, which only these files need

    proto = sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    for text, score, kind in zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True):
        proto.pieces.add(piece=text, score=score, type=kind)  # the numbers of the types are SentencePiece's own
    trainer = proto.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = _TYPE_BYTE in fields["token_type"]
    for name in ("bos", "eos"):
        index = fields.get(f"{name}_token_id")
        setattr(trainer, f"{name}_piece", fields["tokens"][index] if index is not None else "")
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = fields.get("add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = fields.get("remove_extra_whitespaces", False)
    return proto.SerializeToString()
