"""Compare what one pass predicts of a segment with what the segment costs when it is measured.

    python -m benchmarks.search_segments [--rows 24] [--splits 20]

A segment is an F or L layer and the S layers behind it; here it alone is not F. On the small
checkpoint every segment is measured on documents of recall and needles, and predicted by the
attention that worst heads keep. For each split of the documents the exact programme makes patterns
of either, on some documents, and they are asked on the others; so is the pattern that is best of
all on those some (F and S alone). With L, at two prices, the two programmes choose among three
letters. Writes search/segments.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper import SMALL
from benchmarks.records import read_arguments
from benchmarks.search_interval import answered
from sglang_indexcache.library import Slopes
from sglang_indexcache.pattern import FOLDED, FULL, SHARED, Pattern, Suffix
from sglang_indexcache.search.calibration import Score
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.fold_slopes import calibrate
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods.pairwise import most_similar
from sglang_indexcache.search.rules import Constraints, Folding, parse_targets
from sglang_indexcache.search.setup import Setup
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json

NAME = "search/segments"
QUICK = {"rows": 2, "splits": 2, "searched": [2]}
TARGETS = ("1/4", "1/8")
PRICES = (Fraction(1, 4), Fraction(1, 2))

Places = NDArray[np.intp]
"""Numbers of documents."""
Segment = tuple[str, int, int]
"""Letter of its first layer, that layer, and the first layer behind it."""


def segments(count: int, letters: str) -> list[Segment]:
    """Return the segments that cost something; layer 0 is F."""
    return [
        (letter, first, end)
        for letter in letters
        for first in range(count)
        for end in range(first + 1, count + 1)
        if (letter == FULL and end > first + 1) or (letter == FOLDED and first)
    ]


def alone(count: int, segment: Segment, slopes: str) -> Pattern:
    """Return the pattern in which everything but a segment is F."""
    letter, first, end = segment
    text = FULL * first + letter + SHARED * (end - first - 1) + FULL * (count - end)
    return Pattern(text).with_suffix(Suffix(slopes=slopes if letter == FOLDED else ""))


def predicted(mass: Floats, segment: Segment) -> float:
    """Return what the layers of a segment lose by ``[N, 2 N]``, as ``folded_mass`` has it."""
    letter, first, end = segment
    column = first + (len(mass) if letter == FULL else 0)
    layers = range(first + (letter == FULL), end)
    return float(sum(1 - mass[layer, column] for layer in layers))


def cheapest(count: int, costs: dict[Segment, float], budget: int, price: Fraction) -> str:
    """Return the pattern whose segments cost least in sum, within a budget of F layers."""
    prices = {FULL: Fraction(1), FOLDED: price}

    @cache
    def best(end: int, left: Fraction) -> tuple[float, str]:
        """Return the least cost of the layers before ``end``, and their letters."""
        if not end:
            return 0.0, ""
        cheapest_so_far = (float("inf"), "")
        for letter, price in prices.items():
            for first in range(end):
                segment = letter, first, end
                is_free = letter == FULL and first == end - 1
                if price > left or not (is_free or segment in costs):
                    continue
                before, text = best(first, left - price)
                total = before + costs.get(segment, 0.0)
                cheapest_so_far = min(
                    cheapest_so_far, (total, text + letter + SHARED * (end - first - 1))
                )
        return cheapest_so_far

    return best(count, Fraction(budget))[1]


def fitted(folder: Path) -> Slopes:
    """Fit slopes to text that no document here is of, with the command's defaults."""
    setup = Setup.read(SMALL, batches=4, held_out=2, score=Score.ALL)
    return calibrate(SMALL, setup, folder / "small.slopes", "float32", lambda: None)


