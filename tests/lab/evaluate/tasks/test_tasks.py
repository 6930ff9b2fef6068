"""Every task: exact length, the same for a seed, solvable, and no way round reading it."""

from __future__ import annotations

import hashlib
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.data.words import ADJECTIVES, NOUNS, haystack
from sglang_indexcache.lab.evaluate.tasks import TASKS
from sglang_indexcache.lab.evaluate.tasks.context import (
    Asked,
    Context,
    Draft,
    Room,
    around,
    has_template,
    make_context,
    strata,
)
from tests.fixtures.models import make_tokenizer
from tests.lab.evaluate.fake_server import Words
from tests.lab.evaluate.tasks.solvers import SOLVERS

TINY = Path(__file__).parents[4] / "sglang_indexcache" / "lab" / "demo" / "tiny-dsa"
LENGTHS = (1024, 8192, 131072)


@cache
def tokenizer(name: str) -> Any:
    if name == "tiny-dsa":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(TINY)
    return make_tokenizer(4096) if name == "trained" else Words()


def made_of(task: str, tokenizer: Any, length: int, seed: int) -> Context:
    return make_context(task, TASKS[task], tokenizer, length, seed)


@cache
def context(task: str, name: str, length: int, seed: int) -> Context:
    return made_of(task, tokenizer(name), length, seed)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["tiny-dsa", "trained"])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact_and_answers_are_found(task: str, name: str, length: int) -> None:
    drawn_context = context(task, name, length, 11)
    assert len(drawn_context.questions) == 8
    assert (
        max(len(drawn_context.ids) + len(q.ids) + len(q.answer) for q in drawn_context.questions)
        == length
    )
    text = tokenizer(name).decode(drawn_context.ids)
    for question in drawn_context.questions:
        question_text = tokenizer(name).decode(question.ids)
        assert SOLVERS[task](text, question_text) == question.answer_text
        answer_text = tokenizer(name).decode(question.answer)
        if has_template(tokenizer(name)) and task != "notes":
            before, behind = question_text.split("<|assistant|>")
            assert question.text.startswith(before.removeprefix("\n"))
            assert f"{before} {behind}".split() == question.text.split()
            assert answer_text == question.answer_text.lstrip(None if not behind else "")
            assert text.startswith("<|user|> ")
        else:
            assert question_text == f"\n{question.text}"
            assert answer_text == question.answer_text


@pytest.mark.parametrize("task", TASKS)
def test_no_question_answers_another(task: str) -> None:
    for seed in range(5):
        questions = context(task, "words", 4096, seed).questions
        assert len({question.text for question in questions}) == len(questions)
        answers = [question.answer_text for question in questions]
        assert len(set(answers)) == len(answers)
        for question in questions:
            assert not any(answer.strip() in question.text for answer in answers)


@pytest.mark.parametrize("task", TASKS)
def test_depths_are_spread_and_not_in_the_order_of_asking(task: str) -> None:
    order, depths, sorted_depths = [], [], []
    for seed in range(40):
        question_depths = [
            question.depth for question in context(task, "words", 6000, seed).questions
        ]
        assert all(0 <= depth < 1 for depth in question_depths)
        order += range(8)
        depths += question_depths
        sorted_depths.append(sorted(question_depths))
    # One in each eighth of the lines; lines differ in length, so on average over contexts.
    for eighth, eighth_depths in enumerate(zip(*sorted_depths, strict=True)):
        assert sum(eighth_depths) / len(eighth_depths) == pytest.approx(
            (eighth + 0.5) / 8, abs=0.06
        )
    assert spearmanr(order, depths).pvalue > 1e-6


def digest(task: str) -> str:
    content = made_of(task, Words(), 4096, 5)
    return hashlib.sha256(repr(content).encode()).hexdigest()


def test_another_process_makes_the_same_bytes() -> None:
    code = (
        "from tests.lab.evaluate.tasks.test_tasks import digest, TASKS\n"
        "print([digest(task) for task in TASKS])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONHASHSEED": "77", "PYTHONPATH": ":".join(filter(None, sys.path))},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == str([digest(task) for task in TASKS])


