"""Simulate what happens to evaluations before their bounds judge them, and beside that.

    python -m benchmarks.quality_gates [--evaluations 10000] [--seed 0]

`benchmarks/quality_statistics.py` asks how often the bounds are wrong of runs that reached them.
This asks what happens to the others, under the rules of today and those before:

* the control below `index_topk` tokens, on an engine that flips answers by itself: how many sound
  runs it refuses, and how many arms that really differ there;
* the pattern known to be bad, where it loses what the paper's Table 4 says that uniform 1/4 loses:
  how many cells see it, by right answers and by probabilities, and how often a harmless pattern is
  then shown to be harmless;
* answers that are missing because of what the pattern broke: how often a loss is called none.

Writes quality/gates.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.quality_statistics import CELLS, HeldBack, batches, flipped, whole_contexts
from benchmarks.records import read_arguments
from sglang_indexcache.lab.evaluate.plan import (
    CONTROL_CONTEXTS,
    CORRELATION,
    DEVIATION,
    DISCORDANCE,
    ENDPOINTS,
    enough_contexts,
)
from sglang_indexcache.lab.evaluate.run import MOST_MISSING
from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS
from sglang_indexcache.lab.evaluate.verdict import bounds, exceeds_noise, sees
from sglang_indexcache.stats.bounds import Estimate
from sglang_indexcache.stats.pairs import Cell, Differences, Flips, Floats
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

NAME = "quality/gates"
QUICK = {"evaluations": 200}
FLIPS = (0.0, 0.0005, 0.001, 0.005, 0.01, 0.02, 0.05)
FAULTS = (0.05, 0.1, 0.25, 0.5)
ENGINE = 0.005
"""The share of answers that the engine flips where nothing else is said."""
DEFAULT = HeldBack((40,) * 18, 0.01, whole_contexts(0.01, flips=ENGINE))
"""A plan at three lengths; what is lost are whole contexts."""
TIMES = (1.0, 1.5, 2.0)


def control(flips: float, fault: float, evaluations: int, seed: int) -> dict[str, Any]:
    """Return how often the control refuses an arm.

    Args:
        flips: how often the engine flips an answer by itself, whoever is asked.
        fault: share of the answers that the arm changes there; 0 is a sound run.
        evaluations: simulated; each has the contexts of six tasks.
        seed: of the answers.
    """
    chance = np.random.default_rng(seed)
    shape = evaluations, CELLS * CONTROL_CONTEXTS * QUESTIONS
    first, again, arm = (chance.random(shape) < flips for _ in range(3))
    arm_differs, repeat_differs = first != (arm ^ (chance.random(shape) < fault)), first != again
    refused = exceeds_noise(
        (arm_differs & ~repeat_differs).sum(axis=-1), (repeat_differs & ~arm_differs).sum(axis=-1)
    )
    return {
        "flips": flips,
        "fault": fault,
        "pairs": shape[1],
        "refused": float(refused.mean()),
        "refused_by_one_difference": float(arm_differs.any(axis=-1).mean()),
    }


PAPER = {"RULER": 0.015, "MRCR": 0.053, "GraphWalks": 0.178}
"""The share of right answers that uniform 1/4 loses on GLM-5, by the paper's Table 4."""
TASKS = {"needles": "RULER", "tracking": "RULER", "rounds": "MRCR", "parents": "GraphWalks",
         "search-2": "GraphWalks", "search-3": "GraphWalks"}  # fmt: skip
LENGTHS = 3
MOVES = 0.03
"""Standard deviation of a context's mean probability, of what the bad pattern makes of it.

Assumed; on the shipped checkpoint it is 0.02 to 0.03 where a pattern loses nothing, 0.08 where it
loses much.
"""


