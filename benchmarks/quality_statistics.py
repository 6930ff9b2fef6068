r"""Are the verdicts of an evaluation wrong at most as often as they promise? By simulation.

    python -m benchmarks.quality_statistics [--evaluations 10000] [--seed 0]

Each simulated evaluation has the number of contexts that `stats.design` plans for its margin, in
cells that lose differently, eight questions a context whose differences are correlated, and an
engine that flips answers by itself. It is judged by the code that users run, at the planned looks,
until a claim is made. Three truths: no loss, a loss of the margin, three times the margin. Beside
it, two mistakes that the numbers must betray: each question taken for a context of its own
(unclustered), and arms paired with each other's questions (unpaired).

The worlds of :data:`HELD_BACK` have losses of another kind than the differences around them: whole
contexts, one cell, unequal clusters, fine scores that collapse. The first two broke an earlier
version of the bounds (an audit found them); the others were invented before any result was seen,
six in a first round and six in a second.

What stands in front of the bounds and beside them is in `benchmarks/results/quality/README.md`.

Many evaluations are drawn and judged at once, with the very bounds that judge one
(`evaluate.verdict.bounds`). Both verdicts that say "less than the margin" count as such, whether
or not a smaller loss was shown beside.

Writes quality/statistics.json: how often each thing happened in each world, and which
promises are broken beyond chance (one in ten thousand). With 10,000 evaluations that names an
error of 5 % only where it was above 5.8 %: read the rates, not only the names.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import binom

from benchmarks.records import read_arguments
from sglang_indexcache.lab.evaluate.tasks.context import QUESTIONS
from sglang_indexcache.lab.evaluate.verdict import SAME, bounds, loses, repeats_itself, sees
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.lab.stats.bounds import Estimate
from sglang_indexcache.lab.stats.design import Design, spread, spread_over_cells
from sglang_indexcache.lab.stats.pairs import Differences, Flips, Floats
from sglang_indexcache.library.writing import write_json

NAME = "quality/statistics"
QUICK = {"evaluations": 20}
CELLS = 6
EASE = 0.8
"""Mean share of right answers of the reference."""
BATCH = 250
"""Evaluations that are drawn and judged at once."""
LOSSES = (0, 1, 3)
"""Of the pattern, in margins."""


@dataclass(frozen=True)
class World:
    """Conditions that an evaluation meets.

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
        """Design with the contexts that promise its power, as many in each cell."""
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
        contexts = self.design.needed(*spread_over_cells(cells, *self._differing))
        return contexts <= self.design.contexts

    @cached_property
    def cells(self) -> npt.NDArray[np.int64]:
        """Cell of each context in the order of asking: round by round, as in `evaluate.plan`."""
        return np.array([cell for _, cell in self._rounds])

    def asked(self, look: int) -> int:
        """Count the contexts that are asked by a look, of every cell the same share."""
        return int((self._look <= look).sum())

    @cached_property
    def _look(self) -> npt.NDArray[np.int64]:
        return np.array([int(share * self.design.looks) + 1 for share, _ in self._rounds])

    @property
    def _differing(self) -> tuple[float, float]:
        """Discordance with the engine's flips, and its correlation."""
        discordance = (1 - 2 * self.noise) ** 2 * self.discordance
        total = discordance + 2 * self.noise * (1 - self.noise)
        return total, self.correlation * discordance / total

    @cached_property
    def _rounds(self) -> list[tuple[Fraction, int]]:
        """Share of a context's cell that comes before it, and the cell."""
        contexts = self.made or self.design.contexts // CELLS
        sizes = [contexts] * (CELLS - 1) + [self.rows or contexts]
        return sorted(
            (Fraction(n, size), cell) for cell, size in enumerate(sizes) for n in range(size)
        )


@dataclass(frozen=True)
class Answers:
    """Right (1) or wrong (0), int8 [evaluations, contexts, questions]; cells take turns."""

    reference: npt.NDArray[np.int8]
    again: npt.NDArray[np.int8]
    pattern: npt.NDArray[np.int8]


