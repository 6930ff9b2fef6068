"""Notes whose answers lie anywhere in the context, so that selection matters.

Every name and value is one token, a word that the tokenizer knows with its leading space. Names
and values are drawn anew for each document: nothing but the context says which value is right. They
are hidden in text that every machine with Python has: the standard library's sources.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from benchmarks.random_model import machine_text
from sglang_indexcache.errors import DataError

HELD_OUT_EVERY = 10
"""Each tenth file of the machine's text, in name order, is kept for validation."""

Tokens = NDArray[np.int32]

MIN_WORDS = 64
ANSWERS = 4
"""Questions at the end of a document of filler text."""


@dataclass
class TaskDocument:
    """A token sequence and what may be learned from it.

    Attributes:
        ids: the tokens.
        learn: whether token i can be predicted from the context before it; random names cannot.
        answer: whether token i is the answer of a retrieval question.
    """

    ids: list[int] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    answer: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: list[int], learn: bool = False, answer: bool = False) -> None:
        """Append tokens that share their flags."""
        self.ids += ids
        self.learn += [learn] * len(ids)
        self.answer += [answer] * len(ids)

    def cut(self, length: int) -> TaskDocument:
        """Return the first ``length`` tokens."""
        return TaskDocument(self.ids[:length], self.learn[:length], self.answer[:length])


class TaskWords:
    """The single-token vocabulary of the tasks.

    Attributes:
        names: tokens that are asked for.
        values: tokens that are answered; disjoint from the names.

    Raises:
        DataError: if the tokenizer has fewer than :data:`MIN_WORDS` such words.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        pieces = tokenizer.get_vocab()
        # A byte-level BPE writes the leading space as U+0120.
        words = sorted(i for piece, i in pieces.items() if re.fullmatch("\u0120[A-Za-z]+", piece))
        if len(words) < MIN_WORDS:
            raise DataError(
                f"the tokenizer has {len(words)} one-token words and retrieval needs {MIN_WORDS}. "
                "Use a larger vocabulary."
            )
        self.names, self.values = words[0::2], words[1::2]
        pieces_of = [",", "\n?", "\n#", " is", "\nlet", " =", "\n"]
        encoded = tokenizer(pieces_of, add_special_tokens=False)["input_ids"]
        self.comma, self.ask, self.note, self.be, self.let, self.equals, self.end = encoded

    def draw(self, count: int, draw: random.Random) -> list[tuple[int, int]]:
        """Draw ``count`` distinct names, each with a random value."""
        return [(name, draw.choice(self.values)) for name in draw.sample(self.names, count)]


def needles(
    words: TaskWords, text: Tokens, length: int, draw: random.Random, hops: int = 1
) -> TaskDocument:
    """Hide notes in source text; at the end some of them are asked for.

    Args:
        hops: above 1 a value is assigned along a chain of so many names (variable tracking).
    """
    chains = [words.draw(hops, draw) for _ in range(facts_in(length))]
    names = draw.sample(words.names, hops * len(chains))
    facts: list[list[tuple[list[int], bool]]] = []
    questions: list[tuple[int, int]] = []
    for number, chain in enumerate(chains):
        links = names[number * hops : (number + 1) * hops]
        value = chain[0][1]
        lines = [(_fact(words, hops, links[0], value), False)]
        for previous, name in pairwise(links):
            lines.append((_fact(words, hops, name, previous), False))
        facts.append(lines)
        questions.append((links[-1], value))
    drawn = [draw.choice(questions) for _ in range(ANSWERS)]
    tail = TaskDocument()
    for name, value in drawn:
        tail.add([*words.ask, name, *words.be])
        tail.add([value], learn=True, answer=True)
    return _scattered(facts, tail, text, length, draw)


def facts_in(length: int) -> int:
    """Return how many facts a document of filler text with so many tokens hides."""
    return max(1, min(12, length // 40))


def _fact(words: TaskWords, hops: int, name: int, value: int) -> list[int]:
    if hops == 1:
        return [*words.note, name, *words.be, value, *words.end]
    return [*words.let, name, *words.equals, value, *words.end]


def _scattered(
    facts: list[list[tuple[list[int], bool]]],
    tail: TaskDocument,
    text: Tokens,
    length: int,
    draw: random.Random,
) -> TaskDocument:
    """Scatter facts over a text, each chain in its order, then ask the questions."""
    spent = len(tail) + sum(len(ids) for chain in facts for ids, _ in chain)
    filler = window(text, max(length - spent, 1), draw)
    places = sorted(
        (place, number, order)
        for number, chain in enumerate(facts)
        for order, place in enumerate(sorted(draw.randrange(len(filler)) for _ in chain))
    )
    document, at = TaskDocument(), 0
    for place, number, order in places:
        document.add(filler[at:place], learn=True)
        document.add(facts[number][order][0])
        at = place
    document.add(filler[at:], learn=True)
    document.add(tail.ids)
    document.learn[-len(tail) :], document.answer[-len(tail) :] = tail.learn, tail.answer
    return document.cut(length)


@dataclass(frozen=True)
class MachineText:
    """Tokenised source files.

    Attributes:
        train: the training files' tokens, concatenated, an end token after each.
        held_out: likewise, files that training never sees.
    """

    train: Tokens
    held_out: Tokens

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase, limit: int) -> MachineText:
        """Tokenise the standard library's top-level modules.

        Args:
            tokenizer: with an end-of-sequence token.
            limit: characters, at most.

        Raises:
            DataError: if too little text was found to hold any out.
        """
        files = list(machine_text(limit))
        if len(files) < HELD_OUT_EVERY:
            raise DataError(
                f"found {len(files)} modules of the standard library; it takes at least "
                f"{HELD_OUT_EVERY} to hold some out. Give a larger limit."
            )
        ids = [[*row, tokenizer.eos_token_id] for row in tokenizer(files)["input_ids"]]
        held_out = ids[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train = [row for i, row in enumerate(ids) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        return cls(_join(train), _join(held_out))

    def part(self, held_out: bool) -> Tokens:
        """Return the training or the held-out tokens."""
        return self.held_out if held_out else self.train


def window(tokens: Tokens, length: int, draw: random.Random) -> list[int]:
    """Return ``length`` consecutive tokens from a random place."""
    start = draw.randrange(len(tokens) - length)
    ids: list[int] = tokens[start : start + length].tolist()
    return ids


def _join(rows: list[list[int]]) -> Tokens:
    return np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
