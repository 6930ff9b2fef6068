"""Reading of files into documents, one at a time, so that a caller may stop at any of them."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.conversations import Conversation, read_conversation
from sglang_indexcache.lab.data.rows import (
    ROWS,
    form_of,
    has_lines,
    is_list,
    not_utf8,
    opened,
    read_rows,
)

MACHINE = "machine"
"""Source name for the Python standard library's sources, which every machine has."""

TEXT_PIECE = 1 << 20
"""Number of characters of a text file that are read at a time, so that a huge file fits into
memory."""

_TEXT_FIELDS = ("text", "content", "prompt")
_RESPONSE_FIELDS = ("response", "completion", "answer")

_JSON = re.compile(rb'\s*(\{\s*"|\[\s*[{"])')
"""Beginning of a JSON object, or of a list of objects or texts, with which prose hardly ever
begins."""
_NAMED = 5
"""Largest number of left-out files that are named."""

Span = tuple[int, int]
"""Range of characters: the first, and the one after the last."""


@dataclass(frozen=True)
class Text:
    """A text without a template, or a piece of a huge one.

    Attributes:
        where: its file and row; the same for all pieces of a text.
        answers: its marked answers.
        begins: the first piece of the text of which this is a later one, else "".
    """

    text: str
    where: str
    answers: tuple[Span, ...] = ()
    begins: str = ""

    @property
    def has_answers(self) -> bool:
        """Whether any answers are marked."""
        return bool(self.answers)

    @property
    def characters(self) -> int:
        """Number of characters in the text."""
        return len(self.text)


Document = Text | Conversation


def read_documents(source: str) -> Iterator[Document]:
    """Yield every document of a source that is not blank, in the order of files and rows.

    Args:
        source: a file of rows or of text, a folder of them, or :data:`MACHINE`.

    Raises:
        DataError: there is nothing to read, or a row has an unknown form.
    """
    documents = chain.from_iterable(map(read_file, files_of(source)))
    has_text = False
    for document in documents:
        has_text = True
        yield document
    if not has_text:
        raise no_text(source)


def no_text(source: str) -> DataError:
    """Return the error for a source without a document, which names the files left out."""
    left_out = what_is_left_out(source)
    return DataError(f"{source} contains no text" + (f" ({left_out})" if left_out else ""))


def what_is_left_out(source: str) -> str:
    """Return text on the files of a folder that :func:`read_documents` leaves out; "" if none."""
    if source == MACHINE:
        return ""
    files, left_out = find_files(Path(source))
    why = "beside files of rows" if files and has_rows(files[0]) else "as no data"
    names = ", ".join(path.name for path in left_out[:_NAMED])
    more = len(left_out) - _NAMED
    return names and f"left out {why}: {names}" + (f" and {more} more" if more > 0 else "")


def files_of(source: str) -> list[Path]:
    """Return the files from which a source is read, by name.

    Raises:
        DataError: there is none.
    """
    if source == MACHINE:
        return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    path = Path(source)
    if not path.exists():
        raise DataError(
            f"there is no data at {source}. Give a file of rows ({', '.join(ROWS)}) or of text, a "
            f"folder of them, or {MACHINE!r} for this machine's Python sources."
        )
    return find_files(path)[0]


def read_file(path: Path) -> Iterator[Document]:
    """Yield every document of a file that is not blank.

    Raises:
        DataError: the file cannot be read, or a row has an unknown form.
    """
    documents: Iterable[Document]
    if form_of(path) in ROWS:
        documents = (_document(row.value, row.where) for row in read_rows(path))
    else:
        documents = _read_text(path)
    for document in documents:
        if isinstance(document, Conversation) or document.text.strip():
            yield document


def _read_text(path: Path) -> Iterator[Text]:
    try:
        with opened(path) as file:
            if _JSON.match(file.peek(1)):
                raise DataError(
                    f"{path} begins as JSON, and its braces would be read as prose. Let its name "
                    "say what it is: .jsonl for a value a line, .json for one list of rows."
                )
            text = TextIOWrapper(file, encoding="utf-8", newline="")
            begins = ""
            while piece := text.read(TEXT_PIECE):
                piece += text.readline()
                yield Text(piece, str(path), begins=begins)
                begins = begins or piece
    except UnicodeDecodeError as error:
        raise not_utf8(str(path), error) from error


def _document(row: Any, where: str) -> Document:
    """Read a row's messages, prompt and response, text with marked answers, or text."""
    if isinstance(row, str):
        return Text(row, where)
    fields = row if isinstance(row, dict) else {}
    if fields.get("chosen") is not None and fields.get("rejected") is not None:
        raise DataError(
            f"{where} is a preference (chosen and rejected), and only one of the two is to be "
            "learned from. Write that one as messages, or as a prompt with its response."
        )
    if (conversation := read_conversation(fields, where)) is not None:
        return conversation
    responses = (fields.get(name) for name in _RESPONSE_FIELDS)
    response = next((text for text in responses if isinstance(text, str)), None)
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and response is not None:
        text = prompt + response
        return Text(text, where, ((len(prompt), len(text)),) if response else ())
    for name in _TEXT_FIELDS:
        if isinstance(fields.get(name), str):
            return Text(fields[name], where, _answers(fields, fields[name], where))
    raise DataError(
        f"{where} has no text: expected a string, messages or ShareGPT's conversations, a prompt "
        f"with a response, or one of {', '.join(_TEXT_FIELDS)}. Name its field so, or leave it out."
    )


def _answers(fields: Mapping[str, Any], text: str, where: str) -> tuple[Span, ...]:
    marked = fields.get("answers")
    if marked is None:
        return ()
    try:
        spans = tuple((int(start), int(stop)) for start, stop in marked)
    except (TypeError, ValueError):
        spans = ((0, 0),)
    if not all(0 <= start < stop <= len(text) for start, stop in spans):
        raise DataError(
            f"{where}: answers is a list of [start, end] pairs, each the answer's first character "
            f"in the text and the one after its last (the text has {len(text)})"
        )
    return spans


def find_files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files to read, in their order, and the files of the folder that are left out.

    A single file is read. Of a folder, the files with rows are read if there are any, else texts.
    Files and folders whose names begin with a dot are skipped, because version control and
    downloads keep their own data there.

    Raises:
        DataError: a file cannot be read.
    """
    if not path.is_dir():
        return [path], []
    # A link that leads nowhere is kept, so that it is named.
    files = [file for file in _inside(path, set()) if file.is_file() or file.is_symlink()]
    data = {file for file in files if has_rows(file)} or {file for file in files if is_text(file)}
    return [file for file in files if file in data], [file for file in files if file not in data]


def _inside(folder: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield the files of a folder and those below, each once: links may lead in circles.

    Args:
        seen: folders that were looked into, to which this one is added.
    """
    if (place := folder.resolve()) in seen:
        return
    seen.add(place)
    for path in sorted(folder.iterdir()):
        if path.name[0] != ".":
            yield from _inside(path, seen) if path.is_dir() else [path]


def has_rows(path: Path) -> bool:
    """Return whether a file has rows, judged by its name, and for ``.json`` by its beginning."""
    if form_of(path) != ".json":
        return form_of(path) in ROWS
    with opened(path) as file:
        return is_list(file) or has_lines(file)


def is_text(path: Path) -> bool:
    """Return whether a file begins like text, and not like JSON."""
    try:
        with opened(path) as file:
            return not _JSON.match(file.peek(1))
    except DataError:
        return False
