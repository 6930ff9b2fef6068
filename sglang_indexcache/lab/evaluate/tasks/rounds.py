"""Rounds: repeat the i-th of several answers to the same request, from a long conversation.

After MRCR (openai/mrcr, MIT; Vodrahalli et al. 2024, arXiv:2409.12640): eight turns with the same
request, the most that it has, its last turn to the letter, ten characters to put in front.
Different here: the answers are not written by a model, which needs one, but cut from the haystack,
none twice, so the request does not say what the answer contains, and only the order of the turns
does.
"""

from __future__ import annotations

import random
import string
from collections import Counter

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.tasks.context import Asked, Draft, Room, shuffled, strata
from sglang_indexcache.lab.evaluate.tasks.words import NOUNS, windows

_FORMATS = "poem story letter song speech riddle review essay toast fable"
FORMATS = tuple(_FORMATS.split())
LOOK_ALIKES = 8
_OPENING = "Below is a conversation between a user and an assistant."
_TURN = "User: Write a {form} about {topic}s.\nAssistant: {passage}"
_QUESTION = (
    "User: Prepend {mark} to the {place} (1 indexed) {form} about {topic}s. Do not include any "
    "other text in your response."
)
_ORDINALS = ("1st", "2nd", "3rd", "4th", "5th", "6th", "7th", "8th", "9th")


def rounds(draw: random.Random, room: Room) -> Draft:
    """Draft a conversation full of look-alike requests, and ask for what some were answered.

    An answer is the turn's passage to the letter, behind ten characters that the question gives.

    Raises:
        QualityError: the room takes more turns than there are requests.
    """
    words = min(64, max(8, room.tokens // 96))
    longest = _TURN.format(form="review", topic="squirrel", passage="{}")
    turns = room.fill(
        (longest.format(passage) for passage in windows(draw, words)),
        beside=[_OPENING],
        least=room.questions,
    )
    kinds = _kinds(draw, len(turns))
    passages = [turn.partition("Assistant: ")[2] for turn in turns]
    places = _places(kinds)
    questions = []
    for turn in strata(draw, room.questions, len(turns)):
        mark = "".join(draw.choices(string.ascii_letters + string.digits, k=10))
        form, topic = kinds[turn]
        text = _QUESTION.format(mark=mark, place=_ORDINALS[places[turn]], form=form, topic=topic)
        questions.append(Asked(text, f" {mark}{passages[turn]}", (turn,), cue="\nAssistant:"))
    lines = [
        _TURN.format(form=form, topic=topic, passage=passage)
        for (form, topic), passage in zip(kinds, passages, strict=True)
    ]
    alike = {kinds[turn] for question in questions for turn in question.evidence}
    fixed = frozenset(turn for turn, kind in enumerate(kinds) if kind in alike)
    return Draft(_OPENING, lines, shuffled(draw, questions), fixed)


def _kinds(draw: random.Random, turns: int) -> list[tuple[str, str]]:
    """Draw each turn's request: every one comes eight times, the last two to nine times."""
    remaining = [(form, topic) for form in FORMATS for topic in NOUNS]
    draw.shuffle(remaining)
    kinds: list[tuple[str, str]] = []
    while missing := turns - len(kinds):
        if not remaining:
            raise QualityError(
                f"rounds has {len(FORMATS) * len(NOUNS)} different requests, too few for "
                f"{turns} turns; ask for shorter contexts"
            )
        size = missing if missing == LOOK_ALIKES + 1 else min(LOOK_ALIKES, missing)
        kinds += [remaining.pop()] * size
    draw.shuffle(kinds)
    return kinds


def _places(kinds: list[tuple[str, str]]) -> list[int]:
    """Return each turn's place among those with the same request, from 0."""
    counts: Counter[tuple[str, str]] = Counter()
    places = []
    for kind in kinds:
        places.append(counts[kind])
        counts[kind] += 1
    return places
