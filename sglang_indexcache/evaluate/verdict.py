"""What an evaluation may say of a pattern, in one of six ways, and the sentence to paste.

The order in which a run is judged:

1. the control below ``index_topk`` tokens, where every pattern selects everything, must not differ
   in a single question: else the arms differ in more than the pattern, and nothing is claimed;
2. the reference asked twice (A/A) must not differ in the mean: else the order or the engine favours
   an arm;
3. a cell (stratum: a task at a length) cannot see, and leaves the claim, in which the reference
   hardly does better than guessing, or a pattern known to be bad is not seen to lose;
4. over the cells that are left, "no loss beyond the margin" (non-inferiority) and "a loss" are each
   judged at the planned looks (interim analyses); the first claim ends the evaluation of that
   pattern. The first of them waits until every cell was seen to show a loss, or until the end;
5. of several patterns, one is only called safe if all with more full layers were (a fixed
   sequence, each at the whole alpha). A loss needs no such permission.

A run ends with its plan: both claims have spent their alpha then, and a new run needs a new plan.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.tasks import CHANCE
from sglang_indexcache.stats.bounds import Estimate, capital
from sglang_indexcache.stats.design import Design, boundaries
from sglang_indexcache.stats.pairs import Cell, Differences, Flips, Outcome, paired
from sglang_indexcache.support.lengths import counted, format_length, points

LEAST_ABOVE_CHANCE = 0.10
"""Right answers of the reference above what guessing gives, below which a cell shows nothing."""
EASY, CEILING = 0.95, 0.99
"""Right answers of the bad pattern from which a cell is called too easy, and not waited for."""
SAME = 0.005
"""One-sided error of the A/A check: of sound runs, one in a hundred is refused."""


class Kind(enum.Enum):
    """The six verdicts."""

    NO_LOSS = "no loss beyond the margin"
    SMALL_LOSS = "a loss, but less than the margin"
    LOSS = "loss"
    UNDECIDED = "undecided"
    CANNOT_SEE = "this task cannot see it"
    INVALID = "refused"


SAFE = (Kind.NO_LOSS, Kind.SMALL_LOSS)
"""Non-inferior: the pattern loses less than the margin."""
WAITING = "not every task has been seen to show a loss yet"
"""Why a claim of safety is put off to a later look."""
DECIDED = (*SAFE, Kind.LOSS)
"""What ends the evaluation of a pattern."""


@dataclass(frozen=True)
class Worst:
    """The cell in which a pattern loses most, and the difference there.

    No cell loses more than ``bound``, with the error of the claim for all of them together.
    """

    task: str
    length: int
    difference: float
    bound: float


@dataclass(frozen=True)
class Verdict:
    """What a run says of one pattern.

    Attributes:
        headline: the claim, both levels and the worst cell, in one sentence.
        details: the numbers behind it, for whoever pastes the headline.
        difference: right(pattern) - right(reference), mean over cells; None if nothing was claimed.
        levels: right(reference) and right(pattern), 0 to 1, of which that is the difference.
        worst: None where there is one cell.
        interval: one-sided bounds at the design's alpha each, valid at every look.
        exact: whether the interval holds for any number of contexts, and so is wider.
        detectable: smallest loss that the whole run could show, with the design's power.
        more: contexts that are missing for a decision; None unless undecided, or if a cell has one.
        noise: the reference against itself; None where it was not asked twice.
        blind: cells that left the claim.
    """

    kind: Kind
    pattern: str
    headline: str
    details: str = ""
    difference: float | None = None
    levels: tuple[float, float] | None = None
    worst: Worst | None = None
    interval: tuple[float, float] | None = None
    exact: bool = False
    detectable: float | None = None
    more: int | None = None
    contexts: int = 0
    flips: Flips | None = None
    noise: Flips | None = None
    blind: tuple[Cell, ...] = ()

    @property
    def sentence(self) -> str:
        """To paste."""
        return f"{self.headline} {self.details}".strip()


Verdicts = Mapping[str, tuple[int, Verdict]]
"""By candidate: the look at which it was decided, or the last one, and the verdict."""


class Blind(NamedTuple):
    """Why a cell cannot see a loss; it ``waits`` where more answers may yet show that it can."""

    reason: str
    waits: bool


@dataclass(frozen=True)
class Look:
    """All that counts at a planned look (interim analysis), and what it shows of each cell.

    Looks count from 1; without a number it is all that was asked so far. Logs of another harness
    have no control, often no A/A and no pattern known to be bad: the claim is the same, and what
    could not be checked is said after it.
    """

    evaluation: Evaluation
    at: int | None = None

    @property
    def number(self) -> int:
        """Of the look, whose share of alpha a claim may spend."""
        return self.design.looks if self.at is None else self.at

    @property
    def design(self) -> Design:
        """As it was fixed before the run."""
        return self.evaluation.design

    @property
    def reference(self) -> str:
        """The arm that every other is compared with."""
        return self.evaluation.reference.name

    @property
    def bad(self) -> str | None:
        """The arm that must be seen to lose; None for logs without one."""
        return self.evaluation.bad.name if self.evaluation.bad else None

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """Of every arm; of the reference twice where A/A was asked."""
        return self.evaluation.outcomes(self.at)

    @cached_property
    def control(self) -> list[Outcome]:
        """Where every pattern selects everything, and none may differ; nothing of a log."""
        most = self.evaluation.selects_all
        return [row for row in self.outcomes if most is not None and row.length <= most]

    @cached_property
    def long(self) -> list[Outcome]:
        """Where a pattern can matter; all of a log, which does not tell."""
        most = self.evaluation.selects_all
        return [row for row in self.outcomes if most is None or row.length > most]

    @property
    def cells(self) -> set[Cell]:
        """Those of the claim, as long as they can see."""
        return {row.cell for row in self.long}

    @cached_property
    def noise(self) -> Differences | None:
        """The reference against itself (A/A); None where it was not asked twice."""
        again = any(row.arm == self.reference and row.repeat == 1 for row in self.long)
        return paired(self.long, self.reference, self.reference, repeat=1) if again else None

    def right_share(self, arm: str) -> dict[Cell, float]:
        """Mean of an arm's first answers by cell, 0 to 1."""
        found: dict[Cell, list[float]] = defaultdict(list)
        for row in self.long:
            if (row.arm, row.repeat) == (arm, 0):
                found[row.cell].append(row.value)
        return {cell: sum(values) / len(values) for cell, values in found.items()}

    def at_floor(self) -> dict[Cell, float]:
        """Cells in which the reference hardly does better than guessing, with its right share."""
        return {
            cell: share
            for cell, share in self.right_share(self.reference).items()
            if share < CHANCE.get(cell[0], 0.0) + LEAST_ABOVE_CHANCE
        }

    def sees_loss(self, arm: str, cell: Cell) -> bool:
        """Whether an arm was asked in a cell, and seen to lose there."""
        here = [row for row in self.long if row.cell == cell]
        if not any((row.arm, row.repeat) == (arm, 0) for row in here):
            return False
        return bool(sees(paired(here, arm, self.reference), self.design.alpha))

    @cached_property
    def blind(self) -> dict[Cell, Blind]:
        """Cells that cannot see a loss.

        One in which the bad pattern was not asked cannot, because nothing shows that it could.
        """
        found = {
            cell: Blind(
                f"{self.reference} gets {share:.0%} right there, hardly more than guessing", False
            )
            for cell, share in self.at_floor().items()
        }
        if self.bad is None:
            return found
        own, others = self.right_share(self.reference), self.right_share(self.bad)
        for cell in own.keys() - found.keys():
            if cell not in others:
                found[cell] = Blind(f"{self.bad} was not asked there", False)
            elif self.sees_loss(self.bad, cell):
                continue
            elif others[cell] >= EASY:
                reason = f"too easy: even {self.bad} gets {others[cell]:.0%} right there"
                found[cell] = Blind(reason, others[cell] < CEILING)
            else:
                shares = f"{others[cell]:.0%} right, {self.reference} {own[cell]:.0%}"
                few = f"too few contexts to show that {self.bad} loses there"
                none = f"{self.bad} was not seen to lose there"
                reason = few if others[cell] < own[cell] else none
                found[cell] = Blind(f"{reason}: {shares}", True)
        return found

    @property
    def hidden(self) -> list[Cell]:
        """Cells outside the claim in which any pattern is nevertheless seen to lose."""
        arms = {row.arm for row in self.long} - {self.reference, self.bad}
        return sorted(cell for cell in self.blind if any(self.sees_loss(arm, cell) for arm in arms))

    @property
    def seeing_design(self) -> Design:
        """The design with the contexts of cells that see; every cell came equally far."""
        cells = {row.context: row.cell for row in self.long}
        seeing = sum(cell not in self.blind for cell in cells.values())
        contexts = round(self.design.contexts * seeing / len(cells))
        return replace(self.design, contexts=max(contexts, self.design.looks))

    def control_differs(self, arm: str) -> str:
        """Why the arms differ where every pattern selects everything; empty if they do not."""
        flips = paired(self.control, arm, self.reference).flips
        if not flips.lost and not flips.won:
            return ""
        return (
            f"below index_topk tokens, where every pattern selects everything, {arm} differs from "
            f"{self.reference} ({flips}). The arms differ in more than the pattern, or the engine "
            "does not repeat itself: compare flags and checkpoints, and start it with "
            "--enable-deterministic-inference where it has that."
        )

    def unsound(self, arm: str) -> str:
        """Why nothing may be claimed of an arm; empty if all is as it must be."""
        if self.evaluation.selects_all is not None:
            if not self.control:
                raise QualityError(
                    f"no outcome at or below {self.evaluation.selects_all} tokens; the control "
                    "that must not differ is obligatory"
                )
            if differs := self.control_differs(arm):
                return differs
            if self.noise is None:
                return (
                    "the reference was not asked twice, so the engine's own noise is not known. "
                    "Ask it again on a quarter of the contexts, in another order."
                )
        if self.noise and not repeats_itself(self.noise, self.design, self.number):
            return (
                f"the reference differs from itself by {_points(Estimate(self.noise).mean)} points "
                f"({self.noise.flips}). The order of the arms or the state of the server favours "
                "one: flush between blocks and alternate the arms."
            )
        return ""


