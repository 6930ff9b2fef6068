"""The demo's questions: each has its answer in the prompt, once, and asks for it at the end."""

from __future__ import annotations

from transformers import AutoTokenizer

from sglang_indexcache.demo.checkpoints import shipped_checkpoint
from sglang_indexcache.demo.run import QUESTION_TOKENS, questions


def test_questions_can_be_answered_from_their_prompt() -> None:
    model = shipped_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(model)
    found = questions(model, 6)
    assert found == questions(model, 6)
    assert len({tuple(question.prompt) for question in found}) == 6
    for question in found:
        text = tokenizer.decode(question.prompt)
        assert text.count(question.fact) == 1
        assert text.endswith(question.ending)
        assert question.fact.endswith(question.answer)
        assert len(tokenizer(question.answer, add_special_tokens=False)["input_ids"]) == 1
        assert 0.9 * QUESTION_TOKENS < len(question.prompt) < QUESTION_TOKENS
