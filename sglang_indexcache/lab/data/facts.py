"""Short facts to hide in a text and ask for at its end: keys with values, and rules by example.

They test what passages of running text do not: a value that stands in only one place, and a rule
that no single place states. Evaluation asks `notes` in this form, and a search mixes both kinds
into its calibration data.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_indexcache.lab.data.words import ADJECTIVES, NOUNS

NOTES, EXAMPLES, ASKED = 6, 4, 2
"""Number of keys with values, and numbers of a rule's examples and questions."""


@dataclass(frozen=True)
class Fact:
    """A hidden line, and the question about it at the end of the text.

    Attributes:
        shown: the hidden line; empty if only the rule gives the answer.
        cue: the text before the answer; empty for an example that is not asked for.
        answer: the exact text after the cue.
    """

    shown: str
    cue: str = ""
    answer: str = ""


def note(name: str, value: str) -> Fact:
    """Return the fact that a key has a value."""
    return Fact(f"# {name} is {value}", f"? {name} is", f" {value}")


def notes_and_rule(draw: random.Random) -> list[Fact]:
    """Draw six keys with words and numbers as values, and a rule with four examples.

    The rule turns ``swift river`` into ``river, swift``; two new pairs are asked for.
    """
    names = draw.sample(NOUNS, NOTES + NOTES // 2)
    words, numbers = names[NOTES:], draw.sample(range(1000, 10_000), NOTES - NOTES // 2)
    values: Sequence[str] = [*words, *map(str, numbers)]
    facts = [note(name, value) for name, value in zip(names, values, strict=False)]
    qualities = draw.sample(ADJECTIVES, EXAMPLES + ASKED)
    things = draw.sample(NOUNS, EXAMPLES + ASKED)
    pairs = [(f"{a} {b} ->", f" {b}, {a}") for a, b in zip(qualities, things, strict=True)]
    facts += [Fact(before + after) for before, after in pairs[:EXAMPLES]]
    return facts + [Fact("", before, after) for before, after in pairs[EXAMPLES:]]
