"""Selection of a file's rows: what is said of the others, and what those asked cost and show."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.corpus import Corpus, select_rows
from sglang_indexcache.lab.evaluate.evaluation_plan import (
    CONTROL_LOOK,
    CORRELATION,
    DISCORDANCE,
    EvaluationPlan,
    SelectedRows,
)
from sglang_indexcache.lab.evaluate.run import EvaluationRequest
from sglang_indexcache.lab.evaluate.tasks.files import Item
from sglang_indexcache.lab.stats.design import spread
from tests.lab.evaluate.evaluate import ARMS
from tests.lab.evaluate.fake_server import TOPK, Words
from tests.lab.evaluate.tasks.published import prompt_row, write

PLAN = EvaluationPlan((), (256, 512), 8, 4, TOPK, margin=0.1, looks=2)


class Selection(NamedTuple):
    plan: EvaluationPlan
    items: dict[str, dict[int, dict[int, Item]]]
    told: tuple[str, ...]

    @property
    def taken(self) -> tuple[SelectedRows, ...]:
        return self.plan.taken


def selection(
    path: Path, task: str = "prompts", longest: int = 4096, **changes: object
) -> Selection:
    plan = replace(PLAN, **changes)  # type: ignore[arg-type]
    return Selection(*select_rows(plan, {task: path}, Words(), longest))


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """6 rows to 256 tokens, 3 to 512, one too short and two too long."""
    sizes = [10] + [60] * 6 + [180] * 3 + [300] * 2
    rows = [prompt_row(n, " yes", words) for n, words in enumerate(sizes)]
    return write(tmp_path / "mixed.jsonl", rows)


def test_an_item_belongs_to_the_shortest_length_that_holds_it(mixed: Path) -> None:
    selected = selection(mixed)
    cells = {(cell.task, cell.length): cell for cell in selected.taken}
    assert sorted(cells) == [("prompts", 256), ("prompts", 512)]
    for (_, length), cell in cells.items():
        assert all(256 * (length == 512) < size <= length for size in cell.sizes)
    assert sorted(cells["prompts", 256].rows) == [2, 3, 4, 5, 6, 7]
    assert sorted(cells["prompts", 512].rows) == [8, 9, 10]
    [sentence] = selected.told[:1]
    assert sentence.startswith("prompts: 9 of 12 rows are asked: ")
    assert "6 at 256 tokens (all that it has, of 8 asked for)" in sentence
    assert "1 of at most 64 tokens (index_topk), where no pattern matters" in sentence
    assert "2 longer than 512 tokens (the longest --length, or the model's context)" in sentence
    assert "no chat template: conversations are sent as plain turns" in selected.told[1]


def test_the_models_context_is_a_bound_too(mixed: Path) -> None:
    selected = selection(mixed, longest=256)
    assert {cell.length for cell in selected.taken} == {256}
    assert "longer than 256 tokens" in selected.told[0]


def test_no_more_than_was_asked_for_is_taken_in_an_order_of_the_seed(mixed: Path) -> None:
    first, again, reseeded = (selection(mixed, contexts=3, seed=seed) for seed in (0, 0, 5))
    assert first == again
    [rows, other_rows] = [
        next(c.rows for c in selected.taken if c.length == 256) for selected in (first, reseeded)
    ]
    assert len(rows) == 3
    assert rows != other_rows
    assert set(first.items["prompts"]) >= set(rows)
    assert "3 more than --contexts 3" in first.told[0]


def test_too_few_of_one_length_are_left_out_and_named(mixed: Path) -> None:
    selected = selection(mixed, looks=4)
    assert [(cell.task, cell.length) for cell in selected.taken] == [("prompts", 256)]
    assert (
        "3 at 512 tokens, too few for 4 looks (take fewer --length, or fewer --looks)"
        in selected.told[0]
    )


class Strict(Words):
    """A tokenizer whose template knows no developer."""

    chat_template = "one"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: object) -> list[int]:
        if any(message["role"] == "developer" for message in messages):
            raise ValueError("no developer")
        return [1] * 100


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "say yes"}]
    rows = [{"messages": turns, "answer": "yes"} for _ in range(3)]
    rows[1]["messages"] = [{"role": "developer", "content": "be kind"}, *turns]
    path = write(tmp_path / "own.jsonl", rows)
    with pytest.raises(QualityError, match=r"own.jsonl, line 2: .*template refuses .*no dev"):
        select_rows(PLAN, {"prompts": path}, Strict(), 4096)


def test_a_file_without_anything_to_ask_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "short.jsonl", [prompt_row(n, " yes", 3) for n in range(4)])
    message = (
        r"short.jsonl has nothing that can be asked. prompts: 0 of 4 rows are asked. Left out: 4"
    )
    with pytest.raises(QualityError, match=message):
        selection(path)


def test_a_plan_of_files_counts_their_items(mixed: Path) -> None:
    plan = selection(mixed).plan
    assert plan.design.contexts == 9
    control = [p for p in plan.planned if p.look == CONTROL_LOOK]
    assert {p.task for p in control} == {"notes"}
    again = json.loads(json.dumps(asdict(plan)))  # as a journal keeps it
    assert TypeAdapter(EvaluationPlan).validate_python(again) == plan
    mixed_plan = selection(mixed, tasks=("notes",)).plan
    assert mixed_plan.design.contexts == 9 + 2 * 8
    looks = [p.look for p in mixed_plan.planned]
    assert looks == sorted(looks)
    for cell in mixed_plan.cells:
        looks_there = {p.look for p in mixed_plan.planned if (p.task, p.length) == cell}
        assert looks_there - {CONTROL_LOOK} == {1, 2}


def test_contexts_are_those_of_the_rows(mixed: Path) -> None:
    selected = selection(mixed)
    plan, corpus = selected.plan, Corpus(Words(), 4, selected.items)
    rows = [json.loads(line) for line in mixed.read_text().splitlines()]
    for planned in plan.planned:
        if planned.look != CONTROL_LOOK:
            context = corpus.make(planned)
            row = rows[int(planned.context.rpartition("-")[2]) - 1]
            assert Words().decode(context.ids) == row["prompt"]
            assert context.name == planned.context
            [question] = context.questions
            assert Words().decode(question.answer) == row["answer"]
            size = len(context.ids + question.ids + question.answer)
            assert plan.sizes[planned.context] == size <= planned.length
    changed = replace(corpus, items={"prompts": {1: selected.items["prompts"][2]}})
    assert changed.digest != corpus.digest != replace(corpus, items={}).digest


def test_the_cost_is_that_of_the_rows(mixed: Path) -> None:
    plan = selection(mixed).plan
    planned = [p for p in plan.planned if p.look != CONTROL_LOOK]
    sizes = [plan.sizes[p.context] for p in planned]
    times = [3 + p.again for p in planned]
    least = sum(size * count for size, count in zip(sizes, times, strict=True))
    control = 4 * sum(  # three arms, and the reference again
        plan.control_length + plan.control_length % 64
        for p in plan.planned
        if p.look == CONTROL_LOOK
    )
    request = EvaluationRequest(Path(), ARMS[:3], plan, Corpus(Words(), 4), "")
    tokens = request.tokens()
    pages = 64 * sum(times)  # what is left of a page is computed once more
    assert least <= tokens - control <= least + pages


@settings(deadline=None)
@given(st.lists(st.integers(2, 400), min_size=1, max_size=5), st.integers(2, 50))
def test_unequal_cells_show_what_their_means_can(counts: list[int], alike: int) -> None:
    """Against the variance of a mean of means, and as before where all cells are alike.

    The smallest cell is what a bet may lose at once, and t needs that much to differ.
    """

    def plan(sizes: list[int]) -> EvaluationPlan:
        rows = tuple(
            SelectedRows(
                *("prompts", 100 + n, tuple(range(count)), (90,) * count, count),
                *((1,) * count, 90),
            )
            for n, count in enumerate(sizes)
        )
        return EvaluationPlan((), (200,), 8, 8, TOPK, margin=0.1, looks=2, taken=rows)

    deviation, differing = spread(DISCORDANCE, CORRELATION, 1)
    variance = deviation**2 * sum(1 / count for count in counts) / len(counts) ** 2
    unequal = plan(counts)
    equivalent = (variance * sum(counts)) ** 0.5
    weights = [sum(counts) / (len(counts) * count) for count in counts]
    squares = [count * weight**2 for count, weight in zip(counts, weights, strict=True)]
    fourths = [count * weight**4 for count, weight in zip(counts, weights, strict=True)]
    equal = differing * sum(squares) ** 2 / sum(fourths) / sum(counts)
    steps = deviation**2 * sum(squares) / max(weights) ** 2 / sum(counts)
    expected = unequal.design.detectable(equivalent, min(equal, steps), max(weights))
    assert detectable(unequal) == pytest.approx(expected)
    equal_cells = plan([alike] * 3)
    assert detectable(equal_cells) == pytest.approx(
        equal_cells.design.detectable(deviation, differing)
    )


def detectable(plan: EvaluationPlan) -> float:
    return plan.design.detectable(*plan.assumed)


def document_rows(documents: int, questions: int) -> list[dict[str, object]]:
    return [
        {
            "prompt": " ".join(f"d{document}w{n}" for n in range(100)) + f"\nwhich is {question}?",
            "answer": f" {question}",
        }
        for document in range(documents)
        for question in range(questions)
    ]


def test_rows_about_one_document_are_questions_behind_one_context(tmp_path: Path) -> None:
    """One of them was asked, and the others left out."""
    path = write(tmp_path / "own.jsonl", document_rows(6, 4))
    selected = selection(path, "prompts")
    [cell] = selected.taken
    assert sorted((row - 1) // 4 for row in cell.rows) == list(range(6))
    assert (cell.available, cell.questions) == (6, (4,) * 6)
    assert "prompts: 24 of 24 rows are asked, about 6 texts: 6 at 256" in selected.told[0]
    assert "24 paired questions" in dict(selected.plan.in_words())["contexts"]
    assert selected.plan.assumed[:2] == pytest.approx(spread(DISCORDANCE, CORRELATION, 4))
    corpus = Corpus(Words(), 4, selected.items)
    [planned] = [p for p in selected.plan.planned if p.context == "prompts-256-5"]
    context = corpus.make(planned)
    assert [question.name for question in context.questions] == ["row5", "row6", "row7", "row8"]
    for question in context.questions:
        row = int(question.name[3:])
        alone = {"prompts": {5: {row: selected.items["prompts"][5][row]}}}
        alone_context = replace(corpus, items=alone).make(planned)
        assert context.ids + question.ids == alone_context.ids + alone_context.questions[0].ids
        assert question.answer == alone_context.questions[0].answer
    assert selected.plan.longest == cell.longest < selected.plan.sizes[planned.context]
    single = selection(write(tmp_path / "one.jsonl", document_rows(8, 1)), "prompts")
    assert "about" not in single.told[0]


class Counting(Words):
    """A tokenizer that keeps the texts that it was given."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, object]:
        self.texts += text
        return super().__call__(text, add_special_tokens=add_special_tokens)


