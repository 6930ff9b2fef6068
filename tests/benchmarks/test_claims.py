"""Numbers in the prose of pages are computed anew from the records that they are of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.records import estimate
from benchmarks.smollm2 import everywhere
from benchmarks.smollm2.measure import compared
from sglang_indexcache.lab.search.methods import METHODS
from sglang_indexcache.lab.search.methods.decided import KNOCKOUT, TOGETHER
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.run import PROBES
from tests.lab.search.helpers import targets

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results/smollm2"
RANDOM = "random/everywhere"
"""Record of the 32 heads."""


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
    between = PROBES * (TOGETHER + sum(number * on for number, on in KNOCKOUT) + 16)
    patterns = (METHODS["proposals"].least(goal, [1] * 16) + between) / 16
    return patterns, 100 * patterns / evaluations(goal)


def behind(name: str, kinds: str, ratio: str = "1/4") -> list[float]:
    """Return by searched text the points by which a 1/4's recall differs from Algorithm 1's.

    ``kinds`` of rows are "text", "tasks" or "all".
    """
    data = record(name)
    groups = [g for g in data["judged"] if kinds in ("all", KIND[g in everywhere.TASKS])]
    differences = []
    for corpus in data["searches"]:
        pattern = data["arms"][f"{ratio} default, on {corpus}"]
        pairs = everywhere.beside(data, pattern, groups, f"{ratio} Algorithm 1")
        recall = [row["right"]["passages"] - best["right"]["passages"] for row, best in pairs]
        differences.append(100 * float(np.mean(recall)))
    return differences


KIND = {False: "text", True: "tasks"}


def kl_of_default(name: str, ratio: str = "1/4") -> list[float]:
    """Return by searched text the KL of a pattern at recalled tokens, Algorithm 1's last."""
    data = record(name)
    arms = [f"{ratio} default, on {corpus}" for corpus in data["searches"]]
    arms.append(f"{ratio} Algorithm 1")
    return [
        float(np.mean([row["kl"]["passages"] for g in data["judged"].values() for row in g[p]]))
        for p in (data["arms"][arm] for arm in arms)
    ]


def kl_in_words(name: str, ratio: str = "1/4") -> str:
    *kl, of_algorithm_1 = kl_of_default(name, ratio)
    return f"(KL {min(kl):.2f} to {max(kl):.2f} against {of_algorithm_1:.2f})"


def searched(name: str) -> list[str]:
    return list(record(name)["searches"])


def recall_beside(name: str, arm: str, other: str = "all F", groups: Sequence[str] = ()) -> str:
    """Return the points of recall by which an arm differs from another, on all rows by default."""
    data = record(name)
    pairs = everywhere.beside(data, data["arms"][arm], groups or [*data["judged"]], other)
    return everywhere.change(pairs, "right", "passages", 100)


def change_of_text(name: str, ratio: str, way: str) -> str:
    """Return the points of recall, on all rows of text, by which an arm differs from all F."""
    text = [group for group in record(name)["judged"] if group not in everywhere.TASKS]
    return recall_beside(name, f"{ratio} {way}", groups=text)


def small_recall(name: str) -> str:
    """Return the points of recall that a pattern of the small checkpoint adds to all F's."""
    data = json.loads((RESULTS.parent / "search/tiny-dsa/recall.json").read_text())
    [recall] = [each["recall"] for each in data["comparisons"] if each["name"] == name]
    mean, low, high = (100 * recall[key] for key in ("mean", "low", "high"))
    return f"{mean:+.1f} points ({low:+.1f} to {high:+.1f})"


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


def fewest(name: str, corpus: str) -> str:
    """Return the fewest F layers that a search named."""
    return str(record(name)["searches"][corpus]["smallest_that_keeps_recall"])


def tokens(name: str) -> list[float]:
    """Return by searched text the tokens that a search took, in percent of Algorithm 1's."""
    return [100 * search["of_greedy"] for search in record(name)["searches"].values()]


def tokens_in_words(name: str = "everywhere") -> str:
    """Return the least and the most tokens that a search took, in Algorithm 1's."""
    return f"{min(tokens(name)):.1f} to {max(tokens(name)):.1f} %"


