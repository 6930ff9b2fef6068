"""What an evaluation may say of a pattern, in one of six ways, and the sentence to paste.

The order in which a run is judged:

1. the control below ``index_topk`` tokens, where every pattern selects everything, must not differ
   in a single question: else the arms differ in more than the pattern, and nothing is claimed;
2. the reference asked twice (A/A) must not differ in the mean: else the order or the engine favours
   an arm;
3. a cell cannot see, and leaves the claim, in which the reference hardly does better than guessing
   or a pattern known to be bad is not seen to lose;
4. over the cells that are left, "no loss beyond the margin" and "a loss" are each judged at the
   planned looks; the first claim ends the evaluation of that pattern;
5. of several patterns, one is only called safe if all with more full layers were (a fixed
   sequence, each at the whole alpha). A loss needs no such permission.

A run ends with its plan: both claims have spent their alpha then, and a new run needs a new plan.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Evaluation
from sglang_indexcache.evaluate.tasks import CHANCE
from sglang_indexcache.stats.bounds import Estimate, capital
from sglang_indexcache.stats.interim import boundaries
from sglang_indexcache.stats.pairs import Cell, Differences, Flips, Outcome, paired
from sglang_indexcache.stats.power import Design
from sglang_indexcache.support.words import counted

LEAST_ABOVE_CHANCE = 0.10
"""Right answers of the reference above what guessing gives, below which a cell shows nothing."""
CEILING = 0.99
"""Right answers above which nothing can be gained."""
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


@dataclass(frozen=True)
class Worst:
    """The cell in which a pattern loses most.

    Attributes:
        task: of the cell.
        length: likewise, in tokens.
        difference: there.
        bound: no cell loses more, with the error of the claim for all of them together.
    """

    task: str
    length: int
    difference: float
    bound: float


@dataclass(frozen=True)
class Verdict:
    """What a run says of one pattern.

    Attributes:
        kind: the claim.
        pattern: which was judged.
        sentence: to paste, with all that a reader needs to judge it.
        difference: right(pattern) - right(reference), mean over cells; None if nothing was claimed.
        levels: right(reference) and right(pattern), 0 to 1, of which that is the difference.
        worst: cell; None where there is one cell.
        interval: one-sided bounds at the design's alpha each, valid at every look.
        detectable: smallest loss that the whole run could show, with the design's power.
        more: contexts that are missing for a decision; None unless undecided, or if a cell has one.
        flips: pattern against reference.
        noise: the reference against itself; None where it was not asked twice.
        blind: cells that left the claim.
    """

    kind: Kind
    pattern: str
    sentence: str
    difference: float | None = None
    levels: tuple[float, float] | None = None
    worst: Worst | None = None
    interval: tuple[float, float] | None = None
    detectable: float | None = None
    more: int | None = None
    flips: Flips | None = None
    noise: Flips | None = None
    blind: tuple[Cell, ...] = ()


Verdicts = Mapping[str, tuple[int, Verdict]]
"""By candidate: the look at which it was decided, or the last one, and the verdict."""
SAFE = (Kind.NO_LOSS, Kind.SMALL_LOSS)
"""Non-inferior: the pattern loses less than the margin."""
DECIDED = (*SAFE, Kind.LOSS)
"""What ends the evaluation of a pattern."""


@dataclass(frozen=True)
class Judgement:
    """The primary endpoint at one look.

    Attributes:
        kind: NO_LOSS, SMALL_LOSS, LOSS or UNDECIDED.
        level: the reference's own mean over cells.
        difference: mean over cells.
        lower: bound of the difference.
        upper: the other.
        deviation: of a context's difference, in the mean over cells.
        differing: share of contexts that differ.
        heaviest: see `bounds.Estimate.heaviest`.
    """

    kind: Kind
    level: float
    difference: float
    lower: float
    upper: float
    deviation: float
    differing: float
    heaviest: float


def read(differences: Differences, design: Design, look: int) -> Judgement:
    """Judge the primary endpoint.

    Args:
        differences: of all contexts asked so far, in the cells that can see.
        design: as it was fixed before the run.
        look: 1 to ``design.looks``.
    """
    estimate = Estimate(differences)
    deviation = estimate.error * len(differences) ** 0.5
    differing = estimate.differing / len(differences)
    lower, upper = bounds(estimate, design, look)
    kind = Kind.UNDECIDED
    if lower > -design.margin:
        kind = Kind.SMALL_LOSS if upper < 0 else Kind.NO_LOSS
    elif upper < 0:
        kind = Kind.LOSS
    return Judgement(
        kind, estimate.level, estimate.mean, lower, upper, deviation, differing, estimate.heaviest
    )


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


def seen_to_lose(
    outcomes: Sequence[Outcome], control: str, reference: str, alpha: float
) -> set[Cell]:
    """Cells in which the positive control was asked and seen to lose."""
    asked = {(row.task, row.length) for row in outcomes if row.arm == control}
    return {
        cell for cell in asked if sees(paired(outcomes, control, reference, cells=[cell]), alpha)
    }


def right_share(outcomes: Sequence[Outcome], arm: str) -> dict[Cell, float]:
    """Mean of an arm's first answers by cell, 0 to 1."""
    found: dict[Cell, list[float]] = defaultdict(list)
    for row in outcomes:
        if (row.arm, row.repeat) == (arm, 0):
            found[row.task, row.length].append(row.value)
    return {cell: sum(values) / len(values) for cell, values in found.items()}


