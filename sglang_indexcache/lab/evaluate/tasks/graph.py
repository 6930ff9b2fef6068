"""Graphs: the parents of a node, or what a breadth-first search reaches, in a long list of edges.

After GraphWalks (openai/graphwalks, MIT): node ids are ``md5(str(i))[:10]``, targets drawn with
replacement, edges grouped by source, the answer as ``Final Answer: [..]``. The wording of the
instruction varies between published copies; this is ours, with an example in their form. As
corrected upstream in February 2026, a node is never its own parent and no node is named twice.
Different here: nodes of few parents are asked for, so that a question has a depth; edges leave a
node twice where a search is asked for, so that an answer of three steps has at most eight nodes;
and answers are in the order of the edges, so that each is one string.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.tasks.context import Asked, Draft, Room, Task, shuffled, strata

DEGREE, SEARCHED_DEGREE = 4, 2
Edge = tuple[int, int]
_OPENING = """You will be given a graph as a list of directed edges, and an operation to perform.
{rule}
<begin example>
{example}
<end example>
Here is the graph to operate on:
The graph has the following edges:"""
_PARENTS = _OPENING.format(
    rule="Return the nodes that the operation results in, in the order in which their edges are "
    "listed.\nThe parents of a node are the nodes that have an edge leading to it, without the "
    "node itself.",
    example="uvwx -> alke\nabcd -> uvwx\nefgh -> uvwx\nOperation: Find the parents of node uvwx.\n"
    "Final Answer: [abcd, efgh]",
)
_SEARCH = _OPENING.format(
    rule="Return the nodes that the operation results in, in the order in which the edges that "
    "lead the search to them are listed.\nA breadth-first search from a node reaches at a depth "
    "the nodes that are so many edges away, and no fewer.",
    example="uvwx -> alke\nalke -> abcd\nabcd -> uvwx\nalke -> efgh\nOperation: Perform a "
    "breadth-first search from node uvwx. Find the nodes that it reaches at depth 2.\n"
    "Final Answer: [abcd, efgh]",
)
_BEGUN = "\nFinal Answer: ["


def parents(draw: random.Random, room: Room) -> Draft:
    """Draft a random graph, and ask who leads to a node."""
    graph = _edges(draw, room, _PARENTS, DEGREE)
    parents_of: dict[int, dict[int, int]] = defaultdict(dict)
    for line, (source, target) in enumerate(graph):
        if source != target:
            parents_of[target].setdefault(source, line)
    _check(len(parents_of), room)
    questions = [
        _make_question(f"Find the parents of node {_name(node)}.", ends, tuple(ends.values()))
        for node in _chosen(draw, parents_of, room.questions, len(graph))
        for ends in [parents_of[node]]
    ]
    return Draft(_PARENTS, [_line(edge) for edge in graph], shuffled(draw, questions))


def search(depth: int) -> Task:
    """Make the task of a random graph, and what a breadth-first search reaches at a depth."""

    def task(draw: random.Random, room: Room) -> Draft:
        graph = _edges(draw, room, _SEARCH, SEARCHED_DEGREE)
        leaving: dict[int, list[int]] = defaultdict(list)
        for line, (source, _) in enumerate(graph):
            leaving[source].append(line)
        reached = {start: _reached(graph, leaving, start, depth) for start in leaving}
        starts = [start for start, (ends, _) in reached.items() if ends]
        _check(len(starts), room)
        questions = [
            _make_question(
                f"Perform a breadth-first search from node {_name(starts[place])}. Find the nodes "
                f"that it reaches at depth {depth}.",
                *reached[starts[place]],
            )
            for place in strata(draw, room.questions, len(starts))
        ]
        return Draft(_SEARCH, [_line(edge) for edge in graph], shuffled(draw, questions))

    return task


def _edges(draw: random.Random, room: Room, opening: str, most: int) -> list[Edge]:
    """Draw as many edges as fit, so many from each node; half if nodes would be too few."""
    probe = [_line((n, draw.randrange(1000))) for n in range(1000)]
    edges = (room.tokens - room.cost([opening])) * len(probe) // room.cost(probe)
    degree = most if edges >= 2 * most * room.questions else most // 2
    nodes = max(edges // degree, room.questions)
    return [(source, draw.randrange(nodes)) for source in range(nodes) for _ in range(degree)]


def _reached(
    graph: list[Edge], leaving: dict[int, list[int]], start: int, depth: int
) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return nodes at exactly this distance by the line that leads there; and deciding lines."""
    visited, frontier, deciding = {start}, [start], list[int]()
    reached: dict[int, int] = {}
    for _ in range(depth):
        lines = sorted(line for node in frontier for line in leaving[node])
        deciding += lines
        reached = {}
        for line in lines:
            if graph[line][1] not in visited:
                reached.setdefault(graph[line][1], line)
        visited |= reached.keys()
        frontier = list(reached)
    return reached, tuple(deciding)


def _check(nodes: int, room: Room) -> None:
    if nodes < room.questions:
        raise QualityError(
            f"a graph of {room.tokens} tokens has {nodes} nodes to ask for, too few for "
            f"{room.questions} questions"
        )


def _chosen(
    draw: random.Random, parents_of: dict[int, dict[int, int]], count: int, edges: int
) -> list[int]:
    """Choose nodes whose first parents lie at stratified depths, with few parents."""
    chosen: list[int] = []
    for part in range(count):
        target = (part + draw.random()) * edges / count

        def badness(node: int, target: float = target) -> tuple[float, int]:
            first = min(parents_of[node].values())
            return abs(first - target) + edges / 40 * len(parents_of[node]), node

        chosen.append(min((node for node in parents_of if node not in chosen), key=badness))
    return chosen


def _make_question(operation: str, ends: dict[int, int], lines: tuple[int, ...]) -> Asked:
    answer = ", ".join(map(_name, ends)) + "]"
    return Asked(f"Operation:\n{operation}", answer, lines, begun=_BEGUN)


def _name(node: int) -> str:
    return hashlib.md5(str(node).encode(), usedforsecurity=False).hexdigest()[:10]


def _line(edge: Edge) -> str:
    return f"{_name(edge[0])} -> {_name(edge[1])}"
