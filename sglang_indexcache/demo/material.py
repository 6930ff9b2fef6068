"""What the demo asks: facts hidden in source code, and long prompts of it to time."""

from __future__ import annotations

import builtins
import keyword
import random
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoTokenizer

from sglang_indexcache.data.retrieval import MachineText, TaskWords, needles

QUESTION_TOKENS = 256
"""Of each question's document: four times what a layer selects."""
TEXT_CHARACTERS = 1_000_000
PYTHONS = {*keyword.kwlist, *dir(builtins), "self", "args", "kwargs"}
"""No word of a note, because the text around it is Python."""
SHORTEST_WORD = 4
"""Letters, so that a person sees a word; the model knows shorter ones too."""


@dataclass(frozen=True)
class DemoQuestion:
    """A document with facts hidden in source code, that ends by asking for one of them.

    Attributes:
        prompt: token ids.
        fact: the line that holds the answer.
        ending: the prompt's last line.
        answer: what must follow, one token.
        place: the fact's line with its neighbours, two above and two below.
        behind: tokens from the end of the fact's line to the end of the prompt.
    """

    prompt: list[int]
    fact: str
    ending: str
    answer: str
    place: tuple[str, ...]
    behind: int


class Material:
    """The Python standard library's source code, in the tokens of a model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._text = MachineText.read(self._tokenizer, TEXT_CHARACTERS)
        self._words = TaskWords(self._tokenizer)
        self._words.names = self._readable(self._words.names)
        self._words.values = self._readable(self._words.values)

    def questions(self, count: int, length: int = QUESTION_TOKENS) -> list[DemoQuestion]:
        """``count`` different ones, of files that training never saw; the same on every call."""
        return [self._question(random.Random(f"demo/{n}"), length) for n in range(count)]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of ``length`` tokens, none of which begins like another."""
        text = self._text.train
        step = (len(text) - length) // count
        return [text[n * step : n * step + length].tolist() for n in range(count)]

    def _question(self, draw: random.Random, length: int) -> DemoQuestion:
        document = needles(self._words, self._text.held_out, length, draw)
        asked = document.answer.index(True)
        prompt, answer = document.ids[:asked], self._tokenizer.decode(document.ids[asked])
        lines = self._tokenizer.decode(prompt).split("\n")
        fact = lines[-1].replace("?", "#", 1) + answer
        line = lines.index(fact)
        place = tuple(lines[max(0, line - 2) : line + 3])
        rest = "\n".join(lines[line + 1 :])
        behind = len(self._tokenizer(rest, add_special_tokens=False)["input_ids"])
        return DemoQuestion(prompt, fact, lines[-1], answer, place, behind)

    def _readable(self, ids: list[int]) -> list[int]:
        words = {i: self._tokenizer.decode([i]).strip() for i in ids}
        return [
            i
            for i, word in words.items()
            if len(word) >= SHORTEST_WORD and word.islower() and word not in PYTHONS
        ]
