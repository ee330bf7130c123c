"""Text <-> tokens: one `Tokenizer` over a `tokenizer.json`, a SentencePiece `tokenizer.model` or a GGUF's vocabulary.

Text from outside (documents, observations, other models) never becomes a control token: whatever it spells, it is
encoded to ordinary pieces. Control tokens enter a stream by id alone, through `jaxsp.chat`.
"""

import itertools
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxsp.config import UserError
from jaxsp.gguf_metadata import read_gguf_metadata


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A vocabulary with its rules for cutting text.

    Attributes:
        vocab_size: one more than the highest id. A model's embedding may have more rows.
        bos_id: the id every text begins with; None where the model's texts begin without one.
        eos_id: the id that ends a text, if the files name one.
        chat_template: the model's own Jinja template, if the files hold one. It is read, never run.
        special_ids: every control and added token, by its text.
        control_ids: ids that no text is ever encoded to and that are not decoded.
        markup_ids: added tokens such as `<think>` and `<tool_call>` that a model writes itself: they are decoded, but
            text from outside is not encoded to them.
    """

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None = field(repr=False)
    special_ids: Mapping[str, int] = field(repr=False)
    control_ids: frozenset[int] = field(repr=False)
    markup_ids: frozenset[int] = field(repr=False)
    _encode_start: Callable[[str], list[int]] = field(repr=False)
    _encode_inner: Callable[[str], list[int]] = field(repr=False)
    _decode: Callable[[list[int]], str] = field(repr=False)

    def encode(self, text: str) -> list[int]:
        """The tokens of outside text, without `bos_id`: special tokens in it become ordinary pieces."""
        return self.encode_part(text, is_start=True)

    def encode_part(self, text: str, *, is_start: bool = False, has_markup: bool = False) -> list[int]:
        """The tokens of a stretch of a longer stream.

        `is_start` says that the stream starts here, where some tokenizers put a space before the text. `has_markup`
        lets `markup_ids` through: for what an assistant wrote.
        """
        text = _without_surrogates(text)
        forbidden = self.control_ids if has_markup else self.control_ids | self.markup_ids
        tokens = self._encode_start(text) if is_start else self._encode_inner(text)
        if forbidden.isdisjoint(tokens):
            return tokens
        pieces = _cut_inside(text, [name for name, token in self.special_ids.items() if token in forbidden])
        tokens = self._encode_start(pieces[0]) if is_start else self._encode_inner(pieces[0])
        for piece in pieces[1:]:
            tokens = tokens + self._encode_inner(piece)
        # What is left was made by the tokenizer's own normalisation of look-alike characters.
        return [token for token in tokens if token not in forbidden]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`; control tokens and ids past the vocabulary give nothing, broken UTF-8 gives U+FFFD."""
        return self._decode([int(t) for t in tokens if 0 <= t < self.vocab_size and t not in self.control_ids])

    def special_id(self, token: str) -> int | None:
        """The id of the control or added token that reads `token`, or None."""
        return self.special_ids.get(token)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory, a `tokenizer.json`, a SentencePiece `.model` or a `.gguf` file.

    A directory's `tokenizer.json` goes before its `tokenizer.model`. Raises `UserError` that names the file.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"tokenizer: {path} does not exist")
    if path.is_dir():
        found = [path / name for name in ("tokenizer.json", "tokenizer.model") if (path / name).is_file()]
        if not found:
            raise UserError(f"tokenizer: {path} holds neither tokenizer.json nor tokenizer.model")
        path = found[0]
    load = {".json": _load_json, ".model": _load_sentencepiece, ".gguf": _load_gguf}.get(path.suffix)
    if load is None:
        raise UserError(f"tokenizer: {path} is not a directory, tokenizer.json, tokenizer.model or .gguf file")
    try:
        return load(path)
    except UserError:
        raise
    except Exception as error:  # the libraries below raise plain Exception, RuntimeError, OSError ...
        raise UserError(f"tokenizer: {path} cannot be read or is damaged ({error}); fetch it again") from error


# tokenizer.json ------------------------------------------------------------------------------------------------------