def at_floor(outcomes: Sequence[Outcome], reference: str) -> dict[Cell, float]:
    """Cells in which the reference hardly does better than guessing, with its share of right."""
    return {
        cell: share
        for cell, share in right_share(outcomes, reference).items()
        if share < CHANCE.get(cell[0], 0.0) + LEAST_ABOVE_CHANCE
    }


def at_ceiling(outcomes: Sequence[Outcome], reference: str) -> dict[Cell, float]:
    """Cells in which the reference is hardly ever wrong, with its share of right answers."""
    shares = right_share(outcomes, reference)
    return {cell: share for cell, share in shares.items() if share >= CEILING}


def blind_cells(
    outcomes: Sequence[Outcome], control: str | None, reference: str, alpha: float
) -> dict[Cell, str]:
    """Cells that cannot see a loss, each with the reason.

    Args:
        outcomes: of all arms.
        control: the arm that is known to be bad; a cell in which it was not asked cannot see,
            because nothing shows that it could. None if there is no such arm.
        reference: the arm that every other is compared with.
        alpha: of "seen to lose".
    """
    found = {
        cell: f"{reference} gets {share:.0%} right there, hardly more than guessing"
        for cell, share in at_floor(outcomes, reference).items()
    }
    if control is None:
        return found
    own, others = right_share(outcomes, reference), right_share(outcomes, control)
    seen = seen_to_lose(outcomes, control, reference, alpha)
    for cell in own.keys() - seen - found.keys():
        if cell not in others:
            found[cell] = f"{control} was not asked there"
        elif others[cell] >= CEILING:
            found[cell] = f"too easy: even {control} gets {others[cell]:.0%} right there"
        else:
            found[cell] = (
                f"{control} was not seen to lose there: {others[cell]:.0%} right, "
                f"{reference} {own[cell]:.0%}"
            )
    return found


def repeats_itself(noise: Differences, design: Design, look: int) -> Any:
    """Whether the reference, asked twice, has the same mean as far as can be seen."""
    estimate = Estimate(noise)
    z = boundaries(design.fractions, SAME)[min(look, design.looks) - 1]
    return (estimate.lower(z) <= 0) & (estimate.upper(z) >= 0)


def verdicts_of(evaluation: Evaluation) -> Verdicts:
    """By candidate: the look at which it was decided, or the last one, and the verdict.

    The first claim ends the evaluation of a pattern: later contexts do not reopen it. Empty before
    the first look.
    """
    found: dict[str, tuple[int, Verdict]] = {}
    for look in range(1, evaluation.look + 1):
        rows, permitted = evaluation.outcomes(look=look), True
        for arm in evaluation.candidates:
            if arm.name not in found or found[arm.name][1].kind not in DECIDED:
                verdict = judge(
                    rows,
                    arm.name,
                    evaluation.design,
                    look,
                    reference=evaluation.reference.name,
                    bad=evaluation.bad.name,
                    selects_all=evaluation.selects_all,
                    permitted=permitted,
                )
                found[arm.name] = look, verdict
            permitted = permitted and found[arm.name][1].kind in SAFE
    return found


