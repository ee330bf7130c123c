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
from tokenizers import processors

from jaxsp.config import UserError
from jaxsp.gguf_vocabulary import byte_level_tokenizer, read_vocabulary, sentencepiece_model


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
    config = _read_config(path.parent)
    return _from_sentencepiece(path.read_bytes(), config.get("add_bos_token", True), config.get("chat_template"))


def _from_sentencepiece(model: bytes, adds_bos: bool, chat_template: str | None) -> Tokenizer:
    from sentencepiece import sentencepiece_model_pb2  # loads protobuf, which only these files need

    proto = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    outer = sentencepiece.SentencePieceProcessor(model_proto=model)
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


def _load_gguf(path: Path) -> Tokenizer:
    fields = read_vocabulary(path)
    if fields["model"] == "llama":
        model = sentencepiece_model(fields)
        return _from_sentencepiece(model, fields["add_bos_token"], fields.get("tokenizer.chat_template"))
    tokenizer = byte_level_tokenizer(fields)
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
    template. Raises what `read_vocabulary` raises, and OSError where nothing can be written.
    """
    fields = read_vocabulary(path)
    ids = {f"{name}_token": fields.get(f"{name}_token_id") for name in ("bos", "eos")}
    names = {name: fields["tokens"][index] for name, index in ids.items() if index is not None}
    config = {"add_bos_token": fields["add_bos_token"], "clean_up_tokenization_spaces": False, **names}
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    if fields["model"] == "llama":
        config["tokenizer_class"] = "LlamaTokenizer"
        (directory / "tokenizer.model").write_bytes(sentencepiece_model(fields))
    else:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        tokenizer = byte_level_tokenizer(fields)
        if fields["add_bos_token"] and "bos_token" in names:
            bos = names["bos_token"]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, fields["bos_token_id"])]
            )
        tokenizer.save(str(directory / "tokenizer.json"))
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


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