def _load_json(path: Path) -> Tokenizer:
    text = path.read_text("utf-8")
    spec = json.loads(text)
    outer = tokenizers.Tokenizer.from_str(text)
    inner_spec = spec | {name: _without_prefix_space(spec.get(name)) for name in ("normalizer", "pre_tokenizer")}
    inner = outer if inner_spec == spec else tokenizers.Tokenizer.from_str(json.dumps(inner_spec))
    config = _read_config(path.parent)
    names = {name: _token_text(config.get(f"{name}_token")) for name in ("bos", "eos")}
    bos_id = outer.token_to_id(names["bos"]) if names["bos"] else None
    prefix = outer.encode("").ids
    if config.get("add_bos_token") is False:
        bos_id = None
    elif not config.get("add_bos_token"):  # then the post-processor says
        bos_id = prefix[0] if prefix and (bos_id is None or prefix[0] == bos_id) else None
    return _from_hugging_face(
        outer,
        inner,
        bos_id=bos_id,
        eos_id=outer.token_to_id(names["eos"]) if names["eos"] else None,
        chat_template=config.get("chat_template"),
        unknown=spec["model"].get("unk_token"),
    )


def _from_hugging_face(
    outer: tokenizers.Tokenizer,
    inner: tokenizers.Tokenizer,
    *,
    bos_id: int | None,
    eos_id: int | None,
    chat_template: str | None,
    unknown: str | None,
) -> Tokenizer:
    for tokenizer in {id(outer): outer, id(inner): inner}.values():
        tokenizer.encode_special_tokens = True  # "<|im_end|>" in a text is then text
        tokenizer.no_truncation()
        tokenizer.no_padding()
    added = outer.get_added_tokens_decoder()
    special_ids = {token.content: index for index, token in added.items()}
    flagged = {index for index, token in added.items() if token.special and token.content != unknown}
    return Tokenizer(
        vocab_size=max(outer.get_vocab(with_added_tokens=True).values()) + 1,
        bos_id=bos_id,
        eos_id=eos_id,
        chat_template=chat_template,
        special_ids=special_ids,
        control_ids=frozenset(index for index in flagged if len(added[index].content) > 1),
        markup_ids=frozenset(i for i, token in added.items() if i not in flagged and _is_markup(token.content)),
        _encode_start=lambda text: outer.encode(text, add_special_tokens=False).ids,
        _encode_inner=lambda text: inner.encode(text, add_special_tokens=False).ids,
        _decode=_byte_fallback(outer) or (lambda tokens: outer.decode(tokens, skip_special_tokens=True)),
    )


def _byte_fallback(tokenizer: tokenizers.Tokenizer) -> Callable[[list[int]], str] | None:
    """Decodes pieces such as `<0xE2>` as SentencePiece does: only a byte that is no part of UTF-8 becomes U+FFFD, where
    the library spoils all bytes beside it. None where the decoder has no byte fallback."""
    if "ByteFallback" not in repr(tokenizer.decoder):
        return None
    byte = re.compile(r"<0x([0-9A-F]{2})>")
    skipped = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def decode(tokens: list[int]) -> str:
        pieces: list[str] = []
        texts = [tokenizer.id_to_token(token) for token in tokens if token not in skipped]
        for is_byte, run in itertools.groupby(filter(None, texts), lambda text: byte.fullmatch(text) is not None):
            if is_byte:
                chars = bytes(int(text[3:5], 16) for text in run).decode("utf-8", "replace")
                run = itertools.chain(*([c] if c == "\ufffd" else [f"<0x{b:02X}>" for b in c.encode()] for c in chars))
            pieces += run
        return tokenizer.decoder.decode(pieces)  # pyright: ignore[reportOptionalMemberAccess]

    return decode


def _without_prefix_space(spec: Any) -> Any:
    """A normalizer's or pre-tokenizer's JSON that puts no space before the text it is given."""
    if not isinstance(spec, dict) or spec.get("type") == "Prepend":
        return None
    spec = dict(spec)
    for name in ("normalizers", "pretokenizers"):
        if name in spec:
            spec[name] = [part for part in map(_without_prefix_space, spec[name]) if part is not None]
    if spec["type"] == "Metaspace":
        spec.pop("add_prefix_space", None)
        spec["prepend_scheme"] = "never"
    if spec["type"] == "ByteLevel":
        spec["add_prefix_space"] = False
    return spec


def _read_config(directory: Path) -> dict[str, Any]:
    """`tokenizer_config.json` with the text of the default chat template; {} where there is none."""
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    template_path = directory / "chat_template.jinja"
    template = template_path.read_text("utf-8") if template_path.is_file() else config.get("chat_template")
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}.get("default")
    return config | {"chat_template": template}


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


# SentencePiece -------------------------------------------------------------------------------------------------------


def _load_sentencepiece(path: Path) -> Tokenizer:
    proto = _model_proto()
    proto.ParseFromString(path.read_bytes())
    config = _read_config(path.parent)
    return _from_sentencepiece(proto, config.get("add_bos_token", True), config.get("chat_template"))


def _model_proto() -> Any:
    from sentencepiece import sentencepiece_model_pb2  # loads protobuf, which only these files need

    return sentencepiece_model_pb2.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]


