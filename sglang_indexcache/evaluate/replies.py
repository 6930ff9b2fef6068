"""Let the model answer by itself, greedily, and give its replies the tasks' own metrics.

Dearer than :mod:`scoring` and no better at telling arms apart: greedy decoding gives the right
answer if and only if teacher forcing finds each of its tokens the likeliest. It is for whoever
wants to see replies, and for the metrics of the tasks' sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sglang_indexcache.evaluate.metrics import METRICS
from sglang_indexcache.evaluate.scoring import (
    Engine,
    Said,
    Scored,
    Voice,
    ask,
    computed,
)
from sglang_indexcache.evaluate.tasks import Context, Question

SPARE = 16
"""Tokens that a reply may have beyond the right answer's."""


def reply(
    engine: Engine, context: Context, voices: Sequence[Voice], spare: int = SPARE
) -> list[Scored]:
    """Replies to every question of a context, for several voices in the same batches.

    A reply ends with its line, for the right answers of generated tasks have one. To a user's
    file it ends where the model ends it, and is right where its source's metric is 1.

    Args:
        engine: the server.
        context: with its questions.
        voices: as whom to ask.
        spare: see :data:`SPARE`.

    Raises:
        ServerUnavailableError: no answer, or the server gave a request up.
        QualityError: an answer that is not one to what was asked.
    """
    warmed = ask(engine, [context.ids] * len(voices), voices)
    asked = [(voice, question) for voice in voices for question in context.questions]
    ends = {} if context.messages else {"stop": ["\n"]}
    replies = ask(
        engine,
        # What an answer begins with is for the model to write, if the prompt asks for it.
        [context.ids + ([] if context.messages else question.ids) for _, question in asked],
        [replace(voice, parameters={**voice.parameters, **ends}) for voice, _ in asked],
        [len(question.answer) + spare for _, question in asked],
    )
    count = len(context.questions)
    found = []
    for place, first in enumerate(warmed):
        part = replies[place * count : (place + 1) * count]
        info = first["meta_info"]
        found.append(
            Scored(
                [
                    _read(one, context, question)
                    for one, question in zip(part, context.questions, strict=True)
                ],
                info["cached_tokens"],
                sum(computed(one["meta_info"]) for one in (first, *part))
                + sum(len(one["output_ids"]) for one in part),
            )
        )
    return found


def _read(answered: Mapping[str, Any], context: Context, question: Question) -> Said:
    text, ids = str(answered["text"]), list(answered["output_ids"])
    reason = (answered["meta_info"].get("finish_reason") or {}).get("type")
    score = METRICS[context.task](text, question.answer_text)
    exact = ids[: len(question.answer)] == question.answer
    return Said(
        question.name,
        None if question.depth is None else round(question.depth, 6),
        len(question.answer),
        right=score == 1.0 if context.messages else exact,
        reply=text,
        score=score,
        cut=reason == "length",
    )
