"""Contexts of a user's HotpotQA: every answer can be found in them, and nothing else is scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.plan import Planned
from sglang_indexcache.lab.evaluate.tasks.hotpot import HotpotQA
from tests.lab.evaluate.fake_server import Words
from tests.lab.evaluate.tasks.published import poem, write


def row(number: int) -> dict[str, Any]:
    titles = [f"Title {number} {place}" for place in range(10)]
    return {
        "question": f"who wrote {number}?",
        "answer": "yes" if number % 5 == 0 else f"Writer {number}",
        "supporting_facts": [[titles[3], 1], [titles[7], 0]],
        "context": [
            [title, [f"{poem(number, place, 9)}.", f" Writer {number}." if place == 7 else " No."]]
            for place, title in enumerate(titles)
        ],
    }


@pytest.fixture(scope="module")
def hotpot(tmp_path_factory: pytest.TempPathFactory) -> HotpotQA:
    path = tmp_path_factory.mktemp("hotpot") / "hotpotqa.json"
    return HotpotQA.read(write(path, [row(number) for number in range(30)]))


def test_answers_that_no_paragraph_holds_are_left_out(hotpot: HotpotQA) -> None:
    assert len(hotpot.paragraphs) == 300
    assert {hop.answer for hop in hotpot.hops} == {f"Writer {n}" for n in range(30) if n % 5}


@pytest.mark.parametrize("length", [1024, 4096])
def test_every_question_has_its_paragraphs_in_the_context(hotpot: HotpotQA, length: int) -> None:
    corpus = Corpus(Words(), 8, file_tasks={"hotpotqa": hotpot})
    planned = Planned(f"hotpotqa-{length}-3", "hotpotqa", length, 1, False)
    context = corpus.make(planned)
    assert context == corpus.make(planned)
    longest = max(len(question.ids) + len(question.answer) for question in context.questions)
    assert len(context.ids) + longest == length
    text = Words().decode(context.ids)
    assert len({question.text for question in context.questions}) == 8
    for question in context.questions:
        [hop] = [hop for hop in hotpot.hops if hop.question in question.text]
        assert question.answer_text == f" {hop.answer}"
        starts = [text.index(paragraph) / len(text) for paragraph in hop.needs]
        assert question.depth == pytest.approx(min(starts), abs=0.05)
    assert corpus.digest != Corpus(Words(), 8).digest


def test_what_is_no_hotpotqa_is_refused_by_row(tmp_path: Path) -> None:
    path = write(tmp_path / "other.json", [row(1), {"question": "why?"}])
    with pytest.raises(QualityError, match=r"other.json, row 2 is no row of HotpotQA: question"):
        HotpotQA.read(path)
    few = HotpotQA.read(write(tmp_path / "few.json", [row(1)]))
    planned = Planned("hotpotqa-1024-3", "hotpotqa", 1024, 1, False)
    with pytest.raises(QualityError, match="the file has 1 questions that can be scored"):
        Corpus(Words(), 8, file_tasks={"hotpotqa": few}).make(planned)