def _from_sentencepiece(proto: Any, adds_bos: bool, chat_template: str | None) -> Tokenizer:
    outer = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    proto.normalizer_spec.add_dummy_prefix = False
    inner = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    kinds = {number: {i for i, piece in enumerate(proto.pieces) if piece.type == number} for number in (3, 4)}
    special_ids = {proto.pieces[index].piece: index for index in sorted(kinds[3] | kinds[4])}
    return Tokenizer(
        vocab_size=len(proto.pieces),
        bos_id=outer.bos_id() if adds_bos and outer.bos_id() >= 0 else None,
        eos_id=outer.eos_id() if outer.eos_id() >= 0 else None,
        chat_template=chat_template,
        special_ids=special_ids,
        control_ids=frozenset(kinds[3]),
        markup_ids=frozenset(index for index in kinds[4] if _is_markup(proto.pieces[index].piece)),
        _encode_start=outer.encode,
        _encode_inner=inner.encode,
        _decode=outer.decode,
    )


# GGUF ----------------------------------------------------------------------------------------------------------------

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
_ENDS = ("bos", "eos")


def _load_gguf(path: Path) -> Tokenizer:
    fields = _gguf_fields(path)
    if fields["model"] == "llama":
        proto = _gguf_sentencepiece(fields)
        return _from_sentencepiece(proto, fields["add_bos_token"], fields.get("tokenizer.chat_template"))
    tokenizer = _gguf_byte_level(fields)
    return _from_hugging_face(
        tokenizer,
        tokenizer,
        bos_id=fields.get("bos_token_id") if fields["add_bos_token"] else None,
        eos_id=fields.get("eos_token_id"),
        chat_template=fields.get("tokenizer.chat_template"),
        unknown=None,
    )


def export_gguf_tokenizer(path: Path, directory: Path) -> None:
    """Writes the vocabulary of a GGUF file as files in `directory` that `load_tokenizer` and `transformers` read.

    They are `tokenizer.json` or `tokenizer.model`, and `tokenizer_config.json` with the ends of a text and the chat
    template. Raises as `load_tokenizer` does, and OSError where nothing can be written.
    """
    fields = _gguf_fields(path)
    names = {
        f"{name}_token": fields["tokens"][fields[f"{name}_token_id"]] for name in _ENDS if f"{name}_token_id" in fields
    }
    config = {"add_bos_token": fields["add_bos_token"], "clean_up_tokenization_spaces": False, **names}
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    if fields["model"] == "llama":
        config["tokenizer_class"] = "LlamaTokenizer"
        (directory / "tokenizer.model").write_bytes(_gguf_sentencepiece(fields).SerializeToString())
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer = _gguf_byte_level(fields)
        if fields["add_bos_token"] and "bos_token" in names:
            bos = names["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fields["bos_token_id"])]
            )
        tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _gguf_fields(path: Path) -> dict[str, Any]:
    """The metadata by their names below `tokenizer.ggml.`, with `add_bos_token` also where the file is silent."""
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


def _gguf_byte_level(fields: dict[str, Any]) -> tokenizers.Tokenizer:
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


def _gguf_sentencepiece(fields: dict[str, Any]) -> Any:
    """A SentencePiece `ModelProto`."""
    proto = _model_proto()
    for text, score, kind in zip(fields["tokens"], fields["scores"], fields["token_type"], strict=True):
        proto.pieces.add(piece=text, score=score, type=kind)  # the numbers of the types are SentencePiece's own
    trainer = proto.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = _TYPE_BYTE in fields["token_type"]
    for name in _ENDS:
        index = fields.get(f"{name}_token_id")
        setattr(trainer, f"{name}_piece", fields["tokens"][index] if index is not None else "")
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.add_dummy_prefix = fields.get("add_space_prefix", True)
    proto.normalizer_spec.remove_extra_whitespaces = fields.get("remove_extra_whitespaces", False)
    return proto


# Text ----------------------------------------------------------------------------------------------------------------


def _is_markup(text: str) -> bool:
    """Whether an added token is a tag and not, say, a run of spaces."""
    return re.fullmatch(r"<.+>|\[.+\]", text) is not None


def _cut_inside(text: str, reserved: Collection[str]) -> list[str]:
    """`text` in pieces, cut behind the first character of every occurrence of a `reserved` text."""
    pattern = re.compile("(?=" + "|".join(map(re.escape, reserved)) + ")")
    cuts = [0, *(match.start() + 1 for match in pattern.finditer(text)), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


def _without_surrogates(text: str) -> str:
    """`text` with the lone halves that JSON escapes can spell, and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
