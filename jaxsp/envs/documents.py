"""Documents of a corpus, one segment at a time: shuffled by seed, shared out among processes, resumable exactly.

A corpus is a JSONL or Parquet file with a `text` column (and perhaps `id`), a folder of .txt files, or `embedded`, the
small corpus that comes with this package. Grain shuffles, shards and keeps the position; the files are read here, at
random places, because Grain's own Parquet reader is sequential and could only shuffle within a window.

Within one epoch every document is drawn once. A document longer than the limit gives one of its segments per epoch, the
next one each time and starting at a place drawn from the seed: documents stay equally likely however long they are,
and over as many epochs as a document has segments each of them is seen once.
"""

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from jaxsp.config import UserError

EMBEDDED_CORPUS = Path(__file__).parent / "corpus" / "documents.jsonl"

_STATE_VERSION = 1
_SHORTEST_FILL = 0.8
_BREAKS = ("\n\n", "\n", ". ", " ")


@dataclass(frozen=True)
class Document:
    """A segment of a document. `document_id` ends in `#k` (from 0) where the document has several segments."""

    document_id: str
    text: str


class _Source(Protocol):
    """Documents at random places; `len` counts those with text in them."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...


class Corpus:
    """An endless stream of documents. Made by `open_corpus`."""

    def __init__(self, iterator: Any, identity: dict[str, Any]) -> None:
        self._iterator = iterator
        self._identity = identity

    @property
    def num_documents(self) -> int:
        """Documents of the whole corpus, over all processes; those without text are left out."""
        return self._identity["num_documents"]

    def next_documents(self, n: int) -> list[Document]:
        """The next `n` segments of this process's share."""
        return [next(self._iterator) for _ in range(n)]

    def state(self) -> dict[str, Any]:
        """The position and what it is a position in, as JSON."""
        return {**self._identity, "position": self._iterator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where `state` was taken. Raises `UserError` where the corpus or its sharding has changed."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise UserError(
                    f"corpus: the saved position is for {name} = {state.get(name)}, this run has {value}: "
                    f"resume with the corpus, seed and number of processes that the run was started with"
                )
        self._iterator.set_state(state["position"])


def open_corpus(
    path: str | Path,
    *,
    seed: int,
    max_segment_tokens: int,
    encode: Callable[[str], Sequence[int]],
    process_index: int = 0,
    process_count: int = 1,
) -> Corpus:
    """The corpus at `path` as process `process_index` of `process_count` sees it.

    `embedded` is the packaged corpus, `embedded:TOPIC` one topic of it.

    Every text returned encodes to at most `max_segment_tokens` tokens, and is a piece of its document cut at a
    paragraph, line, sentence or word where one is near; `encode` adds no special tokens. All of the corpus is looked
    through once, here, so that a bad document ends a run at its start: `UserError` names the file, the line and what
    is wrong.
    """
    if max_segment_tokens < 1:
        raise UserError(f"corpus.max_segment_tokens must be at least 1, got {max_segment_tokens}")
    assert 0 <= process_index < process_count
    source = _open_source(path)
    if len(source) == 0:
        raise UserError(f"corpus {path} is empty: it needs at least one document with text in it")
    if len(source) < process_count:
        raise UserError(f"corpus {path} has {len(source)} documents, fewer than the {process_count} processes")
    # Here and not above: Grain imports JAX where it is installed, and this module is imported where JAX must not be.
    import grain

    num_local = len(range(process_index, len(source), process_count))
    lengths: dict[int, list[int]] = {}

    def one_segment(index: int, document: Document) -> Document:
        # Grain counts on over the epochs; the order within one is drawn outside, so `index` holds both of these.
        epoch, number = divmod(index, num_local)
        # Kept, for a corpus of a few books would otherwise be cut up again at every draw.
        if number not in lengths:
            lengths[number] = [len(piece) for piece in cut_into_segments(document.text, max_segment_tokens, encode)]
        return _segment(document, lengths[number], epoch, seed)

    stream = (
        grain.MapDataset.source(source)[process_index::process_count]
        .map_with_index(one_segment)
        # Grain adds the epoch to the seed: hashed, for the runs of seeds 0 and 1 would share their orders otherwise.
        .shuffle(seed=zlib.crc32(f"corpus/{seed}".encode()))
        .repeat()
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    )
    identity = {
        "version": _STATE_VERSION,
        "num_documents": len(source),
        "seed": seed,
        "max_segment_tokens": max_segment_tokens,
        "process_index": process_index,
        "process_count": process_count,
    }
    return Corpus(iter(stream), identity)


def cut_into_segments(text: str, max_tokens: int, encode: Callable[[str], Sequence[int]]) -> list[str]:
    """`text` in pieces of at most `max_tokens` tokens each, in order; together they are `text` again.

    Each piece ends at a paragraph, line, sentence or word where its last fifth has one. Only `encode` is asked: pieces
    of the encoding would have to be decoded, and decoded text may encode to more tokens than it came from.
    """
    segments = []
    num_tokens = len(encode(text))
    chars_per_token = len(text) / max(num_tokens, 1)
    while num_tokens > max_tokens:
        length = min(len(text), max(1, int(max_tokens * chars_per_token)))
        while (count := len(encode(text[:length]))) > max_tokens:
            if length == 1:
                raise UserError(
                    f"corpus.max_segment_tokens = {max_tokens} is too few to hold the character {text[0]!r}"
                )
            length = max(1, min(length - 1, int(length * max_tokens / count)))
        length = _nice_length(text, length, max_tokens, encode)
        segments.append(text[:length])
        text = text[length:]
        # The remaining length is a guess until it is near the limit: encoding it each time would be quadratic.
        num_tokens = int(len(text) / chars_per_token)
        if num_tokens <= 2 * max_tokens:
            num_tokens = len(encode(text))
    return [*segments, text] if text else segments


