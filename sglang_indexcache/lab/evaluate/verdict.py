"""Verdict of an evaluation on a pattern, one of six, with the sentence to paste.

The order in which a run is judged:

1. below ``index_topk`` tokens, where every pattern selects everything (the control), no arm may
   differ from the reference more often than the reference differs from itself when it is asked
   twice; otherwise the arms differ in more than the pattern, and nothing is claimed;
2. the reference asked twice (A/A) must not differ in the mean; otherwise the order or the engine
   favours an arm;
3. a cell (stratum: a task at a length) leaves the claim if it cannot see a loss, because the
   reference is hardly better than guessing there, or because a pattern known to be bad is not seen
   to lose;
4. over the remaining cells, "no loss beyond the margin" (non-inferiority) and "a loss" are each
   judged at the planned looks (interim analyses); the first claim ends the evaluation of that
   pattern. A claim of no loss waits until every cell was seen to show a loss, or until the end;
5. of several patterns, one is called safe only if all earlier ones were, which have more F layers
   (a fixed sequence, each at the whole alpha). A loss needs no such permission.

A run ends with its plan: both claims have then spent their alpha, and a new run needs a new plan.
"""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.stats.bounds import Estimate, capital, sign_flip
from sglang_indexcache.lab.stats.design import Design, boundaries
from sglang_indexcache.lab.stats.pairs import Answer, Cell, Differences, Flips, paired
from sglang_indexcache.library.lengths import counted, format_length, points

LEAST_RIGHT = 0.10
"""Share of right answers of the reference below which a cell shows nothing."""
EASY, CEILING = 0.95, 0.99
"""Shares of right answers by the bad pattern from which a cell is called too easy, and from which
it is not waited for."""
SAME = 0.005
"""One-sided error of the A/A check, which refuses one in a hundred sound runs, and of the control,
which refuses at most one in two hundred."""


class Kind(enum.Enum):
    """The six verdicts."""

    NO_LOSS = "no loss beyond the margin"
    SMALL_LOSS = "a loss, but less than the margin"
    LOSS = "loss"
    UNDECIDED = "undecided"
    CANNOT_SEE = "this task cannot see it"
    INVALID = "refused"


MOVE = 3
"""Drop of a context's mean probability, in margins, that counts as a whole bet."""

SAFE = (Kind.NO_LOSS, Kind.SMALL_LOSS)
"""Verdicts of non-inferiority: the pattern loses less than the margin."""
WAITING = "not every task has been seen to show a loss yet"
"""Reason to put off a claim of safety to a later look."""
DECIDED = (*SAFE, Kind.LOSS)
"""Verdicts that end the evaluation of a pattern."""


@dataclass(frozen=True)
class Worst:
    """The cell in which a pattern loses most, and the difference there.

    No cell loses more than ``bound``; the claim's error holds for all cells together.
    """

    task: str
    length: int
    difference: float
    bound: float


