"""Choose a folder's files that are data, and say which were left out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.rows import ROWS, form_of, has_lines, is_list, opened

_JSON = re.compile(rb'\s*(\{\s*"|\[\s*[{"])')
"""Beginning of a JSON object, or of a list of objects or texts. Prose hardly ever begins so."""
_NAMED = 5
"""Files that are named of those that were left out."""


@dataclass(frozen=True)
class Files:
    """Files that are read, in their order, and those of the same folder that are not."""

    read: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()

    def in_words(self) -> str:
        """Say which files were left out; nothing if none were."""
        names = ", ".join(path.name for path in self.left_out[:_NAMED])
        more = len(self.left_out) - _NAMED
        return names and f"left out as no data: {names}" + (f" and {more} more" if more > 0 else "")


def find_files(path: Path) -> Files:
    """Return a file, or a folder's: those with rows if there are any, else those of text.

    Names that begin with a dot are passed over, as are folders of such names: version control and
    downloads keep their own there.

    Raises:
        DataError: a file that cannot be read.
    """
    if not path.is_dir():
        return Files((path,))
    files = [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file() and not any(part[0] == "." for part in file.relative_to(path).parts)
    ]
    data = {file for file in files if has_rows(file)} or {file for file in files if is_text(file)}
    return Files(
        tuple(file for file in files if file in data),
        tuple(file for file in files if file not in data),
    )


def has_rows(path: Path) -> bool:
    """Return whether a file has rows by its name, and if it is ``.json`` by its beginning."""
    if form_of(path) != ".json":
        return form_of(path) in ROWS
    with opened(path) as file:
        return is_list(file) or has_lines(file)


def is_text(path: Path) -> bool:
    """Return whether a file begins as text, and not as JSON."""
    try:
        with opened(path) as file:
            return not _JSON.match(file.peek(1))
    except DataError:
        return False


def refuse_json(path: Path, start: bytes) -> None:
    """Raise DataError for a text file that begins as JSON."""
    if _JSON.match(start):
        raise DataError(
            f"{path} begins as JSON, and its braces would be read as prose. Let its name say what "
            "it is: .jsonl for a value a line, .json for one list of rows."
        )
