"""Rows of tasks that no pattern was searched on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.smollm2.domains import TASKS, Texts


class Letters:
    """A tokenizer that has a token for each letter."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        return SimpleNamespace(input_ids=[ord(letter) for letter in text])


@pytest.mark.parametrize("task", TASKS)
def test_what_counts_in_a_row_is_answers_to_what_it_shows(
    task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filler = torch.full((9000,), ord("~"))
    monkeypatch.setattr(Texts, "tokens", lambda *_, measured: filler)
    rows = Texts(Path(), Letters()).task_rows(task, 2, 4000)
    again = Texts(Path(), Letters()).task_rows(task, 2, 4000)
    assert [row.digest for row in rows] == [row.digest for row in again]
    assert rows[0].digest != rows[1].digest
    for row in rows:
        assert len(row.ids) == 4000
        text = "".join(map(chr, row.ids.tolist()))
        context, questions = text.rsplit("~", 1)
        lines = [line for line in questions.split("\n") if line]
        if task != "rule":
            assert all(line in context for line in lines)
        counted = "".join(chr(int(row.ids[place])) for place in row.recall)
        assert 0 < len(counted) < len(questions)
        assert "~" not in counted
        assert (row.text <= len(context)).all()  # its last token is the last before the questions
