"""Prompts as the model was trained on them: its beginning of text, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sglang_indexcache.errors import QualityError

Message = Mapping[str, str]
_MARK = "What is asked stands here."


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Mapping[str, Any]:
        """``input_ids``: a list of ids for each text."""

    def get_vocab(self) -> Mapping[str, int]:
        """Every piece and its id; a leading space is U+0120 or U+2581."""

    def decode(self, ids: list[int]) -> str:
        """The text of these ids."""


def has_template(tokenizer: Tokenizer) -> bool:
    """Whether conversations are written as the model knows them."""
    return bool(getattr(tokenizer, "chat_template", None))


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids before and behind what a user says; the answer begins where the second ones end.

    By the chat template, without thinking if it has a switch for that: an answer that is put into
    the model's mouth follows at once. Without a template, what the tokenizer begins a text with.

    Raises:
        QualityError: the template refuses a plain question, or changes it.
    """
    if not has_template(tokenizer):
        return beginning(tokenizer), []
    before, mark, behind = _applied(
        ({"role": "user", "content": _MARK},), tokenizer, tokenize=False
    ).partition(_MARK)
    if not mark:
        raise QualityError("the model's chat template changes what a user says")
    ids = tokenizer([before, behind], add_special_tokens=False)["input_ids"]
    return list(ids[0]), list(ids[1])


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer begins a text with; mostly one id or none."""
    [own], [whole] = (
        tokenizer(["a"], add_special_tokens=special)["input_ids"] for special in (False, True)
    )
    starts = (n for n in range(len(whole)) if list(whole[n : n + len(own)]) == list(own))
    return list(whole[: next(starts, 0)])


def rendered(messages: tuple[Message, ...], tokenizer: Tokenizer) -> list[int]:
    """A conversation by the tokenizer's chat template; as plain turns if it has none."""
    if not has_template(tokenizer):
        turns = [f"{one['role'].capitalize()}: {one['content']}" for one in messages]
        text = "\n".join([*turns, "Assistant:"])
        return list(tokenizer([text], add_special_tokens=True)["input_ids"][0])
    return list(_applied(messages, tokenizer, tokenize=True, return_dict=False))


def _applied(messages: tuple[Message, ...], tokenizer: Tokenizer, **how: bool) -> Any:
    try:
        return tokenizer.apply_chat_template(  # type: ignore[attr-defined]
            [dict(message) for message in messages],
            add_generation_prompt=True,
            enable_thinking=False,
            thinking=False,
            **how,
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise QualityError(f"the model's chat template refuses a conversation: {error}") from error
