"""JSON files of the user: rows with the places they stand at, and messages that name these."""

import json
from pathlib import Path
from typing import Any

from jaxsp.config import UserError


def read_json_lines(path: str | Path, what: str) -> list[tuple[str, dict[str, Any]]]:
    """The object of each line with its place, `file:line`; blank lines are skipped.

    Raises `UserError`: `what` with the file if it cannot be read, else the line that is no JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")  # str.splitlines also cuts at U+2028, which a JSON string may hold
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}") from error
    places = ((f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip())
    return [(place, read_object(line, place)) for place, line in places]


def text_of(row: dict[str, Any], field: str, place: str, *, may_be_number: bool = False) -> str:
    """The field's text, or its number as text. Raises `UserError` naming the line, the field and what it is instead."""
    if field not in row:
        raise UserError(f"{place}: field `{field}` is missing")
    value = row[field]
    is_number = may_be_number and isinstance(value, int | float) and not isinstance(value, bool)
    if not (isinstance(value, str) or is_number):
        wanted = "text or a number" if may_be_number else "text"
        raise UserError(f"{place}: field `{field}` must be {wanted}, got {json.dumps(value)[:80]}")
    return str(value)


def read_object(text: bytes, place: str, what: str = "a line of JSON") -> dict[str, Any]:
    """The JSON object in `text`; a byte-order mark before it is left out. Raises `UserError`: `place` is not `what`."""
    try:
        row = json.loads(text.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not {what}: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: not a JSON object")
    return row