def judge(
    outcomes: Sequence[Outcome],
    pattern: str,
    design: Design,
    look: int = 1,
    *,
    reference: str,
    bad: str | None = None,
    selects_all: int | None = None,
    permitted: bool = True,
) -> Verdict:
    """The verdict on one pattern.

    Logs of another harness have no control, often no A/A and no pattern known to be bad: the claim
    is the same, and what could not be checked is said after it.

    Args:
        outcomes: right (1) or wrong (0), or a score, of every arm; of the reference twice where A/A
            was asked.
        pattern: the arm that is judged.
        design: as it was fixed before the run.
        look: which of the planned looks this is, from 1.
        reference: the arm that every other is compared with.
        bad: the arm that must be seen to lose; None for logs without one.
        selects_all: ``index_topk``; cells of at most this length are the control. None for logs.
        permitted: whether every pattern with more full layers was shown to be safe (the fixed
            sequence).

    Raises:
        QualityError: a look that is none, an arm without outcomes, or a run without its control.
    """
    if not 1 <= look <= design.looks:
        raise QualityError(
            f"look {look} is none of the {design.looks} planned ones; a run that goes on beyond "
            "its plan has no alpha left: plan a new one"
        )
    logs = selects_all is None
    long = [row for row in outcomes if logs or row.length > (selects_all or 0)]
    noise = _noise(long, reference)
    unsound = "" if logs else _unsound(outcomes, pattern, reference, noise, selects_all or 0)
    unsound = unsound or (_restless(noise, design, look) if noise else "")
    if unsound:
        return _without(Kind.INVALID, pattern, unsound)
    blind = blind_cells(long, bad, reference, design.alpha)
    seeing = {(row.task, row.length) for row in long} - blind.keys()
    if not seeing:
        return _without(Kind.CANNOT_SEE, pattern, _cannot_see(blind))
    differences = paired(long, pattern, reference, cells=seeing)
    left = _without_blind(design, long, blind)
    why = "" if permitted else "a pattern with more full layers was not shown to be safe"
    dark = [row for row in long if (row.task, row.length) in blind and row.arm != bad]
    hidden = _hidden(dark, reference, design)
    if hidden and not why:
        places = ", ".join(map(_place, hidden))
        why = f"a pattern visibly loses at {places}, which would be left out"
    verdict = _claim(pattern, reference, differences, left, look, noise, why)
    caveats = [_cannot_see(blind)] if blind else []
    if bad is None:
        caveats.append("Not shown: that these questions can see a bad pattern.")
    if noise is None:
        caveats.append("Not known: the engine's own noise.")
    sentence = " ".join([verdict.sentence, *caveats])
    return replace(verdict, blind=tuple(sorted(blind)), sentence=sentence)


def _hidden(outcomes: Sequence[Outcome], reference: str, design: Design) -> list[Cell]:
    """Cells outside the claim in which any pattern is nevertheless seen to lose."""
    arms = {row.arm for row in outcomes} - {reference}
    found = (seen_to_lose(outcomes, arm, reference, design.alpha) for arm in arms)
    return sorted({cell for cells in found for cell in cells})


def _worst(differences: Differences, design: Design, look: int) -> Worst | None:
    """The cell with the largest loss, and a bound that holds for all cells at once."""
    count = len(differences.names)
    if count == 1:
        return None
    z = boundaries(design.fractions, design.alpha / count)[look - 1]
    estimates = [Estimate(differences.of(cell)) for cell in range(count)]
    place = min(range(count), key=lambda cell: estimates[cell].mean)
    bound = max(-one.guarded(z) for one in estimates)
    return Worst(*differences.names[place], estimates[place].mean, bound)


def _noise(outcomes: Sequence[Outcome], reference: str) -> Differences | None:
    if not any(row.arm == reference and row.repeat == 1 for row in outcomes):
        return None
    return paired(outcomes, reference, reference, repeat=1)


def _unsound(
    outcomes: Sequence[Outcome],
    pattern: str,
    reference: str,
    noise: Differences | None,
    selects_all: int,
) -> str:
    """Why nothing may be claimed of a run of ours; empty if all is as it must be."""
    short = [row for row in outcomes if row.length <= selects_all]
    if not short:
        raise QualityError(
            f"no outcome at or below {selects_all} tokens; the control that must not differ is "
            "obligatory"
        )
    control = paired(short, pattern, reference)
    if control.values.any() or control.flips.lost or control.flips.won:
        return (
            f"refused: below index_topk tokens, where every pattern selects everything, the arms "
            f"differ ({control.flips}). They differ in more than the pattern, or the engine does "
            "not repeat itself: compare flags and checkpoints, and ask for deterministic kernels."
        )
    if noise is None:
        return (
            "refused: the reference was not asked twice, so the engine's own noise is not known. "
            "Ask it again on a quarter of the contexts, in another order."
        )
    return ""


def _restless(noise: Differences, design: Design, look: int) -> str:
    if not repeats_itself(noise, design, look):
        return (
            f"refused: the reference differs from itself by {_points(Estimate(noise).mean)} points "
            f"({noise.flips}). The order of the arms or the state of the server favours one: "
            "flush between blocks and alternate the arms."
        )
    return ""