def bounds(estimate: Estimate, design: Design, look: int) -> tuple[Any, Any]:
    """One-sided bounds of the difference at a look, on which both claims rest."""
    z = design.bounds[look - 1]
    return estimate.guarded(z), estimate.upper(z)


def sees(differences: Differences, alpha: float) -> Any:
    """Whether a control that is known to be bad has been seen to lose.

    By the bet, so that it may be asked after every context and the control ended once it has.
    """
    values = -differences.values
    largest = float(abs(values).max(initial=1.0))
    return capital(values, largest, 0.0) >= 1 / alpha


def repeats_itself(noise: Differences, design: Design, look: int) -> Any:
    """Whether the reference, asked twice, has the same mean as far as can be seen."""
    estimate = Estimate(noise)
    z = boundaries(design.fractions, SAME)[min(look, design.looks) - 1]
    return (estimate.lower(z) <= 0) & (estimate.upper(z) >= 0)


def claimed(lower: float, upper: float, margin: float) -> Kind:
    """What the bounds of the primary endpoint claim: NO_LOSS, SMALL_LOSS, LOSS or UNDECIDED."""
    if lower > -margin:
        return Kind.SMALL_LOSS if upper < 0 else Kind.NO_LOSS
    return Kind.LOSS if upper < 0 else Kind.UNDECIDED


