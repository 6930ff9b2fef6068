"""A user's files: read as they are published, scored by the published rules, refused by line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.lab.client.score import TokenScores
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.evaluation_plan import Planned
from sglang_indexcache.lab.evaluate.servers import right_share
from sglang_indexcache.lab.evaluate.tasks.context import rendered
from sglang_indexcache.lab.evaluate.tasks.files import FILES, Item, pieces, read_items
from tests.lab.evaluate.fake_server import Words
from tests.lab.evaluate.tasks.published import aa_lcr_row, prompt_row, write

ROWS = {
    "aa-lcr": aa_lcr_row,
    "prompts": lambda number: prompt_row(number, " yes"),
    "passages": lambda number: prompt_row(number, " a long answer of many words"),
}
SUFFIXES = (".jsonl", ".json", ".parquet")


def items_of(task: str, path: Path) -> list[tuple[int, Item]]:
    return [(row.number, item) for row, item in read_items(FILES[task], path)]


def test_every_file_has_rows_here() -> None:
    assert set(ROWS) == set(FILES)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("task", FILES)
def test_published_rows_are_read_from_every_kind_of_file(
    tmp_path: Path, task: str, suffix: str
) -> None:
    rows = [ROWS[task](number) for number in range(3)]
    items = items_of(task, write(tmp_path / f"rows{suffix}", rows))
    assert items == [(number, FILES[task](row)) for number, row in enumerate(rows, 1)]


def test_aa_lcr_is_asked_in_its_own_words_and_counted_by_token(tmp_path: Path) -> None:
    rows = [aa_lcr_row(number) for number in range(3)]
    items = items_of("aa-lcr", write(tmp_path / "aa_lcr_v2.csv", rows))
    assert items == [(number, FILES["aa-lcr"](row)) for number, row in enumerate(rows, 1)]
    item = items[2][1]
    [message] = item.prompt
    assert isinstance(message, dict)
    parts = [part.strip() for part in message["content"].split("\n\n")]
    assert parts == [
        *("BEGIN INPUT DOCUMENTS", rows[2]["context"].strip(), "END INPUT DOCUMENTS"),
        "Answer the following question using the input documents provided above.",
        *("START QUESTION", "Which line comes first in 2?", "END QUESTION"),
    ]
    assert (item.answer, item.by_token) == ("line 2,\nthen none", True)
    [question] = (
        Corpus(Words(), 8, {"aa-lcr": {3: {3: item}}})
        .make(Planned("aa-lcr-4096-3", "aa-lcr", 4096, 1, False))
        .questions
    )
    assert question.by_token
    tops = [[(3, -0.1)], [(4, -0.2)], [(5, -0.3)]]  # the second token is not the likeliest
    scores = TokenScores([-0.1, -2.0, -0.3], tops, 9)
    assert right_share(scores, by_token=True) == pytest.approx(2 / 3)
    assert right_share(scores, by_token=False) == 0


def test_passages_are_prompts_whose_tokens_count_one_by_one() -> None:
    row = prompt_row(3, " a long answer of many words")
    whole, by_token = FILES["prompts"](row), FILES["passages"](row)
    assert by_token.by_token
    assert not whole.by_token
    assert (by_token.prompt, by_token.answer) == (whole.prompt, whole.answer)


def test_prompts_are_conversations_or_texts() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for row in ({"messages": messages}, {"prompt": messages}):
        assert FILES["prompts"]({**row, "answer": "a"}) == Item(tuple(messages), "a")
    assert FILES["prompts"]({"prompt": "once", "answer": " upon"}) == Item("once", " upon")


def test_an_item_is_a_context_with_one_question() -> None:
    item = FILES["prompts"]({"messages": [{"role": "user", "content": "hi"}], "answer": " yes"})
    corpus = Corpus(Words(), 8, {"prompts": {2: {2: item}}})
    context = corpus.make(Planned("prompts-4096-2", "prompts", 4096, 1, False))
    [question] = context.questions
    text = Words().decode(context.ids + question.ids + question.answer)
    assert text == "User: hi\nAssistant: yes"
    assert question.ids == []
    assert pieces(item, Words()) == (context.ids, question.answer)


class Templated(Words):
    """A tokenizer with a chat template that has a switch for thinking."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, enable_thinking: bool = True, **_: Any
    ) -> list[int]:
        if messages[0]["role"] == "tool":
            raise ValueError("no tools")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        thinks = "<think>" if enable_thinking else ""
        ids: list[int] = self([f"{text}<assistant>{thinks}"], add_special_tokens=False)[
            "input_ids"
        ][0]
        return ids


def test_conversations_are_written_by_the_template_and_answered_without_thinking() -> None:
    item = FILES["prompts"]({"messages": [{"role": "user", "content": "hi"}], "answer": "yes"})
    prompt, answer = pieces(item, Templated())
    assert Words().decode(prompt) == "<user>hi<assistant>"
    assert Words().decode(answer) == "yes"
    with pytest.raises(QualityError, match="chat template refuses a conversation: no tools"):
        rendered(({"role": "tool", "content": "x"},), Templated())


DAMAGED: dict[str, tuple[str, Any, str]] = {
    "not json": ("prompts", {"messages": "[{"}, "messages is not JSON"),
    "no list": ("prompts", {"messages": {"role": "user"}}, "messages is no list of chat messages"),
    "no role": ("prompts", {"messages": [{"content": "x"}]}, "message without a known role"),
    "parts": (
        "prompts",
        {"messages": [{"role": "user", "content": [1]}]},
        "content is a list of parts; write it as plain text",
    ),
    "answered": (
        "prompts",
        {"messages": [{"role": "assistant", "content": "x"}]},
        "ends with the assistant's turn",
    ),
    "no answer": ("aa-lcr", {"answer": None}, "answer is missing; its fields are answer, context"),
    "no text": ("aa-lcr", {"context": 3}, "context is empty, or no text"),
    "nothing": ("prompts", {"prompt": None}, "prompt or messages is missing; its fields are"),
    "blank": ("prompts", {"answer": " "}, "has no answer, or one that is no text"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_damaged_row_is_named(tmp_path: Path, case: str, suffix: str) -> None:
    task, changed, sentence = DAMAGED[case]
    rows = [ROWS[task](0), {**ROWS[task](1), **changed}]
    path = write(tmp_path / f"rows{suffix}", rows)
    where = "line 2" if suffix == ".jsonl" else "row 2"
    with pytest.raises(QualityError, match=rf"rows\{suffix}, {where}: .*{sentence}") as error:
        items_of(task, path)
    assert "\n" not in str(error.value)


def test_a_row_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("7\n")
    with pytest.raises(QualityError, match=r"a.jsonl, line 1 is no object with named fields"):
        items_of("prompts", path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_bytes(content)
    with suppress(QualityError, DataError):  # and nothing else
        items_of("prompts", path)