def _nice_length(text: str, length: int, max_tokens: int, encode: Callable[[str], Sequence[int]]) -> int:
    """The end of the last paragraph, line, sentence or word in the last fifth of `text[:length]`, else `length`."""
    if length == len(text):
        return length
    for mark in _BREAKS:
        place = text.rfind(mark, int(_SHORTEST_FILL * length), length)
        # A shorter text can encode to more tokens, where the cut splits what was one token.
        if place > 0 and len(encode(text[: place + len(mark)])) <= max_tokens and place + len(mark) <= length:
            return place + len(mark)
    return length


def _segment(document: Document, lengths: Sequence[int], epoch: int, seed: int) -> Document:
    """The segment of a document, cut into pieces of `lengths` characters, that `epoch` gives."""
    ends = list(accumulate(lengths))
    pieces = [document.text[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    # Pieces of white space alone say nothing. Stripping the others could make their token counts grow.
    pieces = [piece for piece in pieces if piece.strip()]
    if len(pieces) == 1:
        return Document(document.document_id, pieces[0])
    first = zlib.crc32(f"{seed}/{document.document_id}".encode())
    number = (first + epoch) % len(pieces)
    return Document(f"{document.document_id}#{number}", pieces[number])


def _open_source(path: str | Path) -> _Source:
    name, _, topic = str(path).partition(":")
    if name == "embedded":
        source = _JsonLines(EMBEDDED_CORPUS, topic or None)
        if not len(source):
            lines = EMBEDDED_CORPUS.read_text("utf-8").splitlines()
            topics = ", ".join(dict.fromkeys(json.loads(line)["topic"] for line in lines))
            raise UserError(f"corpus.path = {path}: the embedded corpus has no topic {topic!r}; it has {topics}")
        return source
    path = Path(path)
    if path.is_dir():
        return _TextFolder(path)
    if not path.exists():
        raise UserError(f"corpus {path} does not exist: corpus.path is a .jsonl or .parquet file, a folder of .txt")
    if path.suffix not in _SOURCES:
        raise UserError(f"corpus {path}: the name must end in {' or '.join(_SOURCES)}, or be a folder of .txt files")
    return _SOURCES[path.suffix](path)


class _JsonLines:
    """Lines of a JSONL file, found again by their byte offsets; where a `topic` is given, those with this `topic`."""

    def __init__(self, path: Path, topic: str | None = None) -> None:
        self._path = path
        self._lines: list[tuple[int, int]] = []  # (byte offset, line number) of each document with text
        offset = 0
        try:
            with path.open("rb") as stream:
                for number, line in enumerate(stream, start=1):
                    is_wanted = topic is None or json.loads(line).get("topic") == topic
                    if line.strip() and is_wanted and _document_of_line(path, number, line).text.strip():
                        self._lines.append((offset, number))
                    offset += len(line)
        except OSError as error:
            raise UserError(f"corpus {path} cannot be read: {error.strerror}") from error

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Document:
        offset, number = self._lines[index]
        with self._path.open("rb") as stream:
            stream.seek(offset)
            return _document_of_line(self._path, number, stream.readline())


def _document_of_line(path: Path, number: int, line: bytes) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}:{number}: not a line of JSON: {error}") from error
    if not isinstance(record, dict) or "text" not in record:
        raise UserError(f"{path}:{number}: field `text` is missing")
    if not isinstance(record["text"], str):
        raise UserError(f"{path}:{number}: field `text` must be a string, got {json.dumps(record['text'])[:80]}")
    document_id = record.get("id")
    return Document(f"{path.name}:{number}" if document_id is None else str(document_id), record["text"])


class _Parquet:
    """Rows of a Parquet file. The text column is held in memory, in Arrow's compact form."""

    def __init__(self, path: Path) -> None:
        # Here and not above: only users of Parquet files should pay for it.
        import pyarrow
        import pyarrow.parquet

        self._name = path.name
        try:
            file = pyarrow.parquet.ParquetFile(path)
            names = file.schema_arrow.names
            if "text" not in names:
                raise UserError(f"corpus {path}: column `text` is missing, the file has {', '.join(names)}")
            table = file.read(columns=[name for name in ("text", "id") if name in names])
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"corpus {path} is not a readable Parquet file: {error}") from error
        kind = table.schema.field("text").type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise UserError(f"corpus {path}: column `text` must hold strings, got {kind}")
        self._text = table.column("text")
        self._ids = table.column("id") if "id" in names else None
        self._rows = [row for row, text in enumerate(self._text) if (text.as_py() or "").strip()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Document:
        row = self._rows[index]
        document_id = None if self._ids is None else self._ids[row].as_py()
        return Document(f"{self._name}:{row}" if document_id is None else str(document_id), self._text[row].as_py())


class _TextFolder:
    """The .txt files under a folder, in the order of their paths, which are also their ids."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.txt"))
        if not self._names:
            raise UserError(f"corpus {path} is a folder without .txt files")
        self._names = [name for name in self._names if self._read(name).strip()]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> Document:
        return Document(self._names[index], self._read(self._names[index]))

    def _read(self, name: str) -> str:
        try:
            return (self._path / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"corpus {self._path / name} cannot be read as UTF-8 text: {error}") from error


_SOURCES: dict[str, Callable[[Path], _Source]] = {".jsonl": _JsonLines, ".parquet": _Parquet}
