"""The numbers of a report: a pure function of an evaluation, as plain values.

The verdicts are the primary result and come from `verdict`. Everything else here is secondary: it
helps to see where a loss sits, and proves nothing by itself, because with so many numbers some are
far out by chance. Its intervals are those of one look at 5 % on each side.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Answer, Arm, Evaluation, Mode, Role
from sglang_indexcache.evaluate.verdict import (
    Verdicts,
    at_ceiling,
    blind_cells,
    points,
    verdicts_of,
)
from sglang_indexcache.stats.bounds import Estimate
from sglang_indexcache.stats.pairs import Cell, Differences, Flips, Outcome, paired
from sglang_indexcache.support.lengths import format_length

ONE_LOOK = 1.6448536269514722
"""The standard normal value that 5 % lie above."""
NOISE = "A/A"
"""How the reference asked twice is called where it stands beside the arms."""
DEPTHS = 4
"""Parts that a context is divided into."""
_FARTHEST = 8.0


@dataclass(frozen=True)
class PlacedDifference:
    """An arm against the reference in one place; of right answers 0.01 is a point.

    Attributes:
        arm: its name, or :data:`NOISE`.
        task: empty if all are meant.
        length: tokens; 0 if all are meant, or where a log does not tell.
        mean: arm minus reference.
        low: lower bound, 5 % beyond it; -inf where nothing is known.
        high: the other.
        contexts: behind it.
        flips: pairs that differ.
    """

    arm: str
    task: str
    length: int
    mean: float
    low: float
    high: float
    contexts: int
    flips: Flips


@dataclass(frozen=True)
class Level:
    """Mean of what an arm scored at one length: right answers, or nats."""

    arm: str
    length: int
    mean: float
    questions: int


@dataclass(frozen=True)
class Spot:
    """Mean difference from the reference at one depth of one length.

    Attributes:
        depth: which part of the context, from 0.
    """

    arm: str
    length: int
    depth: int
    mean: float
    questions: int


@dataclass(frozen=True)
class BlindSpot:
    """A cell in which something cannot show.

    Attributes:
        blind: whether that is a loss.
        reason: why.
    """

    task: str
    length: int
    blind: bool
    reason: str


@dataclass(frozen=True)
class LookStep:
    """Where a pattern stood at a look, as standard normal values to hold against the boundary.

    Attributes:
        no_loss: how far above minus the margin the difference is.
        loss: how far below zero.
    """

    arm: str
    look: int
    contexts: int
    no_loss: float
    loss: float


@dataclass(frozen=True)
class Summary:
    """All numbers of a report.

    Attributes:
        verdicts: as they were reached.
        cells: right answers by arm, task and length, A/A too.
        lengths: the same by arm and length over all tasks.
        control: the arms at or below ``index_topk`` tokens.
        nll: added nats per answer token by arm and length.
        rights: mean right answers by arm and length.
        kl: mean divergence from the reference by arm and length, in nats; A/A too.
        agreement: share of answer tokens at which the likeliest is the reference's.
        spots: NLL by depth, or right answers where there is no NLL.
        spots_are_nats: which.
        steps: at each look, to the one that decided.
        limits: cells that cannot see a loss or a gain, by all answers that there are.
        flicker: deviation of a context's mean difference between two askings of the reference;
            None where it was not asked twice.
    """

    verdicts: Verdicts
    cells: tuple[PlacedDifference, ...]
    lengths: tuple[PlacedDifference, ...]
    control: tuple[PlacedDifference, ...]
    nll: tuple[PlacedDifference, ...]
    rights: tuple[Level, ...]
    kl: tuple[Level, ...]
    agreement: tuple[Level, ...]
    spots: tuple[Spot, ...]
    spots_are_nats: bool
    steps: tuple[LookStep, ...]
    limits: tuple[BlindSpot, ...]
    flicker: float | None


def summarise(evaluation: Evaluation, verdicts: Verdicts | None = None) -> Summary:
    """Compute everything that a report shows.

    Args:
        evaluation: as it was recorded.
        verdicts: to report instead of the evaluation's own, for logs of others.
    """
    right = outcomes(evaluation)
    long = [row for row in right if row.length > evaluation.selects_all]
    short = [row for row in right if row.length <= evaluation.selects_all]
    nats = _long(evaluation, "nll")
    verdicts = verdicts_of(evaluation) if verdicts is None else verdicts
    return Summary(
        verdicts=verdicts,
        cells=_differences(evaluation, long, lambda row: (row.task, row.length)),
        lengths=_differences(evaluation, long, lambda row: ("", row.length)),
        control=_differences(evaluation, short, lambda row: ("", row.length)),
        nll=_differences(evaluation, nats, lambda row: ("", row.length), bounded=False),
        # A/A is asked on some contexts alone: its level would not compare, its difference does.
        rights=_levels(evaluation, [row for row in long if row.repeat == 0]),
        kl=_levels(evaluation, _long(evaluation, "kl")),
        agreement=_levels(evaluation, _long(evaluation, "agreement")),
        spots=_spots(evaluation, "nll" if nats else "right"),
        spots_are_nats=bool(nats),
        steps=_steps(evaluation, verdicts),
        limits=_limits(evaluation, long),
        flicker=_flicker(evaluation, long),
    )


def outcomes(evaluation: Evaluation, look: int | None = None) -> list[Outcome]:
    """Right or wrong; the scores of logs that have nothing else."""
    return evaluation.outcomes(look=look) or evaluation.outcomes("score", look)


def headlines(evaluation: Evaluation, summary: Summary) -> list[str]:
    """The sentence to paste, one for each pattern, with all that a reader needs to judge it."""
    where = provenance(evaluation)
    if not summary.verdicts:
        return [f"No verdict yet: the first look has not been reached. {where}"]
    return [f"{verdict.sentence} {where}" for _, verdict in summary.verdicts.values()]


def provenance(evaluation: Evaluation) -> str:
    """What was evaluated and how, in a sentence or two."""
    facts = evaluation.facts
    lengths = ", ".join(format_length(length) for length in evaluation.lengths if length)
    parts = [
        f"tasks {', '.join(evaluation.tasks)}",
        f"lengths {lengths}" if lengths else "",
        f"margin {points(evaluation.margin)}",
        f"model {facts['model']}" if facts.get("model") else "",
        f"checkpoint {str(facts['checkpoint'])[:12]}" if facts.get("checkpoint") else "",
        f"commit {facts['commit']}" if facts.get("commit") else "",
        f"flags {_flags(facts['flags'])}" if facts.get("flags") else "",
        str(facts["started"])[:10] if facts.get("started") else "",
    ]
    verified = "" if evaluation.pattern_verified else " Pattern not verified by the server."
    found = "; ".join(part for part in parts if part)
    had = "generated" if evaluation.mode is Mode.GENERATE else evaluation.mode.value
    return f"{found[0].upper()}{found[1:]}. Answers {had}.{verified}"


def plain(summary: Summary) -> dict[str, Any]:
    """JSON values; infinite bounds become null."""
    data = {
        "verdicts": [
            {"look": look, **asdict(verdict), "kind": verdict.kind.name.lower()}
            for look, verdict in summary.verdicts.values()
        ],
        "secondary": {
            name: [asdict(row) for row in getattr(summary, name)]
            for name in (
                "lengths", "cells", "control", "nll", "rights", "kl",
                "agreement", "spots", "steps", "limits",
            )
        },
    }  # fmt: skip
    found: dict[str, Any] = _finite(data)
    return found


def _flags(flags: Any) -> str:
    if isinstance(flags, Mapping):
        flags = [f"{name} {value}" for name, value in flags.items()]
    return flags if isinstance(flags, str) else " ".join(str(flag) for flag in flags)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def _long(evaluation: Evaluation, value: str) -> list[Outcome]:
    return [row for row in evaluation.outcomes(value) if row.length > evaluation.selects_all]


def _others(evaluation: Evaluation) -> Iterable[tuple[str, str, int]]:
    """Who is compared with the reference: how it is called, its arm, its repeat."""
    reference = evaluation.reference.name
    yield NOISE, reference, 1
    for arm in evaluation.arms:
        if arm.role is not Role.REFERENCE:
            yield arm.name, arm.name, 0


def _differences(
    evaluation: Evaluation,
    rows: Sequence[Outcome],
    place: Callable[[Outcome], Cell],
    *,
    bounded: bool = True,
) -> tuple[PlacedDifference, ...]:
    reference = evaluation.reference.name
    groups: dict[Cell, list[Outcome]] = defaultdict(list)
    for row in rows:
        groups[place(row)].append(row)
    found = []
    for name, arm, repeat in _others(evaluation):
        for (task, length), here in sorted(groups.items()):
            if any((row.arm, row.repeat) == (arm, repeat) for row in here):
                pairs = paired(here, arm, reference, repeat=repeat)
                found.append(_difference(name, task, length, pairs, bounded=bounded))
    return tuple(found)


def _difference(
    arm: str, task: str, length: int, pairs: Differences, *, bounded: bool
) -> PlacedDifference:
    estimate = Estimate(pairs, bounded)
    low = estimate.guarded(ONE_LOOK) if bounded else estimate.lower(ONE_LOOK)
    high = estimate.upper(ONE_LOOK)
    return PlacedDifference(arm, task, length, estimate.mean, low, high, len(pairs), pairs.flips)


def _flicker(evaluation: Evaluation, rows: Sequence[Outcome]) -> float | None:
    name = evaluation.reference.name
    if not any(row.repeat == 1 for row in rows):
        return None
    return float(np.sqrt(np.mean(paired(rows, name, name, repeat=1).values ** 2)))


def _levels(evaluation: Evaluation, rows: Sequence[Outcome]) -> tuple[Level, ...]:
    reference = evaluation.reference.name
    groups: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        name = NOISE if (row.arm, row.repeat) == (reference, 1) else row.arm
        groups[name, row.length].append(row.value)
    return tuple(
        Level(arm, length, float(np.mean(values)), len(values))
        for (arm, length), values in sorted(groups.items())
    )


def _spots(evaluation: Evaluation, value: str) -> tuple[Spot, ...]:
    """By depth, of the questions that candidate and reference both answered."""
    reference = evaluation.reference.name
    rows = [
        row
        for row in evaluation.answers
        if row.repeat == 0
        and row.length > evaluation.selects_all
        and row.context not in evaluation.lost
    ]

    def values(arm: Arm) -> dict[tuple[str, str], tuple[Answer, float]]:
        return {
            (row.context, row.question): (row, float(number))
            for row in rows
            if row.arm == arm.name and (number := getattr(row, value)) is not None
        }

    base = values(evaluation.reference)
    found = []
    for arm in evaluation.arms:
        if arm.name == reference or arm.role is Role.BAD:
            continue
        groups: dict[tuple[int, int], list[float]] = defaultdict(list)
        for key, (row, number) in values(arm).items():
            if key in base:
                if row.depth is None:  # a user's file does not tell
                    continue
                part = min(int(row.depth * DEPTHS), DEPTHS - 1)
                groups[row.length, part].append(number - base[key][1])
        found += [
            Spot(arm.name, length, part, float(np.mean(numbers)), len(numbers))
            for (length, part), numbers in sorted(groups.items())
        ]
    return tuple(found)


def _steps(evaluation: Evaluation, verdicts: Verdicts) -> tuple[LookStep, ...]:
    """Over the cells that the verdict is about, to the look at which it was reached."""
    found = []
    for look in range(1, evaluation.look + 1):
        rows = [row for row in outcomes(evaluation, look) if row.length > evaluation.selects_all]
        for arm in evaluation.candidates:
            if arm.name not in verdicts or look > verdicts[arm.name][0]:
                continue
            blind = verdicts[arm.name][1].blind
            here = [row for row in rows if (row.task, row.length) not in blind]
            if here:
                estimate = Estimate(paired(here, arm.name, evaluation.reference.name))
                safe = _strength(partial(_above, estimate, -evaluation.margin))
                lost = _strength(partial(_below, estimate, 0.0))
                found.append(LookStep(arm.name, look, len(estimate.differences), safe, lost))
    return tuple(found)


def _limits(evaluation: Evaluation, rows: Sequence[Outcome]) -> tuple[BlindSpot, ...]:
    reference = evaluation.reference.name
    bad = next((arm.name for arm in evaluation.arms if arm.role is Role.BAD), None)
    blind = blind_cells(rows, bad, reference, evaluation.design.alpha)
    full = {
        cell: f"{reference} gets {share:.0%} right there: no gain can show"
        for cell, share in at_ceiling(rows, reference).items()
    }
    return tuple(
        BlindSpot(*cell, cell in blind, reason) for cell, reason in sorted((full | blind).items())
    )


def _above(estimate: Estimate, level: float, z: float) -> bool:
    return bool(estimate.guarded(z) > level)


def _below(estimate: Estimate, level: float, z: float) -> bool:
    return bool(estimate.upper(z) < level)


def _strength(holds: Callable[[float], bool]) -> float:
    """The boundary up to which a claim holds, between -8 and 8."""
    low, high = -_FARTHEST, _FARTHEST
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def missing_contexts(evaluation: Evaluation) -> tuple[int, int]:
    """How many contexts could not be answered by every arm, and how many were planned."""
    long = [planned for planned in evaluation.planned if planned.look != CONTROL_LOOK]
    return len(evaluation.lost), len(long)
