"""Reading of rows from a user's file, one at a time, so that a caller may stop at any of them."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from sglang_indexcache.errors import DataError

LINES = (".jsonl", ".ndjson")
"""Endings of files with one JSON value a line."""

ROWS = (*LINES, ".json", ".csv", ".tsv", ".parquet")
"""Endings of files with rows; ``.gz`` may follow any of them but the last."""

_BATCH = 256
"""Number of rows of a parquet file that are held at a time."""

_GZIP, _BOM = b"\x1f\x8b", b"\xef\xbb\xbf"
_PICTURE = "a picture, and no text. Leave it out"
_NO_TEXT = {
    b"\x28\xb5\x2f\xfd": "packed by zstd. Unpack it first: zstd -d",
    b"BZh9": "packed by bzip2. Unpack it first: bunzip2",
    b"\xfd7zXZ": "packed by xz. Unpack it first: unxz",
    b"PK\x03\x04": "a zip archive. Unpack it first: unzip",
    b"%PDF": "a PDF. Take its text out first, for example with pdftotext",
    b"PAR1": "a parquet file by another name. Let its name end in .parquet",
    b"ARROW1": "an Arrow file. Write it as .parquet, for example with pandas",
    b"\x89PNG": _PICTURE,
    b"\xff\xd8\xff": _PICTURE,
    b"GIF8": _PICTURE,
    b"\xff\xfe": "UTF-16. Convert it first: iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16. Convert it first: iconv -f UTF-16 -t UTF-8",
    b"": "no text: it holds zero bytes. Convert what it holds to .jsonl or plain text",
}
"""Kinds of files that hold no text, by their first bytes, with advice for each. The last row is for
a zero byte anywhere among these bytes."""

File = BufferedReader | gzip.GzipFile
"""An open file of unpacked bytes."""


class FileRow(NamedTuple):
    """One row; its number, from 1, is its line in a file of lines, and its place in other files."""

    number: int
    where: str
    value: Any


def form_of(path: Path) -> str:
    """Return a file's ending in lower case, without ``.gz``."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_rows(path: Path) -> Iterator[FileRow]:
    """Yield every row of a file that is not blank, in its order.

    ``.parquet``, ``.csv`` and ``.tsv`` (with a header) have rows. Any other file is one JSON list,
    if it begins like one, or has one JSON value per line.

    Raises:
        DataError: the file cannot be read, or a row is damaged; names the file, and the row.
    """
    if form_of(path) == ".parquet":
        yield from _parquet(path)
        return
    with opened(path) as file:
        if form_of(path) in (".csv", ".tsv"):
            yield from _csv(path, file)
        elif has_lines(file) or not (is_list(file) or form_of(path) == ".json"):
            yield from _lines(path, file)
        else:
            yield from _list(path, file)


@contextmanager
def opened(path: Path) -> Iterator[File]:
    """Open a file after its byte order mark, and unpack gzip.

    Raises:
        DataError: the file cannot be read, also later in the block, or holds no text; names the
            fix.
    """
    try:
        with path.open("rb") as raw, _unpacked(raw) as file:
            head = file.peek(1)
            for start, words in _NO_TEXT.items():
                if head.startswith(start) if start else b"\0" in head:
                    raise DataError(f"{path} is {words}.")
            if head.startswith(_BOM):
                file.read(len(_BOM))
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged: gzip says {error}. Fetch it again.") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _unpacked(raw: BufferedReader) -> File:
    packed = raw.peek(len(_GZIP)).startswith(_GZIP)
    return gzip.GzipFile(fileobj=raw) if packed else raw


def is_list(file: File) -> bool:
    """Return whether a file begins like a JSON list, without consuming any of it."""
    return file.peek(1).lstrip().startswith(b"[")


def has_lines(file: File) -> bool:
    """Return whether a file seems to have a JSON value on each of several lines.

    It looks at the few thousand bytes that it can see without consuming them.
    """
    first, newline, others = file.peek(1).lstrip().partition(b"\n")
    if newline:
        return _is_json(first) and bool(others.strip())
    return first.startswith(b"{") and not _is_json(first)  # a long line


def _is_json(content: bytes) -> bool:
    try:
        json.loads(content)
    except (ValueError, RecursionError):
        return False
    return True


def not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    """Return the error for bytes that are text in another encoding."""
    return DataError(
        f"{where} is not UTF-8 (it holds the byte {error.object[error.start]:#04x}). Convert it "
        "first, for example with iconv."
    )


def _lines(path: Path, file: File) -> Iterator[FileRow]:
    for number, line in enumerate(file, start=1):  # in bytes, only a newline ends a line
        if line.strip():
            where = f"{path}, line {number}"
            yield FileRow(number, where, _parsed(line, where))


def _list(path: Path, file: File) -> Iterator[FileRow]:
    values = _parsed(file.read(), str(path))
    if not isinstance(values, list):
        raise DataError(
            f"{path} does not hold a list of rows but one value. Write the list in it as a file of "
            "its own, for example with jq .data"
        )
    for number, value in enumerate(values, start=1):
        yield FileRow(number, f"{path}, row {number}", value)


def _csv(path: Path, file: File) -> Iterator[FileRow]:
    csv.field_size_limit(sys.maxsize)  # a field may hold a whole book
    text = TextIOWrapper(file, encoding="utf-8", newline="")
    delimiter = "\t" if form_of(path) == ".tsv" else ","
    try:
        rows = csv.DictReader(text, delimiter=delimiter, strict=True)
        for number, value in enumerate(rows, start=1):
            yield FileRow(number, f"{path}, row {number}", value)
    except UnicodeDecodeError as error:
        raise not_utf8(str(path), error) from error
    except csv.Error as error:
        between = "tabs" if delimiter == "\t" else "commas"
        raise DataError(
            f"{path} is not CSV: {error}. Write it with {between} between fields, and quotes "
            "around those that hold any, or fetch it again."
        ) from error


def from_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is none, or an escape in it is half of a character, which no tokenizer takes.
    """
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _parsed(content: bytes, where: str) -> Any:
    try:
        return from_json(content.decode())
    except UnicodeDecodeError as error:
        raise not_utf8(where, error) from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{where} holds {half!r}, which is half of a character. Mend it, or leave it out."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON: {error}. Mend it, or fetch it again.") from error
    except RecursionError as error:
        raise DataError(f"{where} is nested too deeply. Mend it, or fetch it again.") from error


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
            for row in part.to_pylist():
                number += 1
                value = {name: without_nulls(value) for name, value in row.items()}
                yield FileRow(number, f"{path}, row {number}", value)
    except ArrowException as error:
        raise DataError(
            f"{path} cannot be read as parquet after row {number}: {error}. Fetch it again."
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def without_nulls(value: Any) -> Any:
    """Remove null fields at every depth, because Arrow adds the fields of other rows."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    if isinstance(value, list):
        return [without_nulls(element) for element in value]
    return value
