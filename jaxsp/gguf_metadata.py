"""The key-value pairs at the head of a GGUF file: its config and its vocabulary."""

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file (version 2 or 3, little-endian); arrays as lists.

    `gguf.GGUFReader` makes an array object for every string and takes seconds for a vocabulary.
    Raises `ValueError`, `struct.error` or `OSError` for a file that is not whole.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, version, _, num_pairs = struct.unpack_from("<4sIQQ", data)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"not a GGUF file of version 2 or 3: it begins with {magic!r}, version {version}")
        offset = 24
        metadata = {}
        for _ in range(num_pairs):
            key, offset = _read_gguf_value(data, offset, 8)
            (kind,) = struct.unpack_from("<I", data, offset)
            metadata[key], offset = _read_gguf_value(data, offset + 4, kind)
    return metadata


def _read_gguf_value(data: mmap.mmap, offset: int, kind: int) -> tuple[Any, int]:
    """The value of type `kind` at `offset`, and the offset behind it."""
    if kind in _SCALARS:
        (value,) = struct.unpack_from("<" + _SCALARS[kind], data, offset)
        return value, offset + struct.calcsize("<" + _SCALARS[kind])
    if kind == 8:
        (length,) = struct.unpack_from("<Q", data, offset)
        end = offset + 8 + length
        if end > len(data):
            raise ValueError("it ends in the middle of a string")
        return data[offset + 8 : end].decode("utf-8"), end
    if kind != 9:
        raise ValueError(f"value type {kind} is unknown")
    inner, length = struct.unpack_from("<IQ", data, offset)
    offset += 12
    if inner in _SCALARS:
        layout = f"<{length}{_SCALARS[inner]}"
        return list(struct.unpack_from(layout, data, offset)), offset + struct.calcsize(layout)
    values = []
    for _ in range(length):
        value, offset = _read_gguf_value(data, offset, inner)
        values.append(value)
    return values, offset
