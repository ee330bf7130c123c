"""Rows of JSONL files, and messages that name the line and the field."""

import re
from pathlib import Path

import pytest

from jaxsp.config import UserError
from jaxsp.json_lines import read_json_lines, text_of


def test_rows_come_in_order_with_their_places_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('\ufeff{"a": 1}\r\n\n  \n{"a": "x\u2028y é"}'.encode())
    assert read_json_lines(path, "--input") == [(f"{path}:1", {"a": 1}), (f"{path}:4", {"a": "x\u2028y é"})]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{", "not a line of JSON: Expecting property name"),
        (b'{"a": "\xe9"}', "not a line of JSON: 'utf-8' codec"),
        (b"[" * 100_000, "not a line of JSON: maximum recursion depth"),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(UserError, match=f"^{re.escape(f'{path}:2: {message}')}"):
        read_json_lines(path, "--input")


def test_a_file_that_cannot_be_read_is_named_with_what_it_was_to_be(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=f"^questions file {re.escape(str(path))} cannot be read: {reason}$"):
            read_json_lines(path, "questions file")


def test_a_field_is_text_or_where_it_may_be_a_number_as_text() -> None:
    assert text_of({"a": "5"}, "a", "f:1") == "5"
    assert [text_of({"a": value}, "a", "f:1", may_be_number=True) for value in ("x", 5, 0.5)] == ["x", "5", "0.5"]


@pytest.mark.parametrize("may_be_number", [False, True])
@pytest.mark.parametrize(("value", "shown"), [(None, "null"), (True, "true"), ([1], "[1]"), ({}, "{}")])
def test_a_field_of_another_type_is_named(value, shown: str, may_be_number: bool) -> None:
    with pytest.raises(UserError, match=r"^f:1: field `a` must be text( or a number)?, got " + re.escape(shown)):
        text_of({"a": value}, "a", "f:1", may_be_number=may_be_number)


def test_a_number_is_no_text_where_only_text_may_be_and_a_missing_field_is_named() -> None:
    with pytest.raises(UserError, match=r"^f:1: field `a` must be text, got 5$"):
        text_of({"a": 5}, "a", "f:1")
    with pytest.raises(UserError, match=r"^f:1: field `a` is missing$"):
        text_of({}, "a", "f:1")
