"""GraphWalks: what an operation on a long list of edges results in.

Rows of openai/graphwalks (MIT): ``prompt``, ``answer_nodes`` (or ``answer``, as its card calls it),
``problem_type``. The prompt is asked as it is, as one user message. Parents of a node are written
in the order of their edges, so their tokens can be scored; what a breadth-first search reaches has
no order, so those rows are asked only of a model that answers by itself. Files from before
February 2026 name some nodes among their own parents; that is mended. The card's score is
`metrics.graphwalks`.
"""

from __future__ import annotations

import json
import re

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.items import Item, Row, text_of

BEGUN = "Final Answer: ["


def graphwalks(row: Row) -> Item:
    """A graph with its question.

    Raises:
        QualityError: a field that is missing, or an answer that is no list of nodes.
    """
    prompt, kind = text_of(row, "prompt"), text_of(row, "problem_type")
    messages = ({"role": "user", "content": prompt},)
    nodes = _nodes(row)
    if kind.lower() != "parents":
        return Item(messages, ", ".join(nodes) + "]", BEGUN, one_form=False)
    asked = re.findall(r"parents of node (\w+)", prompt)
    nodes = [node for node in nodes if node not in asked[-1:]]
    starts: dict[str, int] = {}
    for edge in re.finditer(r"^(\w+) -> (\w+)\s*$", prompt, re.MULTILINE):
        if asked and edge[2] == asked[-1] and edge[1] in nodes:
            starts.setdefault(edge[1], edge.start())
    if not nodes or set(starts) != set(nodes):
        return Item(messages, ", ".join(nodes) + "]", BEGUN, one_form=not nodes)
    ordered = sorted(starts, key=lambda node: starts[node])
    depth = starts[ordered[0]] / len(prompt)
    return Item(messages, ", ".join(ordered) + "]", BEGUN, depth)


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
