"""Tracking: which variables have a value, along chains of assignments.

After RULER's ``vt`` (NVIDIA/RULER, Apache-2.0): names of 5 capitals, values of 5 digits, 4 hops,
its noise, question and answer prefix. Different here: one chain for each of eight questions, which
distract from each other; the chains begin at stratified depths and each is in order; upstream's
example with names of 3 letters is left out, since the answer is scored and not parsed; and
"assigned" is spelled as it should be.
"""

from __future__ import annotations

import random
import string
from itertools import pairwise, repeat

from sglang_indexcache.evaluate.tasks.context import NOISE, Asked, Draft, Room, shuffled

HOPS = 4
_OPENING = "Memorize and track the chain(s) of variable assignment hidden in the following text."
_QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
_BEGUN = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are:"
)


def tracking(draw: random.Random, room: Room, haystack: str) -> Draft:
    """Chains of assignments in noise."""
    del haystack
    count = HOPS + 1
    variables = _variables(draw, count * room.questions)
    values = draw.sample(range(10_000, 100_000), room.questions)
    chains = [variables[count * n : count * (n + 1)] for n in range(room.questions)]
    written = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
    every = [line for lines in written for line in lines]
    noise = room.fill(repeat(NOISE), beside=[_OPENING, *every])
    # Each statement has a depth; a chain begins in its own part and goes on anywhere behind.
    placed: list[tuple[float, int, int]] = []
    for number in range(room.questions):
        first = (number + draw.random()) / room.questions
        later = sorted(draw.uniform(first, 1.0) for _ in range(HOPS))
        placed += [(depth, number, hop) for hop, depth in enumerate([first, *later])]
    lines: list[str] = []
    evidence: dict[int, list[int]] = {number: [] for number in range(room.questions)}
    used = 0
    for depth, number, hop in sorted(placed):
        until = int(depth * len(noise))
        lines += noise[used:until]
        used = max(used, until)
        evidence[number].append(len(lines))
        lines.append(written[number][hop])
    lines += noise[used:]
    asked = [
        Asked(
            _QUESTION.format(value=values[number]),
            " " + ", ".join(chains[number]),
            tuple(evidence[number]),
            _BEGUN.format(count=count, value=values[number]),
        )
        for number in range(room.questions)
    ]
    return Draft(_OPENING, lines, shuffled(draw, asked))


def _variables(draw: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(found)


def _statements(chain: list[str], value: int) -> list[str]:
    first = f"VAR {chain[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}" for before, name in pairwise(chain))]
