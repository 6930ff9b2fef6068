"""Questions that a user has: rows of a file, each one a prompt with its answer.

A task of this kind is a function from a row, as it is published, to an :class:`Item`. An item is a
context of its own with a single question, so it counts as one independent observation: `selection`
asks one of those that share a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_indexcache.data.rows import FileRow, read_rows
from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.chat import Message, Tokenizer, rendered
from sglang_indexcache.evaluate.tasks.context import Context, Question

Row = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True)
class Item:
    """A row as it is asked.

    Attributes:
        prompt: the conversation that is to be answered; or a text, which is sent as it is.
        answer: the right one, to the letter.
        begun: what an answer in the prescribed form begins with; it is fed in with the answer.
        depth: where in the prompt the answer lies, 0 to 1; None where the file does not tell.
        one_form: whether the answer can be written in one way alone, so that its tokens can be
            scored.
    """

    prompt: tuple[Message, ...] | str
    answer: str
    begun: str = ""
    depth: float | None = None
    one_form: bool = True

    @property
    def text(self) -> str:
        """Everything that is sent, to see how far two items begin alike."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "".join(f"\0{one['role']}\0{one['content']}" for one in self.prompt)

    @property
    def characters(self) -> int:
        """Of everything that is sent."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(message["content"]) for message in self.prompt)


Reader = Callable[[Row], Item]
"""From a row to what is asked.

Raises:
    QualityError: what the row lacks, without its place.
"""


def read_items(reader: Reader, path: Path) -> Iterator[tuple[FileRow, Item]]:
    """Every row of a file, as it lies there and as it is asked.

    Args:
        reader: of the file's form.
        path: .parquet, .jsonl, or .json (a list of rows).

    Raises:
        DataError: naming the line or row that cannot be read.
        QualityError: naming the line or row, and what is wrong with it.
    """
    for row in read_rows(path):
        if not isinstance(row.value, dict):
            raise QualityError(f"{row.where} is no object with named fields")
        try:
            item = reader(row.value)
        except QualityError as error:
            raise QualityError(f"{row.where}: {error}") from error
        yield row, item


def as_context(
    item: Item, task: str, tokenizer: Tokenizer, length: int, name: str, number: int
) -> Context:
    """An item as it is sent: one question, which the whole prompt belongs to.

    Args:
        item: the row.
        task: of which file.
        tokenizer: of the model.
        length: of its cell, in tokens.
        name: of the context.
        number: of the row.
    """
    pieces = tokenizer([item.begun, item.answer], add_special_tokens=False)["input_ids"]
    question = Question(
        f"row{number}", list(pieces[0]), list(pieces[1]), item.begun, item.answer, item.depth
    )
    return Context(name, task, length, prompt_ids(item, tokenizer), [question])


def tokens(item: Item, tokenizer: Tokenizer) -> int:
    """Of prompt and answer."""
    pieces = tokenizer([item.begun, item.answer], add_special_tokens=False)["input_ids"]
    return len(prompt_ids(item, tokenizer)) + sum(map(len, pieces))


def prompt_ids(item: Item, tokenizer: Tokenizer) -> list[int]:
    """The prompt as the model reads it, ready for its answer."""
    if isinstance(item.prompt, str):
        return list(tokenizer([item.prompt], add_special_tokens=True)["input_ids"][0])
    return rendered(item.prompt, tokenizer)


def conversation(value: Any, name: str) -> tuple[Message, ...]:
    """Chat messages, as a list or as JSON text of one.

    Raises:
        QualityError: it is none, or its last turn is not to be answered.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise QualityError(f"{name} is not JSON ({error.msg})") from error
    if not isinstance(value, list) or not value:
        raise QualityError(f"{name} is no list of chat messages")
    for message in value:
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            raise QualityError(
                f"{name} has a message whose content is a list of parts; write it as plain text"
            )
        if (
            not isinstance(message, dict)
            or message.get("role") not in _ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise QualityError(
                f"{name} has a message without a known role or without text as its content"
            )
    if value[-1]["role"] == "assistant":
        raise QualityError(f"{name} ends with the assistant's turn, so nothing is asked")
    return tuple({"role": one["role"], "content": one["content"]} for one in value)


def text_of(row: Row, *names: str) -> str:
    """The first of these fields that the row has.

    Raises:
        QualityError: it has none, or it is no text.
    """
    for name in names:
        if row.get(name) is not None:
            if not isinstance(row[name], str) or not row[name].strip():
                raise QualityError(f"{name} is empty, or no text")
            return str(row[name])
    known = ", ".join(sorted(map(str, row))) or "none"
    raise QualityError(f"{' or '.join(names)} is missing; its fields are {known}")