def behind_the_best(name: str) -> list[float]:
    """Return the points by which each text's 1/4 is behind the best that was asked, ascending."""
    points = behind(name, "all")
    return sorted(max(0, *points) - each for each in points)


def behind_the_best_text(corpus: str, name: str = "everywhere") -> str:
    """Return the points by which a text's 1/4 is behind the best text's, with their interval."""
    points = behind(name, "all")
    best = searched(name)[points.index(max(points))]
    return recall_beside(name, f"1/4 default, on {corpus}", f"1/4 default, on {best}")[1:]


def more_documents() -> str:
    """Return the points by which documentation's 1/4 of 32 documents is above Algorithm 1's."""
    return recall_beside("more_documents", "1/4 default, on documentation", "1/4 Algorithm 1")


def named_instead(corpus: str) -> str:
    """Return what the fewest F layers that a search names on 32 heads change in other text."""
    return change_of_text(RANDOM, fewest(RANDOM, corpus), f"default, on {corpus}")


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
    "the default's tokens on sixteen rows": (
        PAGE,
        lambda: f"{tokens_in_words()} of Algorithm 1's tokens on these sixteen rows",
    ),
    "behind Algorithm 1 on 32 heads": (
        PAGE,
        lambda: f"recalls {behind_the_best_text('novel', RANDOM)} points less (KL",
    ),
    "documentation, with more documents": (
        PAGE,
        lambda: f"essay's 1/4, {more_documents()} points",
    ),
    "KL on 32 heads": (PAGE, lambda: kl_in_words(RANDOM)),
    "KL of halves on 32 heads": (PAGE, lambda: f"nearer to it {kl_in_words(RANDOM, '1/2')}"),
    "seven texts near the best on 9 heads": (
        PAGE,
        lambda: f"within {behind_the_best('everywhere')[-2]:.1f} points of the best",
    ),
    "documentation behind the best": (
        PAGE,
        lambda: f"from documentation it is {behind_the_best_text('documentation')} behind the best",
    ),
    "tokens on 32 heads": (PAGE, lambda: f"are probed, {tokens_in_words(RANDOM)}"),
    "halves behind Algorithm 1": (
        PAGE,
        lambda: (
            f"its 1/2 recalls {min(behind('everywhere', 'all', '1/2')):+.1f} to "
            f"{max(behind('everywhere', 'all', '1/2')):+.1f} points beside Algorithm 1's. **On "
            f"32 heads it recalls {-max(behind(RANDOM, 'all', '1/2')):.1f} to "
            f"{-min(behind(RANDOM, 'all', '1/2')):.1f} less**"
        ),
    ),
    "beside Algorithm 1 on 9 heads": (
        PAGE,
        lambda: (
            f"{min(behind('everywhere', 'all')):+.1f} to {max(behind('everywhere', 'all')):+.1f}"
            " points beside Algorithm 1's over all rows"
        ),
    ),
    "behind Algorithm 1 in tasks": (
        PAGE,
        lambda: (
            f"recalls {-max(behind('everywhere', 'tasks')):.0f} to "
            f"{-min(behind('everywhere', 'tasks')):.0f} points more"
        ),
    ),
    "KL on 9 heads": (PAGE, lambda: kl_in_words("everywhere")),
    "the 1/8 on 9 heads": (
        PAGE,
        lambda: f"loses {change_of_text('everywhere', '1/8', 'default, on C')[1:]} points of text",
    ),
    "the 1/8 from essay": (
        PAGE,
        lambda: f"18 for 17: {change_of_text('everywhere', '1/8', 'default, on essay')} points",
    ),
    "beside Algorithm 1, for a user": (
        "docs/search.md",
        lambda: (
            f"recalled {-min(behind('everywhere', 'all')):.1f} points less than Algorithm 1's to "
            f"{max(behind('everywhere', 'all')):.1f} more"
        ),
    ),
    "beside Algorithm 1, in short": (
        "README.md",
        lambda: (
            f"recall {-min(behind('everywhere', 'all')):.1f} points less than Algorithm 1's to "
            f"{max(behind('everywhere', 'all')):.1f} more"
        ),
    ),
    "tokens that it took": (
        "docs/search.md",
        lambda: f"it took {tokens_in_words()} of the tokens",
    ),
    "patterns on 16 documents": (
        "docs/search.md",
        lambda: f"the default {patterns_on_16(47)[0]:.0f} to {patterns_on_16(78)[0]:.0f} on 16",
    ),
    "tokens on 16 documents": (
        "docs/search.md",
        lambda: (
            f"at most {np.ceil(patterns_on_16(30)[1]):.0f} % of Algorithm 1's tokens at 30 layers, "
            f"{np.ceil(patterns_on_16(47)[1]):.0f} % at 47"
        ),
    ),
    "what the 1/8 adds elsewhere": (
        "README.md",
        lambda: (
            f"and {float(elsewhere('everywhere', '1/8', 'Algorithm 1', slice(6, 7))[1:6]):.2f}"
            " on other text"
        ),
    ),
    "5 layers on other text": (
        PAGE,
        lambda: (
            f"names 5 F layers instead, which lose {named_instead('documentation')[1:]} to "
            f"{named_instead('mixed')[1:]} points of text"
        ),
    ),
    "the default on the small checkpoint": (
        "benchmarks/results/search/README.md",
        lambda: f"the default recalls {small_recall('default 1/4')} beside all F at 1/4",
    ),
    "Algorithm 1 on the small checkpoint": (
        "benchmarks/results/search/README.md",
        lambda: f"Algorithm 1 recalls {small_recall('Algorithm 1, 1/4').replace(' points', '')}",
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


def test_quarters_of_32_heads_recall_more_than_all_f_and_four_are_algorithm_1s() -> None:
    assert all(
        change_of_text(RANDOM, "1/4", f"default, on {corpus}")[0] == "+"
        for corpus in searched(RANDOM)
    )
    beside = dict(zip(searched(RANDOM), behind(RANDOM, "all"), strict=True))
    arms = record(RANDOM)["arms"]
    greedy = arms["1/4 Algorithm 1"]
    assert len(beside) == 5
    assert [text for text in beside if arms[f"1/4 default, on {text}"] != greedy] == ["novel"]
    assert -1 < beside["novel"] < -0.9


def test_halves_of_32_heads_recall_more_than_all_f() -> None:
    for corpus in searched(RANDOM):
        assert recall_beside(RANDOM, f"1/2 default, on {corpus}")[0] == "+"


def test_quarters_of_eight_texts_have_layer_18_and_recall_as_much_as_algorithm_1s() -> None:
    beside = dict(zip(searched("everywhere"), behind("everywhere", "all"), strict=True))
    assert len(beside) == 8
    assert [corpus for corpus, points in beside.items() if points < 0] == ["documentation"]
    arms = record("everywhere")["arms"]
    assert all(arms[f"1/4 default, on {corpus}"][18] == "F" for corpus in beside)


def test_no_eighth_of_32_heads_loses_less_than_2_points() -> None:
    data = record(RANDOM)
    for name in data["arms"]:
        ratio, _, way = name.partition(" ")
        if ratio == "1/8":
            assert float(change_of_text(RANDOM, ratio, way).split()[0]) < -2
    named = {corpus: fewest(RANDOM, corpus) for corpus in searched(RANDOM)}
    assert named.pop("novel") == "6/30"
    assert named_instead("novel")[0] == "+"
    assert set(named.values()) == {"5/30"}


def test_more_documents_of_documentation_find_essays_quarter_with_few_more_forwards() -> None:
    more, fewer = record("more_documents"), record("everywhere")
    quarter = "1/4 default, on"
    assert more["arms"][f"{quarter} documentation"] == fewer["arms"][f"{quarter} essay"]
    rows = [data["searched"]["rows"] for data in (more, fewer)]
    shares = [data["searches"]["documentation"]["of_greedy"] for data in (more, fewer)]
    assert rows == [32, 16]
    assert round(100 * (2 * shares[0] / shares[1] - 1)) == 28