def test_a_row_is_tokenized_once_for_the_plan_and_for_asking(tmp_path: Path) -> None:
    path, tokenizer = write(tmp_path / "own.jsonl", document_rows(6, 4)), Counting()
    plan, items, _ = select_rows(PLAN, {"prompts": path}, tokenizer, 4096)
    corpus = Corpus(tokenizer, 4, items)
    for planned in plan.planned:
        if planned.look != CONTROL_LOOK:
            corpus.make(planned)
    prompts = [text for text in tokenizer.texts if "which is" in text]
    assert len(prompts) == len(set(prompts)) == 24


def words_of(name: str, count: int) -> str:
    return " ".join(f"{name}{n}" for n in range(count))


def test_a_text_is_recognised_behind_any_opening(tmp_path: Path) -> None:
    """Once only a common beginning was: eight questions about a text erred in half of all runs."""
    rows = [
        {
            "prompt": f"{words_of(f'opening{text}x{n}w', 700)} {words_of(f'text{text}w', 800)}",
            "answer": "yes",
        }
        for text in range(3)
        for n in range(4)
    ]
    rows += [{"prompt": words_of(f"other{n}w", 1500), "answer": "yes"} for n in range(5)]
    selected = selection(
        write(tmp_path / "own.jsonl", rows), lengths=(4096,), contexts=20, longest=8192
    )
    [cell] = selected.taken
    assert cell.questions == (1,) * 8
    assert len({(row - 1) // 4 for row in cell.rows if row <= 12}) == 3
    assert {row for row in cell.rows if row > 12} == set(range(13, 18))
    assert "9 about the text of another row (one text, one observation)" in selected.told[0]


def test_cuts_of_a_document_that_overlap_are_said(tmp_path: Path) -> None:
    """Half of 48 texts overlapped a neighbour by 30 %, and nobody was told."""
    book = [f"b{n}" for n in range(12_000)]
    rules = words_of("rule", 150)  # what stands in all of them is no sign

    def told(step: int) -> str:
        starts = range(0, len(book) - 1200, step)
        rows = [
            {"prompt": f"{' '.join(book[start : start + 1200])} {rules}", "answer": "yes"}
            for start in starts
        ]
        path = write(tmp_path / "own.jsonl", rows)
        return selection(path, lengths=(4096,), contexts=20, longest=8192).told[0]

    assert "texts share a tenth to a half with another" in told(850)
    assert "share a tenth" not in told(1200)


def test_turns_of_a_conversation_are_one_observation(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = []
    for talk in range(4):
        first = {"role": "user", "content": f"talk {talk} " * 40}
        reply = {"role": "assistant", "content": "yes " * 20}
        rows.append({"messages": [first], "answer": "yes"})
        rows.append(
            {"messages": [first, reply, {"role": "user", "content": "and?"}], "answer": "no"}
        )
    path = write(tmp_path / "talks.jsonl", rows)
    selected = selection(path)
    assert [(len(cell.rows), sum(cell.questions)) for cell in selected.taken] == [(4, 8)]
    apart = selection(path, lengths=(100, 512))  # turns of two lengths: one of them is asked
    assert sum(sum(cell.questions) for cell in apart.taken) <= 4
    assert "about the text of another row" in apart.told[0]
