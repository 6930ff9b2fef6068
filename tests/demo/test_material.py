"""The demo's questions: each has its answer in the prompt, once, and asks for it at the end."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.demo.material import QUESTION_TOKENS, SHORTEST_WORD, Material


@pytest.fixture(scope="module")
def material() -> Material:
    return Material(shipped_checkpoint())


def test_questions_can_be_answered_from_their_prompt(material: Material) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    found = material.questions(6)
    assert found == material.questions(6)
    assert len({tuple(question.prompt) for question in found}) == 6
    for question in found:
        text = tokenizer.decode(question.prompt)
        assert text.count(question.fact) == 1
        assert text.endswith(question.ending)
        assert question.fact.endswith(question.answer)
        assert 0 < question.behind < len(question.prompt)
        assert len(tokenizer(question.answer, add_special_tokens=False)["input_ids"]) == 1
        assert 0.9 * QUESTION_TOKENS < len(question.prompt) < QUESTION_TOKENS


def test_a_person_can_see_the_answer(material: Material) -> None:
    for question in material.questions(6):
        assert question.fact in question.place
        assert len(question.place) > 1
        _, name, _, value = question.fact.split()
        assert min(len(name), len(value)) >= SHORTEST_WORD
        assert question.ending == f"? {name} is"
        assert question.answer.strip() == value


def test_no_prompt_begins_like_another(material: Material) -> None:
    prompts = material.prompts(7, 512)
    assert [len(prompt) for prompt in prompts] == [512] * 7
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 7