@dataclass(frozen=True)
class Verdict:
    """Verdict of a run on one pattern.

    Attributes:
        headline: the claim, both levels and the worst cell, in one sentence.
        details: the numbers behind the headline.
        difference: right(pattern) - right(reference), mean over cells; None if nothing was claimed.
        levels: right(reference) and right(pattern), 0 to 1, whose difference that is.
        worst: the worst cell; None if there is only one cell.
        interval: one-sided bounds, each at the design's alpha, valid at every look.
        exact: whether the interval holds for any number of contexts, and so is wider.
        detectable: smallest loss that the whole run could show, with the design's power.
        more: number of contexts missing for a decision; None unless undecided, or if a cell has one
            context.
        noise: the reference against itself; None if it was not asked twice.
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
        """Sentence to paste: the headline and its details."""
        return f"{self.headline} {self.details}".strip()


Verdicts = Mapping[str, tuple[int, Verdict]]
"""Verdict on each candidate, with the look at which it was decided, or else the last look."""


class Blind(NamedTuple):
    """Reason why a cell cannot see a loss; it ``waits`` if more answers may show that it can."""

    reason: str
    waits: bool


@dataclass(frozen=True)
class Look:
    """Everything that counts at a planned look (interim analysis), and what it shows in each cell.

    Looks count from 1; without a number, everything asked so far counts. Logs of another harness
    have no control, and often no A/A and no pattern known to be bad. Their claim is the same,
    followed by what could not be checked.
    """

    evaluation: Evaluation
    at: int | None = None

    @property
    def number(self) -> int:
        """Number of the look that decides how much alpha a claim may spend."""
        return self.design.looks if self.at is None else self.at

    @property
    def design(self) -> Design:
        """Test design, fixed before the run."""
        return self.evaluation.design

    @property
    def reference(self) -> str:
        """Name of the arm with which every other is compared."""
        return self.evaluation.reference.name

    @property
    def bad(self) -> str | None:
        """Name of the arm that must be seen to lose; None for logs without one."""
        return self.evaluation.bad.name if self.evaluation.bad else None

    @cached_property
    def control(self) -> list[Answer]:
        """Answers at lengths where every pattern selects everything; empty for a log."""
        most, rows = self.evaluation.selects_all, self._counted
        return [row for row in rows if most is not None and row.length <= most]

    @cached_property
    def long(self) -> list[Answer]:
        """Answers to compare, at lengths where a pattern can matter; all answers of a log."""
        most, rows = self.evaluation.selects_all, self._counted
        return [row for row in rows if most is None or row.length > most]

    @cached_property
    def _counted(self) -> Sequence[Answer]:
        return self.evaluation.answers if self.at is None else self.evaluation.until(self.at)

    def compared(
        self, arm: str, *, cells: Iterable[Cell] | None = None, repeat: int = 0
    ) -> Differences:
        """Compare an arm with the reference's first answers; each comparison is made once."""
        key = arm, None if cells is None else frozenset(cells), repeat
        if key not in self._compared:
            self._compared[key] = paired(
                self.long, arm, self.reference, cells=key[1], repeat=repeat
            )
        return self._compared[key]

    @cached_property
    def _compared(self) -> dict[tuple[str, frozenset[Cell] | None, int], Differences]:
        """Comparisons that were made."""
        return {}

    @property
    def cells(self) -> set[Cell]:
        """Cells with answers to compare, including cells that cannot see a loss."""
        return {row.cell for row in self.long}

    @cached_property
    def noise(self) -> Differences | None:
        """Differences of the reference from itself (A/A); None if it was not asked twice."""
        asked_twice = any(row.arm == self.reference and row.repeat == 1 for row in self.long)
        return self.compared(self.reference, repeat=1) if asked_twice else None

    def right_share(self, arm: str) -> dict[Cell, float]:
        """Return the share of an arm's first answers that are right, by cell, 0 to 1."""
        by_cell: dict[Cell, list[float]] = defaultdict(list)
        for row in self.long:
            if (row.arm, row.repeat) == (arm, 0):
                by_cell[row.cell].append(row.right)
        return {cell: sum(values) / len(values) for cell, values in by_cell.items()}

    def at_floor(self) -> dict[Cell, float]:
        """Return its share of right answers in cells where the reference hardly beats guessing."""
        return {
            cell: share
            for cell, share in self.right_share(self.reference).items()
            if share < LEAST_RIGHT
        }

    def sees_loss(self, arm: str, cell: Cell) -> bool:
        """Return whether an arm was asked in a cell and was seen to lose there.

        Probabilities count too, except if the arm is nearly always right, because then nothing is
            lost.
        """
        rows = [row for row in self.long if row.cell == cell]
        values = [row.right for row in rows if (row.arm, row.repeat) == (arm, 0)]
        # A decided arm is asked no more, so a cell may have none of its answers.
        if not values:
            return False
        answers, probabilities = paired(rows, arm, self.reference), None
        if all(row.logprobs for row in rows) and sum(values) / len(values) < EASY:
            probabilities = paired(rows, arm, self.reference, of="probability")
        return bool(sees(answers, self.design.alpha, probabilities, self.design.margin))

    @cached_property
    def blind(self) -> dict[Cell, Blind]:
        """Cells that cannot see a loss.

        A cell in which the bad pattern was not asked is blind, because nothing shows that it could
        see one.
        """
        blind = {
            cell: Blind(
                f"{self.reference} gets {share:.0%} right there, hardly more than guessing", False
            )
            for cell, share in self.at_floor().items()
        }
        if self.bad is None:
            return blind
        reference, bad = self.right_share(self.reference), self.right_share(self.bad)
        for cell in reference.keys() - blind.keys():
            if cell not in bad:
                blind[cell] = Blind(f"{self.bad} was not asked there", False)
            elif self.sees_loss(self.bad, cell):
                continue
            elif bad[cell] >= EASY:
                reason = f"too easy: even {self.bad} gets {bad[cell]:.0%} right there"
                # Below the ceiling, more contexts may still show a loss.
                blind[cell] = Blind(reason, bad[cell] < CEILING)
            else:
                shares = f"{bad[cell]:.0%} right, {self.reference} {reference[cell]:.0%}"
                few = f"too few contexts to show that {self.bad} loses there"
                none = f"{self.bad} was not seen to lose there"
                reason = few if bad[cell] < reference[cell] else none
                blind[cell] = Blind(f"{reason}: {shares}", True)
        return blind

    @property
    def hidden(self) -> list[Cell]:
        """Cells outside the claim in which some pattern is nevertheless seen to lose."""
        arms = {row.arm for row in self.long} - {self.reference, self.bad}
        return sorted(cell for cell in self.blind if any(self.sees_loss(arm, cell) for arm in arms))

    @property
    def seeing_design(self) -> Design:
        """The design with only the contexts of cells that see, assuming equal progress in all."""
        cells = {row.context: row.cell for row in self.long}
        seeing = sum(cell not in self.blind for cell in cells.values())
        # A blind cell's contexts prove nothing, so the design must not count on them.
        contexts = round(self.design.contexts * seeing / len(cells))
        return replace(self.design, contexts=max(contexts, self.design.looks))

    def control_differs(self, arm: str) -> str:
        """Return why arms differ although every pattern selects everything; "" if they do not."""
        by_arm, by_reference = self._differing(arm, 0), self._differing(self.reference, 1)
        if not exceeds_noise(len(by_arm - by_reference), len(by_reference - by_arm)):
            return ""
        flips = paired(self.control, arm, self.reference).flips
        # The arm's flips include those that the engine makes by itself, so print both counts.
        return (
            f"below index_topk tokens, where every pattern selects everything, {arm} differs from "
            f"{self.reference} ({flips}), which differs from itself in {len(by_reference)}. "
            "The arms differ in more than the pattern: compare flags and checkpoints."
        )

    def _differing(self, arm: str, repeat: int) -> set[tuple[str, str]]:
        """Find control questions that an arm answers unlike the reference did the first time."""
        first: dict[tuple[str, str], float] = {}
        answers: dict[tuple[str, str], float] = {}
        for row in self.control:
            key = row.context, row.question
            if (row.arm, row.repeat) == (self.reference, 0):
                first[key] = row.right
            elif (row.arm, row.repeat) == (arm, repeat):
                answers[key] = row.right
        # A question that the reference was not asked counts as equal.
        return {key for key, value in answers.items() if first.get(key, value) != value}

    def unsound(self, arm: str) -> str:
        """Return why nothing may be claimed about an arm; "" if everything is as it must be."""
        # A log has no control and mostly no second answers; its details say so instead.
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
    """Return the one-sided bounds of the difference at a look, on which both claims rest."""
    z = design.bounds[look - 1]
    return estimate.guarded(z), estimate.upper(z)