def verdicts_of(evaluation: Evaluation) -> Verdicts:
    """What is said of each candidate: the first claim is final, later contexts do not reopen it.

    Empty before the first look.
    """
    found: dict[str, tuple[int, Verdict]] = {}
    for number in range(1, evaluation.look + 1):
        look, permitted = Look(evaluation, number), True
        for arm in evaluation.candidates:
            if arm.name not in found or found[arm.name][1].kind not in DECIDED:
                found[arm.name] = number, judge(look, arm.name, permitted)
            permitted = permitted and found[arm.name][1].kind in SAFE
    return found


def judge(look: Look, pattern: str, permitted: bool = True) -> Verdict:
    """The verdict on one pattern.

    ``permitted`` says whether every pattern with more full layers was shown to be safe (the fixed
    sequence).
    """
    if unsound := look.unsound(pattern):
        return Verdict(Kind.INVALID, pattern, f"{pattern}: refused: {unsound}")
    if not look.cells - look.blind.keys():
        return Verdict(Kind.CANNOT_SEE, pattern, f"{pattern}: {_cannot_see(look.blind)}")
    forbidden = ""
    if look.number < look.design.looks and any(one.waits for one in look.blind.values()):
        forbidden = WAITING
    if hidden := look.hidden:
        places = ", ".join(map(place, hidden))
        forbidden = f"a pattern visibly loses at {places}, which would be left out"
    if not permitted:
        forbidden = "a pattern with more full layers was not shown to be safe"
    return _claim(look, pattern, forbidden)


