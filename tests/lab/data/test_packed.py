"""A user's files as packed rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.data import documents
from sglang_indexcache.lab.data.documents import read_documents
from sglang_indexcache.lab.data.drawn import drawn
from sglang_indexcache.lab.data.marking import is_held_out
from sglang_indexcache.lab.data.packed import LEAST, FileRows
from tests.lab.data.letters import letters, text_of

LENGTH = 12
TEXTS = [f"document {i:03d}"[: 4 + i % 9] + f"{i:03d}" for i in range(120)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def read_rows(*sources: str, train: int = 1000, held_out: int = 1000, seed: int = 0) -> FileRows:
    return FileRows.read(sources, letters(), LENGTH, train, held_out, seed)


def letters_in(rows: tuple[tuple[object, ...], ...]) -> list[str]:
    return [text_of(piece.tolist()) for row in rows for piece in row]  # type: ignore[attr-defined]


def test_every_document_is_there_once_and_whole_unless_it_is_longer_than_a_row(source: str) -> None:
    rows = read_rows(source)
    assert "".join(sorted(letters_in(rows.train) + letters_in(rows.held_out))) == "".join(
        sorted(text[i : i + LENGTH] for text in TEXTS for i in range(0, len(text), LENGTH))
    )
    for row in (*rows.train, *rows.held_out):
        assert 0 < sum(map(len, row)) <= LENGTH
    assert any(len(row) > 1 for row in rows.train)


def test_all_windows_of_a_document_are_on_one_side(tmp_path: Path) -> None:
    """Each window's own tokens once decided, so a text that was trained on judged, too."""
    path = tmp_path / "long.jsonl"
    texts = [chr(ord("A") + i) * (3 * LENGTH + i) for i in range(26)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sides = read_rows(str(path))
    for held_out, rows in ((False, sides.train), (True, sides.held_out)):
        mine = {text for text in texts if is_held_out(list(map(ord, text))) is held_out}
        assert len(mine) > 1
        assert "".join(sorted(letters_in(rows))) == "".join(
            sorted(text[i : i + LENGTH] for text in mine for i in range(0, len(text), LENGTH))
        )


def test_a_huge_text_is_on_one_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of a file was a document of its own, so that a book held out its own chapters."""
    monkeypatch.setattr(documents, "TEXT_PIECE", 40)
    for number in range(26):
        lines = (f"{chr(ord('A') + number)}{i:018}\n" for i in range(9))
        (tmp_path / f"{number:02}.txt").write_text("".join(lines))
    rows = read_rows(str(tmp_path))
    train, held_out = (
        set(filter(str.isalpha, "".join(letters_in(part)))) for part in (rows.train, rows.held_out)
    )
    assert len(train | held_out) == len(train) + len(held_out) == 26
    with pytest.raises(TrainingError, match="split a long text into some"):
        read_rows(str(tmp_path / "00.txt"))


def test_rows_come_from_all_of_the_files(tmp_path: Path) -> None:
    """The first files of a folder once gave them all."""
    for number in range(26):
        (tmp_path / f"{number:02d}.txt").write_text(chr(ord("A") + number) * LENGTH)
    draws = [read_rows(str(tmp_path), train=8, held_out=2, seed=seed) for seed in (0, 0, 1)]
    letters_of = [sorted(text[0] for text in letters_in(rows.train)) for rows in draws]
    assert letters_of[0] == letters_of[1] != letters_of[2]
    assert len(set(letters_of[0])) == 8
    assert min(letters_of[0]) < "J" < "R" < max(letters_of[0])


def test_no_more_is_held_than_is_wanted(source: str) -> None:
    twice = [*read_documents(source), *read_documents(source)]
    chosen = drawn(twice, 0, LEAST, 1000)
    sizes = [document.characters for document in chosen]
    assert sum(sizes) >= 1000 > sum(sizes[:-1])
    fewer = drawn(twice, 0, LEAST, 1)
    assert (len(fewer), fewer) == (LEAST, chosen[:LEAST])
    assert len(drawn(read_documents(source), 0, LEAST, 10**9)) == len(TEXTS)


def test_rows_are_drawn_once_each_before_any_comes_again(source: str) -> None:
    rows = read_rows(source)
    count = len(rows.train)
    first, second = (
        [letters_in((rows.drawn(epoch * count + i),)) for i in range(count)] for epoch in range(2)
    )
    assert sorted(first) == sorted(second) == sorted(letters_in((row,)) for row in rows.train)
    assert first != second
    again = read_rows(source, seed=1)
    assert [letters_in((again.drawn(i),)) for i in range(count)] != first


def test_too_little(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(TrainingError, match="one document in four is held out"):
        read_rows(str(tmp_path / "short.txt"))