def sees(
    differences: Differences,
    alpha: float,
    probable: Differences | None = None,
    margin: float = 0.01,
) -> Any:
    """Return whether a control that is known to be bad has been seen to lose.

    The test is a bet, so it may be made after every context, and the control ends as soon as it is
    seen to lose. Half of the bet is on right answers, which show a loss of a few points only after
    hundreds of contexts. Half is on their probability, where a context counts by at most
    :data:`MOVE` margins. So it measures how often answers become less sure; if nothing is lost,
    they become surer just as often.

    Args:
        differences: differences in right answers.
        alpha: largest probability of seeing a loss by a control that loses nothing.
        probable: differences in the right answers' probability; None if it is not known.
        margin: smallest mean drop in probability that counts, 0 to 1.
    """
    values = -differences.values
    largest = float(abs(values).max(initial=1.0))
    wealth = capital(values, largest, 0.0)
    if probable is not None:
        # A certain drop that is smaller than the margin is no loss that matters to a user.
        drops = -probable.values
        probable_wealth = capital((drops / (MOVE * margin)).clip(-1, 1), 1.0, 0.0)
        wealth = (wealth + np.where(drops.mean(axis=-1) >= margin, probable_wealth, 0.0)) / 2
    return wealth >= 1 / alpha


def exceeds_noise(arm_alone: Any, again_alone: Any) -> Any:
    """Return whether an arm differs from the reference more often than the reference from itself.

    An engine that flips answers flips those of both equally often. So if only one of the two
    differs on a question, it is the arm with a probability of one half (a sign test).

    Args:
        arm_alone: number of questions, or an array of such numbers, on which only the arm differs.
        again_alone: the same for the reference's second answers.
    """
    from scipy.special import bdtrc

    # bdtrc(k, n, p) sums from k + 1 on, which gives the chance of this many questions or more.
    return bdtrc(np.asarray(arm_alone) - 1, np.asarray(arm_alone) + again_alone, 0.5) <= SAME


