"""A user's files: read as they are published, scored by the published rules, refused by line."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.metrics import METRICS
from sglang_indexcache.evaluate.tasks import FILES, Item
from sglang_indexcache.evaluate.tasks.items import as_context, read_items, rendered, tokens
from tests.evaluate.fake_server import Words
from tests.evaluate.tasks.published import (
    CLOSING,
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
    "prompts": prompt_row,
}
SUFFIXES = (".jsonl", ".json", ".parquet")


def read(task: str, path: Path) -> list[tuple[int, Item]]:
    return list(read_items(FILES[task], path))


def test_every_file_has_rows_here() -> None:
    assert set(ROWS) == set(FILES)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("task", FILES)
def test_published_rows_are_read_from_every_kind_of_file(
    tmp_path: Path, task: str, suffix: str
) -> None:
    rows = [ROWS[task](number) for number in range(3)]
    found = read(task, write(tmp_path / f"rows{suffix}", rows))
    assert found == [(number, FILES[task](row)) for number, row in enumerate(rows, 1)]
    assert all(item.depth is None or 0 <= item.depth < 1 for _, item in found)


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
    # Its card calls the field "answer"; copies have it as text.
    for answer in (row["answer_nodes"], str(row["answer_nodes"])):
        assert FILES["graphwalks"]({**row, "answer_nodes": None, "answer": answer}) == item
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


def test_prompts_are_conversations_or_texts() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for row in ({"messages": messages}, {"prompt": messages}):
        assert FILES["prompts"](row) == Item(tuple(messages), None)
    assert FILES["prompts"]({"prompt": "once"}) == Item("once", None)
    assert FILES["prompts"]({"prompt": "once", "answer": " upon"}) == Item("once", " upon")


# The grading code of the cards of openai/mrcr and openai/graphwalks and of THUDM/LongBench.
def card_of_mrcr(response: str, answer: str, mark: str) -> float:
    if not response.startswith(mark):
        return 0.0
    response, answer = response.removeprefix(mark), answer.removeprefix(mark)
    return float(SequenceMatcher(None, response, answer).ratio())


def card_of_graphwalks(response: str, truth: set[str]) -> float:
    line = response.split("\n")[-1]
    part = re.search(r"Final Answer: ?\[.*\]", line) if "Final Answer:" in line else None
    if not part:
        return 0.0
    inner = part[0].removeprefix("Final Answer:").strip().strip("[]")
    sampled = {one.strip() for one in inner.split(",") if one.strip()}
    overlap = len(sampled & truth)
    recall = overlap / len(truth) if truth else 0
    precision = overlap / len(sampled) if sampled else 0
    if recall + precision:
        return 2 * recall * precision / (recall + precision)
    return float(not sampled and not truth)


def rule_of_longbench(response: str) -> str | None:
    response = response.replace("*", "")
    for pattern in (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])"):
        if match := re.search(pattern, response):
            return match[1]
    return None


MARK = "aYooSG8CQg"
WORDS = st.lists(st.sampled_from(["tapir", "night", "\n", "of", "  ", MARK]), max_size=12)


@given(st.booleans(), WORDS, WORDS)
def test_mrcr_is_scored_as_its_card_does(marked: bool, said: list[str], right: list[str]) -> None:
    reply, answer = (MARK if marked else "") + " ".join(said), MARK + " ".join(right)
    assert METRICS["mrcr"](reply, answer) == card_of_mrcr(reply, answer, MARK)


NODES = st.lists(st.sampled_from([node(n) for n in range(5)]), max_size=5)


@given(NODES, NODES, st.sampled_from(["", "Let me see [x].\n", "Final Answer: []\n"]),
       st.sampled_from(["Final Answer: [{}]", "Final Answer:[{}]", "[{}]", "{}"]))  # fmt: skip
def test_graphwalks_is_scored_as_its_card_does(
    said: list[str], right: list[str], before: str, form: str
) -> None:
    reply = before + form.format(", ".join(said))
    answer = ", ".join(dict.fromkeys(right)) + "]"
    expected = card_of_graphwalks(reply, set(right))
    assert METRICS["graphwalks"](reply, answer) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["The correct answer is ", "(", ")", "*", "A", "C", "no"])))
def test_longbench_is_scored_as_its_code_does(parts: list[str]) -> None:
    reply = "".join(parts)
    for letter in "ABCD":
        expected = rule_of_longbench(reply) == letter
        assert METRICS["longbench-v2"](reply, letter) == expected


def test_an_item_is_a_context_with_one_question() -> None:
    item = FILES["longbench-v2"](longbench_row(1))
    made = as_context(item, "longbench-v2", Words(), 4096, "longbench-v2-4096-2", 2)
    [question] = made.questions
    text = Words().decode(made.ids + question.ids + question.answer)
    assert isinstance(item.prompt, tuple)
    assert text == f"User: {item.prompt[0]['content']}\nAssistant:The correct answer is (B"
    assert made.messages == item.prompt
    assert tokens(item, Words()) == len(made.ids + question.ids + question.answer)


class Templated(Words):
    """A tokenizer with a chat template that has a switch for thinking."""

    chat_template = "yes"

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, enable_thinking: bool = True, **_: Any
    ) -> list[int]:
        if messages[0]["role"] == "tool":
            raise ValueError("no tools")
        text = "".join(f"<{one['role']}>{one['content']}" for one in messages)
        thinks = "<think>" if enable_thinking else ""
        ids: list[int] = self([f"{text}<assistant>{thinks}"], add_special_tokens=False)[
            "input_ids"
        ][0]
        return ids


def test_conversations_are_written_by_the_template_and_answered_without_thinking() -> None:
    item = FILES["prompts"]({"messages": [{"role": "user", "content": "hi"}], "answer": "yes"})
    made = as_context(item, "prompts", Templated(), 64, "prompts-64-1", 1)
    assert Words().decode(made.ids) == "<user>hi<assistant>"
    # An engine that is asked by chat completions thinks if the template says so.
    assert Words().decode(rendered(made.messages, Templated())) == "<user>hi<assistant><think>"
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
    "half nodes": ("graphwalks", {"answer_nodes": "[a"}, "answer is no list of nodes"),
    "no kind": ("graphwalks", {"problem_type": None}, "problem_type is missing"),
    "no prompt": ("graphwalks", {"prompt": " "}, "prompt is empty, or no text"),
    "letter": ("longbench-v2", {"answer": "E"}, "answer is 'E', and none of A, B, C, D"),
    "choice": ("longbench-v2", {"choice_C": None}, "choice_C is missing"),
    "no text": ("longbench-v2", {"context": 3}, "context is empty, or no text"),
    "nothing": ("prompts", {"prompt": None}, "prompt or messages is missing; its fields are"),
    "blank": ("prompts", {"answer": " "}, "answer is empty, or no text; leave it out"),
}


@pytest.mark.parametrize("case", DAMAGED)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_damaged_row_is_named(tmp_path: Path, case: str, suffix: str) -> None:
    task, changed, said = DAMAGED[case]
    rows = [ROWS[task](0), {**ROWS[task](1), **changed}]
    path = write(tmp_path / f"rows{suffix}", rows)
    where = "line 2" if suffix == ".jsonl" else "row 2"
    with pytest.raises(QualityError, match=rf"^{where} of .*rows\{suffix}: .*{said}") as error:
        read(task, path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"prompt": "x"}\n\n{"prompt":', "line 3 of .*a.jsonl is not JSON"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "line 1 of .*a.jsonl is not JSON"),
        ("a.jsonl", b"7\n", "line 1 of .*a.jsonl is no object with named fields"),
        ("a.json", b'[\n{"prompt": "x"},\n{]', "line 3 of .*a.json is not JSON"),
        ("a.json", b'{"prompt": "x"}', "a.json is no list of rows"),
        ("a.json", b"\xff", "a.json is not UTF-8"),
        ("a.parquet", b"PAR1 and then nothing", "a.parquet cannot be read as parquet"),
        ("nowhere.json", None, "there is no file .*nowhere.json"),
    ],
)
def test_a_damaged_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(QualityError, match=said):
        read("prompts", path)


def test_parquet_without_pyarrow_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "rows.parquet", [prompt_row(1)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(QualityError, match=r"rows.parquet needs pyarrow: pip install pyarrow"):
        read("prompts", path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.jsonl"
    path.write_bytes(content)
    with suppress(QualityError):  # and nothing else
        read("prompts", path)
