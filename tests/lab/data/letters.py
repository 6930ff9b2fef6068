"""A tokenizer of one token a character, so that a test can say which tokens it expects."""

from __future__ import annotations

from typing import Any

from sglang_indexcache.lab.data.marking import Marker


class Letters:
    """The part of a tokenizer that a marker needs."""

    is_fast, chat_template = True, None

    def __init__(self) -> None:
        self.added_tokens_decoder: dict[int, Any] = {}
        self.characters = 0

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool, **_: bool
    ) -> dict[str, Any]:
        assert not add_special_tokens
        assert not verbose
        self.characters += len(text)
        offsets = [(i, i + 1) for i in range(len(text))]
        return {"input_ids": [ord(c) for c in text], "offset_mapping": offsets}


def letters() -> Marker:
    """Return a marker whose tokenizer makes one token of each character."""
    return Marker(Letters(), "letters")


def text_of(ids: tuple[int, ...]) -> str:
    """Return the text of such tokens."""
    return "".join(map(chr, ids))
