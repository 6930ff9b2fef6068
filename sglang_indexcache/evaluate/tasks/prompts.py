"""Prompts: whatever a user sends to his own model.

A row has ``messages`` (a conversation, written by the model's chat template) or ``prompt`` (a text,
sent as it is; or a conversation). With an ``answer`` it is scored like every other question.
Without one nobody knows what is right: the reference continues it, and every arm is then held
against that continuation, which says how far a pattern moves the model and not whether for worse.
"""

from __future__ import annotations

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.items import Item, Message, Row, conversation, text_of


def prompts(row: Row) -> Item:
    """A prompt, with its answer if it has one.

    Raises:
        QualityError: no prompt, or an answer that is no text.
    """
    prompt: tuple[Message, ...] | str
    if row.get("messages") is not None:
        prompt = conversation(row["messages"], "messages")
    elif isinstance(row.get("prompt"), list):
        prompt = conversation(row["prompt"], "prompt")
    else:
        prompt = text_of(row, "prompt", "messages")
    answer = row.get("answer")
    if answer is not None and not (isinstance(answer, str) and answer.strip()):
        raise QualityError("answer is empty, or no text; leave it out if nobody knows it")
    return Item(prompt, answer)
