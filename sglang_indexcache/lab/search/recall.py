"""Mixing of recall into a text, whose end asks for parts of it, so that a loss sees copying.

Most tokens follow from the few before them. Whether a pattern keeps the few heads that look up
something far back shows only if a text asks for it: for repeated passages, and for short keys and
rules, which other heads look up (benchmarks/results/smollm2/real-model.md).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.lab.data.words import notes_and_rule

LENGTH, CUE = 64, 16
"""Number of tokens in a passage, and number of its first tokens that identify it; the others
count."""
MOST = 8
SHORTEST = 8
"""Smallest number of tokens in a passage; a text that is too short for one gets none."""
SHARE = 4
"""Facts take at most one token in this many, so a short text hides fewer facts."""
TEXT, PASSAGES, KEYS = 1, 2, 3
KINDS = ("", "text", "passages", "keys")
"""Names of the kinds of tokens, by number; 0 does not count."""

Kinds = NDArray[np.uint8]
Tokens = tuple[int, ...]
HiddenFact = tuple[Tokens, Tokens, Tokens]
"""Tokens of a fact's line, of its cue and of its answer; empty if it has none."""


@dataclass(frozen=True)
class Passages:
    """Places of the passages that replace the end of a text.

    Attributes:
        kept: number of the text's tokens that stay unchanged.
        starts: start of each passage among them, in the order of repetition.
        length, cue: number of tokens in a passage, and number of its first tokens that do not
            count.
    """

    kept: int
    starts: tuple[int, ...]
    length: int
    cue: int

    @classmethod
    def of(cls, length: int, seed: int | str) -> Passages:
        """Choose passages for a text of ``length`` tokens, at most a quarter of it, from all over.

        From 256 tokens on, a passage has 64 tokens, and there is one for every 256 tokens, at most
        eight.
        """
        size = min(LENGTH, length // 4)
        if size < SHORTEST:
            return cls(length, (), 0, 0)
        count = min(MOST, length // (4 * size))
        prefix = length - count * size
        order = random.Random(seed).sample(range(count), count)
        starts = [(prefix - size) * (2 * place + 1) // (2 * count) for place in order]
        return cls(prefix, tuple(starts), size, size * CUE // LENGTH)

    @property
    def counted(self) -> np.ndarray:
        """Places of the repeated tokens that count, ``[n]`` int64."""
        firsts = self.kept + self.length * np.arange(len(self.starts))
        return (firsts[:, None] + np.arange(self.cue, self.length)).reshape(-1)


def hidden_facts(seed: int | str, encode: Callable[[str], Sequence[int]]) -> list[HiddenFact]:
    """Draw keys with values, and a rule, as tokens."""

    def line(text: str, around: str) -> Tokens:
        return tuple(encode(around.format(text))) if text else ()

    return [
        (line(fact.shown, "\n{}\n"), line(fact.cue, "\n{}"), line(fact.answer, "{}"))
        for fact in notes_and_rule(random.Random(seed))
    ]


def with_recall(ids: Tokens, facts: Sequence[HiddenFact]) -> tuple[Tokens, Kinds]:
    """Hide facts in a text, and replace its end by questions for them and repeated passages.

    The text keeps its length. The facts' lines are between pieces of the text; after it come the
    passages, and then the questions for facts, in another order.

    Returns:
        The tokens and their kinds: :data:`TEXT` in the later half of the kept text,
        :data:`PASSAGES` and :data:`KEYS` in the repeated parts except the cues.
    """
    chosen = _fitting(facts, len(ids) // SHARE)
    lines = [line for line, _, _ in chosen if line]
    asked = [(cue, answer) for _, cue, answer in chosen if answer]
    random.Random(str(ids)).shuffle(asked)
    room = len(ids) - sum(map(len, chain.from_iterable(chosen)))
    passages = Passages.of(room, str(ids))
    pieces = np.array_split(np.array(ids[: passages.kept], dtype=np.int64), len(lines) + 1)
    mixed: list[int] = []
    for piece, line in zip(pieces, [*lines, ()], strict=True):
        mixed += [*piece.tolist(), *line]
    kinds = np.zeros(len(ids), dtype=np.uint8)
    end = len(mixed)
    kinds[end // 2 : end] = TEXT
    for start in passages.starts:
        mixed += ids[start : start + passages.length]
    kinds[passages.counted + end - passages.kept] = PASSAGES
    for cue, answer in asked:
        mixed += [*cue, *answer]
        kinds[len(mixed) - len(answer) : len(mixed)] = KEYS
    return tuple(mixed), kinds


def _fitting(facts: Sequence[HiddenFact], room: int) -> list[HiddenFact]:
    """Return as many of the first facts as fit into ``room`` tokens."""
    chosen: list[HiddenFact] = []
    for fact in facts:
        room -= sum(map(len, fact))
        if room < 0:
            break
        chosen.append(fact)
    return chosen