def repeats_itself(noise: Differences, design: Design, look: int) -> Any:
    """Return whether the reference, asked twice, shows no difference in its mean."""
    estimate = Estimate(noise)
    # This test is made at every look, so its error is spent over the looks like a claim's.
    z = boundaries(design.fractions, SAME)[min(look, design.looks) - 1]
    return (estimate.lower(z) <= 0) & (estimate.upper(z) >= 0)


def loses(estimate: Estimate, design: Design, look: int) -> Any:
    """Return whether a pattern is shown to lose at a look.

    If enough contexts differ, the test is t; otherwise it is the exact sign-flip test at the error
    that this look may spend. The bounds are wide in the latter case, because a pattern may lose
    rare contexts whole; a loss that was seen needs no such allowance.
    """
    by_t = estimate.upper(design.bounds[look - 1]) < 0
    if not np.any(estimate.exact):
        return by_t
    by_signs = sign_flip(estimate.scaled) <= design.errors[look - 1]
    return np.where(estimate.exact, by_signs, by_t)[()]


def claimed(lower: float, is_lost: bool, margin: float) -> Kind:
    """Return the claim of the primary endpoint: NO_LOSS, SMALL_LOSS, LOSS or UNDECIDED.

    Args:
        lower: lower bound of the difference.
        is_lost: the result of :func:`loses`.
    """
    # Both may hold at once: a loss can be proven, and proven to be smaller than the margin.
    if lower > -margin:
        return Kind.SMALL_LOSS if is_lost else Kind.NO_LOSS
    return Kind.LOSS if is_lost else Kind.UNDECIDED


def verdicts_of(evaluation: Evaluation) -> Verdicts:
    """Judge each candidate; its first claim is final, and later contexts do not reopen it.

    The result is empty before the first look.
    """
    verdicts: dict[str, tuple[int, Verdict]] = {}
    for number in range(1, evaluation.look + 1):
        # Candidates are ordered from most to fewest F layers; in this fixed sequence each is tested
        # at alpha.
        look, permitted = Look(evaluation, number), True
        for arm in evaluation.candidates:
            if arm.name not in verdicts or verdicts[arm.name][1].kind not in DECIDED:
                verdicts[arm.name] = number, judge(look, arm.name, permitted)
            permitted = permitted and verdicts[arm.name][1].kind in SAFE
    return verdicts


