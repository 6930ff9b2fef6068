"""Policy that chooses a prompt's pattern by its length: ``full < 32K <= 1/2 < 128K <= 1/4``.

Read from left to right: prompts with fewer than 32,000 tokens are served in full, prompts from
there to below 128,000 under the pattern 1/2, longer prompts under 1/4. In this form every length
has exactly one pattern. A pattern alone is a policy with one step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from sglang_indexcache.errors import SettingsError, quoted
from sglang_indexcache.library.lengths import format_length, parse_length
from sglang_indexcache.pattern import Pattern

_LONGEST = 10_000
"""Longest text in characters: it may come over HTTP, and the scheduler parses it between
forwards."""

_FORM = "PATTERN < LENGTH <= PATTERN, for example: full < 32K <= 1/2 < 128K <= 1/4"


@dataclass(frozen=True)
class Policy:
    """Patterns by prompt length."""

    steps: tuple[tuple[int, Pattern], ...]
    """Pairs of a prompt length in tokens and the pattern from there on, ascending, the first at
    0."""

    @classmethod
    def of(cls, pattern: Pattern) -> Policy:
        """Make a policy with ``pattern`` for every length."""
        return cls(((0, pattern),))

    @classmethod
    def parse(cls, text: str, resolve: Callable[[str], Pattern]) -> Policy:
        """Parse a user's text; ``resolve`` returns the pattern for each name in it.

        Raises:
            SettingsError: the text has another form, or its lengths do not increase.
        """
        if len(text) > _LONGEST:
            raise SettingsError(f"{quoted(text)} is no choice by prompt length. Write {_FORM}.")
        words = [word.strip() for word in re.split("(<=?)", text)]
        if len(words) == 1:
            return cls.of(resolve(text))
        signs = [words[i : i + 3 : 2] for i in range(1, len(words), 4)]
        if len(words) % 4 != 1 or any(pair != ["<", "<="] for pair in signs):
            raise SettingsError(f"{quoted(text)} is no choice by prompt length. Write {_FORM}.")
        if not all(words):
            raise SettingsError(
                f"{quoted(text)} lacks a pattern before or behind a length. Write {_FORM}."
            )
        starts = [0, *map(parse_length, words[2::4])]
        if any(start >= end for start, end in pairwise(starts)):
            raise SettingsError(f"the lengths in {quoted(text)} must grow from left to right")
        return cls(tuple(zip(starts, map(resolve, words[::4]), strict=True)))

    def pattern_for(self, length: int) -> Pattern:
        """Return the pattern of a prompt of ``length`` tokens."""
        return self.steps[bisect_right(self.steps, length, key=lambda step: step[0]) - 1][1]

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The pattern of each step; the first is that of the shortest prompts."""
        return tuple(pattern for _, pattern in self.steps)

    def __str__(self) -> str:
        first, *longer = self.steps
        ranges = [f" < {format_length(start)} <= {pattern}" for start, pattern in longer]
        return "".join([str(first[1]), *ranges])
