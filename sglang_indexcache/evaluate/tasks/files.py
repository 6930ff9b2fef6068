"""Public data sets and your own prompts: a function from a row of each to what is asked.

* ``mrcr``: openai/mrcr (MIT): ``prompt`` (chat messages as JSON), ``answer``,
  ``random_string_to_prepend``. Repeat the i-th of several look-alike answers of a conversation.
* ``graphwalks``: openai/graphwalks (MIT): ``prompt``, ``answer_nodes`` (or ``answer``, as its card
  calls it), ``problem_type``. Parents of a node are written in the order of their edges, so their
  tokens can be scored; what a breadth-first search reaches has no order. Files from before February
  2026 name some nodes among their own parents; those are left out of the answer.
* ``longbench-v2``: THUDM/LongBench-v2 (MIT; Bai et al. 2024, arXiv:2412.15204): ``context``,
  ``question``, ``choice_A`` to ``choice_D``, ``answer``, in the words of its ``prompts/0shot.txt``.
  Guessing has 25 %.
* ``prompts``: your own: ``messages`` (a conversation, written by the model's chat template) or
  ``prompt`` (a text, sent as it is; or a conversation), and ``answer``.
"""

from __future__ import annotations

import json
import re

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.chat import Message
from sglang_indexcache.evaluate.tasks.items import (
    Item,
    Reader,
    Row,
    conversation,
    text_of,
)

LETTERS = "ABCD"
MARK = 10
"""Characters that MRCR asks to be put in front."""
_LONGBENCH = """Please read the following text and answer the question below.

<text>
{document}
</text>

What is the correct answer to this question: {question}
Choices:
{choices}

Format your response as follows: "The correct answer is (insert answer here)"."""


def mrcr(row: Row) -> Item:
    """A conversation and the answer that is to be repeated, its random string in front.

    Raises:
        QualityError: a field that is missing, or an answer without its random string.
    """
    messages = conversation(row.get("prompt"), "prompt")
    answer, mark = text_of(row, "answer"), text_of(row, "random_string_to_prepend")
    if len(mark) != MARK or not answer.startswith(mark):
        raise QualityError(
            f"answer does not begin with the {MARK} characters of random_string_to_prepend"
        )
    sizes = [len(message["content"]) for message in messages]
    place = row.get("desired_msg_index")
    told = isinstance(place, int) and 0 <= place < len(sizes)
    return Item(messages, answer, depth=sum(sizes[:place]) / max(sum(sizes), 1) if told else None)


def graphwalks(row: Row) -> Item:
    """A graph with its question.

    Raises:
        QualityError: a field that is missing, or an answer that is no list of nodes.
    """
    begun = "Final Answer: ["
    prompt, kind = text_of(row, "prompt"), text_of(row, "problem_type")
    messages = ({"role": "user", "content": prompt},)
    nodes = _nodes(row)
    if kind.lower() != "parents":
        return Item(messages, ", ".join(nodes) + "]", begun, one_form=False)
    asked = re.findall(r"parents of node (\w+)", prompt)
    nodes = [node for node in nodes if node not in asked[-1:]]
    starts: dict[str, int] = {}
    for edge in re.finditer(r"^(\w+) -> (\w+)\s*$", prompt, re.MULTILINE):
        if asked and edge[2] == asked[-1] and edge[1] in nodes:
            starts.setdefault(edge[1], edge.start())
    if not nodes or set(starts) != set(nodes):
        return Item(messages, ", ".join(nodes) + "]", begun, one_form=not nodes)
    ordered = sorted(starts, key=lambda node: starts[node])
    return Item(messages, ", ".join(ordered) + "]", begun, starts[ordered[0]] / len(prompt))


def _nodes(row: Row) -> list[str]:
    """Each once."""
    value = row.get("answer_nodes")
    value = row.get("answer") if value is None else value
    if isinstance(value, str):
        try:
            value = json.loads(value.replace("'", '"'))
        except json.JSONDecodeError as error:
            raise QualityError(f"its answer is no list of nodes ({error.msg})") from error
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        raise QualityError("its answer (answer_nodes) is no list of nodes")
    return list(dict.fromkeys(value))


def longbench(row: Row) -> Item:
    """A document, a question and four choices.

    Raises:
        QualityError: a field that is missing, or an answer that is none of the letters.
    """
    choices = [f"({letter}) {text_of(row, f'choice_{letter}').strip()}" for letter in LETTERS]
    answer = text_of(row, "answer").strip()
    if answer not in tuple(LETTERS):
        raise QualityError(f"answer is {answer!r}, and none of {', '.join(LETTERS)}")
    prompt = _LONGBENCH.format(
        document=text_of(row, "context").strip(),
        question=text_of(row, "question").strip(),
        choices="\n".join(choices),
    )
    return Item(({"role": "user", "content": prompt},), answer, "The correct answer is (")


def prompts(row: Row) -> Item:
    """A prompt with its answer.

    Raises:
        QualityError: no prompt, or no answer.
    """
    prompt: tuple[Message, ...] | str
    if row.get("messages") is not None:
        prompt = conversation(row["messages"], "messages")
    elif isinstance(row.get("prompt"), list):
        prompt = conversation(row["prompt"], "prompt")
    else:
        prompt = text_of(row, "prompt", "messages")
    answer = row.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        raise QualityError(
            "it has no answer, or one that is no text, so nothing can be right or wrong. Leave it "
            "out, or see with `indexcache search compare` how far a pattern moves the model there"
        )
    return Item(prompt, answer)


FILES: dict[str, Reader] = {
    "mrcr": mrcr,
    "graphwalks": graphwalks,
    "longbench-v2": longbench,
    "prompts": prompts,
}
"""What a user's file can hold, by the name that the command gives it."""