def bad_pattern(
    contexts: int, endpoint: str, sure: bool, evaluations: int, seed: int
) -> dict[str, Any]:
    """Count the cells that see the bad pattern lose, and how often a harmless one is called so.

    Cells that do not see it at the end leave the claim, which is judged at the last look.

    Args:
        contexts: of each cell.
        endpoint: what of the harmless pattern is judged; it differs as a plan assumes.
        sure: whether a loss is seen by probabilities, too.
        evaluations: simulated.
        seed: of the answers.
    """
    chance = np.random.default_rng(seed)
    losses = np.array([PAPER[where] for where in TASKS.values()] * LENGTHS)
    world = replace(DEFAULT, sizes=(contexts,) * losses.size)
    design = world.design
    names = tuple((f"{task} {n}", 1) for n in range(LENGTHS) for task in TASKS)
    cells = np.repeat(np.arange(losses.size), contexts)
    counts = {"cells": 0, "contexts": 0, "no_loss": 0}
    for _ in range(evaluations):
        lost = chance.binomial(QUESTIONS, np.repeat(losses, contexts)) / QUESTIONS
        engine = flipped(chance, world, 1, ENGINE)[0]
        moved = -np.repeat(losses, contexts) + MOVES * chance.standard_normal(cells.size)
        differences = _harmless(chance, cells.size)
        if endpoint == "probability":
            differences = DEVIATION * chance.standard_normal(cells.size)
        bad, probable = (
            _of_cells(values, cells, names) for values in ((engine - lost).clip(-1), moved)
        )
        seeing = [
            cell
            for cell in range(losses.size)
            if sees(bad.of(cell), design.alpha, probable.of(cell) if sure else None, design.margin)
        ]
        counted = np.isin(cells, seeing)
        counts["cells"] += len(seeing)
        counts["contexts"] += int(counted.sum())
        if seeing:
            part = _of_cells(
                differences[counted],
                np.unique(cells[counted], return_inverse=True)[1],
                tuple(names[cell] for cell in seeing),
            )
            remaining = replace(design, contexts=int(counted.sum()))
            lower, _ = bounds(Estimate(part), remaining, remaining.looks)
            counts["no_loss"] += bool(lower > -design.margin)
    means = {kind: count / evaluations for kind, count in counts.items()}
    plan = {"planned": contexts, "sure": sure, "endpoint": endpoint}
    return plan | {"of_cells": losses.size, "of_contexts": cells.size} | means


def _harmless(chance: np.random.Generator, contexts: int) -> Floats:
    """Draw differences as a plan assumes them: so many pairs differ, tied within contexts."""
    shape = contexts, QUESTIONS
    tied = chance.random(shape) < CORRELATION**0.5
    level = np.where(tied, chance.random((contexts, 1)), chance.random(shape))
    lost, won = level < DISCORDANCE / 2, level > 1 - DISCORDANCE / 2
    differences: Floats = won.mean(axis=-1) - lost.mean(axis=-1)
    return differences


def _of_cells(values: Any, cells: Any, names: tuple[Cell, ...]) -> Differences:
    questions = np.full(len(cells), QUESTIONS)
    return Differences(values, cells, names, Flips(0, 0, len(cells)), questions)


def missing(times: float, evaluations: int, seed: int) -> dict[str, Any]:
    """Return how often a loss of so many margins is called none if what is lost fails.

    As many contexts fail as a run may lack.

    At the last look. Counted as lost, the contexts that failed are what they were.
    """
    chance, design = np.random.default_rng(seed), DEFAULT.design
    most = int(MOST_MISSING * design.contexts)
    claimed = {"left_out": 0, "counted_as_lost": 0}
    for size in batches(evaluations):
        sample = DEFAULT.evaluations(chance, size, times)
        for values in sample.values:
            failed = np.flatnonzero(values == -1)[:most]
            complete = replace(sample, values=values)
            answered = Estimate(_without(complete, failed))
            lower, _ = bounds(answered, design, design.looks)
            claimed["left_out"] += bool(lower > -design.margin)
            lower, _ = bounds(answered, design, design.looks, Estimate(complete))
            claimed["counted_as_lost"] += bool(lower > -design.margin)
    return {
        "loss_in_margins": times,
        "contexts": design.contexts,
        "most_missing": most,
        "no_loss": {rule: count / evaluations for rule, count in claimed.items()},
    }


def _without(sample: Differences, places: Any) -> Differences:
    return replace(
        sample,
        values=np.delete(sample.values, places),
        cells=np.delete(sample.cells, places),
        questions=np.delete(sample.questions, places),
    )


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=10_000, help="of each row")
    parser.add_argument("--seed", type=int, default=0)
    arguments = read_arguments(parser, NAME, quick=QUICK)
    evaluations, seed = arguments.evaluations, arguments.seed
    arms = [(flips, 0.0) for flips in FLIPS] + [(ENGINE, fault) for fault in FAULTS]
    cells, before = LENGTHS * len(TASKS), (40, "answers")
    now = [
        (enough_contexts(cells, QUESTIONS, 0.01, 4, endpoint), endpoint) for endpoint in ENDPOINTS
    ]
    plans = [(*before, False), *((*plan, True) for plan in (before, *now))]
    facts = {
        "command": arguments.command,
        "evaluations": evaluations,
        "seed": seed,
        "machine": machine(),
        "control": [control(*arm, evaluations, seed + n) for n, arm in enumerate(arms)],
        "bad_pattern": [
            bad_pattern(*plan, evaluations // 10, seed + 200 + n) for n, plan in enumerate(plans)
        ],
        "missing": [missing(t, evaluations // 5, seed + 100 + n) for n, t in enumerate(TIMES)],
    }
    write_json(arguments.output.with_suffix(".json"), facts)


if __name__ == "__main__":
    main()
