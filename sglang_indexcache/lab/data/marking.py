"""A document's tokens, and which of them are answers."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.conversations import Conversation
from sglang_indexcache.lab.data.documents import Document, Span, Text

Mask = NDArray[np.bool_]

HELD_OUT_SHARE = 4
"""One sequence in this many is held out: never used to search or to train."""


@dataclass(frozen=True, eq=False)
class Marked:
    """Tokens of one document, or of a piece of it.

    Attributes:
        ids: ``[length]`` token ids.
        answers: ``[length]`` bool, whether a token holds any part of an answer.
    """

    ids: tuple[int, ...]
    answers: Mask

    def __len__(self) -> int:
        return len(self.ids)

    def piece(self, start: int, length: int) -> Marked:
        """Return at most ``length`` tokens from ``start`` on."""
        end = start + length
        return Marked(self.ids[start:end], self.answers[start:end])


def fingerprint(sequence: Sequence[int]) -> bytes:
    """Return a digest of a ``[length]`` sequence, by which copies of a document are known."""
    return hashlib.sha256(",".join(map(str, sequence)).encode()).digest()


def is_held_out(sequence: Sequence[int]) -> bool:
    """Return whether a ``[length]`` sequence belongs to the held-out part, as one in four does.

    A digest of its tokens decides, so no command can mix the two parts, whatever its number of
    batches and its seed.
    """
    return fingerprint(sequence)[0] % HELD_OUT_SHARE == 0


class Marker:
    """Converter from documents to tokens.

    Texts are encoded unchanged, without special tokens. Conversations are encoded by the chat
    template, which writes its own special tokens.

    Args:
        name: the checkpoint's name, for error messages.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer, self._name = tokenizer, name
        added = tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special)
        self._sides: dict[str, bool] = {}

    def encode(self, text: str) -> list[int]:
        """Return the tokens of an unchanged text."""
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def marked(self, document: Document) -> Marked:
        """Encode a document and mark its answers; a conversation ends at its last response.

        Raises:
            DataError: the template or the tokenizer does not show where the answers are.
        """
        if isinstance(document, Text):
            return self._encode(document.text, document.answers)
        return self._conversation(document, max(document.responses, default=None))

    def is_held_out(self, document: Document, marked: Marked) -> bool:
        """Return whether a document is held out; every piece of a huge text goes with its first."""
        if not isinstance(document, Text) or not document.begins:
            return is_held_out(marked.ids)
        if document.where not in self._sides:
            self._sides[document.where] = is_held_out(self.encode(document.begins))
        return self._sides[document.where]

    def cut(self, conversation: Conversation, length: int) -> Marked | None:
        """Cut a conversation after the last response at which it has at most ``length`` tokens.

        Returns None if it is longer already at its first response.
        """
        ends = conversation.responses
        # The length grows with the number of responses, so bisect.
        count = bisect_left(
            ends, length + 1, key=lambda end: len(self._conversation(conversation, end))
        )
        return self._conversation(conversation, ends[count - 1]) if count else None

    def _encode(self, text: str, answers: Sequence[Span]) -> Marked:
        options = {"add_special_tokens": False, "verbose": False}
        if not answers:
            ids = self._tokenizer(text, **options)["input_ids"]
            return Marked(tuple(ids), np.zeros(len(ids), dtype=bool))
        if not self._tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of {self._name} cannot say which characters a token holds, so "
                "answers cannot be found: it needs a tokenizer.json. Or count other tokens "
                "(--score late)."
            )
        encoding = self._tokenizer(text, return_offsets_mapping=True, **options)
        inside = np.zeros(len(text) + 1, dtype=np.int64)
        for start, stop in answers:
            inside[start + 1 : stop + 1] = 1
        answered = inside.cumsum()  # entry i counts answer characters before character i
        first, end = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        # Some tokenizers leave blanks out of the offsets, so a token of only blanks has an empty
        # range.
        first = np.maximum(np.minimum(first, end - 1), 0)
        return Marked(tuple(encoding["input_ids"]), answered[end] > answered[first])

    def _conversation(self, conversation: Conversation, last: int | None) -> Marked:
        """Encode the messages up to the response ``last``, or all messages if it is None."""
        if last is None:
            return self._encode(self._render(conversation, len(conversation.messages)), ())
        text = self._render(conversation, last + 1)
        spans = []
        for response in conversation.responses:
            if response < last:
                try:
                    spans += self._span(conversation, text, response)
                except DataError:  # the template refuses so short a conversation
                    continue
        said_last = self._span(conversation, text, last)
        if not said_last:
            raise DataError(
                f"{conversation.where}: the chat template of {self._name} writes the messages "
                "before the last response differently once that is there, so its tokens cannot be "
                "told from theirs. Give a template that keeps them, or write text with answers."
            )
        return self._encode(text, [*spans, *said_last])

    def _span(self, conversation: Conversation, text: str, response: int) -> list[Span]:
        """Return the span of a response in the rendered ``text``, including its end-of-turn token.

        The result is empty if ``text`` does not hold the response as it was written then: some
        templates strip the thinking of earlier turns.
        """
        through = self._render(conversation, response + 1)
        if not text.startswith(through):
            return []
        before, prompt = "", ""
        if response:
            before = self._render(conversation, response)
            prompt = self._render(conversation, response, ask=True)
        start = len(prompt)
        if not text.startswith(prompt):
            # A template's generation prompt may ask for thinking, but not stand before a response
            # without it.
            if not text.startswith(before):
                return []
            start = len(before)
            for expected, actual in zip(prompt[start:], text[start:], strict=False):
                if expected != actual:
                    break
                start += 1
        trimmed = through.rstrip()
        return [(start, len(trimmed) if trimmed.endswith(self._special) else len(through))]

    def _render(self, conversation: Conversation, count: int, *, ask: bool = False) -> str:
        """Render the first ``count`` messages; ``ask`` adds the generation prompt."""
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{conversation.where} has chat messages, and the tokenizer of {self._name} has no "
                "chat template. Give it one (chat_template.jinja), or write the data as text with "
                "answers."
            )
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(conversation.messages[:count]),
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=ask,
            )
        except Exception as error:  # a template is a program and may raise any error
            raise DataError(
                f"{conversation.where}: the chat template of {self._name} refuses the first "
                f"{count} messages: {error}"
            ) from error
        return rendered