# RULER c3f5e3b, scripts/data/synthetic/constants.py and niah.py.
def test_published_rules_are_kept() -> None:
    text = tokenizer("words").decode(context("needles", "words", 4096, 0).ids)
    uuid = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    needles = text.splitlines()[2:]
    assert re.fullmatch(rf"One of the special magic uuids for {uuid} is: {uuid}\.", needles[0])
    assert all(re.fullmatch(rf"One of .* {uuid} is: {uuid}\.", line) for line in needles)
    assert (
        "Some special magic uuids are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the uuids afterwards.\n"
    ) in text
    for question in context("tracking", "words", 4096, 0).questions:
        assert re.fullmatch(r"( [A-Z]{5},){4} [A-Z]{5}", question.answer_text)


def test_words_are_distinct() -> None:
    assert len(set(ADJECTIVES)) == len(ADJECTIVES)
    assert len(set(NOUNS)) == len(NOUNS)


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_context_is_refused(task: str) -> None:
    with pytest.raises(QualityError):
        made_of(task, tokenizer("words"), 40, 0)


class Beginning(Words):
    """A tokenizer that begins every text with an id of its own."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, Any]:
        rows = super().__call__(text, add_special_tokens=False)["input_ids"]
        return {"input_ids": [[9999] * add_special_tokens + ids for ids in rows]}


def test_a_context_begins_as_a_text_does_for_the_model() -> None:
    assert around(Beginning()) == ([9999], [])
    content = made_of("needles", Beginning(), 2048, 3)
    assert content.ids[0] == 9999
    assert content.ids.count(9999) == 1
    assert max(len(content.ids) + len(q.ids) + len(q.answer) for q in content.questions) == 2048
    assert around(Words()) == ([], [])


def test_questions_and_answers_stand_in_the_turns_of_the_models_template() -> None:
    tiny = tokenizer("tiny-dsa")
    drawn_context = context("tracking", "tiny-dsa", 1024, 3)
    prompt = tiny.decode(drawn_context.ids + drawn_context.questions[0].ids)
    turns = prompt.removeprefix("<|user|>").partition("<|assistant|>")
    rendered = tiny.apply_chat_template(
        [{"role": "user", "content": turns[0]}], tokenize=False, add_generation_prompt=True
    )
    begun = prompt.removeprefix(rendered)
    assert begun.startswith("Answer: According to the chain(s)")
    assert begun.endswith(", they are:")


def test_generated_text_is_the_same_everywhere_and_says_nothing_twice() -> None:
    text = haystack()[: haystack().index("\n", 299_999)]
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "d71c438ddc805063"
    sentences = text.replace("\n", " ").split(". ")
    assert len(set(sentences)) > 0.9 * len(sentences)


@pytest.mark.parametrize(("count", "total"), [(8, 8), (8, 9), (8, 13), (7, 100)])
def test_no_place_is_drawn_twice(count: int, total: int) -> None:
    """Two parts of 13 / 8 lines rounded to one line: the same question stood there twice."""
    for seed in range(200):
        places = strata(random.Random(seed), count, total)
        assert places == sorted(set(places))
        assert len(places) == count
        assert 0 <= places[0] <= places[-1] < total


def stubborn(draw: random.Random, room: Room) -> Draft:
    """Make as many lines whatever room there is; the first and the last have an answer."""
    del draw
    lines = [f"line {number} says something" for number in range(60)]
    questions = [Asked(f"What says line {number}?", " something", (number,)) for number in (0, 59)]
    return Draft("Read.", lines, questions[: room.questions])


def test_a_draft_that_stays_too_long_loses_lines_that_no_answer_needs() -> None:
    """Such a draft ended whole runs."""
    length = 200
    words = Words()
    drawn_context = make_context("stubborn", stubborn, words, length, 3, questions=2)
    assert (
        len(drawn_context.ids) + max(len(q.ids) + len(q.answer) for q in drawn_context.questions)
        == length
    )
    context = words.decode(drawn_context.ids)
    numbers = [int(number) for number in re.findall(r"line (\d+) says", context)]
    assert numbers == sorted(numbers)
    assert {0, 59} <= set(numbers) < set(range(60))
    for question in drawn_context.questions:
        number = int(re.findall(r"\d+", question.text)[0])
        assert question.depth is not None
        at = len(words.decode(drawn_context.ids[: round(question.depth * len(drawn_context.ids))]))
        assert context[at:].lstrip("\n").startswith(f"line {number} ")
    with pytest.raises(QualityError, match="does not fit 10 tokens"):
        make_context("stubborn", stubborn, Words(), 10, 3, questions=2)
