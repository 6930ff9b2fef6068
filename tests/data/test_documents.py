import json
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.data import documents
from sglang_indexcache.data.documents import Conversation, Text, read_documents
from sglang_indexcache.errors import DataError

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

    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "b.jsonl").write_text('{"text": "one\\u2028line"}\n\n{"text": "two"}\n')
    tool_answer = {"role": "assistant", "content": "5", "name": "x"}  # null in the rows without it
    rows = [{"messages": CHAT}, {"messages": [CHAT[0], tool_answer]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    documents = list(read_documents(str(tmp_path)))
    texts = [d.text for d in documents if isinstance(d, Text)]
    assert texts == ["plain", "one\u2028line", "two"]
    assert [list(d.messages) for d in documents if isinstance(d, Conversation)] == [
        CHAT,
        [CHAT[0], tool_answer],
    ]
    assert documents[-1].where.endswith("c.parquet, row 2")


def test_a_huge_text_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "TEXT_PIECE", 10)
    path = tmp_path / "a.txt"
    path.write_text("line one\nline two\nline three\n")
    pieces = [d.text for d in read_documents(str(path)) if isinstance(d, Text)]
    assert pieces == ["line one\nline two\n", "line three\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "contains no text"),
        ("blank.jsonl", b"\n \n", "contains no text"),
        ("latin.txt", "café".encode("latin-1"), "latin.txt is not UTF-8 .it holds the byte 0xe9"),
        ("fields.jsonl", b'{"body": "a"}', "line 1 has no text: expected a string, messages, a"),
        ("chat.jsonl", b'{"messages": ["hello"]}', "messages that are not a list of objects with"),
        ("span.jsonl", b'{"text": "a", "answers": [[0, 2]]}', "one after its last .the text has 1"),
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
