import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsp.config import UserError
from jaxsp.envs.documents import Corpus, cut_into_segments, open_corpus


def encode(text: str) -> list[int]:
    """Byte pairs, aligned to the text's start: cutting text can raise the count, as with real tokenizers."""
    data = text.encode()
    return [int.from_bytes(data[i : i + 2]) for i in range(0, len(data), 2)]


def open_here(path: Path | str, **changes) -> Corpus:
    settings = {"seed": 0, "max_segment_tokens": 1000, "encode": encode} | changes
    return open_corpus(path, **settings)


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "ten.jsonl"
    path.write_text("".join(json.dumps({"id": f"d{i}", "text": f"document {i}"}) + "\n" for i in range(10)))
    return path


def ids(corpus: Corpus, n: int) -> list[str]:
    return [document.document_id for document in corpus.next_documents(n)]


def test_every_epoch_holds_every_document_once_in_an_order_of_its_own(jsonl):
    corpus = open_here(jsonl)
    epochs = [ids(corpus, 10) for _ in range(5)]
    assert all(sorted(epoch) == [f"d{i}" for i in range(10)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 5


def test_the_order_depends_on_the_seed_alone_and_neighbouring_seeds_do_not_share_it(jsonl):
    assert ids(open_here(jsonl, seed=3), 40) == ids(open_here(jsonl, seed=3), 40)
    orders = {seed: ids(open_here(jsonl, seed=seed), 40) for seed in (0, 1, 2)}
    assert orders[0][10:20] != orders[1][:10]
    assert len({tuple(order[:10]) for order in orders.values()}) == 3


@pytest.mark.parametrize("num_before", [0, 3, 10, 27])
def test_a_restored_corpus_goes_on_at_the_exact_document(jsonl, num_before):
    corpus = open_here(jsonl)
    corpus.next_documents(num_before)
    state = json.loads(json.dumps(corpus.state()))
    expected = corpus.next_documents(25)
    resumed = open_here(jsonl)
    resumed.next_documents(7)  # whatever it did before
    resumed.restore(state)
    assert resumed.next_documents(25) == expected


def test_a_position_in_another_corpus_or_sharding_is_refused_by_name(jsonl):
    state = open_here(jsonl).state()
    with pytest.raises(UserError, match="process_count = 1, this run has 2"):
        open_here(jsonl, process_count=2).restore(state)
    jsonl.write_text(jsonl.read_text() + '{"text": "one more"}\n')
    with pytest.raises(UserError, match="num_documents = 10, this run has 11"):
        open_here(jsonl).restore(state)


@pytest.mark.parametrize("process_count", [2, 3, 10])
def test_the_processes_share_out_the_documents(jsonl, process_count):
    num_local = [len(range(index, 10, process_count)) for index in range(process_count)]
    corpora = [open_here(jsonl, process_index=i, process_count=process_count) for i in range(process_count)]
    for _ in range(2):
        epoch = [name for corpus, n in zip(corpora, num_local, strict=True) for name in ids(corpus, n)]
        assert sorted(epoch) == [f"d{i}" for i in range(10)]


def test_a_long_document_gives_each_of_its_segments_once_in_as_many_epochs(tmp_path):
    path = tmp_path / "book.jsonl"
    book = "\n\n".join(f"Paragraph {i}. It says {i * i}. " + "So it goes on. " * (i % 5) for i in range(40))
    path.write_text(
        json.dumps({"id": "book", "text": book}) + "\n" + json.dumps({"id": "note", "text": "short"}) + "\n"
    )
    pieces = cut_into_segments(book, 100, encode)
    assert len(pieces) > 5
    documents = open_here(path, max_segment_tokens=100).next_documents(2 * len(pieces))
    from_book = [document for document in documents if document.document_id != "note"]
    assert sorted(d.document_id for d in from_book) == sorted(f"book#{k}" for k in range(len(pieces)))
    assert {d.document_id: d.text for d in from_book} == {f"book#{k}": piece for k, piece in enumerate(pieces)}
    assert all(len(encode(document.text)) <= 100 for document in documents)


@given(st.text(max_size=300), st.integers(min_value=2, max_value=40))
@settings(deadline=None, max_examples=150)
def test_segments_stay_within_the_limit_and_together_are_the_text(text, max_tokens):
    pieces = cut_into_segments(text, max_tokens, encode)
    assert "".join(pieces) == text
    assert all(piece and len(encode(piece)) <= max_tokens for piece in pieces)


def test_segments_are_nearly_full_and_end_at_words():
    text = "The quick brown fox jumps over the lazy dog. " * 200
    pieces = cut_into_segments(text, 50, encode)
    assert all(piece.endswith(" ") for piece in pieces[:-1])
    assert all(len(encode(piece)) >= 35 for piece in pieces[:-1])


def test_a_limit_that_holds_no_character_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("🦉🦉🦉")
    with pytest.raises(UserError, match=r"corpus\.max_segment_tokens = 1 is too few"):
        open_here(tmp_path, max_segment_tokens=1).next_documents(1)


def test_parquet_jsonl_and_text_files_give_the_same_texts(tmp_path):
    texts = [f"document {i}, 中文 \n second line" for i in range(7)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts, "score": list(range(7))}), tmp_path / "a.parquet", row_group_size=2
    )
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    expected = Counter(texts)
    drawn = {path: open_here(tmp_path / path).next_documents(7) for path in ("a.parquet", "a.jsonl", "folder")}
    assert all(Counter(document.text for document in documents) == expected for documents in drawn.values())
    assert sorted(d.document_id for d in drawn["a.parquet"])[0] == "a.parquet:0"
    assert sorted(d.document_id for d in drawn["a.jsonl"])[0] == "a.jsonl:1"
    assert sorted(d.document_id for d in drawn["folder"])[0] == "deep/0.txt"


