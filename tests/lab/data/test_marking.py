"""Tokens of answers, against oracles that know nothing of offsets."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from sglang_indexcache.errors import DataError
from sglang_indexcache.lab.data.conversations import Conversation
from sglang_indexcache.lab.data.documents import Text
from sglang_indexcache.lab.data.marking import Marked, Marker
from tests.cli.test_search import TINY
from tests.fixtures.models import make_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = (  # as GLM's and Qwen's: the thinking of turns before the last question is left out
    "[gMASK]<sop>{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% else %}<|assistant|>{% if loop.index0 > ns.last and m['thinking'] %}"
    "<think>{{ m['thinking'] }}</think>{% else %}</think>{% endif %}{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


@cache
def tokenizer(kind: str) -> Any:
    """Return the demo's, one of little more than bytes, or one whose offsets leave out blanks."""
    if kind == "demo":
        return AutoTokenizer.from_pretrained(TINY)
    built = make_tokenizer(261 if kind == "bytes" else 700)
    if kind == "trimming":
        built.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    special = ["<|im_start|>", "<|im_end|>", "[gMASK]", "<sop>", "<think>", "</think>"]
    built.add_special_tokens({"additional_special_tokens": special})
    return built


def marker(kind: str = "trimming", template: str | None = CHATML) -> Marker:
    of_kind = tokenizer(kind)
    of_kind.chat_template = template
    return Marker(of_kind, "test")


def slowly(kind: str, text: str, spans: list[tuple[int, int]]) -> list[bool]:
    """Mark byte by byte: a token is an answer's if one of its bytes is of a character that is."""
    of_kind = tokenizer(kind)
    answers = [any(start <= i < stop for start, stop in spans) for i in range(len(text))]
    of_bytes = [a for c, a in zip(text, answers, strict=True) for _ in c.encode()]
    marks, at = [], 0
    for token in of_kind(text, add_special_tokens=False)["input_ids"]:
        size = len(of_kind.convert_ids_to_tokens(token))  # a letter a byte
        marks.append(any(of_bytes[at : at + size]))
        at += size
    assert at == len(of_bytes)
    return marks


WORDS = st.lists(
    st.one_of(
        st.sampled_from(
            [" ", "\n", "  ", "\t", "return", " self", "é", "\U0001d518😀", "e\u0301", "日本", ";"]
        ),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    ),
    max_size=14,
).map("".join)


@pytest.mark.parametrize("kind", ["demo", "bytes"])
@settings(deadline=None)  # the first example makes a tokenizer
@given(data=st.data())
def test_marks_the_tokens_that_hold_an_answer(kind: str, data: st.DataObject) -> None:
    text = data.draw(WORDS.filter(bool))
    ends = st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))
    pairs = [tuple(sorted(pair)) for pair in data.draw(st.lists(ends, max_size=3))]
    spans = [(a, b) for a, b in pairs if a < b]
    document = marker(kind).marked(Text(text, "here", tuple(spans)))
    assert document.answers.tolist() == slowly(kind, text, spans)


def test_blanks_that_offsets_leave_out_are_marked() -> None:
    text = "x = 1\n\n\n    return x"
    document = marker().marked(Text(text, "here", ((5, 8),)))
    trimming = tokenizer("trimming")
    assert trimming.decode(np.array(document.ids)[document.answers]).strip(" ") == "\n\n\n"


# -- conversations -----------------------------------------------------------------------------


def chat(*turns: str, system: str = "") -> Conversation:
    """Make user and assistant speak in turn; "a|b" is a thinking and what it led to."""
    messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns):
        thinking, _, content = turn.rpartition("|")
        role = "assistant" if number % 2 else "user"
        messages.append({"role": role, "content": content, "thinking": thinking})
    return Conversation(tuple(messages), "data.jsonl, line 7")


def runs(document: Marked) -> list[str]:
    """Return the answers, as text."""
    trimming, stretches, before = tokenizer("trimming"), [], False
    for token, answer in zip(document.ids, document.answers, strict=True):
        if answer and not before:
            stretches.append([])
        if answer:
            stretches[-1].append(token)
        before = bool(answer)
    return [trimming.decode(ids) for ids in stretches]


TURNS = st.text(st.characters(codec="utf-8", exclude_characters="<|[>"), min_size=1, max_size=12)


@settings(deadline=None)
@given(turns=st.lists(TURNS.filter(lambda t: "|" not in t), min_size=2, max_size=6))
def test_responses_and_their_end_of_turn_are_the_answers(turns: list[str]) -> None:
    """The template and the roles were once lost, and every token counted."""
    conversation = chat(*turns, system="Be brief.")
    document = marker().marked(conversation)
    responses = [turn + "<|im_end|>" for turn in turns[1::2]]
    assert runs(document) == responses
    messages = conversation.messages[
        : 2 * len(responses) + 1
    ]  # a question after the last response is cut
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert tokenizer("trimming").decode(document.ids) == expected


def test_a_template_that_strips_earlier_thinking_gives_the_last_response() -> None:
    document = marker(template=STRIPPING).marked(chat("2+2?", "hm|4", "3+3?", "well|6"))
    assert runs(document) == ["well</think>6"]
    text = tokenizer("trimming").decode(document.ids)
    before = "[gMASK]<sop><|user|>2+2?<|assistant|></think>4<|user|>3+3?<|assistant|><think>"
    assert text == before + "well</think>6"


def test_a_response_without_the_thinking_that_the_template_asks_for() -> None:
    document = marker(template=STRIPPING).marked(chat("2+2?", "4", "3+3?", "6"))
    assert runs(document) == ["</think>4", "</think>6"]


def test_a_template_without_end_of_turn() -> None:
    template = (TINY / "chat_template.jinja").read_text()
    document = marker(template=template).marked(chat("2+2?", "4 \n"))
    assert runs(document) == ["4 \n"]


def test_a_template_that_refuses_a_beginning_still_gives_later_responses() -> None:
    template = "{% if messages | length < 3 %}{{ raise_exception('too few') }}{% endif %}" + CHATML
    assert runs(marker(template=template).marked(chat("a", "b", "c", "d"))) == ["d<|im_end|>"]


def test_is_cut_after_the_last_response_that_fits() -> None:
    conversation = chat("2+2?", "4", "3+3?", "6", "4+4?", "8")
    of_chat = marker()
    sizes = [
        len(of_chat.marked(chat(*turns))) for turns in (["2+2?", "4"], ["2+2?", "4", "3+3?", "6"])
    ]
    for length in range(sizes[0], sizes[1]):
        assert runs(of_chat.cut(conversation, length) or of_chat.marked(conversation)) == [
            "4<|im_end|>"
        ]
    cut = of_chat.cut(conversation, sizes[1])
    assert cut is not None
    assert runs(cut) == ["4<|im_end|>", "6<|im_end|>"]
    assert of_chat.cut(conversation, sizes[0] - 1) is None


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "line 7 has chat messages, and the tokenizer of test has no chat template"),
        ("{{ raise_exception('no system') }}", "line 7: the chat template of test refuses"),
        ("{{ messages | length }}" + CHATML, "line 7: the chat template .* differently once that"),
    ],
)
def test_templates_that_will_not_do(template: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        marker(template=template).marked(chat("a", "b"))


def test_a_tokenizer_without_offsets() -> None:
    class Slow:
        is_fast, added_tokens_decoder = False, {}

    with pytest.raises(DataError, match=r"of test cannot say .* needs a tokenizer.json"):
        Marker(Slow(), "test").marked(Text("ab", "here", ((1, 2),)))
