r"""Are the verdicts of an evaluation wrong at most as often as they promise? By simulation.

    python -m benchmarks.quality_statistics [--evaluations 10000] [--seed 0]

Each simulated evaluation has the number of contexts that `stats.power` plans for its margin, in
cells that lose differently, eight questions a context whose differences are correlated, and an
engine that flips answers by itself. It is judged by the code that users run, at the planned looks,
until a claim is made. Three truths: no loss, a loss of the margin, three times the margin. Beside
it, two mistakes that the numbers must betray: each question taken for a context of its own
(unclustered), and arms paired with each other's questions (unpaired).

The worlds of :data:`HELD_BACK` have losses of another kind than the differences around them: whole
contexts, one cell, unequal clusters, fine scores that collapse. The first two broke an earlier
version of the bounds (an audit found them); the others were invented before any result was seen.

Writes quality/statistics.json: how often each thing happened in each world, and which
promises are broken beyond chance (one in ten thousand). With 10,000 evaluations that names an
error of 5 % only where it was above 5.8 %: read the rates, not only the names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from benchmarks.records import read_arguments
from sglang_indexcache.evaluate.tasks import QUESTIONS
from sglang_indexcache.evaluate.verdict import SAME, Judgement, Kind, read, repeats_itself, sees
from sglang_indexcache.stats.pairs import Differences, Flips, Floats
from sglang_indexcache.stats.power import Design, spread, spread_over_cells
from sglang_indexcache.study.provenance import machine, versions
from sglang_indexcache.support.files import write_json

NAME = "quality/statistics"
QUICK = {"evaluations": 20}
CELLS = 6
EASE = 0.8
"""Mean share of right answers of the reference."""
LOSSES = (0, 1, 3)
"""Of the pattern, in margins."""


@dataclass(frozen=True)
class World:
    """What an evaluation meets.

    Attributes:
        margin: of the claim.
        discordance: share of questions on which pattern and reference really differ at no loss.
        correlation: of the differences of two questions in a context.
        noise: how often the engine flips an answer by itself.
        loss: of the pattern before the engine's flips, 0 to 1; the mean over cells, which lose
            from nothing to twice as much. If the last has rows, it alone loses.
        made: contexts of every other cell; as many as the design plans if the last has no rows.
        rows: of a file, each with one question, which are the last cell.
    """

    margin: float
    discordance: float
    correlation: float
    noise: float
    loss: float = 0.0
    made: int = 0
    rows: int = 0

    @property
    def truth(self) -> float:
        """The difference that an endless evaluation finds; flips dilute the loss."""
        return -self.loss * (1 - 2 * self.noise)

    @cached_property
    def design(self) -> Design:
        """With the contexts that promise the design's power, as many in each cell."""
        plan = Design(contexts=CELLS, margin=self.margin)
        if self.rows:
            return replace(plan, contexts=(CELLS - 1) * self.made + self.rows)
        contexts = plan.needed(*spread(*self._differing, QUESTIONS))
        return replace(plan, contexts=CELLS * -(-contexts // CELLS))

    @property
    def promised(self) -> bool:
        """Whether a plan says that no loss beyond the margin would be shown."""
        if not self.rows:
            return True
        cells = [(self.made, QUESTIONS)] * (CELLS - 1) + [(self.rows, 1)]
        needed = self.design.needed(*spread_over_cells(cells, *self._differing))
        return needed <= self.design.contexts

    @cached_property
    def cells(self) -> npt.NDArray[np.int64]:
        """Of each context in the order of asking: round by round, as in `evaluate.plan`."""
        return np.array([cell for _, cell in self._rounds])

    def asked(self, look: int) -> int:
        """Contexts that count at a look, of every cell the same share."""
        return int((self._look <= look).sum())

    @cached_property
    def _look(self) -> npt.NDArray[np.int64]:
        return np.array([int(done * self.design.looks) + 1 for done, _ in self._rounds])

    @property
    def _differing(self) -> tuple[float, float]:
        """Discordance with the engine's flips, and its correlation."""
        kept = (1 - 2 * self.noise) ** 2 * self.discordance
        total = kept + 2 * self.noise * (1 - self.noise)
        return total, self.correlation * kept / total

    @cached_property
    def _rounds(self) -> list[tuple[Fraction, int]]:
        """What share of a context's cell comes before it, and the cell."""
        made = self.made or self.design.contexts // CELLS
        sizes = [made] * (CELLS - 1) + [self.rows or made]
        return sorted(
            (Fraction(n, size), cell) for cell, size in enumerate(sizes) for n in range(size)
        )


@dataclass(frozen=True)
class Answers:
    """Right (1) or wrong (0), int8 [contexts, questions]; contexts take turns among the cells."""

    reference: npt.NDArray[np.int8]
    again: npt.NDArray[np.int8]
    pattern: npt.NDArray[np.int8]


def simulate(world: World, draw: np.random.Generator) -> Answers:
    """All answers of one evaluation.

    With probability sqrt(correlation) a question takes its context's draw, else its own: then the
    differences of two questions of a context have exactly that correlation.
    """
    contexts = world.design.contexts
    shape = (contexts, QUESTIONS)
    own, shared = draw.random(shape), draw.random((contexts, 1))
    level = np.where(draw.random(shape) < world.correlation**0.5, shared, own)
    won = world.discordance / 2
    losing = np.eye(CELLS)[-1] * CELLS if world.rows else np.linspace(0, 2, CELLS)
    tilt = losing[world.cells, None]
    lost = won + world.loss * tilt
    difference = np.where(level < lost, -1, np.where(level > 1 - won, 1, 0))
    ease = draw.beta(10 * EASE, 10 * (1 - EASE), (contexts, 1))
    right = np.where(difference == 0, draw.random(shape) < ease, difference < 0)

    def asked(answers: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        found = (answers.astype(bool) ^ (draw.random(shape) < world.noise)).astype(np.int8)
        if world.rows:  # they have one question: all others are it again
            found = np.where(world.cells[:, None] == CELLS - 1, found[:, :1], found)
        return found

    return Answers(asked(right), asked(right), asked(right + difference))


Pairing = Callable[[npt.NDArray[np.int8], npt.NDArray[np.int8]], Floats]
"""Reference and arm to one difference a unit, float64 [units]."""


def by_context(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """As it should be."""
    found: Floats = (arm - reference).mean(axis=1)
    return found


def by_question(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """The mistake of taking the questions of a context for independent."""
    return (arm - reference).astype(np.float64).ravel()


def unpaired(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """The mistake of comparing an arm's answers with those to other questions."""
    return by_context(np.roll(reference, CELLS, axis=0), arm)


PAIRINGS: dict[str, Pairing] = {
    "by context": by_context,
    "by question": by_question,
    "unpaired": unpaired,
}


def differences(world: World, pairing: Pairing, reference: Any, arm: Any) -> Differences:
    """Of the first contexts."""
    values = pairing(reference, arm)
    questions = len(values) // len(reference)
    cells = np.repeat(world.cells[: len(reference)], questions)
    names = tuple((f"task-{cell}", 1) for cell in range(CELLS))
    change = arm - reference
    flips = Flips(int((change < 0).sum()), int((change > 0).sum()), change.size)
    behind = np.where((cells == CELLS - 1) & (world.rows > 0), 1, QUESTIONS // questions)
    return Differences(values, cells, names, flips, behind)


def evaluate(world: World, answers: Answers, pairing: Pairing) -> tuple[int, Judgement]:
    """Judge at each planned look until a claim is made: the look, and what it says."""
    design = world.design
    for look in range(1, design.looks + 1):
        count = world.asked(look)
        found = differences(world, pairing, answers.reference[:count], answers.pattern[:count])
        reading = read(found, design, look)
        if reading.kind is not Kind.UNDECIDED:
            break
    return look, reading


def rates(world: World, evaluations: int, seed: int, pairing: str = "by context") -> dict[str, Any]:
    """How often each thing happened among the simulated evaluations of one world."""
    draw = np.random.default_rng(seed)
    counts = dict.fromkeys(
        ("no_loss", "loss", "misses_below", "misses_above", "refused", "control_seen"), 0
    )
    used = 0
    design = world.design
    for _ in range(evaluations):
        answers = simulate(world, draw)
        look, reading = evaluate(world, answers, PAIRINGS[pairing])
        used += world.asked(look)
        counts["no_loss"] += reading.kind is Kind.NO_LOSS
        counts["loss"] += reading.kind is Kind.LOSS
        counts["misses_below"] += world.truth < reading.lower
        counts["misses_above"] += world.truth > reading.upper
        quarter = design.contexts // 4
        same = differences(world, by_context, answers.reference[:quarter], answers.again[:quarter])
        counts["refused"] += not repeats_itself(same, design, design.looks)
        counts["control_seen"] += sees(
            differences(world, by_context, answers.reference, answers.pattern), design.alpha
        )
    return {
        "pairing": pairing,
        "world": asdict(world),
        "contexts": design.contexts,
        "contexts_used": used / evaluations,
        **{name: count / evaluations for name, count in counts.items()},
    }


def broken(row: dict[str, Any], evaluations: int, doubt: float = 1e-4) -> list[str]:
    """Which promises a world's rates break, beyond what chance does with probability ``doubt``.

    Args:
        row: from :func:`rates`.
        evaluations: behind it.
        doubt: of an alarm if the promise just holds.
    """
    world = World(**row["world"])
    design = world.design

    def often(name: str, promised: float) -> bool:
        return bool(row[name] * evaluations > binom.ppf(1 - doubt, evaluations, promised))

    def rarely(name: str, promised: float) -> bool:
        return bool(row[name] * evaluations < binom.ppf(doubt, evaluations, promised))

    found = [name for name in ("misses_below", "misses_above") if often(name, design.alpha)]
    if often("refused", 2 * SAME):
        found.append("refused")
    if world.loss == 0:
        found += ["loss"] if often("loss", design.alpha) else []
        found += ["control_seen"] if often("control_seen", design.alpha) else []
        found += ["power"] if world.promised and rarely("no_loss", design.power) else []
    elif -world.truth > world.margin * (1 - 1e-9):
        found += ["no_loss"] if often("no_loss", design.alpha) else []
    return found


def worlds() -> Iterator[World]:
    """All that are studied: rare flips and frequent ones, tied not at all, a little and much.

    In the last two of equal cells the size follows from t alone, so that their power is no more
    than promised. Then a file's few rows beside generated contexts, which alone lose: too few for
    the margin, as the plan says, and enough.
    """
    studied = ((0.02, 0.3), (0.1, 0.1), (0.1, 0.3), (0.2, 0.3), (0.3, 0.0))
    for discordance, correlation in studied:
        for times in LOSSES:
            margin, noise = 0.03, 0.005
            loss = times * margin / (1 - 2 * noise)
            yield World(margin, discordance, correlation, noise, loss)
    for margin, made, few in ((0.02, 96, 8), (0.05, 64, 64)):
        for times in LOSSES:
            yield World(margin, 0.1, 0.3, 0.005, times * margin / (1 - 2 * 0.005), made, few)


@dataclass(frozen=True)
class Catastrophe:
    """A world in which few answers are lost wholly, among others that differ a little.

    Attributes:
        cells: equally large.
        contexts: of each cell.
        margin: of the claim.
        whole: share of contexts that lose, at a loss of the margin.
        size: what such a context loses, 0 to 1.
        flips: share of questions that the engine flips in each arm; or, of fine scores, the
            standard deviation of what it adds.
        wins: share of contexts that gain as much, beside those that lose.
        one_cell: whether the first cell alone loses.
        fine: whether a context has one score between 0 and 1, and not questions.
        unequal: whether contexts have 1 to 8 questions instead of 8.
        looks: analyses.
    """

    cells: int
    contexts: int
    margin: float
    whole: float
    size: float = 1.0
    flips: float = 0.02
    wins: float = 0.0
    one_cell: bool = False
    fine: bool = False
    unequal: bool = False
    looks: int = 4

    @property
    def design(self) -> Design:
        """As a user would plan it."""
        return Design(self.cells * self.contexts, self.margin, self.looks)

    def draw(self, chance: np.random.Generator, times: float) -> Differences:
        """One evaluation of a pattern that loses so many times the margin."""
        count = self.cells * self.contexts
        cells = np.arange(count) % self.cells
        questions = chance.integers(1, 9, count) if self.unequal else np.full(count, QUESTIONS)
        if self.fine:
            questions = np.ones(count, dtype=np.int64)
            values = chance.normal(0, self.flips, count) - chance.normal(0, self.flips, count)
        else:
            # An answer that is right in both arms, and flipped in one: lost or won alike.
            changed = 2 * self.flips * (1 - self.flips)
            asked = np.arange(QUESTIONS) < questions[:, None]
            kind = chance.random((count, QUESTIONS))
            each = np.where(kind < changed / 2, -1, np.where(kind > 1 - changed / 2, 1, 0)) * asked
            values = each.sum(axis=1) / questions
        losing = times * self.whole * np.where(self.one_cell, self.cells * (cells == 0), 1.0)
        fate = chance.random(count)
        values = np.where(fate < losing + self.wins, -self.size, values)
        values = np.where(fate > 1 - self.wins, self.size, values)
        flips = Flips(int((values < 0).sum()), int((values > 0).sum()), int(questions.sum()))
        names = tuple((f"task-{cell}", 1) for cell in range(self.cells))
        return Differences(values.clip(-1, 1), cells, names, flips, questions)


HELD_BACK = {
    "whole contexts, 6 cells of 32, the engine flips 2 %": Catastrophe(6, 32, 0.01, 0.01),
    "one cell of 100 fine scores, 1.25 % collapse": Catastrophe(
        1, 100, 0.01, 0.0125, size=0.8, flips=0.02, fine=True, looks=1
    ),
    "half of a context's answers, 6 cells of 64": Catastrophe(6, 64, 0.01, 0.02, size=0.5),
    "whole contexts lost and won, 6 cells of 64": Catastrophe(6, 64, 0.01, 0.01, wins=0.01),
    "whole contexts of one cell of 6, 64 each": Catastrophe(6, 64, 0.01, 0.01, one_cell=True),
    "whole contexts of 1 to 8 questions, 4 cells of 100": Catastrophe(
        4, 100, 0.01, 0.01, flips=0.03, unequal=True
    ),
    "fine scores, 400 in one cell, a third lost by 3.3 %": Catastrophe(
        1, 400, 0.01, 0.0333, size=0.3, flips=0.1, fine=True, looks=1
    ),
    "whole contexts, margin 3, 3 cells of 40, flips 5 %": Catastrophe(
        3, 40, 0.03, 0.03, flips=0.05
    ),
}


def held_back(name: str, evaluations: int, seed: int) -> dict[str, Any]:
    """Errors and power in one of these worlds: a loss of the margin, and none."""
    world = HELD_BACK[name]
    design, chance = world.design, np.random.default_rng(seed)
    row: dict[str, Any] = {"world": name, "contexts": design.contexts}
    for times, label in ((1.0, "at_margin"), (0.0, "at_none")):
        kinds = dict.fromkeys(Kind, 0)
        for _ in range(evaluations):
            whole = world.draw(chance, times)
            for look in range(1, design.looks + 1):
                part = first(whole, design.contexts * look // design.looks)
                kind = read(part, design, look).kind
                if kind is not Kind.UNDECIDED:
                    break
            kinds[kind] += 1
        row[label] = {kind.name.lower(): kinds[kind] / evaluations for kind in CLAIMS}
    most = binom.ppf(1 - 1e-4, evaluations, design.alpha) / evaluations
    row["broken"] = [
        label
        for label, claim in (("at_margin", "no_loss"), ("at_none", "loss"))
        if row[label][claim] > most
    ]
    return row


CLAIMS = (Kind.NO_LOSS, Kind.LOSS)


def first(whole: Differences, count: int) -> Differences:
    """Of the contexts in the order of asking."""
    return replace(
        whole,
        values=whole.values[:count],
        cells=whole.cells[:count],
        questions=whole.questions[:count],
    )


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=10_000, help="per world")
    parser.add_argument("--seed", type=int, default=0)
    arguments = read_arguments(parser, NAME, quick=QUICK)
    rows = []
    plan = [(world, "by context") for world in worlds() if not world.rows]
    # Each mistake where it does its harm: claims of no loss at the margin, and power.
    world = World(margin=0.03, discordance=0.1, correlation=0.3, noise=0.005)
    plan += [(replace(world, loss=0.03 / 0.99), "by question"), (world, "unpaired")]
    # Last, so that every other world keeps its seed.
    plan += [(world, "by context") for world in worlds() if world.rows]
    for number, (world, pairing) in enumerate(plan):
        row = rates(world, arguments.evaluations, arguments.seed + number, pairing)
        row["broken"] = broken(row, arguments.evaluations)
        rows.append(row)
        print(number, len(plan), world, pairing, row["broken"], flush=True)
    unseen = []
    for number, name in enumerate(HELD_BACK):
        unseen.append(held_back(name, arguments.evaluations, arguments.seed + 1000 + number))
        print(unseen[-1], flush=True)
    write_json(
        arguments.output.with_suffix(".json"),
        {
            "command": arguments.command,
            "evaluations": arguments.evaluations,
            "seed": arguments.seed,
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
            "held_back": unseen,
        },
    )


if __name__ == "__main__":
    main()