def test_parquet_ids_are_kept_and_documents_without_text_left_out(tmp_path):
    table = pyarrow.table({"id": [7, 8, 9], "text": ["seven", None, "  "]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    corpus = open_here(tmp_path / "a.parquet")
    assert corpus.num_documents == 1
    assert ids(corpus, 2) == ["7", "7"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"title": "b"}\n', "c.jsonl:2: field `text` is missing"),
        ('{"text": 5}\n', "c.jsonl:1: field `text` must be a string, got 5"),
        ('{"text": "a"}\n\nnot json\n', "c.jsonl:3: not a line of JSON"),
        ("[1]\n", "c.jsonl:1: field `text` is missing"),
        ("", "is empty"),
        ('{"text": "  "}\n', "is empty"),
    ],
)
def test_a_bad_jsonl_is_refused_at_its_line(tmp_path, content, message):
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(UserError) as error:
        open_here(tmp_path / "c.jsonl")
    assert message in str(error.value)


def test_unreadable_corpora_are_refused_by_name(tmp_path):
    (tmp_path / "bad.parquet").write_text("no parquet at all")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "columns.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "numbers.parquet")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "none").mkdir()
    (tmp_path / "a.csv").write_text("text\n")
    (tmp_path / "two.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    for name, message in {
        "missing.jsonl": "does not exist",
        "bad.parquet": "not a readable Parquet file",
        "columns.parquet": "column `text` is missing, the file has body",
        "numbers.parquet": "must hold strings, got int64",
        "none": "folder without .txt files",
        "a.csv": "must end in .jsonl or .parquet",
        "": "latin.txt cannot be read as UTF-8",
    }.items():
        with pytest.raises(UserError, match=message):
            open_here(tmp_path / name)
    with pytest.raises(UserError, match="fewer than the 3 processes"):
        open_here(tmp_path / "two.jsonl", process_count=3)


def test_a_topic_that_the_embedded_corpus_lacks_is_named_with_those_it_has():
    with pytest.raises(UserError, match=r"corpus\.path = embedded:cooking: .* no topic 'cooking'; it has quantities, "):
        open_here("embedded:cooking")


def test_the_embedded_corpus_opens_by_name():
    corpus = open_here("embedded", max_segment_tokens=64)
    assert corpus.num_documents > 0
    assert all(len(encode(document.text)) <= 64 for document in corpus.next_documents(50))


def test_importing_the_module_does_not_import_jax_and_opening_starts_no_device(jsonl):
    script = (
        "import sys\n"
        "from jaxsp.envs.documents import open_corpus\n"
        "assert 'jax' not in sys.modules and 'grain' not in sys.modules\n"
        f"open_corpus({str(jsonl)!r}, seed=0, max_segment_tokens=9, encode=list).next_documents(3)\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
