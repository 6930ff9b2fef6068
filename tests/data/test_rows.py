"""The rows of a user's file, whichever form it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_indexcache.data.rows import FileRow, read_rows
from sglang_indexcache.errors import DataError

ROWS = [{"a": 1}, {"a": 2}]


def test_lines_are_counted_with_the_blank_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n"two\u2028parts"\n')
    assert list(read_rows(path)) == [
        FileRow(1, f"{path}, line 1", {"a": 1}),
        FileRow(3, f"{path}, line 3", "two\u2028parts"),
    ]


def test_a_list_and_a_parquet_file_are_counted_by_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    list_file, table = tmp_path / "a.json", tmp_path / "a.parquet"
    list_file.write_text(json.dumps(ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), table)
    for path in (list_file, table):
        assert [row.value for row in read_rows(path)] == ROWS
        assert [row.where for row in read_rows(path)] == [f"{path}, row 1", f"{path}, row 2"]


def test_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nbroken\n')
    assert next(read_rows(path)).value == {"a": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a', r"a\.jsonl, line 2 is not JSON: .* fetch it again"),
        ("a.jsonl", b'"caf\xe9"', r"line 1 is not UTF-8 .it holds the byte 0xe9"),
        ("a.json", b'{"a": 1}', r"a\.json does not hold a list of rows"),
        ("a.json", b'[{"a": 1}', r"a\.json is not JSON"),
        ("a.csv", b'a,b\n1,"2', r"a\.csv is not CSV: unexpected end of data"),
        ("a.csv", b"a,b\n1,caf\xe9\n", r"a\.csv is not UTF-8 .it holds the byte 0xe9"),
        ("a.parquet", b"PAR1 not", r"a\.parquet cannot be read as parquet after row 0"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_rows(tmp_path / name))


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*none\.jsonl: No such file"):
        list(read_rows(tmp_path / "none.jsonl"))