def judge(look: Look, pattern: str, permitted: bool = True) -> Verdict:
    """Judge one pattern.

    ``permitted`` says whether every pattern before this one was shown to be safe (the fixed
    sequence).
    """
    # First check for reasons that void every claim, then whether anything could be seen at all.
    if unsound := look.unsound(pattern):
        return Verdict(Kind.INVALID, pattern, f"{pattern}: refused: {unsound}")
    if not look.cells - look.blind.keys():
        return Verdict(Kind.CANNOT_SEE, pattern, f"{pattern}: {_cannot_see(look.blind)}")
    forbidden = ""
    if look.number < look.design.looks and any(blind.waits for blind in look.blind.values()):
        forbidden = WAITING
    # Each reason outranks the earlier ones: a wait may end at the next look, the others will not.
    if hidden := look.hidden:
        places = ", ".join(map(place, hidden))
        forbidden = f"a pattern visibly loses at {places}, which would be left out"
    if not permitted:
        forbidden = "a pattern that is judged before it was not shown to be safe"
    return _claim(look, pattern, forbidden)


def _claim(look: Look, pattern: str, forbidden: str) -> Verdict:
    """Judge a pattern on the cells that can see a loss.

    ``forbidden`` is the reason why "no loss" may not be claimed, or "".
    """
    cells = look.cells - look.blind.keys()
    differences = look.compared(pattern, cells=cells)
    design, estimate = look.seeing_design, Estimate(differences)
    lower, upper = map(float, bounds(estimate, design, look.number))
    is_lost = bool(loses(estimate, design, look.number))
    kind = _permitted(claimed(lower, is_lost, design.margin), forbidden)
    more = None
    if kind is Kind.UNDECIDED and math.isfinite(estimate.error):
        # The planned contexts are asked in any case, even if fewer would be enough.
        more = max(design.needed(*estimate.spread), design.contexts) - len(differences)
    mean = float(estimate.mean)
    verdict = Verdict(
        kind,
        pattern,
        "",
        difference=mean,
        levels=(estimate.level, estimate.level + mean),
        worst=_worst(differences, design, look.number),
        interval=(lower, upper),
        exact=bool(estimate.exact),
        detectable=design.detectable(*estimate.spread),
        more=more,
        contexts=len(differences),
        flips=differences.flips,
        noise=look.noise.flips if look.noise else None,
        blind=tuple(sorted(look.blind)),
    )
    headline = _headline(verdict, mean, lower, look, forbidden)
    return replace(verdict, headline=headline, details=_details(verdict, differences, look))


def _permitted(kind: Kind, forbidden: str) -> Kind:
    """Return the claim that may be made if ``forbidden`` says why "no loss" may not be claimed.

    A proven loss stays proven; "no loss" becomes undecided. While cells wait, neither is final.
    """
    if not forbidden or kind not in SAFE:
        return kind
    return Kind.LOSS if kind is Kind.SMALL_LOSS and forbidden != WAITING else Kind.UNDECIDED


def _worst(differences: Differences, design: Design, look: int) -> Worst | None:
    """Return the cell with the largest loss, and a bound that holds for all cells at once."""
    count = len(differences.names)
    if count == 1:
        return None
    # Bonferroni, so that the bound holds for all cells at once.
    z = boundaries(design.fractions, design.alpha / count)[look - 1]
    estimates = [Estimate(differences.of(cell)) for cell in range(count)]
    lowest = min(range(count), key=lambda cell: estimates[cell].mean)
    # The maximum over all cells: a small cell can have the worst bound without the largest loss.
    bound = max(-float(estimate.guarded(z)) for estimate in estimates)
    return Worst(*differences.names[lowest], float(estimates[lowest].mean), bound)


def _headline(verdict: Verdict, mean: float, lower: float, look: Look, forbidden: str) -> str:
    """Return the claim with both levels, and with the worst cell if it lost."""
    assert verdict.levels is not None
    claim = _claim_in_words(verdict, mean, lower, look, forbidden)
    text = f"{verdict.pattern}: {claim} ({look.reference} {verdict.levels[0]:.1%}, "
    text += f"{verdict.pattern} {verdict.levels[1]:.1%}"
    if (worst := verdict.worst) and worst.difference < 0:
        text += f"; worst: {place((worst.task, worst.length))}, {_points(worst.difference)}"
    return f"{text})."


