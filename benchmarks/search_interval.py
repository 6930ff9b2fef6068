"""Count how often the interval of a held-out loss covers the truth: Student's, and ours.

    python -m benchmarks.search_interval [--runs 20000] [--seed 0]

A few documents often carry most of what a pattern loses, and then Student's interval, which the
search told until this study, lies too low. Each run takes some documents and asks whether the
interval of their mean covers the mean of all. Three kinds of truth:

* made-up losses whose mean is known, of documents that are alike up to one in 24 that loses;
* the patterns that ship for the small checkpoint, on recall and needles of 256 tokens: the answers'
  loss of 96 documents is measured once, and runs draw from these.
  It also says what the interval covers of those runs that hold one of the two documents that lose
  most, and of those that hold neither;
* patterns that `both` found on 16 documents of made-up landscapes, on 3,000 others.

It also counts how often `search compare` called a larger difference than its bound "unlikely" and
the truth was larger: without a least number of documents, as before, and with it.

Writes search/interval.json.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.records import read_arguments
from benchmarks.search_synthetic import FRESH, FRESH_SEED, KINDS, MARKS, Landscape
from benchmarks.training.retrieval import MachineText, TaskWords
from benchmarks.training.tasks import TASKS, TEXT_CHARACTERS
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration, Objective, Score
from sglang_indexcache.search.compare import SMALL
from sglang_indexcache.search.difference import CONFIDENCE, ENOUGH
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.search.run import Search
from sglang_indexcache.stats.bounds import Estimate, student_half_width, unseen
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

NAME = "search/interval"
QUICK = {"runs": 500, "landscapes": 1, "rows": 4}
DOCUMENTS = (8, 16, 32, 64, 128)
WORST = 2
"""Documents that lose most, which runs hold or not."""
LENGTH = 256
SHIPPED = ("tiny-dsa-1of2", "tiny-dsa-1of4", "tiny-dsa-1of8")
LAYERS, SEARCHED_ON, FIRST_SEED = 30, 16, 3000
SEARCHED_KINDS = ("base", "noisy batches", "heavy-tailed", "rare critical layers")
REFERENCE_LOSS = 2.0
"""Nats per token, of which `search compare` calls one percent small."""

Draw = Callable[[np.random.Generator, tuple[int, int]], Floats]
Intervals = tuple[Floats, Floats]


def lognormal(sigma: float) -> Draw:
    """Draw losses of every document, some much more than others; mean ``exp(sigma^2 / 2)``."""
    return lambda chance, shape: np.exp(sigma * chance.standard_normal(shape))


def one_in(documents: int, loss: float = 1.5) -> Draw:
    """Draw losses of one document in so many; the others move a little both ways."""
    return lambda chance, shape: (
        loss * (chance.random(shape) < 1 / documents) + 0.01 * chance.standard_normal(shape)
    )


MADE_UP: dict[str, tuple[Draw, float]] = {
    "documents alike (normal)": (lambda chance, shape: chance.normal(0.1, 0.3, shape), 0.1),
    "lognormal, sigma 1": (lognormal(1.0), float(np.exp(0.5))),
    "lognormal, sigma 1.5": (lognormal(1.5), float(np.exp(1.125))),
    "Pareto, exponent 2.5": (lambda chance, shape: chance.pareto(2.5, shape), 1 / 1.5),
    "one document in 8": (one_in(8), 1.5 / 8),
    "one document in 16": (one_in(16), 1.5 / 16),
    "one document in 24": (one_in(24), 1.5 / 24),
}
"""Ways to draw differences, and the mean of each."""


def student(values: Floats) -> Intervals:
    """Return Student's t intervals of ``[runs, n]`` values, which were told before."""
    half, mean = student_half_width(values, CONFIDENCE), values.mean(axis=-1)
    return mean - half, mean + half


def ours(values: Floats) -> Intervals:
    """Return the intervals that `search run` and `search compare` tell."""
    return Estimate.of(values).interval(CONFIDENCE)


KINDS_OF_INTERVAL = {"student": student, "ours": ours}


def covered(values: Floats, truth: float) -> dict[str, dict[str, float]]:
    """Return the shares of ``[runs, n]`` in which the truth is inside, or above what is told."""
    rates = {}
    for name, interval in KINDS_OF_INTERVAL.items():
        low, high = interval(values)
        rates[name] = {
            "covers": float(((low <= truth) & (truth <= high)).mean()),
            "tells_too_little": float((high < truth).mean()),
            "median_width_over_truth": float(np.median(high - low) / abs(truth)),
        }
    return rates


