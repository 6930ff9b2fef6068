"""The retrieval tasks that the small checkpoint learns, and what guessing gives in each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from benchmarks.training.retrieval import (
    TaskDocument,
    TaskWords,
    Tokens,
    facts_in,
    needles,
)

TEXT_CHARACTERS = 4_000_000
"""How much of that text the reports read."""

RECALL_SHARE = (0.4, 0.75)
"""How much of a recall document its list may fill."""

TOKENS_A_PAIR = 3
"""Name, value and comma in that list."""


def recall(words: TaskWords, text: Tokens, length: int, draw: random.Random) -> TaskDocument:
    """Ask for associative recall: a list of name-value pairs, then names without their values."""
    del text
    room = length - len(words.ask)
    share = draw.uniform(*RECALL_SHARE)
    pairs = words.draw(max(1, min(int(share * room / TOKENS_A_PAIR), len(words.names))), draw)
    document = TaskDocument()
    for name, value in pairs:
        document.add([name, value, *words.comma])
    document.add(words.ask)
    while len(document) + 2 <= length:
        name, value = draw.choice(pairs)
        document.add([name])
        document.add([value], learn=True, answer=True)
        document.add(words.comma)
    return document.cut(length)


Task = Callable[[TaskWords, Tokens, int, random.Random], TaskDocument]
TASKS: dict[str, Task] = {
    "recall": recall,
    "needles": needles,
    "tracking": partial(needles, hops=2),
}


def chance(task: str, length: int, names: int | None = None) -> float:
    """Return the accuracy of answering with any of the document's values: the least of meaning.

    Args:
        task: of :data:`TASKS`.
        length: tokens of a document.
        names: that the vocabulary has; a recall list holds no more pairs. None for enough.
    """
    if task != "recall":
        return 1 / facts_in(length)
    low, high = RECALL_SHARE  # the mean of 1/pairs over the shares that are drawn
    full = high if names is None else min(max(names * TOKENS_A_PAIR / length, low), high)
    total = math.log(full / low) * TOKENS_A_PAIR / length
    return (total + (high - full) / (names or 1)) / (high - low)
