"""The tasks, solved by reading their text: every answer must follow from the context."""

from __future__ import annotations

import random
import re
import statistics

import pytest

from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.tasks import TASKS, chance
from tests.lab.heal.tokenizers import tokenizer


@pytest.fixture(scope="module")
def words() -> TaskWords:
    return TaskWords(tokenizer())


@pytest.fixture(scope="module")
def text() -> MachineText:
    return MachineText.read(tokenizer(), 500_000)


def solve(task: str, before: str) -> str:
    """Return the answer to the last question in ``before``, from the facts in it alone."""
    if task == "recall":
        facts, question = before.split("\n?")
        table = dict(pair.split(" ")[1:] for pair in facts.split(",") if pair)
        return table[question.split(" ")[-1]]
    name = re.findall(r"\n\? ([A-Za-z]+) is", before)[-1]
    if task == "needles":
        return re.findall(rf"\n# {name} is ([A-Za-z]+)\n", before)[-1]
    return follow(before, name)


def follow(before: str, name: str) -> str:
    while values := re.findall(rf"\nlet {name} = ([A-Za-z]+)\n", before):
        name = values[-1]
    return name


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [64, 200])
def test_every_answer_follows_from_the_context(
    task: str, length: int, words: TaskWords, text: MachineText, seed: int
) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        document = TASKS[task](words, text.train, length, draw)
        assert len(document) == len(document.learn) == len(document.answer) <= length
        assert any(document.answer)
        for at, is_answer in enumerate(document.answer):
            if is_answer:
                expected = tokenizer().decode([document.ids[at]]).strip()
                before = decode_apart(document.ids[:at])
                assert solve(task, before) == expected


def decode_apart(ids: list[int]) -> str:
    return "".join(tokenizer().decode([i]) for i in ids)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [128, 256, 512])
def test_chance_is_what_guessing_a_value_of_the_document_gives(
    task: str, length: int, words: TaskWords, text: MachineText, seed: int
) -> None:
    print(f"seed {seed}")
    draw, rates = random.Random(seed), []
    for _ in range(200):
        document = TASKS[task](words, text.train, length, draw)
        decoded = decode_apart(document.ids)
        if task == "recall":
            rates.append(1 / decoded.split("\n?")[0].count(","))
        else:
            mark = r"\n# [A-Za-z]+ is [A-Za-z]+\n" if task == "needles" else r"\nlet "
            facts = len(re.findall(mark, decoded)) // (1 if task == "needles" else 2)
            rates.append(1 / facts)
    assert statistics.mean(rates) == pytest.approx(chance(task, length, len(words.names)), rel=0.1)