def _claim_in_words(verdict: Verdict, mean: float, lower: float, look: Look, forbidden: str) -> str:
    margin, within = points(look.design.margin), lower > -look.design.margin
    if verdict.kind is Kind.NO_LOSS:
        return f"no loss beyond {margin}"
    if verdict.kind in (Kind.SMALL_LOSS, Kind.LOSS):
        less = f", less than the margin of {margin}" if within else ""
        return f"a loss of {-100 * mean:.1f} points{less}"
    if forbidden and within:
        return f"not claimed, because {forbidden}"
    if verdict.more is None:
        return "undecided: somewhere a task has a single context so far, whose spread is not known"
    if look.number < look.design.looks:
        return f"undecided so far; about {counted(verdict.more, 'more context')} would decide"
    needed = counted(verdict.contexts + verdict.more, "context")
    return (
        f"undecided; a new run of {needed} would probably decide, but its "
        f"{look.design.alpha:.0%} are of that run alone: both together err more often"
    )


def _details(verdict: Verdict, differences: Differences, look: Look) -> str:
    assert verdict.difference is not None
    assert verdict.interval is not None
    assert verdict.detectable is not None
    design = look.design
    lower, upper = map(_points, verdict.interval)
    width = f"{1 - 2 * design.alpha:.0%}{' exact' if verdict.exact else ''} interval"
    if design.looks > 1:  # wider than the tables' intervals, which are for a single look
        width += " for this look"
    noise = f"; A/A: {verdict.noise}" if verdict.noise else ""
    sentences = [
        f"Difference {_points(verdict.difference)} points ({width} {lower} to {upper}); "
        f"{differences.flips}, in {verdict.contexts:,} contexts{noise}."
    ]
    if verdict.exact:
        values = differences.values
        chance = float(sign_flip(Estimate(differences).scaled))
        lost, won = int((values < 0).sum()), int((values > 0).sum())
        sentences.append(
            f"{counted(lost, 'context')} lost and {won} won: p = {chance:.2g} by an exact "
            "sign-flip test."
        )
    if empty := empty_margin(look, verdict.levels):
        sentences.append(empty)
    if verdict.worst:
        sentences.append(
            f"No cell loses more than {100 * verdict.worst.bound:.1f} points (bound for all "
            f"{len(differences.names)} of them together)."
        )
    # Once a loss is proven, the smallest detectable loss is of no interest.
    if verdict.kind is not Kind.LOSS:
        sentences.append(
            f"A loss of {100 * verdict.detectable:.1f} points would have been found with "
            f"{design.power:.0%} probability."
        )
    sentences.append(f"One-sided {design.alpha:.0%}, look {look.number} of {design.looks}.")
    if look.blind:
        sentences.append(_cannot_see(look.blind))
    if look.bad is None:
        sentences.append("Not shown: that these questions can see a bad pattern.")
    if not verdict.noise:
        sentences.append("Not known: the engine's own noise.")
    return " ".join(sentences)


def empty_margin(look: Look, levels: tuple[float, float] | None) -> str:
    """Return a warning if the margin is too wide to mean anything; "" if it is not.

    The margin should be at most half of the loss that the control showed, and a tenth of the
    reference's right answers.
    """
    margin, cells = look.design.margin, look.cells - look.blind.keys()
    too_wide = []
    if levels is not None and 0 < levels[0] < 10 * margin:
        too_wide.append(f"{margin / levels[0]:.0%} of what {look.reference} gets right")
    if look.bad is not None:
        lost = -float(Estimate(look.compared(look.bad, cells=cells)).mean)
        if 0 < lost < 2 * margin:
            too_wide.append(f"{margin / lost:.0%} of what {look.bad} loses")
    if not too_wide:
        return ""
    return f"The margin is {' and '.join(too_wide)}: a claim within it says little. Take a smaller."


def _cannot_see(blind: Mapping[Cell, Blind]) -> str:
    cells = (f"{place(cell)} ({why.reason})" for cell, why in sorted(blind.items()))
    return f"Cannot see: {'; '.join(cells)}."


def place(cell: Cell) -> str:
    """Return a task and a length as text for messages."""
    task, length = cell
    return f"{task} at {format_length(length)}" if length else task


def _points(value: float) -> str:
    return f"{100 * value:+.1f}"
