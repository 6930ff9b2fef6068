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


def rounds(context: str, question: str) -> str:
    match = re.search(r"Prepend (\w+) to the (\d)\w\w \(1 indexed\) (\w+) about (\w+)\.", question)
    assert match
    turns = re.split(r"^User: ", context, flags=re.M)[1:]
    opening = f"Write a {match[3]} about {match[4]}."
    alike_turns = [turn for turn in turns if turn.split("\n")[0] == opening]
    passage = alike_turns[int(match[2]) - 1].split("\n")[1].removeprefix("Assistant: ")
    return f" {match[1]}{passage}"


def parents(context: str, question: str) -> str:
    match = re.search(r"parents of node (\w+)\.", question)
    assert match
    edges = [line.split(" -> ") for line in context.splitlines() if " -> " in line]
    sources = [source for source, target in edges if target == match[1] != source]
    return ", ".join(dict.fromkeys(sources)) + "]"


def search(context: str, question: str) -> str:
    match = re.search(r"from node (\w+)\. .* at depth (\d)\.", question)
    assert match
    lines = [line for line in context.splitlines() if re.fullmatch(r"\w{10} -> \w{10}", line)]
    edges = [line.split(" -> ") for line in lines]
    distance, reached = {match[1]: 0}, [match[1]]
    for depth in range(1, int(match[2]) + 1):
        before, reached = set(reached), []
        for source, target in edges:
            if source in before and distance.get(target, depth) == depth and target not in reached:
                distance[target] = depth
                reached.append(target)
    return ", ".join(reached) + "]"


def notes(context: str, question: str) -> str:
    name = re.fullmatch(r"\n\? (\w+) is", question)
    assert name
    words = re.findall(rf"^# {name[1]} is( \w+)$", context, re.M)
    assert len(words) == 1
    return str(words[0])


SOLVERS: dict[str, Callable[[str, str], str]] = {
    "needles": needle,
    "tracking": tracking,
    "rounds": rounds,
    "parents": parents,
    "search-2": search,
    "search-3": search,
    "notes": notes,
}
