import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data import documents
from sglang_indexcache.lab.data.conversations import Conversation
from sglang_indexcache.lab.data.documents import Text, read_documents, what_is_left_out

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


def only_document(tmp_path: Path, row: Any) -> Any:
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(row))
    [document] = read_documents(str(path))
    return document


@pytest.mark.parametrize(
    ("row", "text", "answers"),
    [
        ("abc", "abc", ()),
        ({"text": "abc"}, "abc", ()),
        ({"content": "abc", "other": 1}, "abc", ()),
        ({"prompt": "abc"}, "abc", ()),
        ({"prompt": "ab", "response": "c"}, "abc", ((2, 3),)),
        ({"prompt": "ab", "completion": "c"}, "abc", ((2, 3),)),
        ({"prompt": "ab", "answer": "cd"}, "abcd", ((2, 4),)),
        ({"prompt": "ab", "answer": ""}, "ab", ()),
        ({"text": "abcd", "answers": [[1, 2], [3, 4]]}, "abcd", ((1, 2), (3, 4))),
        ({"text": "abcd", "answers": []}, "abcd", ()),
    ],
)
def test_records(tmp_path: Path, row: Any, text: str, answers: tuple[Any, ...]) -> None:
    document = only_document(tmp_path, row)
    assert (document.text, document.answers) == (text, answers)
    assert document.has_answers == bool(answers)


def test_messages_keep_their_roles(tmp_path: Path) -> None:
    """Their contents were once joined by newlines."""
    document = only_document(
        tmp_path, {"messages": CHAT, "text": "rendered", "tools": [{"name": "f"}]}
    )
    assert isinstance(document, Conversation)
    assert [m["role"] for m in document.messages] == ["user", "assistant"]
    assert document.responses == (1,)
    assert document.tools == [{"name": "f"}]
    assert not only_document(tmp_path, {"messages": CHAT[:1]}).has_answers


def test_reads_every_format(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "a.csv").write_text('text,note\n"two\nlines",\n')
    (tmp_path / "b.jsonl").write_text('{"text": "one\\u2028line"}\n\n{"text": "two"}\n')
    tool_answer = {"role": "assistant", "content": "5", "name": "x"}  # null in the rows without it
    rows = [{"messages": CHAT}, {"messages": [CHAT[0], tool_answer]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "d.json").write_text(json.dumps([{"messages": CHAT}], indent=1))
    documents = list(read_documents(str(tmp_path)))
    texts = [d.text for d in documents if isinstance(d, Text)]
    assert texts == ["two\nlines", "one\u2028line", "two"]
    assert [list(d.messages) for d in documents if isinstance(d, Conversation)] == [
        CHAT,
        [CHAT[0], tool_answer],
        CHAT,
    ]
    assert documents[-2].where.endswith("c.parquet, row 2")


def test_a_huge_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TEXT_PIECE", 10)
    path = tmp_path / "a.txt"
    path.write_text("line one\nline two\nline three\n")
    pieces = [d for d in read_documents(str(path)) if isinstance(d, Text)]
    assert [piece.text for piece in pieces] == ["line one\nline two\n", "line three\n"]
    assert [piece.begins for piece in pieces] == ["", pieces[0].text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b"\n \n", "contains no text"),
        ("latin.txt", "café".encode("latin-1"), "latin.txt is not UTF-8 .it holds the byte 0xe9"),
        ("fields.jsonl", b'{"body": "a"}', "line 1 has no text: expected a string, messages or"),
        ("chat.jsonl", b'{"messages": ["hello"]}', "messages that are not a list of objects with"),
        ("span.jsonl", b'{"text": "a", "answers": [[0, 2]]}', "one after its last .the text has 1"),
        (
            "dpo.jsonl",
            b'{"prompt": "a", "chosen": "b", "rejected": "c"}',
            "line 1 is a preference .chosen and rejected.* as messages, or as a prompt",
        ),
        (
            "liked.jsonl",
            b'{"messages": [{"role": "user"}], "chosen": ["b"], "rejected": ["c"]}',
            "line 1 is a preference",
        ),
        ("prose.txt", b'\n [ {"text": "a"} ]', "prose.txt begins as JSON, .* .jsonl for a value a"),
        ("prose.md", b'{\n "text": "a"}', "prose.md begins as JSON, .* .json for one list"),
        ("words.txt", b'["a", "b"]', "words.txt begins as JSON"),
        ("one.json", b'{"text": "a"}', "does not hold a list of rows"),
        ("a.png", b"\x89PNG\r\n", "a.png is a picture, and no text"),
        ("a.bin", b"ab\0c", "a.bin is no text"),
        ("squad.jsonl", b'{"text": "a", "answers": ["a"]}', "line 1: answers is a list of .start"),
    ],
)
def test_bad_data(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_documents(str(tmp_path / name)))


