"""Answers found by reading the text, without a line of the generators.

Each solver gets the context as text and a question, and returns the answer to the letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable


def needle(context: str, question: str) -> str:
    key = re.search(r"What is the special magic (?:uuid|number) for (\S+) mentioned", question)
    assert key
    values = re.findall(rf"One of the special magic \w+ for {key[1]} is: (\S+)\.$", context, re.M)
    assert len(values) == 1
    return f" {values[0]}"


def tracking(context: str, question: str) -> str:
    value = re.search(r"assigned the value (\d+) in", question)
    assert value
    names: list[str] = []
    for name, source in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", context, re.M):
        if source == value[1] or source in names:
            names.append(name)
    return " " + ", ".join(names)


def notes(context: str, question: str) -> str:
    name = re.fullmatch(r"\n\? (\w+) is", question)
    assert name
    words = re.findall(rf"^# {name[1]} is( \w+)$", context, re.M)
    assert len(words) == 1
    return str(words[0])


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "needles": needle,
    "tracking": tracking,
    "notes": notes,
}
