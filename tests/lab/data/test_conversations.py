"""Conversations in the forms in which people keep them; the oracle is SGLang's own normaliser."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.conversations import Conversation, read_conversation
from sglang_indexcache.lab.data.documents import read_documents
from tests.lab.data.test_marking import marker

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
GLM_LIKE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def calling(arguments: Any, name: str = "weather") -> list[dict[str, Any]]:
    function = {"name": name, "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
        {"role": "assistant", "content": "No."},
    ]


def conversation(**row: Any) -> Conversation:
    result = read_conversation(row, "data.jsonl, line 3")
    assert result is not None
    return result


@pytest.mark.parametrize("text", ['{"city": "Bonn", "days": 2}', "{}", '{"a": {"b": [1, null]}}'])
def test_arguments_become_what_the_server_makes_of_them(text: str) -> None:
    serving_chat = pytest.importorskip("sglang.srt.entrypoints.openai.serving_chat")
    messages = calling(text)
    expected = copy.deepcopy(messages)
    for message in expected:
        serving_chat.normalize_assistant_tool_call_arguments(message)
    ours = conversation(messages=messages).messages
    assert [m.get("tool_calls") for m in ours] == [m.get("tool_calls") for m in expected]
    assert messages == calling(text), "the row was changed"


@pytest.mark.parametrize("nothing", ["", "null", " ", None])
def test_a_call_without_arguments_has_none(nothing: Any) -> None:
    [call] = conversation(messages=calling(nothing)).messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": calling('{"city": "Bonn"}'), "tools": TOOLS},
        {"messages": calling({"city": "Bonn"}), "tools": json.dumps(TOOLS)},
        {"messages": json.dumps(calling('{"city": "Bonn"}')), "tools": [json.dumps(TOOLS[0])]},
        {"conversations": calling('{"city": "Bonn"}'), "tools": json.dumps(TOOLS)},
    ],
)
def test_every_form_is_rendered_alike(row: dict[str, Any]) -> None:
    """GLM's template iterates arguments, and so refused what the server takes."""
    glm = marker(template=GLM_LIKE)
    plain = Conversation(
        tuple({k: v or "" for k, v in m.items()} for m in calling({"city": "Bonn"})), "here", TOOLS
    )
    assert glm.marked(conversation(**row)).ids == glm.marked(plain).ids


def test_parameters_as_text_become_an_object() -> None:
    function = {"name": "weather", "parameters": json.dumps({"type": "object"})}
    chat = conversation(messages=calling({}), tools=[{"type": "function", "function": function}])
    assert chat.tools[0]["function"]["parameters"] == {"type": "object"}
    assert conversation(messages=calling({}), tools="[]").tools is None
    assert conversation(messages=calling({}), tools="").tools is None


def test_sharegpt(tmp_path: Path) -> None:
    says = [("human", "Hi"), ("gpt", "Hello"), ("user", "And?"), ("observation", "5"), ("gpt", "5")]
    row = {"id": "t0", "conversations": [{"from": a, "value": b} for a, b in says]}
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([row, {**row, "system": "Be brief."}], indent=2))
    plain, instructed = read_documents(str(path))
    assert isinstance(plain, Conversation)
    assert isinstance(instructed, Conversation)
    assert [m["role"] for m in plain.messages] == ["user", "assistant", "user", "tool", "assistant"]
    assert [m["content"] for m in plain.messages] == [text for _, text in says]
    assert instructed.messages[0] == {"role": "system", "content": "Be brief."}
    assert instructed.messages[1:] == plain.messages
    assert plain.responses == (1, 4)


def test_parquet_does_not_give_a_call_the_fields_of_another(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    function = {"name": "sum", "parameters": {"n": {"type": "int"}}}
    other = [{"type": "function", "function": function}]
    rows = [
        {"messages": calling({"city": "Bonn"}), "tools": TOOLS},
        {"messages": calling({"n": 3}, "sum"), "tools": other},
    ]
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    for document, row in zip(read_documents(str(path)), rows, strict=True):
        assert isinstance(document, Conversation)
        expected = conversation(**row)
        assert document.messages == expected.messages
        assert document.tools == expected.tools


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": calling("[1]")}, r"line 3: the arguments of a call of weather are \[1\]"),
        ({"messages": calling("{'a'")}, "arguments of a call of weather are text that is not JSON"),
        ({"messages": "[{"}, "line 3: messages are text that is not JSON"),
        ({"messages": r'["\ud83d"]'}, "line 3: messages are text that is not JSON.*surrogates"),
        ({"messages": calling({}), "tools": "weather"}, "line 3: tools are text that is not JSON"),
        ({"messages": ["hello"]}, "messages that are not a list of objects with a role"),
        ({"messages": []}, "messages that are not a list of objects with a role"),
        ({"conversations": ["hello"]}, "conversations that are not a list of objects with a role"),
        (
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            "said from 'function_call'; known are text values from human, user, gpt",
        ),
    ],
)
def test_bad_messages_are_refused_by_row(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        conversation(**row)
