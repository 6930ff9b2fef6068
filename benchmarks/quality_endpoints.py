"""Compare what an evaluation can compare: right answers, or their probability.

    python -m benchmarks.quality_endpoints [--evaluations 4000] [--seed 0]

Contexts are drawn from the evaluation of the shipped checkpoint (`quality/tiny-dsa`): what a
pattern did to the right answers of a context, and to their probability, with the sign of both
turned by chance, so that nothing is lost on average. In other runs, at the margin of one point,
whole contexts are lost beside that, or half of the answers of twice as many, or a little
everywhere. An engine flips answers by itself, which moves a context's mean probability by a normal
amount (:data:`ENGINE`, assumed). The plans are the default ones of three lengths; judged is by the
code that users run. Writes quality/endpoints.json.
"""

from __future__ import annotations

import argparse
import gzip
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quality_statistics import CELLS, HeldBack, batches, flipped, judge
from benchmarks.records import RESULTS, read_arguments
from sglang_indexcache.lab.evaluate.evaluation import NAME as JOURNAL
from sglang_indexcache.lab.evaluate.evaluation import Evaluation, load
from sglang_indexcache.lab.evaluate.plan import ENDPOINTS, enough_contexts
from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS
from sglang_indexcache.lab.evaluate.verdict import Look
from sglang_indexcache.stats.pairs import Floats
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

NAME = "quality/endpoints"
QUICK = {"evaluations": 100}
LENGTHS, MARGIN = 3, 0.01
FLIPS = (0.0, 0.02)
"""Share of answers that the engine flips."""
ENGINE = 0.01
"""Standard deviation of what such an engine adds to a context's mean probability."""
KINDS = ("whole contexts", "half contexts", "a little everywhere")


@dataclass(frozen=True)
class Contexts:
    """Losses and where they fall: a :data:`benchmarks.quality_statistics.Draw`.

    Attributes:
        changes: float64 [contexts], of a real pattern, from which is drawn.
        levels: float64 [contexts], the reference's means there, of which a loss takes a part.
        endpoint: what both are of.
        flips: of the engine; 0 is one that repeats itself.
        kind: of :data:`KINDS`.
    """

    changes: Floats
    levels: Floats
    endpoint: str
    flips: float
    kind: str

    def __call__(
        self, chance: np.random.Generator, world: HeldBack, count: int, times: float
    ) -> Floats:
        """Draw ``[count, contexts]`` differences at so many margins of loss."""
        shape = count, len(world.cells)
        places = chance.integers(len(self.changes), size=shape)
        values = self.changes[places] * chance.choice((-1.0, 1.0), shape)
        if self.endpoint == "probability":
            values = values + (self.flips > 0) * ENGINE * chance.standard_normal(shape)
        else:
            values = values + flipped(chance, world, count, self.flips)
        loss = times * world.margin
        if self.kind == KINDS[2]:
            lower: Floats = values - self._a_little(chance, shape, loss)
            return lower
        part = 0.5 if self.kind == KINDS[1] else 1.0
        lost = chance.random(shape) < loss / (part * self.levels.mean())
        # What is lost is lost whole, but for what else moves half of a context's answers.
        differences: Floats = np.where(
            lost, -part * self.levels[places] + (1 - part) * values, values
        )
        return differences

    def _a_little(self, chance: np.random.Generator, shape: tuple[int, int], loss: float) -> Any:
        if self.endpoint == "probability":
            return loss
        return chance.binomial(QUESTIONS, loss, shape) / QUESTIONS


def pool(evaluation: Evaluation, arm: str, endpoint: str) -> tuple[Floats, Floats]:
    """Return an arm's changes in each context of a record, and the reference's mean there."""
    look = Look(replace(evaluation, endpoint=endpoint))
    differences = look.compared(arm)
    return differences.values, differences.reference


def compare(contexts: Contexts, evaluations: int, seed: int) -> dict[str, float]:
    """Count claims of a pattern that loses nothing, and of one that loses the margin."""
    cells = CELLS * LENGTHS
    size = enough_contexts(cells, QUESTIONS, MARGIN, 4, contexts.endpoint)
    world = HeldBack((size,) * cells, MARGIN, contexts)
    design, chance = world.design, np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    for count in batches(evaluations):
        for times in (0.0, 1.0):
            differences = world.evaluations(chance, count, times)
            verdicts = judge(
                differences, design, lambda look: design.contexts * look // design.looks
            )
            if times:
                counts["wrong"] += int(verdicts.safe.sum())
            else:
                counts["no_loss"] += int(verdicts.safe.sum())
                counts["loss"] += int(verdicts.lost.sum())
                counts["used"] += int(verdicts.used.sum())
    return {name: counts[name] / evaluations for name in ("no_loss", "loss", "used", "wrong")} | {
        "contexts": design.contexts
    }


def published() -> Evaluation:
    """Return the evaluation of the shipped checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        journal = (RESULTS / "quality/tiny-dsa" / f"{JOURNAL}.gz").read_bytes()
        (Path(folder) / JOURNAL).write_bytes(gzip.decompress(journal))
        return load(Path(folder))


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=4_000, help="of each row and kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = read_arguments(parser, NAME, quick=QUICK)
    evaluation, rows = published(), list[dict[str, Any]]()
    for arm in evaluation.candidates:
        for flips in FLIPS:
            for endpoint in ENDPOINTS:
                changes, levels = pool(evaluation, arm.name, endpoint)
                row: dict[str, Any] = {"pattern": arm.name, "flips": flips, "endpoint": endpoint}
                row["deviation"] = float(changes.std())
                for number, kind in enumerate(KINDS):
                    contexts = Contexts(changes, levels, endpoint, flips, kind)
                    seed = arguments.seed + 10 * len(rows) + number
                    row[kind] = compare(contexts, arguments.evaluations, seed)
                rows.append(row)
                print(row, flush=True)
    facts = {name: getattr(arguments, name) for name in ("command", "evaluations", "seed")}
    facts |= {"machine": machine(), "contexts": len(changes), "engine": ENGINE, "rows": rows}
    write_json(arguments.output.with_suffix(".json"), facts)


if __name__ == "__main__":
    main()
