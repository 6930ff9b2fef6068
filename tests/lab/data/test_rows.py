"""The rows of a user's file, whichever form it has."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.rows import FileRow, read_rows

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


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "A.JSON"])
def test_a_list_is_one_by_whatever_name_and_layout(tmp_path: Path, name: str, indent: Any) -> None:
    path = tmp_path / name
    many = [{"text": "x" * 9_000}, *ROWS]  # longer than what is looked at
    for rows in (ROWS, many, ["one", "two"]):
        path.write_text(json.dumps(rows, indent=indent))
        assert [row.value for row in read_rows(path)] == rows


@pytest.mark.parametrize("first", [{"a": 1}, {"a": "x" * 9_000}, [1, 2]])
def test_a_json_file_may_hold_lines(tmp_path: Path, first: Any) -> None:
    """So most .json files of the hub do."""
    path = tmp_path / "train.json"
    path.write_text("\n" + "".join(f"{json.dumps(row)}\n" for row in (first, *ROWS)))
    assert [row.value for row in read_rows(path)] == [first, *ROWS]
    assert next(read_rows(path)).where == f"{path}, line 2"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"a": "é"}\n{"a": "2"}\n'),
        ("a.json", '[{"a": "é"},\n{"a": "2"}]'),
        ("a.csv", "a\né\n2\n"),
        ("a.tsv", "a\né\n2\n"),
    ],
)
def test_a_byte_order_mark_and_gzip_change_nothing(tmp_path: Path, name: str, content: str) -> None:
    for end, pack in (("", bytes), (".gz", gzip.compress)):
        for encoding in ("utf-8", "utf-8-sig"):
            path = tmp_path / (name + end)
            path.write_bytes(pack(content.encode(encoding)))
            assert [row.value for row in read_rows(path)] == [{"a": "é"}, {"a": "2"}]


def test_gzip_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(b'{"a": 1}', mtime=0))
    assert [row.value for row in read_rows(path)] == [{"a": 1}]


def test_nulls_that_parquet_adds_are_left_out_at_every_depth(tmp_path: Path) -> None:
    """Those of a .jsonl are its author's, and stay."""
    import pyarrow as pa
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {"a": {"deep": [{"x": 1, "list": [{"p": 1}, {"q": [None, 2]}]}]}, "b": 1},
        {"a": {"deep": [{"y": {"z": "w"}}], "other": 2}, "b": None},
    ]
    table, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
    parquet.write_table(pa.Table.from_pylist(rows), table)
    assert [row.value for row in read_rows(table)] == rows
    lines.write_text(json.dumps({"a": {"b": None}}))
    assert [row.value for row in read_rows(lines)] == [{"a": {"b": None}}]


def test_no_more_is_read_than_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\nbroken\n')
    assert next(read_rows(path)).value == {"a": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a', r"a\.jsonl, line 2 is not JSON: .* fetch it again"),
        (
            "a.jsonl",
            rb'{"a": "\ud83d\ude00"}' + b"\n" + rb'["\uD83D!"]',
            r"line 2 holds '.ud83d', wh",
        ),
        ("a.csv", b'text;n\n"a";1', "is not CSV: .* Write it with commas between fields"),
        ("a.tsv", b'text\tn\n"a" b\t1', "is not CSV: .* Write it with tabs between fields"),
        ("a.jsonl", b'"caf\xe9"', r"line 1 is not UTF-8 .it holds the byte 0xe9"),
        ("a.json", b'{"a": 1}', r"a\.json does not hold a list of rows"),
        ("a.json", b'[{"a": 1}', r"a\.json is not JSON"),
        ("a.json", b'{\n "data": [\n{"a": 1}]}', r"a\.json does not hold a list .* jq \.data"),
        ("a.json", b'{"a": 1\n{"a": 2}\n', r"a\.json is not JSON"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl is nested too deeply"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16"), r"a\.jsonl is UTF-16.* iconv -f UTF-16"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"a": 1}' * 99, mtime=0)[:-9],
            r"a\.jsonl\.gz is damaged: .* again",
        ),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\x04", r"a\.jsonl is packed by zstd\. .* zstd -d"),
        ("a.csv", b"PAR1\x15\x04", r"a\.csv is a parquet file .* end in \.parquet"),
        ("a.jsonl", b"a\0b", r"a\.jsonl is no text: it holds zero bytes"),
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
