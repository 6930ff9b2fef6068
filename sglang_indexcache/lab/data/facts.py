"""Short facts that a text hides and is asked for again: keys with their values, rules by example.

They ask for what passages of running text do not: a value that one place alone tells, and a rule
that no single place does. Evaluation asks `notes` in this form, and a search mixes both kinds into
what it calibrates on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_indexcache.lab.data.words import ADJECTIVES, NOUNS

NOTES, EXAMPLES, ASKED = 6, 4, 2
"""Keys with values, and of a rule the examples and the words to be asked for."""


@dataclass(frozen=True)
class Fact:
    """A line that is hidden, and what is asked for at the end of the text.

    Attributes:
        shown: the line; empty for what only the rule tells.
        cue: what stands before the answer; empty for an example that is not asked for.
        answer: what follows the cue, to the letter.
    """

    shown: str
    cue: str = ""
    answer: str = ""


def note(name: str, value: str) -> Fact:
    """Return a key with its value."""
    return Fact(f"# {name} is {value}", f"? {name} is", f" {value}")


def notes_and_rule(draw: random.Random) -> list[Fact]:
    """Draw six keys with words and numbers for values, and a rule by four examples.

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
