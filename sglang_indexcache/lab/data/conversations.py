"""Chat messages in common file formats, read as SGLang's server reads them.

This follows ``normalize_assistant_tool_call_arguments`` and ``_apply_jinja_template`` in SGLang's
``serving_chat.py``: a tool call's arguments become an object, a message without content gets empty
content, and fields that are null are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.rows import from_json

FIELDS = ("messages", "conversations")
"""Fields of a row that hold chat messages; the second is ShareGPT's name."""

_SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Role for each speaker in a ShareGPT conversation."""


@dataclass(frozen=True)
class Conversation:
    """Chat messages, before any template.

    Attributes:
        messages: each has a "role", and any other fields that the template reads.
        tools: the functions that the assistant may call, or None.
    """

    messages: tuple[Mapping[str, Any], ...]
    where: str
    tools: Any = None

    @property
    def responses(self) -> tuple[int, ...]:
        """Indices of the assistant's messages."""
        return tuple(i for i, m in enumerate(self.messages) if m["role"] == "assistant")

    @property
    def has_answers(self) -> bool:
        """Whether there is any message by the assistant."""
        return bool(self.responses)

    @property
    def characters(self) -> int:
        """Number of characters in the messages' content, before any template: an estimate."""
        return sum(len(str(message.get("content", ""))) for message in self.messages)


def read_conversation(row: Mapping[str, Any], where: str) -> Conversation | None:
    """Return the conversation in a row, or None if the row has none.

    Raises:
        DataError: the messages have an unknown form; names the row.
    """
    name = next((name for name in FIELDS if row.get(name) not in (None, "")), None)
    if name is None:
        return None
    messages = _value(row[name], f"{where}: {name}")
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where} has {name} that are not a list of objects with a role")
    turns = [_message(message, name, where) for message in messages]
    if isinstance(row.get("system"), str) and row["system"] and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": row["system"]})
    return Conversation(tuple(turns), where, _tools(row.get("tools"), where))


def _message(message: Any, name: str, where: str) -> dict[str, Any]:
    """Return one message as a template reads it, also from ShareGPT's ``from`` and ``value``."""
    if isinstance(message, dict) and "from" in message and "role" not in message:
        speaker = message["from"]
        if speaker not in _SHAREGPT or not isinstance(message.get("value"), str):
            raise DataError(
                f"{where} has {name} with something said from {speaker!r}; known are text values "
                f"from {', '.join(_SHAREGPT)}. Write such rows as messages with role and content."
            )
        return {"role": _SHAREGPT[speaker], "content": message["value"]}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} has {name} that are not a list of objects with a role")
    cleaned = {key: value for key, value in message.items() if value is not None}
    cleaned.setdefault("content", "")
    calls = _value(cleaned.get("tool_calls"), f"{where}: tool_calls")
    if message["role"] == "assistant" and isinstance(calls, list):
        cleaned["tool_calls"] = [_call(call, where) for call in calls]
    return cleaned


def _call(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object; the API writes them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    place = f"{where}: the arguments of a call of {function.get('name')}"
    arguments = _value(function.get("arguments"), place)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise DataError(
            f"{place} are {json.dumps(arguments)[:40]}, which no server takes: they must be a JSON "
            "object. Mend the row, or leave it out."
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(value: Any, where: str) -> Any:
    """Return tools with their descriptions as objects, though a row may have them as JSON text."""
    tools = _value(value, f"{where}: tools")
    if not isinstance(tools, list):
        return tools
    return [_tool(_value(tool, f"{where}: tools"), where) for tool in tools] or None


def _tool(tool: Any, where: str) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("parameters"), str):
        return tool
    parameters = _value(function["parameters"], f"{where}: parameters of a tool")
    return {**tool, "function": {**function, "parameters": parameters}}


def _value(value: Any, place: str) -> Any:
    """Parse a value that is JSON text, and return any other unchanged; blank text becomes None."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} are text that is not JSON: {error}. Mend the row, or leave it out."
        ) from error
