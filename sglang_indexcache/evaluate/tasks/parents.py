"""Parents: which nodes have an edge to a given one, in a long list of edges.

After GraphWalks (openai/graphwalks, MIT): node ids are ``md5(str(i))[:10]``, out-degree 4 with
targets drawn with replacement, edges grouped by source, the answer as ``Final Answer: [..]``. The
wording of the instruction varies between published copies; this is ours, with an example in their
form. As corrected upstream in February 2026, a node is never its own parent and no parent is named
twice. Different here: nodes of few parents are asked for, so that a question has a depth, and the
answer is in the order of the edges, so that it is one string.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks.context import Asked, Draft, Room, shuffled

DEGREE = 4
_OPENING = """You will be given a graph as a list of directed edges, and an operation to perform.
Return the nodes that the operation results in, in the order in which their edges are listed.
The parents of a node are the nodes that have an edge leading to it, without the node itself.
<begin example>
uvwx -> alke
abcd -> uvwx
efgh -> uvwx
Operation: Find the parents of node uvwx.
Final Answer: [abcd, efgh]
<end example>
Here is the graph to operate on:
The graph has the following edges:"""
_QUESTION = "Operation:\nFind the parents of node {node}.\nFinal Answer: ["


def parents(draw: random.Random, room: Room, haystack: str) -> Draft:
    """A random graph."""
    del haystack
    probe = [_edge(n, draw.randrange(1000)) for n in range(1000)]
    edges = (room.tokens - room.cost([_OPENING])) * len(probe) // room.cost(probe)
    degree = DEGREE if edges >= 2 * DEGREE * room.questions else DEGREE // 2
    nodes = max(edges // degree, room.questions)
    graph = [(source, draw.randrange(nodes)) for source in range(nodes) for _ in range(degree)]
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for line, (source, target) in enumerate(graph):
        if source != target:
            found[target].setdefault(source, line)
    if len(found) < room.questions:
        raise QualityError(
            f"parents with {room.questions} questions has room for {nodes} nodes, too few; "
            "ask for longer contexts, or for fewer questions"
        )
    asked = [
        Asked(
            _QUESTION.format(node=_name(node)),
            ", ".join(map(_name, found[node])) + "]",
            tuple(found[node].values()),
        )
        for node in _chosen(draw, found, room.questions, len(graph))
    ]
    return Draft(_OPENING, [_edge(*edge) for edge in graph], shuffled(draw, asked))


def _chosen(
    draw: random.Random, found: dict[int, dict[int, int]], count: int, edges: int
) -> list[int]:
    """Nodes whose first parents lie at stratified depths, of the fewest parents that there are."""
    chosen: list[int] = []
    for part in range(count):
        target = (part + draw.random()) * edges / count

        def badness(node: int, target: float = target) -> tuple[float, int]:
            first = min(found[node].values())
            return abs(first - target) + edges / 40 * len(found[node]), node

        chosen.append(min((node for node in found if node not in chosen), key=badness))
    return chosen


def _name(node: int) -> str:
    return hashlib.md5(str(node).encode(), usedforsecurity=False).hexdigest()[:10]


def _edge(source: int, target: int) -> str:
    return f"{_name(source)} -> {_name(target)}"