def test_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no data at"):
        next(read_documents(str(tmp_path / "missing")))


@pytest.mark.parametrize(
    "text", ["{{ title }} and more", "[[link]] and more", "[a list](of.md)", "{ x }", "[1] A"]
)
def test_braces_alone_are_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig")
    assert [d.text for d in read_documents(str(tmp_path)) if isinstance(d, Text)] == [text]


def test_gzip_of_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "book.txt.gz"
    path.write_bytes(gzip.compress("Once upon a time.\r\n".encode("utf-8-sig")))
    [document] = read_documents(str(path))
    assert isinstance(document, Text)
    assert document.text == "Once upon a time.\r\n"


def test_a_folder_as_the_hub_leaves_it(tmp_path: Path) -> None:
    """Its own files were read first, and reading stops when there is enough."""
    for name, content in {
        ".cache/huggingface/download/train.jsonl.metadata": b"0123\n",
        ".gitattributes": b"*.parquet filter=lfs\n",
        ".hidden.jsonl": b'{"text": "hidden"}\n',
        "README.md": b"---\nlicense: mit\n---\n",
        "dataset_infos.json": b'{"default": {"features": {}}}',
        "picture.png": b"\x89PNG\r\n\x1a\n\0",
        "data/train.jsonl": b'{"text": "one"}\n',
        "data/more.json": b'[{"text": "two"}]',
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    texts = [d.text for d in read_documents(str(tmp_path)) if isinstance(d, Text)]
    assert texts == ["two", "one"]
    said = what_is_left_out(str(tmp_path))
    assert said == "left out beside files of rows: README.md, dataset_infos.json, picture.png"


def test_links_are_followed_once(tmp_path: Path) -> None:
    """A folder that was linked was passed over in silence, and a link that leads nowhere, too."""
    for name in ("data/a.txt", "elsewhere/deep/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    data = tmp_path / "data"
    (data / "linked").symlink_to(tmp_path / "elsewhere")
    (data / "circle").symlink_to(data)
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    (data / "gone.txt").symlink_to(tmp_path / "gone.txt")
    texts = [d.text for d in read_documents(str(data)) if isinstance(d, Text)]
    assert texts == ["data/a.txt", "elsewhere/deep/b.txt"]
    assert what_is_left_out(str(data)) == "left out as no data: gone.txt"
    (data / "gone.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match=r"cannot read .*gone\.jsonl: No such file"):
        next(read_documents(str(data)))


def test_a_folder_of_texts_leaves_out_what_is_none(tmp_path: Path) -> None:
    for name, content in {
        "a.txt": b"one",
        "b.md": b"two",
        "config.json": b'{"a": 1}',
        "notebook.ipynb": b'{\n "cells": []}',
        "weights.bin": b"a\0",
        **{f"{number}.pdf": b"%PDF-1.7" for number in range(4)},
    }.items():
        (tmp_path / name).write_bytes(content)
    texts = [d.text for d in read_documents(str(tmp_path)) if isinstance(d, Text)]
    assert texts == ["one", "two"]
    assert what_is_left_out(str(tmp_path)) == (
        "left out as no data: 0.pdf, 1.pdf, 2.pdf, 3.pdf, config.json and 2 more"
    )
    for path in tmp_path.glob("*.*"):
        if path.suffix in (".txt", ".md"):
            path.unlink()
    with pytest.raises(DataError, match=r"contains no text \(left out as no data: 0\.pdf"):
        next(read_documents(str(tmp_path)))