def _claim(look: Look, pattern: str, forbidden: str) -> Verdict:
    """What the cells that see show of it; ``forbidden`` says why it may not be called safe."""
    cells = look.cells - look.blind.keys()
    differences = paired(look.long, pattern, look.reference, cells=cells)
    design, estimate = look.seeing_design, Estimate(differences)
    lower, upper = map(float, bounds(estimate, design, look.number))
    kind = claimed(lower, upper, design.margin)
    if forbidden and kind in SAFE:
        final = kind is Kind.SMALL_LOSS and forbidden != WAITING
        kind = Kind.LOSS if final else Kind.UNDECIDED
    more = None
    if kind is Kind.UNDECIDED and math.isfinite(estimate.error):
        more = max(design.needed(*estimate.spread), design.contexts) - len(differences)
    mean, levels = float(estimate.mean), (estimate.level, estimate.level + float(estimate.mean))
    worst = _worst(differences, design, look.number)
    claim = _claim_in_words(kind, mean, lower, more, len(differences), look, forbidden)
    where = ""
    if worst and worst.difference < 0:
        where = f"; worst: {place((worst.task, worst.length))}, {_points(worst.difference)}"
    verdict = Verdict(
        kind,
        pattern,
        f"{pattern}: {claim} ({look.reference} {levels[0]:.1%}, {pattern} {levels[1]:.1%}{where}).",
        difference=mean,
        levels=levels,
        worst=worst,
        interval=(lower, upper),
        exact=bool(estimate.exact),
        detectable=design.detectable(*estimate.spread),
        more=more,
        contexts=len(differences),
        flips=differences.flips,
        noise=look.noise.flips if look.noise else None,
        blind=tuple(sorted(look.blind)),
    )
    return replace(verdict, details=_details(verdict, differences, look))


def _worst(differences: Differences, design: Design, look: int) -> Worst | None:
    """The cell with the largest loss, and a bound that holds for all cells at once."""
    count = len(differences.names)
    if count == 1:
        return None
    z = boundaries(design.fractions, design.alpha / count)[look - 1]
    estimates = [Estimate(differences.of(cell)) for cell in range(count)]
    cell = min(range(count), key=lambda cell: estimates[cell].mean)
    bound = max(-float(one.guarded(z)) for one in estimates)
    return Worst(*differences.names[cell], float(estimates[cell].mean), bound)


def _claim_in_words(
    kind: Kind,
    difference: float,
    lower: float,
    more: int | None,
    contexts: int,
    look: Look,
    forbidden: str,
) -> str:
    margin, within = points(look.design.margin), lower > -look.design.margin
    if kind is Kind.NO_LOSS:
        return f"no loss beyond {margin}"
    if kind in (Kind.SMALL_LOSS, Kind.LOSS):
        less = f", less than the margin of {margin}" if within else ""
        return f"a loss of {-100 * difference:.1f} points{less}"
    if forbidden and within:
        return f"not claimed, because {forbidden}"
    if more is None:
        return "undecided: somewhere a task has a single context so far, whose spread is not known"
    if look.number < look.design.looks:
        return f"undecided so far; about {counted(more, 'more context')} would decide"
    whole = counted(contexts + more, "context")
    return f"undecided; a new run of {whole} would probably decide"


def _details(verdict: Verdict, differences: Differences, look: Look) -> str:
    assert verdict.difference is not None
    assert verdict.interval is not None
    assert verdict.detectable is not None
    design = look.design
    lower, upper = map(_points, verdict.interval)
    width = f"{1 - 2 * design.alpha:.0%}{' exact' if verdict.exact else ''} interval"
    if design.looks > 1:  # wider than the tables' intervals, which are those of a single look
        width += " for this look"
    noise = f"; A/A: {verdict.noise}" if verdict.noise else ""
    said = [
        f"Difference {_points(verdict.difference)} points ({width} {lower} to {upper}); "
        f"{differences.flips}, in {verdict.contexts:,} contexts{noise}."
    ]
    if verdict.worst:
        said.append(
            f"No cell loses more than {100 * verdict.worst.bound:.1f} points (bound for all "
            f"{len(differences.names)} of them together)."
        )
    if verdict.kind is not Kind.LOSS:
        said.append(
            f"A loss of {100 * verdict.detectable:.1f} points would have been found with "
            f"{design.power:.0%} probability."
        )
    said.append(f"One-sided {design.alpha:.0%}, look {look.number} of {design.looks}.")
    if look.blind:
        said.append(_cannot_see(look.blind))
    if look.bad is None:
        said.append("Not shown: that these questions can see a bad pattern.")
    if not verdict.noise:
        said.append("Not known: the engine's own noise.")
    return " ".join(said)


def _cannot_see(blind: Mapping[Cell, Blind]) -> str:
    cells = (f"{place(cell)} ({one.reason})" for cell, one in sorted(blind.items()))
    return f"Cannot see: {'; '.join(cells)}."


def place(cell: Cell) -> str:
    """A task and a length, as messages name them."""
    task, length = cell
    return f"{task} at {format_length(length)}" if length else task


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
