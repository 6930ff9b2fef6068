"""An evaluation as it was recorded: what was planned, what was answered, what is missing.

Plain values, and nothing that depends on a server or on when it is looked at: the journal is read
into this, and verdicts, tables and pictures are pure functions of it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sglang_indexcache.ask.score import Top
from sglang_indexcache.errors import QualityError
from sglang_indexcache.stats.pairs import Outcome
from sglang_indexcache.stats.power import Design

CONTROL_LOOK = 0
"""Of contexts of at most ``index_topk`` tokens: they are asked before the first look."""
TOP = 20
"""Likeliest tokens that are asked for at each token of an answer."""
LEAST_LIKELY = math.log(1e-4)
"""Of those, less likely ones are not kept: they weigh nothing, and would fill the journal."""
_NOTHING = 1e-9
"""A probability that rounding leaves of none."""


class Role(enum.Enum):
    """What an arm is there for."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    BAD = "bad"
    """The positive control: known to lose quality, and must be seen to."""


class Mode(enum.Enum):
    """How the answers were obtained."""

    TEACHER_FORCED = "teacher-forced"
    """The right answer is fed in; it counts as given if every token of it is the likeliest."""
    GENERATE = "generate"
    """The model wrote its answers, and another harness scored them."""


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        name: as the user wrote it; unique.
        pattern: F and S; empty where a log does not tell.
        role: why it is asked. A/A is the reference with ``Answer.repeat`` 1, not an arm.
    """

    name: str
    pattern: str
    role: Role


@dataclass(frozen=True)
class Planned:
    """A context of the plan; they are in the order of asking.

    Attributes:
        context: its name, unique.
        task: what is asked behind it.
        length: tokens of context, question and answer.
        look: at which planned look it first counts, from 1; ``CONTROL_LOOK`` for the control.
        again: whether the reference is asked twice (A/A).
    """

    context: str
    task: str
    length: int
    look: int
    again: bool


@dataclass(frozen=True)
class Answer:
    """One question as one arm answered it: what was measured, and what the journal keeps.

    Attributes:
        arm: its name.
        repeat: 0; 1 where the reference was asked again.
        context: name of the planned context.
        question: unique within the context.
        task: as planned.
        length: tokens as planned.
        depth: where in the context the first line lies that the answer follows from, 0 to 1; None
            where a user's file does not tell.
        right: whether the answer is right to the letter; None in logs that have a score instead.
        tokens: of the right answer.
        logprobs: of those tokens, in nats; empty if it comes from a log.
        tops: the likeliest tokens at their positions.
        trace: sum of every log-probability that came back; two patterns have the same one only
            where they compute the same.
        score: the metric of another harness, 0 to 1; None for answers of ours.
        kl: mean Kullback-Leibler divergence from the reference over the answer's tokens, in nats:
            a lower bound, see :func:`divergence`. None for the reference itself.
        agreement: share of the answer's tokens at which the likeliest one is the reference's.
    """

    arm: str
    repeat: int
    context: str
    question: str
    task: str
    length: int
    depth: float | None
    right: bool | None
    tokens: int = 0
    logprobs: tuple[float, ...] = ()
    tops: tuple[Top, ...] = ()
    trace: float | None = None
    score: float | None = None
    kl: float | None = None
    agreement: float | None = None

    @property
    def nll(self) -> float | None:
        """Mean nats for each token of the right answer; None if it comes from a log."""
        return -sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    def beside(self, reference: Answer | None) -> Answer:
        """With its divergence and agreement, where the reference answered the same tokens."""
        if reference is None or not self.tops or len(reference.tops) != len(self.tops):
            return self
        pairs = list(zip(reference.tops, self.tops, strict=True))
        return replace(
            self,
            kl=sum(divergence(*pair) for pair in pairs) / len(pairs),
            agreement=sum(float(a[0][0] == b[0][0]) for a, b in pairs) / len(pairs),
        )


def divergence(first: Sequence[tuple[int, float]], second: Sequence[tuple[int, float]]) -> float:
    """A lower bound of the Kullback-Leibler divergence, in nats, from the likeliest tokens alone.

    Joining outcomes never raises it: those that only the first names are one outcome, and all that
    is left is another. Of how the second divides its own rest between these two, only the most that
    the first can have is known (what is not named is less likely than what was kept); the division
    with the least divergence is taken.
    """
    known = dict(second)
    both = [(p, known[token]) for token, p in first if token in known]
    alone = [p for token, p in first if token not in known]
    mine, left = _total(alone), 1 - _total(p for _, p in first)
    theirs = 1 - _total(q for _, q in both)
    least = second[-1][1] if len(second) >= TOP else LEAST_LIKELY
    most = min(len(alone) * math.exp(least), theirs * mine / max(mine + left, _NOTHING))
    joined = sum(
        p * math.log(p / max(q, _NOTHING))
        for p, q in ((mine, most), (left, theirs - most))
        if p > _NOTHING
    )
    return max(0.0, sum(math.exp(p) * (p - q) for p, q in both) + joined)


def _total(logprobs: Iterable[float]) -> float:
    return sum(map(math.exp, logprobs))


@dataclass(frozen=True)
class Missing:
    """A context that an arm could not answer; it then counts in no arm.

    Attributes:
        context: name of the planned context.
        arm: which one failed.
        reason: what the server said, the last time.
    """

    context: str
    arm: str
    reason: str


@dataclass(frozen=True)
class Evaluation:
    """All that a report may say something about.

    Attributes:
        facts: what was evaluated, to print beside a verdict: ``model`` (name), ``checkpoint``
            (digest), ``material`` (digest of tokenizer, text and files, and the questions behind a
            context: contexts of one name are alike within one), ``server`` (SGLang's facts that may
            not differ between arms), ``versions``, ``commit``, ``flags`` (of the command),
            ``started`` (UTC). JSON values.
        design: as it was fixed before the first request.
        selects_all: ``index_topk``: no pattern can matter at or below this length.
        arms: the reference, then candidates from most to fewest full layers, then the bad one.
        mode: how answers were obtained.
        pattern_verified: whether the server itself said which pattern each answer was made with.
        planned: contexts in the order of asking.
        answers: of all arms, in the order of asking; only contexts that every arm is through with.
        missing: what could not be answered.
        tokens: that servers computed, those from a cache left out.
        seconds: that answers took, all together.
        finished: whether nothing is left to be asked: every pattern is decided or the plan is done.
        notices: what a reader must know besides, each one sentence.
    """

    facts: Mapping[str, Any]
    design: Design
    selects_all: int
    arms: tuple[Arm, ...]
    mode: Mode
    pattern_verified: bool
    planned: tuple[Planned, ...]
    answers: tuple[Answer, ...] = ()
    missing: tuple[Missing, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    finished: bool = False
    notices: tuple[str, ...] = ()

    @property
    def margin(self) -> float:
        """The loss that still counts as none."""
        return self.design.margin

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order of the plan, without what only the control asks."""
        long = (planned for planned in self.planned if planned.look != CONTROL_LOOK)
        return tuple(dict.fromkeys(planned.task for planned in long))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rising, those of the control left out."""
        long = {planned.length for planned in self.planned if planned.look != CONTROL_LOOK}
        return tuple(sorted(long))

    @property
    def control_length(self) -> int | None:
        """Of the contexts in which every pattern selects everything."""
        short = [planned.length for planned in self.planned if planned.look == CONTROL_LOOK]
        return max(short, default=None)

    @property
    def reference(self) -> Arm:
        """What the others are compared with."""
        return self._only(Role.REFERENCE)

    @property
    def bad(self) -> Arm:
        """What must be seen to lose."""
        return self._only(Role.BAD)

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """From most to fewest full layers."""
        return tuple(arm for arm in self.arms if arm.role is Role.CANDIDATE)

    @cached_property
    def lost(self) -> frozenset[str]:
        """Names of the contexts that some arm could not answer."""
        return frozenset(missing.context for missing in self.missing)

    @property
    def look(self) -> int:
        """The last planned look all of whose contexts were asked; 0 before the first."""
        name = self.reference.name
        asked = {row.context for row in self.answers if row.arm == name} | self.lost
        left = [max(planned.look, 1) for planned in self.planned if planned.context not in asked]
        return min(left) - 1 if left else self.design.looks

    def outcomes(self, value: str = "right", look: int | None = None) -> list[Outcome]:
        """What the statistics take.

        Args:
            value: ``right``, ``nll``, ``kl``, ``agreement`` or ``score``; rows without it are left
                out.
            look: only contexts that count at this look; all that were asked by default.
        """
        counts = {
            planned.context for planned in self.planned if look is None or planned.look <= look
        } - self.lost
        return [
            Outcome(
                row.context, row.question, row.task, row.length, row.arm, float(number), row.repeat
            )
            for row in self.answers
            if row.context in counts and (number := getattr(row, value)) is not None
        ]

    def _only(self, role: Role) -> Arm:
        arms = [arm for arm in self.arms if arm.role is role]
        if len(arms) != 1:
            raise QualityError(f"an evaluation has one {role.value} arm, this one {len(arms)}")
        return arms[0]