def simulate(world: World, draw: np.random.Generator, evaluations: int = 1) -> Answers:
    """Draw all answers of some evaluations.

    With probability sqrt(correlation) a question takes its context's draw, else its own: then the
    differences of two questions of a context have exactly that correlation.
    """
    contexts = evaluations, world.design.contexts, 1
    shape = evaluations, world.design.contexts, QUESTIONS
    fresh, shared = draw.random(shape), draw.random(contexts)
    level = np.where(draw.random(shape) < world.correlation**0.5, shared, fresh)
    won = world.discordance / 2
    losing = np.eye(CELLS)[-1] * CELLS if world.rows else np.linspace(0, 2, CELLS)
    threshold = won + world.loss * losing[world.cells, None]
    difference = np.where(level < threshold, -1, np.where(level > 1 - won, 1, 0))
    ease = draw.beta(10 * EASE, 10 * (1 - EASE), contexts)
    right = np.where(difference == 0, draw.random(shape) < ease, difference < 0)

    def measured(answers: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
        flips = (answers.astype(bool) ^ (draw.random(shape) < world.noise)).astype(np.int8)
        if world.rows:  # they have one question: all others are it again
            flips = np.where(world.cells[:, None] == CELLS - 1, flips[..., :1], flips)
        return flips

    return Answers(measured(right), measured(right), measured(right + difference))


Pairing = Callable[[npt.NDArray[np.int8], npt.NDArray[np.int8]], Floats]
"""Reference and arm to one difference a unit, float64 [evaluations, units]."""


def by_context(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """Pair as it should be."""
    values: Floats = (arm - reference).mean(axis=-1)
    return values


def by_question(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """Make the mistake of taking the questions of a context for independent."""
    return (arm - reference).astype(np.float64).reshape(len(arm), -1)


def unpaired(reference: npt.NDArray[np.int8], arm: npt.NDArray[np.int8]) -> Floats:
    """Make the mistake of comparing an arm's answers with those to other questions."""
    return by_context(np.roll(reference, CELLS, axis=1), arm)


PAIRINGS: dict[str, Pairing] = {
    "by context": by_context,
    "by question": by_question,
    "unpaired": unpaired,
}


def differences(world: World, values: Floats) -> Differences:
    """Return all contexts' differences, with as many values each as the pairing makes of it."""
    units = values.shape[-1] // world.design.contexts
    cells = np.repeat(world.cells, units)
    names = tuple((f"task-{cell}", 1) for cell in range(CELLS))
    behind = np.where((cells == CELLS - 1) & (world.rows > 0), 1, QUESTIONS // units)
    return Differences(values, cells, names, Flips(0, 0, values.size), behind)


@dataclass(frozen=True)
class Judged:
    """Ends of some evaluations, each an array of them.

    Attributes:
        safe: "less than the margin" was claimed.
        lost: "a loss" was.
        lower: bound at the look that decided, or the last one.
        upper: the other.
        used: contexts until then.
    """

    safe: npt.NDArray[np.bool_]
    lost: npt.NDArray[np.bool_]
    lower: Floats
    upper: Floats
    used: npt.NDArray[np.int64]


def judge(sample: Differences, design: Design, count_at: Callable[[int], int]) -> Judged:
    """Judge many evaluations at each planned look until a claim is made.

    Args:
        sample: all that each would ask.
        design: of each.
        count_at: how many values count at a look.
    """
    count = len(sample.values)
    verdicts = Judged(
        *(np.zeros(count, dtype=bool) for _ in range(2)),
        *(np.zeros(count) for _ in range(2)),
        np.zeros(count, dtype=np.int64),
    )
    open_ = np.arange(count)
    for look in range(1, design.looks + 1):
        part = first(sample, count_at(look))
        estimate = Estimate(replace(part, values=part.values[open_]))
        lower, upper = bounds(estimate, design, look)
        is_lost = loses(estimate, design, look)
        verdicts.lower[open_], verdicts.upper[open_], verdicts.used[open_] = lower, upper, len(part)
        verdicts.safe[open_], verdicts.lost[open_] = lower > -design.margin, is_lost
        open_ = open_[(lower <= -design.margin) & ~is_lost]
        if not open_.size:
            break
    return verdicts


def batches(evaluations: int) -> Iterator[int]:
    """Yield how many are drawn at once."""
    for begin in range(0, evaluations, BATCH):
        yield min(BATCH, evaluations - begin)


def rates(world: World, evaluations: int, seed: int, pairing: str = "by context") -> dict[str, Any]:
    """Return how often each thing happened among the simulated evaluations of one world."""
    draw = np.random.default_rng(seed)
    counts: Counter[str] = Counter()
    design = world.design
    for size in batches(evaluations):
        answers = simulate(world, draw, size)
        values = PAIRINGS[pairing](answers.reference, answers.pattern)
        units = values.shape[-1] // design.contexts
        sample = differences(world, values)
        verdicts = judge(sample, design, lambda look, units=units: units * world.asked(look))
        counts["no_loss"] += int(verdicts.safe.sum())
        counts["loss"] += int((verdicts.lost & ~verdicts.safe).sum())
        counts["any_loss"] += int(verdicts.lost.sum())
        counts["misses_below"] += int((world.truth < verdicts.lower).sum())
        counts["misses_above"] += int((world.truth > verdicts.upper).sum())
        counts["contexts_used"] += int(verdicts.used.sum()) // units
        repeats = differences(world, by_context(answers.reference, answers.again))
        quarter = first(repeats, design.contexts // 4)
        counts["refused"] += int((~repeats_itself(quarter, design, design.looks)).sum())
        control = sees(
            differences(world, by_context(answers.reference, answers.pattern)), design.alpha
        )
        counts["control_seen"] += int(control.sum())
    return {
        "pairing": pairing,
        "world": asdict(world),
        "contexts": design.contexts,
        **{name: count / evaluations for name, count in counts.items()},
    }


def broken(row: dict[str, Any], evaluations: int, doubt: float = 1e-4) -> list[str]:
    """List the promises that a world's rates break, beyond chance of probability ``doubt``.

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

    promises = [name for name in ("misses_below", "misses_above") if often(name, design.alpha)]
    if often("refused", 2 * SAME):
        promises.append("refused")
    if world.loss == 0:
        promises += ["loss"] if often("any_loss", design.alpha) else []
        promises += ["control_seen"] if often("control_seen", design.alpha) else []
        promises += ["power"] if world.promised and rarely("no_loss", design.power) else []
    elif -world.truth > world.margin * (1 - 1e-9):
        promises += ["no_loss"] if often("no_loss", design.alpha) else []
    return promises


def worlds() -> Iterator[World]:
    """Yield all that are studied: rare and frequent flips, tied not at all, a little and much.

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
    for margin, contexts, few in ((0.02, 96, 8), (0.05, 64, 64)):
        for times in LOSSES:
            yield World(margin, 0.1, 0.3, 0.005, times * margin / (1 - 2 * 0.005), contexts, few)


Draw = Callable[[np.random.Generator, "HeldBack", int, float], Floats]
"""From chance, a world, a number of evaluations and a loss in margins to [evaluations, contexts].
"""


@dataclass(frozen=True)
class HeldBack:
    """A world in which what is lost is of another kind than what differs around it.

    Attributes:
        sizes: contexts of each cell.
        margin: of the claim.
        drawn: differences of the contexts.
        behind: questions behind a context, at least and at most.
        looks: analyses.
    """

    sizes: tuple[int, ...]
    margin: float
    drawn: Draw
    behind: tuple[int, int] = (QUESTIONS, QUESTIONS)
    looks: int = 4

    @property
    def design(self) -> Design:
        """Design as a user would plan it."""
        return Design(sum(self.sizes), self.margin, self.looks)

    @cached_property
    def cells(self) -> npt.NDArray[np.int64]:
        """Cell of each context, in the order of asking."""
        rounds = ((n / size, cell) for cell, size in enumerate(self.sizes) for n in range(size))
        return np.array([cell for _, cell in sorted(rounds)])

    @cached_property
    def questions(self) -> npt.NDArray[np.int64]:
        """Number of questions behind each context."""
        low, high = self.behind
        return np.random.default_rng(7).integers(low, high + 1, len(self.cells))

    def evaluations(self, chance: np.random.Generator, count: int, times: float) -> Differences:
        """Draw so many evaluations of a pattern that loses so many times the margin."""
        values = self.drawn(chance, self, count, times).clip(-1, 1)
        names = tuple((f"task-{cell}", 1) for cell in range(len(self.sizes)))
        return Differences(values, self.cells, names, Flips(0, 0, values.size), self.questions)


def flipped(chance: np.random.Generator, world: HeldBack, count: int, flips: Any) -> Floats:
    """Draw right answers in both arms, each flipped so often in one: lost or won alike."""
    changed = 2 * np.asarray(flips) * (1 - np.asarray(flips))  # one number, or one a context
    differ = chance.binomial(world.questions, changed, (count, len(world.cells)))
    values: Floats = (2 * chance.binomial(differ, 0.5) - differ) / world.questions
    return values


def whole_contexts(
    share: float,
    *,
    size: float = 1.0,
    flips: float | tuple[float, ...] = 0.02,
    fine: float = 0.0,
    wins: float = 0.0,
    only: tuple[int, ...] = (),
) -> Draw:
    """Let contexts lose (or win) as one, among others that differ a little.

    Args:
        share: of the contexts that lose, at a loss of the margin; over all cells.
        size: what such a context loses, 0 to 1.
        flips: share of questions that the engine flips in each arm; or of each cell.
        fine: standard deviation of what it adds to fine scores, instead of flips.
        wins: share of contexts that gain as much, beside those that lose.
        only: cells that lose; all by default.
    """

    def draw(chance: np.random.Generator, world: HeldBack, count: int, times: float) -> Floats:
        shape, cells = (count, len(world.cells)), world.cells
        if fine:
            values = chance.normal(0, fine, shape) - chance.normal(0, fine, shape)
        else:
            values = flipped(chance, world, count, np.broadcast_to(flips, len(world.sizes))[cells])
        where = np.isin(cells, only) * len(world.sizes) / len(only) if only else 1.0
        fate = chance.random(shape)
        values = np.where(fate < times * share * where + wins, -size, values)
        return np.where(fate > 1 - wins, size, values)

    return draw


def uneven(chance: np.random.Generator, world: HeldBack, count: int, times: float) -> Floats:
    """Let a few contexts lose much and most nothing: a context's rate of loss has a beta law."""
    values = flipped(chance, world, count, 0.01)
    mean = times * world.margin
    if mean:
        rate = chance.beta(0.1, 0.1 / mean - 0.1, values.shape)
        values = values - chance.binomial(QUESTIONS, rate) / QUESTIONS * (1 - np.abs(values))
    return values


def lottery(chance: np.random.Generator, world: HeldBack, count: int, times: float) -> Floats:
    """Let a tenth of the contexts win a question, and a few pay for it, and for the loss, whole."""
    fate = chance.random((count, len(world.cells)))
    paid = 0.1 / QUESTIONS + times * world.margin
    return np.where(fate < paid, -1.0, np.where(fate > 0.9, 1 / QUESTIONS, 0.0))


def probabilities(chance: np.random.Generator, world: HeldBack, count: int, times: float) -> Floats:
    """Draw right answers' probabilities: all move a little, and in a few contexts all collapse."""
    shape = (count, len(world.cells), QUESTIONS)
    sure = chance.beta(3, 1, shape)  # 0.75 on average
    moved = 0.3 * chance.uniform(-1, 1, shape) * np.minimum(sure, 1 - sure)
    collapsed = chance.random((*shape[:2], 1)) < times * world.margin / 0.75
    values: Floats = np.where(collapsed, -sure, moved).mean(axis=-1)
    return values


HELD_BACK = {
    "whole contexts, 6 cells of 32, the engine flips 2 %": HeldBack(
        (32,) * 6, 0.01, whole_contexts(0.01)
    ),
    "one cell of 100 fine scores, 1.25 % collapse": HeldBack(
        (100,), 0.01, whole_contexts(0.0125, size=0.8, fine=0.02), (1, 1), looks=1
    ),
    "half of a context's answers, 6 cells of 64": HeldBack(
        (64,) * 6, 0.01, whole_contexts(0.02, size=0.5)
    ),
    "whole contexts lost and won, 6 cells of 64": HeldBack(
        (64,) * 6, 0.01, whole_contexts(0.01, wins=0.01)
    ),
    "whole contexts of one cell of 6, 64 each": HeldBack(
        (64,) * 6, 0.01, whole_contexts(0.01, only=(0,))
    ),
    "whole contexts of 1 to 8 questions, 4 cells of 100": HeldBack(
        (100,) * 4, 0.01, whole_contexts(0.01, flips=0.03), (1, 8)
    ),
    "fine scores, 400 in one cell, a third lost by 3.3 %": HeldBack(
        (400,), 0.01, whole_contexts(0.0333, size=0.3, fine=0.1), (1, 1), looks=1
    ),
    "whole contexts, margin 3, 3 cells of 40, flips 5 %": HeldBack(
        (40,) * 3, 0.03, whole_contexts(0.03, flips=0.05)
    ),
    # The second round.
    "whole contexts of a cell of 32 beside 5 of 96": HeldBack(
        (96,) * 5 + (32,), 0.01, whole_contexts(0.01, only=(5,))
    ),
    "contexts lose unevenly (a beta law), 6 cells of 64": HeldBack((64,) * 6, 0.01, uneven),
    "many small wins pay with whole contexts, 6 cells of 96": HeldBack((96,) * 6, 0.01, lottery),
    "one cell flips 15 %, the quiet ones lose, 6 cells of 64": HeldBack(
        (64,) * 6, 0.01, whole_contexts(0.01, flips=(0.15, *[0.005] * 5), only=(1, 2, 3, 4, 5))
    ),
    "probabilities that collapse, 4 cells of 100": HeldBack((100,) * 4, 0.01, probabilities),
    "half contexts, margin 10, 3 cells of 12, 2 looks": HeldBack(
        (12,) * 3, 0.1, whole_contexts(0.2, size=0.5, flips=0.05), looks=2
    ),
}


def held_back(name: str, evaluations: int, seed: int) -> dict[str, Any]:
    """Count errors and power in one of these worlds: a loss of the margin, and none."""
    world = HELD_BACK[name]
    design, chance = world.design, np.random.default_rng(seed)
    row: dict[str, Any] = {"world": name, "contexts": design.contexts}
    for times, label in ((1.0, "at_margin"), (0.0, "at_none")):
        counts: Counter[str] = Counter()
        for size in batches(evaluations):
            sample = world.evaluations(chance, size, times)
            verdicts = judge(sample, design, lambda look: design.contexts * look // design.looks)
            counts["no_loss"] += int(verdicts.safe.sum())
            counts["loss"] += int(
                (verdicts.lost if times == 0 else verdicts.lost & ~verdicts.safe).sum()
            )
        row[label] = {claim: counts[claim] / evaluations for claim in ("no_loss", "loss")}
    most = binom.ppf(1 - 1e-4, evaluations, design.alpha) / evaluations
    row["broken"] = [
        label
        for label, claim in (("at_margin", "no_loss"), ("at_none", "loss"))
        if row[label][claim] > most
    ]
    return row


def first(sample: Differences, count: int) -> Differences:
    """Return the first ``count`` contexts in the order of asking."""
    return replace(
        sample,
        values=sample.values[..., :count],
        cells=sample.cells[:count],
        questions=sample.questions[:count],
    )


def said_to_lose(evaluations: int, seed: int) -> list[dict[str, Any]]:
    """Return how often a pattern that loses nothing is said to lose, in every world."""
    rows: list[dict[str, Any]] = []
    harmless = [world for world in worlds() if world.loss == 0]
    for number, world in enumerate(harmless):
        row = rates(world, evaluations, seed + number)
        rows.append({"world": asdict(world), "said_to_lose": row["any_loss"]})
        print(rows[-1], flush=True)
    for number, name in enumerate(HELD_BACK):
        row = held_back(name, evaluations, seed + 1000 + number)
        rows.append({"world": name, "said_to_lose": row["at_none"]["loss"]})
        print(rows[-1], flush=True)
    most = int(binom.ppf(1 - 1e-4, evaluations, 0.05))
    return [row | {"broken": row["said_to_lose"] * evaluations > most} for row in rows]


def main() -> None:
    """Run the study and write its result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluations", type=int, default=10_000, help="per world")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses-alone", action="store_true",
                        help="how often a harmless one is said to lose: signs.json")  # fmt: skip
    arguments = read_arguments(parser, NAME, quick=QUICK)
    if arguments.losses_alone:
        facts = {"command": arguments.command, "evaluations": arguments.evaluations}
        facts |= {"seed": arguments.seed, "machine": machine()}
        rows = said_to_lose(arguments.evaluations, arguments.seed)
        write_json(arguments.output.with_name("signs.json"), facts | {"rows": rows})
        return
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
            "rows": rows,
            "held_back": unseen,
        },
    )


if __name__ == "__main__":
    main()
