"""Needles, tracking and notes: find a value among look-alikes, along assignments, or in a text.

The tasks follow RULER (NVIDIA/RULER, Apache-2.0; Hsieh et al. 2024, arXiv:2404.06654), with its
sentences, questions and answer prefixes. `needles` is its ``niah_multikey_3``: uuids for uuids in a
haystack of needles. `tracking` is its ``vt``: names of 5 capitals, values of 5 digits, 4 hops, its
noise. There are differences. Eight needles at stratified depths are asked for after one context.
Likewise eight chains begin at stratified depths and distract from each other; each is in order.
Upstream's example with names of 3 letters is left out, because the answer is scored and not parsed;
and the spelling of "assigned" is corrected.

`notes` is for models that are too small for the published forms: needles as this project's small
checkpoint learned to find them (``benchmarks/training``): ``# name is value`` hidden in text,
``? name is`` at the end. Names and values are words that the tokenizer has in one piece,
alternately used as names, as in training, so an answer is one token.
"""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Iterator
from itertools import cycle, islice, pairwise, repeat

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.data.words import haystack, note
from sglang_indexcache.lab.evaluate.tasks.context import NOISE, Asked, Draft, Room, shuffled, strata

_UUID_OPENING = (
    "Some special magic uuids are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the uuids afterwards."
)
_NEEDLE = "One of the special magic uuids for {key} is: {value}."
_UUID_QUESTION = "What is the special magic uuid for {key} mentioned in the provided text?"
_UUID_BEGUN = " The special magic uuid for {key} mentioned in the provided text is"
HOPS = 4
_CHAIN_OPENING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text."
)
_CHAIN_QUESTION = (
    "Question: Find all variables that are assigned the value {value} in the text above."
)
_CHAIN_BEGUN = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} "
    "variables are assigned the value {value}, they are:"
)
SHORTEST = 3
"""Smallest number of letters in a name or value: shorter words occur everywhere in running text."""
_NOTES_OPENING = "# notes"


def needles(draw: random.Random, room: Room) -> Draft:
    """Draft a haystack that consists of needles."""
    pairs: list[tuple[str, str]] = []

    def lines() -> Iterator[str]:
        while True:
            pairs.append((_uuid(draw), _uuid(draw)))
            yield _NEEDLE.format(key=pairs[-1][0], value=pairs[-1][1])

    haystack_lines = room.fill(lines(), beside=[_UUID_OPENING], least=room.questions)
    questions = []
    for place in strata(draw, room.questions, len(haystack_lines)):
        key, value = pairs[place]
        question, prefix = _UUID_QUESTION.format(key=key), _UUID_BEGUN.format(key=key)
        questions.append(Asked(question, f" {value}", (place,), prefix))
    return Draft(_UUID_OPENING, haystack_lines, shuffled(draw, questions))


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def tracking(draw: random.Random, room: Room) -> Draft:
    """Draft chains of assignments in noise."""
    count = HOPS + 1
    variables = _variables(draw, count * room.questions)
    values = draw.sample(range(10_000, 100_000), room.questions)
    chains = [variables[count * n : count * (n + 1)] for n in range(room.questions)]
    statements = [_statements(chain, value) for chain, value in zip(chains, values, strict=True)]
    all_statements = [line for lines in statements for line in lines]
    noise = room.fill(repeat(NOISE), beside=[_CHAIN_OPENING, *all_statements])
    # Each statement has a depth. A chain begins in its own part and continues anywhere after that.
    places: list[tuple[float, int, int]] = []
    for number in range(room.questions):
        first = (number + draw.random()) / room.questions
        later = sorted(draw.uniform(first, 1.0) for _ in range(HOPS))
        places += [(depth, number, hop) for hop, depth in enumerate([first, *later])]
    lines: list[str] = []
    evidence: dict[int, list[int]] = {number: [] for number in range(room.questions)}
    used = 0
    for depth, number, hop in sorted(places):
        until = int(depth * len(noise))
        lines += noise[used:until]
        used = max(used, until)
        evidence[number].append(len(lines))
        lines.append(statements[number][hop])
    lines += noise[used:]
    questions = [
        Asked(
            _CHAIN_QUESTION.format(value=values[number]),
            " " + ", ".join(chains[number]),
            tuple(evidence[number]),
            _CHAIN_BEGUN.format(count=count, value=values[number]),
        )
        for number in range(room.questions)
    ]
    return Draft(_CHAIN_OPENING, lines, shuffled(draw, questions))


def _variables(draw: random.Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(draw.choices(string.ascii_uppercase, k=5))] = None
    return list(names)


def _statements(chain: list[str], value: int) -> list[str]:
    first = f"VAR {chain[0]} = {value}"
    return [first, *(f"VAR {name} = VAR {before}" for before, name in pairwise(chain))]


def notes(draw: random.Random, room: Room) -> Draft:
    """Draft notes between the lines of a text, which is repeated if it is too short."""
    text = haystack().splitlines()
    start = draw.randrange(len(text))
    facts = [note(*pair) for pair in _pairs(draw, room)]
    hidden = [fact.shown for fact in facts]
    lines = room.fill(islice(cycle(text), start, None), beside=[_NOTES_OPENING, *hidden])
    questions = []
    for number, place in enumerate(strata(draw, room.questions, len(lines) + 1)):
        lines.insert(place + number, hidden[number])
        questions.append(Asked(facts[number].cue, facts[number].answer, (place + number,)))
    return Draft(_NOTES_OPENING, lines, shuffled(draw, questions), chat=False)


def _pairs(draw: random.Random, room: Room) -> list[tuple[str, str]]:
    """Draw a name and a value for each question, with no value contained in a name."""
    words = room.words()
    names, values = (
        [word for word in half if len(word) >= SHORTEST] for half in (words[0::2], words[1::2])
    )
    chosen = _sample(draw, names, room.questions)
    usable = [word for word in values if not any(word in name for name in chosen)]
    return list(zip(chosen, _sample(draw, usable, room.questions), strict=True))


def _sample(draw: random.Random, words: list[str], count: int) -> list[str]:
    if len(words) < count:
        raise QualityError(
            f"notes with {count} questions needs as many one-token words for names and values, and "
            f"the tokenizer has {len(words)}"
        )
    return draw.sample(words, count)