def by_documents(
    draw: Draw, truth: float, runs: int, chance: np.random.Generator
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the coverage at every number of documents."""
    return {str(count): covered(draw(chance, (runs, count)), truth) for count in DOCUMENTS}


def of_these(values: Floats) -> tuple[Draw, float]:
    """Take a population's documents at random, with replacement; and its mean."""
    return lambda chance, shape: chance.choice(values, shape), float(values.mean())


def with_the_worst(
    values: Floats, runs: int, chance: np.random.Generator
) -> dict[str, dict[str, float]]:
    """Return how often runs hold none of the worst documents, and what our interval covers then."""
    truth, worst, rates = values.mean(), np.argsort(values)[-WORST:], {}
    for count in DOCUMENTS:
        places = chance.integers(len(values), size=(runs, count))
        low, high = ours(values[places])
        covers, holds = (low <= truth) & (truth <= high), np.isin(places, worst).any(axis=-1)
        rates[str(count)] = {
            "hold_none": float((~holds).mean()),
            "covers_without": float(covers[~holds].mean()),
            "covers_with": float(covers[holds].mean()),
        }
    return rates


def answered(folder: Path, rows: int) -> Calibration:
    """Return documents of recall, then as many of needles, whose answers count; one a batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = TaskWords(tokenizer)
    text = MachineText.read(tokenizer, TEXT_CHARACTERS).held_out
    documents = [
        TASKS[task](words, text, LENGTH, random.Random(f"interval/{task}/{row}"))
        for task in ("recall", "needles")
        for row in range(rows)
    ]
    checkpoint = Checkpoint.read(folder)
    objective = Objective(Score.ANSWERS, int(checkpoint.shape["index_topk"]))
    return Calibration(
        tuple(tuple(map(int, document.ids)) for document in documents),
        1,
        "recall and needles",
        counted=tuple(objective.counted(np.array(document.answer)) for document in documents),
        objective=objective,
    )


def shipped_losses(rows: int) -> dict[str, list[float]]:
    """Measure what each shipped pattern adds to each document's loss on answers, nats per token."""
    folder, places = shipped_checkpoint(), range(2 * rows)
    checkpoint = Checkpoint.read(folder)
    evaluator = TransformersEvaluator(folder, answered(folder, rows))
    start = evaluator.loss(Pattern.full(checkpoint.num_layers), places)
    library = Library.default()
    return {
        name: (evaluator.loss(library.resolve(name, checkpoint).pattern, places) - start).tolist()
        for name in SHIPPED
    }


def searched_losses(kind: str, seed: int) -> Iterable[Floats]:
    """Yield for each target what the pattern found on few documents adds on many others."""
    rules = Constraints.make(Pattern.full(LAYERS))
    ledger = Ledger(Landscape(KINDS[kind], LAYERS, SEARCHED_ON, seed))
    search = Search(ledger, parse_targets(MARKS, rules), Options.parse("both"))
    for _ in search.run():
        pass
    fresh = Landscape(KINDS[kind], LAYERS, FRESH, seed, FRESH_SEED)
    start = fresh.loss(rules.start, range(FRESH))
    for choice in search.found.values():
        yield fresh.loss(choice.pattern, range(FRESH)) - start


def searched(kind: str, landscapes: int, runs: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return the mean coverage over the patterns that searches of one kind of landscape found."""
    rows = [
        by_documents(*of_these(values), runs, chance)
        for seed in range(FIRST_SEED, FIRST_SEED + landscapes)
        for values in searched_losses(kind, seed)
    ]
    means = {
        count: {
            name: {
                kind: float(np.mean([row[count][name][kind] for row in rows])) for kind in shares
            }
            for name, shares in intervals.items()
        }
        for count, intervals in rows[0].items()
    }
    return {"patterns": len(rows), "documents": means}


def called_unlikely(share: float, runs: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return how often `search compare` calls the true difference unlikely.

    One document in 16 loses; ``share`` is the true loss over the reference's.
    """
    truth = share * REFERENCE_LOSS
    draw, rates = one_in(16, 16 * truth), {}
    for count in DOCUMENTS:
        values = draw(chance, (runs, count))
        row = {}
        for name, interval in KINDS_OF_INTERVAL.items():
            low, high = interval(values)
            most = np.maximum(-low, high)
            unlikely = (low <= 0) & (high >= 0) & (most <= SMALL * REFERENCE_LOSS)
            unlikely &= (name == "student") | (count >= ENOUGH)
            row[name] = float((unlikely & (most < truth)).mean())
        rates[str(count)] = row
    return rates


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20_000, help="of each world")
    parser.add_argument("--landscapes", type=int, default=8, help="of each kind that is searched")
    parser.add_argument("--rows", type=int, default=48, help="documents of recall, and of needles")
    parser.add_argument("--seed", type=int, default=0)
    arguments = read_arguments(parser, NAME, quick=QUICK)
    runs, chance = arguments.runs, np.random.default_rng(arguments.seed)
    made_up = {name: by_documents(*world, runs, chance) for name, world in MADE_UP.items()}
    losses = shipped_losses(arguments.rows)
    shipped = {
        name: by_documents(*of_these(np.array(values)), runs, chance)
        for name, values in losses.items()
    }
    by_kind = {
        kind: searched(kind, arguments.landscapes, runs // 20, chance) for kind in SEARCHED_KINDS
    }
    facts = {
        "command": arguments.command,
        "runs": runs,
        "seed": arguments.seed,
        "machine": machine(),
        "unseen_share": {str(count): unseen(count, 1 - CONFIDENCE) for count in DOCUMENTS},
        "made_up": made_up,
        "shipped_losses": losses,
        "shipped": shipped,
        "shipped_worst": {
            name: with_the_worst(np.array(values), runs, chance) for name, values in losses.items()
        },
        "searched": by_kind,
        "called_unlikely": {
            str(share): called_unlikely(share, runs, chance) for share in (0.01, 0.025)
        },
    }
    write_json(arguments.output.with_suffix(".json"), facts)


if __name__ == "__main__":
    main()
