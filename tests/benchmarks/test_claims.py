"""Numbers in the prose of pages are computed anew from the records that they are of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.records import estimate
from benchmarks.smollm2 import everywhere
from benchmarks.smollm2.measure import compared
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.pattern import Pattern
from tests.lab.search.helpers import targets

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/smollm2"


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def change(lines: list[dict[str, Any]], name: str, field: str = "recall") -> str:
    """Return what a line changes against the first, as a page writes it."""
    [line] = [line for line in lines if line["name"] == name]
    scale = 100 if field == "recall" else 1
    return estimate(*compared(line, lines[0], field), scale)


def at(length: int, topk: int) -> list[dict[str, Any]]:
    [cell] = [c for c in record("long")["cells"] if (c["length"], c["topk"]) == (length, topk)]
    lines: list[dict[str, Any]] = cell["lines"]
    return lines


def verdict(length: str, pattern: str) -> dict[str, Any]:
    verdicts = json.loads((RESULTS / "verdicts" / length / "eval.json").read_text())["verdicts"]
    letters = {"1/4": "FSFSSSSFFSSFFSFSSFSSSSSSSSSSSS", "1/8": "FSFSSSSFSSSSSSSSSFSSSSSSSSSSSS"}
    [found] = [v for v in verdicts if v["pattern"] in (pattern, letters.get(pattern))]
    return dict(found)


def share(method: str) -> str:
    """Return a search's tokens in those of Algorithm 1, at 30 layers and four rows."""
    goal = targets(30, "1/2", "1/4", "1/8")
    return f"{METHODS[method].least(goal, [1024] * 4) / (evaluations(goal) * 4096):.3f}"


def patterns_on_16(layers: int) -> tuple[float, float]:
    """Return what the default search runs at most on 16 documents: patterns, and percent."""
    goal = targets(layers, "1/2", "1/4", "1/8")
    patterns = METHODS["proposals"].least(goal, [1] * 16) / 16
    return patterns, 100 * patterns / evaluations(goal)


def behind(name: str, corpus: str, ratio: str, *, tasks: bool) -> str:
    """Return the points of recall by which a default's pattern differs from Algorithm 1's."""
    data = record(name)
    groups = [group for group in data["judged"] if tasks or group not in everywhere.TASKS]
    pattern = data["arms"][f"{ratio} default, on {corpus}"]
    pairs = everywhere.beside(data, pattern, groups, f"{ratio} Algorithm 1")
    return everywhere.change(pairs, "right", "passages", 100)


def worst_indexer() -> str:
    layers = record("random/indexers")["indexers"]
    worst = max(layers, key=lambda entry: float(np.mean(entry["loss"][-6:])))
    return f"of layer {worst['layer']}"


def elsewhere(name: str, ratio: str, way: str, cells: slice) -> str:
    """Return cells of a line of the study on other people's text."""
    [line] = [
        line for line in everywhere.table(record(name)).splitlines() if f"| {ratio} {way}" in line
    ]
    return " | ".join([cell.strip() for cell in line.strip("| ").split("|")][cells])


def found(name: str, corpus: str) -> tuple[str, float]:
    """Return the fewest F layers that a search named, and its tokens in Algorithm 1's, percent."""
    search = record(name)["searches"][corpus]
    return search["smallest_that_keeps_recall"], 100 * search["of_greedy"]


SEARCHED = tuple(record("everywhere")["searches"])


def the_quarter() -> Pattern:
    [pattern] = {entry["patterns"]["1/4"] for entry in record("everywhere")["searches"].values()}
    return Pattern(pattern)


PAGE = "benchmarks/results/smollm2/real-model.md"
CLAIMS: dict[str, tuple[str, Callable[[], str]]] = {
    "one pass's tokens": (
        PAGE,
        lambda: f"| one pass, worst head on average | {share('one-pass')} |",
    ),
    "similarity's tokens": (PAGE, lambda: f"| similarity (the paper's) | {share('similarity')} |"),
    "Algorithm 1's patterns": (
        PAGE,
        lambda: f"{evaluations(targets(30, '1/2', '1/4', '1/8'))} patterns on each of the four",
    ),
    "one pass's 1/4 on 32 heads": (
        PAGE,
        lambda: f"| {change(record('random/searched')['lines'], '1/4 one-pass:mixed')} |",
    ),
    "the 1/8 at 8,192": (PAGE, lambda: f"1/8 {change(at(8192, 512), '1/8 greedy:mixed')}"),
    "its text at 8,192": (
        PAGE,
        lambda: f"its text {change(at(8192, 512), '1/8 greedy:mixed', 'loss')}",
    ),
    "one pass's 1/2 at 8,192": (
        PAGE,
        lambda: f"one pass's 1/2 {change(at(8192, 512), '1/2 one-pass:mixed')}",
    ),
    "similarity's 1/2 at 8,192": (
        PAGE,
        lambda: f"similarity's 1/2 {change(at(8192, 512), '1/2 similarity:mixed')}",
    ),
    "the worst indexer": (PAGE, lambda: f"and the first, {worst_indexer()}, takes"),
    "the default's tokens": (
        PAGE,
        lambda: (
            f"for {min(found('everywhere', corpus)[1] for corpus in SEARCHED):.1f} to "
            f"{max(found('everywhere', corpus)[1] for corpus in SEARCHED):.1f} % of Algorithm 1's"
        ),
    ),
    "one quarter for all": (
        PAGE,
        lambda: f"give one 1/4** ({' '.join(map(str, the_quarter().full_layers))})",
    ),
    "what the 1/8 adds elsewhere": (
        "README.md",
        lambda: (
            f"and {float(elsewhere('everywhere', '1/8', 'default, on nov', slice(6, 7))[1:6]):.2f}"
            " on other text"
        ),
    ),
    "11 layers on other text": (
        PAGE,
        lambda: (
            f"{found('random/everywhere', 'novel')[0].partition('/')[0]} F layers are named "
            f"({elsewhere('random/everywhere', '11/30', 'default, on novel', slice(8, 9))} on other"
        ),
    ),
    "5 layers on other text": (
        PAGE,
        lambda: (
            f"on documentation {found('random/everywhere', 'documentation')[0][0]} "
            f"({elsewhere('random/everywhere', '5/30', 'default, on doc', slice(8, 9))}: four"
        ),
    ),
    "the verdict on 1/8 at 8,192": (
        PAGE,
        lambda: f"**1/8 loses {-100 * verdict('8Ki', '1/8')['difference']:.1f} points**",
    ),
    "the verdict on 1/4 at 8,192": (
        PAGE,
        lambda: f"by 1/4** ({100 * verdict('8Ki', '1/4')['difference']:+.1f}; ",
    ),
}
"""Page, and the words of it that the record gives, by what they are about."""


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_page_says_what_its_record_says(claim: str) -> None:
    page, words = CLAIMS[claim]
    text = " ".join((ROOT / page).read_text().split())
    assert words() in text, words()