class Study:
    """Losses of patterns and matrices by document; each is measured once."""

    def __init__(self, rows: int, slopes: Slopes) -> None:
        self.evaluator = TransformersEvaluator(SMALL, answered(SMALL, rows), slopes=slopes)
        self.count, self.slopes = self.evaluator.num_layers, slopes
        self._ledger = Ledger(self.evaluator)
        self.kept = np.stack([self.evaluator.folded_mass(d) for d in self._ledger.all_batches])
        folds = {n for n, numbers in enumerate(slopes.by_layer) if numbers is not None}
        self.segments = [
            segment
            for segment in segments(self.count, FULL + FOLDED)
            if segment[0] == FULL or segment[1] in folds
        ]
        self.folds = frozenset(folds)

    def added(self, pattern: Pattern) -> Floats:
        """Return ``[documents]``: what a pattern adds to all F's loss, nats per answer token."""
        full = self._ledger.losses(Pattern.full(self.count))
        return np.asarray(self._ledger.losses(pattern) - full)

    def measured(self, segment: Segment) -> Floats:
        """Return ``[documents]``: what a segment adds where all else is F."""
        return self.added(alone(self.count, segment, self.slopes.digest))

    def every(self, full_layers: int) -> list[Pattern]:
        """Return all patterns of F and S with so many F layers."""
        layer_sets = combinations(range(1, self.count), full_layers - 1)
        return [Pattern.from_layers(self.count, {0, *layers}) for layers in layer_sets]

    def found(self, budget: int, chosen: Places) -> Iterator[tuple[str, Pattern]]:
        """Yield what each way finds on the documents ``chosen``, by its name."""
        mass, all_full = self.kept[chosen].mean(axis=0), Pattern.full(self.count)
        costs = {segment: float(self.measured(segment)[chosen].mean()) for segment in self.segments}
        exact = {segment: cost for segment, cost in costs.items() if segment[0] == FULL}
        plain = mass[:, self.count :]
        yield "F, S: predicted", most_similar(plain, budget, Constraints.make(all_full))
        yield "F, S: measured", Pattern(cheapest(self.count, exact, budget, Fraction(1)))
        every = self.every(budget)
        best = int(np.argmin([self.added(pattern)[chosen].mean() for pattern in every]))
        yield "F, S: every pattern", every[best]
        yield "F, S: uniform", Pattern.uniform(self.count, self.count // budget)
        for price in PRICES:
            name = f"L at {float(price):g}"
            rules = Constraints.make(all_full, (), Folding(price, self.folds, self.slopes.digest))
            yield f"{name}: predicted", most_similar(mass, budget, rules)
            letters = Pattern(cheapest(self.count, costs, budget, price))
            slopes = self.slopes.digest if letters.is_folded else ""
            yield f"{name}: measured", letters.with_suffix(Suffix(slopes=slopes))


def split(rows: int, searched: int, chance: np.random.Generator) -> tuple[Places, Places]:
    """Return documents to search on, half of either task, and the others."""
    orders, half = [task * rows + chance.permutation(rows) for task in range(2)], searched // 2
    chosen, remaining = (
        [order[cut] for order in orders] for cut in (slice(half), slice(half, None))
    )
    return np.concatenate(chosen), np.concatenate(remaining)


def rank_correlation(rows: list[dict[str, Any]]) -> float:
    """Return Spearman's rho of what is predicted and measured; ties keep their order."""
    ranks = [
        np.argsort(np.argsort([row[key] for row in rows])) for key in ("predicted", "measured")
    ]
    return float(np.corrcoef(ranks)[0, 1])


def by_way(study: Study, budget: int, parts: list[tuple[Places, Places]]) -> dict[str, Any]:
    """Return what each way's patterns add, on documents that chose them and on the others."""
    ways: dict[str, list[tuple[str, float, float]]] = {}
    for number, (chosen, remaining) in enumerate(parts, 1):
        for name, pattern in study.found(budget, chosen):
            added = study.added(pattern)
            line = (pattern.layers, float(added[chosen].mean()), float(added[remaining].mean()))
            ways.setdefault(name, []).append(line)
        print(f"budget {budget}: split {number} of {len(parts)}", flush=True)
    optimum = [line[0] for line in ways["F, S: every pattern"]]
    return {
        name: {
            "searched": float(np.mean([line[1] for line in lines])),
            "held_out": float(np.mean([line[2] for line in lines])),
            "held_out_worst": max(line[2] for line in lines),
            "is_optimum": sum(line[0] == best for line, best in zip(lines, optimum, strict=True)),
            "patterns": sorted({line[0] for line in lines}),
        }
        for name, lines in ways.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=24, help="documents of recall, and of needles")
    parser.add_argument("--searched", type=int, nargs="+", default=[8, 24], help="documents")
    parser.add_argument("--splits", type=int, default=20)
    arguments = read_arguments(parser, NAME, argv, QUICK)
    with TemporaryDirectory() as folder:
        study = Study(arguments.rows, fitted(Path(folder)))
    mass = study.kept.mean(axis=0)
    rows = []
    for segment in study.segments:
        added, guess = study.measured(segment).mean(), predicted(mass, segment)
        rows.append({"segment": segment, "predicted": guess, "measured": float(added)})
        print(segment, round(guess, 4), round(float(added), 4), flush=True)
    goal = parse_targets(TARGETS, Constraints.make(Pattern.full(study.count)))
    by_layers = {}
    for searched in arguments.searched:
        chance = np.random.default_rng(searched)
        parts = [split(arguments.rows, searched, chance) for _ in range(arguments.splits)]
        by_layers[str(searched)] = {
            mark.label: by_way(study, mark.full_layers, parts) for mark in goal.marks
        }
    record = {
        "what": "segments of the small checkpoint, predicted from one pass and measured alone",
        "command": arguments.command,
        "checkpoint": checkpoint_digest(SMALL),
        "machine": machine(),
        "documents": 2 * arguments.rows,
        "splits": arguments.splits,
        "rank_correlation": {
            letter: rank_correlation([row for row in rows if row["segment"][0] == letter])
            for letter in (FULL, FOLDED)
        },
        "segments": rows,
        "found": by_layers,
    }
    write_json(arguments.output.with_suffix(".json"), record)


if __name__ == "__main__":
    main()
