"""Read the rows of a user's file, one at a time: whoever has enough stops, and no more is read."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_indexcache.errors import DataError

LINES = (".jsonl", ".ndjson")
"""Endings of files with one JSON value a line."""

_BATCH = 256
"""Rows of a parquet file that are held at a time."""


class FileRow(NamedTuple):
    """One row; its number, from 1, is its line in a file of lines, its place in any other."""

    number: int
    where: str
    value: Any


def read_rows(path: Path) -> Iterator[FileRow]:
    """Yield every row of a file that is not blank, in its order.

    ``.parquet`` and ``.csv`` (with a head) have rows, ``.json`` holds one list, anything else has a
    JSON value a line.

    Raises:
        DataError: the file cannot be read, or a row is damaged; names the file, and the row.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".csv":
            yield from _csv(path)
        elif path.suffix == ".json":
            yield from _list(path)
        else:
            yield from _lines(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """Make the error for bytes that are no text."""
    return DataError(
        f"{where} is not UTF-8 (it holds the byte {error.object[error.start]:#04x}). Convert it "
        "first, for example with iconv."
    )


def _lines(path: Path) -> Iterator[FileRow]:
    with path.open("rb") as file:  # bytes, so that only a newline ends a line
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield FileRow(number, where, _parsed(line, where))


def _list(path: Path) -> Iterator[FileRow]:
    values = _parsed(path.read_bytes(), str(path))
    if not isinstance(values, list):
        raise DataError(f"{path} does not hold a list of rows")
    for number, value in enumerate(values, start=1):
        yield FileRow(number, f"{path}, row {number}", value)


def _csv(path: Path) -> Iterator[FileRow]:
    csv.field_size_limit(sys.maxsize)  # a field may hold a book
    with path.open(encoding="utf-8", newline="") as file:
        try:
            for number, value in enumerate(csv.DictReader(file, strict=True), start=1):
                yield FileRow(number, f"{path}, row {number}", value)
        except UnicodeDecodeError as error:
            raise not_utf8(str(path), error) from error
        except csv.Error as error:
            raise DataError(f"{path} is not CSV: {error}. Fetch it again.") from error


def _parsed(content: bytes, where: str) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. Mend it, or fetch it again.") from error


def _parquet(path: Path) -> Iterator[FileRow]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(
            f"reading {path} needs pyarrow: pip install pyarrow, or convert the file to .jsonl"
        ) from error
    number = 0
    try:
        for part in ParquetFile(path).iter_batches(batch_size=_BATCH):
            for value in part.to_pylist():
                number += 1
                yield FileRow(number, f"{path}, row {number}", value)
    except ArrowException as error:
        raise DataError(
            f"{path} cannot be read as parquet after row {number}: {error}. Fetch it again."
        ) from error