def _without_blind(design: Design, outcomes: Sequence[Outcome], blind: Collection[Cell]) -> Design:
    """The design with the contexts of cells that see; every cell came equally far."""
    cells = {row.context: (row.task, row.length) for row in outcomes}
    seeing = sum(cell not in blind for cell in cells.values())
    contexts = round(design.contexts * seeing / len(cells))
    return replace(design, contexts=max(contexts, design.looks))


def _claim(
    pattern: str,
    reference: str,
    differences: Differences,
    design: Design,
    look: int,
    noise: Differences | None,
    forbidden: str,
) -> Verdict:
    reading = read(differences, design, look)
    seen = reading.deviation, reading.differing, reading.heaviest
    kind, more = reading.kind, None
    if forbidden and kind in SAFE:
        kind = Kind.LOSS if kind is Kind.SMALL_LOSS else Kind.UNDECIDED
    if kind is Kind.UNDECIDED and math.isfinite(reading.deviation):
        needed = design.needed(*seen)
        more = max(needed, design.contexts) - len(differences)
    verdict = Verdict(
        kind,
        pattern,
        "",
        difference=reading.difference,
        levels=(reading.level, reading.level + reading.difference),
        worst=_worst(differences, design, look),
        interval=(reading.lower, reading.upper),
        detectable=design.detectable(*seen),
        more=more,
        flips=differences.flips,
        noise=noise.flips if noise else None,
    )
    sentence = _sentence(verdict, reference, differences, design, look, forbidden)
    return replace(verdict, sentence=sentence)


def _sentence(
    verdict: Verdict,
    reference: str,
    differences: Differences,
    design: Design,
    look: int,
    forbidden: str,
) -> str:
    assert verdict.interval is not None
    assert verdict.levels is not None
    assert verdict.difference is not None
    assert verdict.detectable is not None
    lower, upper = verdict.interval
    if verdict.kind is Kind.NO_LOSS:
        claim = f"no loss beyond {points(design.margin)}"
    elif verdict.kind is Kind.SMALL_LOSS:
        loss = -100 * verdict.difference
        claim = f"a loss of {loss:.1f} points, less than the margin of {points(design.margin)}"
    elif verdict.kind is Kind.LOSS:
        claim = f"a loss of {-100 * verdict.difference:.1f} points"
    elif forbidden and lower > -design.margin:
        claim = f"not claimed, because {forbidden}"
    elif verdict.more is None:
        claim = "undecided: somewhere a task has a single context so far, whose spread is not known"
    elif not verdict.more:
        claim = (
            f"undecided: a new run of the same size shows, with {design.power:.0%} probability, "
            "that it loses nothing if it does"
        )
    elif look < design.looks:
        claim = (
            f"undecided at look {look} of {design.looks}, {counted(verdict.more, 'more context')}"
        )
    else:
        claim = (
            f"undecided, {counted(verdict.more, 'more context')}: a new run with so many more "
            f"shows, with {design.power:.0%} probability, that it loses nothing if it does"
        )
    noise = f"; A/A: {verdict.noise}" if verdict.noise else ""
    worst = ""
    if verdict.worst:
        place = _place((verdict.worst.task, verdict.worst.length))
        worst = (
            f" Worst of {len(differences.names)} cells: {place}, "
            f"{_points(verdict.worst.difference)} points; no cell loses more than "
            f"{100 * verdict.worst.bound:.1f} (bound for all of them together)."
        )
    missing = f" {differences.missing:,} questions missing." if differences.missing else ""
    return (
        f"{verdict.pattern}: {claim}. {reference} {verdict.levels[0]:.1%}, {verdict.pattern} "
        f"{verdict.levels[1]:.1%}: difference {_points(verdict.difference)} points "
        f"({1 - 2 * design.alpha:.0%} interval {_points(lower)} to {_points(upper)}); "
        f"{differences.flips}, in {len(differences):,} contexts{noise}.{worst}{missing} "
        f"A loss of {100 * verdict.detectable:.1f} points would have been found "
        f"with {design.power:.0%} probability (one-sided {design.alpha:.0%}, "
        f"look {min(look, design.looks)} of {design.looks})."
    )


def _without(kind: Kind, pattern: str, reason: str) -> Verdict:
    return Verdict(kind, pattern, f"{pattern}: {reason}")


def _cannot_see(blind: Mapping[Cell, str]) -> str:
    cells = (f"{_place(cell)} ({reason})" for cell, reason in sorted(blind.items()))
    return f"Cannot see: {'; '.join(cells)}."


def _place(cell: Cell) -> str:
    task, length = cell
    return f"{task} at {length:,}" if length else task


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"


def points(value: float) -> str:
    """``0.01`` as "1 point"."""
    number = f"{100 * value:g}"
    return f"{number} point{'' if number == '1' else 's'}"
