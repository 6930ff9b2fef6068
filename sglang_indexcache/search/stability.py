"""Whether another calibration set gives the same answer (paper, "Properties of the greedy ...")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
from rich.console import Console
from scipy import stats

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.session import run_search
from sglang_indexcache.search.sources import Source
from sglang_indexcache.search.targets import parse_targets
from sglang_indexcache.support.files import write_json


@dataclass(frozen=True)
class Agreement:
    """Agreement of searches, over all pairs of them.

    Attributes:
        kendall_tau: mean Kendall rank correlation of the order in which layers became S, over the
            layers that both flipped; 1 is the same order, 0 none in common. NaN where fewer than
            two layers were flipped by both.
        kendall_tau_lowest: the lowest of them.
        common_full_layers: by mark, mean share of F layers that two answers have in common.
        expected_by_chance: by mark, that share for patterns drawn at random (layer 0 fixed).
    """

    kendall_tau: float
    kendall_tau_lowest: float
    common_full_layers: Mapping[str, float]
    expected_by_chance: Mapping[str, float]


def search_each(
    sources: Sequence[Source],
    goals: Sequence[str] | None,
    options: Options,
    output: Path,
    console: Console,
) -> Agreement:
    """Search on each source for the same goals; ``stability.json`` says how far they agree."""
    searches = []
    for number, source in enumerate(sources):
        with source.open() as setup:
            rules = Constraints.make(setup.checkpoint.own)
            targets = parse_targets(goals, rules)
            folder = output / f"set-{number}"
            searches.append(run_search(setup, rules, targets, options, folder, console=console))
    orders = [[s.layer for s in search.path if s.layer is not None] for search in searches]
    answers = [{f.mark.label: f.pattern for f in s.found.values()} for s in searches]
    result = agreement(orders, answers)
    patterns = [{mark: str(p) for mark, p in answer.items()} for answer in answers]
    numbers = {**asdict(result), "orders": orders, "patterns": patterns}
    write_json(output / "stability.json", numbers)
    return result


def agreement(
    orders: Sequence[Sequence[int]], answers: Sequence[Mapping[str, Pattern]]
) -> Agreement:
    """Compare two or more searches of one checkpoint.

    Args:
        orders: for each search the layers in the order in which they became S.
        answers: for each search its pattern by mark.
    """
    taus = [_tau(first, second) for first, second in combinations(orders, 2)]
    known = [tau for tau in taus if not np.isnan(tau)] or [float("nan")]
    marks = [mark for mark in answers[0] if all(mark in answer for answer in answers)]
    return Agreement(
        kendall_tau=float(np.mean(known)),
        kendall_tau_lowest=min(known),
        common_full_layers={
            mark: float(np.mean([_common(a[mark], b[mark]) for a, b in combinations(answers, 2)]))
            for mark in marks
        },
        expected_by_chance={mark: _chance(answers[0][mark]) for mark in marks},
    )


def _tau(first: Sequence[int], second: Sequence[int]) -> float:
    both = sorted(set(first) & set(second))
    if len(both) < 2:
        return float("nan")
    ranks = [[order.index(layer) for layer in both] for order in (first, second)]
    return float(stats.kendalltau(*ranks).statistic)


def _common(first: Pattern, second: Pattern) -> float:
    shared = set(first.full_layers) & set(second.full_layers)
    return len(shared) / max(len(first.full_layers), len(second.full_layers))


def _chance(pattern: Pattern) -> float:
    """Expected share in common of two random sets of this size that both hold layer 0."""
    kept, total = len(pattern.full_layers), len(pattern)
    others = 0.0 if total == 1 else (kept - 1) ** 2 / (total - 1)
    return (1 + others) / kept
