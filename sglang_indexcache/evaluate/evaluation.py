"""An evaluation as it was recorded: what was planned, what was answered, what is missing.

Plain values, and nothing that depends on a server or on when it is looked at: the journal is read
into this, and verdicts, tables and pictures are pure functions of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.tasks import UNSCORED
from sglang_indexcache.evaluate.verdict import Kind, Verdict, judge
from sglang_indexcache.stats.pairs import Outcome
from sglang_indexcache.stats.power import Design

CONTROL_LOOK = 0
"""Of contexts of at most ``index_topk`` tokens: they are asked before the first look."""


class Role(enum.Enum):
    """What an arm is there for."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    BAD = "bad"
    """The positive control: known to lose, and must be seen to."""


class Mode(enum.Enum):
    """How an answer was had."""

    TEACHER_FORCED = "teacher-forced"
    """The right answer was put in the model's mouth; right if each of its tokens was the likeliest.
    """
    GENERATE = "generate"
    """The model answered by itself, greedily."""


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Attributes:
        name: as the user wrote it; unique.
        pattern: F and S; empty where the endpoint cannot say what it runs.
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
    """One question as one arm answered it.

    Attributes:
        arm: its name.
        repeat: 0; 1 where the reference was asked again.
        context: name of the planned context.
        question: unique within the context.
        task: as planned.
        length: tokens as planned.
        depth: where in the context the first line lies that the answer follows from, 0 to 1; None
            where a user's file does not tell.
        right: whether the answer is right to the letter; None where no answer is known (prompts).
        nll: nats for each token of the right answer, their mean; None if not teacher-forced.
        kl: mean Kullback-Leibler divergence from the reference over the answer's tokens, in nats,
            of the 20 likeliest tokens and one bucket for the rest: a lower bound. None for the
            reference itself, or if not teacher-forced.
        agreement: share of the answer's tokens at which the likeliest one is the reference's.
        tokens: of the answer.
        reply: what the model answered by itself; None if teacher-forced.
        score: the task's official metric, 0 to 1; None where there is none.
    """

    arm: str
    repeat: int
    context: str
    question: str
    task: str
    length: int
    depth: float | None
    right: bool | None
    nll: float | None = None
    kl: float | None = None
    agreement: float | None = None
    tokens: int = 0
    reply: str | None = None
    score: float | None = None


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
        mode: how answers were had.
        pattern_verified: whether the server itself said which pattern each answer was made with.
        planned: contexts in the order of asking.
        answers: of all arms, in the order of asking; only contexts that every arm is through with.
        missing: what could not be answered.
        tokens: that servers computed, those from a cache left out; of chat completions, whole
            prompts, since nobody says what came from a cache.
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
    def scored(self) -> bool:
        """Whether any answer is right or wrong, so that there can be a verdict."""
        return any(task != UNSCORED for task in self.tasks)

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

    @property
    def answered(self) -> set[str]:
        """Names of the contexts with an answer of the reference that are missing in no arm."""
        lost = {missing.context for missing in self.missing}
        name = self.reference.name
        return {row.context for row in self.answers if row.arm == name} - lost

    @property
    def look(self) -> int:
        """The last planned look all of whose contexts were asked; 0 before the first."""
        asked = self.answered | {missing.context for missing in self.missing}
        left = [max(planned.look, 1) for planned in self.planned if planned.context not in asked]
        return min(left) - 1 if left else self.design.looks

    def outcomes(self, value: str = "right", look: int | None = None) -> list[Outcome]:
        """What the statistics take.

        Args:
            value: ``right``, ``nll``, ``kl``, ``agreement`` or ``score``; rows without it are left
                out.
            look: only contexts that count at this look; all that were asked by default.
        """
        lost = {missing.context for missing in self.missing}
        counts = {
            planned.context
            for planned in self.planned
            if (look is None or planned.look <= look) and planned.context not in lost
        }
        found = []
        for row in self.answers:
            number = getattr(row, value)
            if number is not None and row.context in counts:
                found.append(
                    Outcome(
                        row.context,
                        row.question,
                        row.task,
                        row.length,
                        row.arm,
                        float(number),
                        row.repeat,
                    )
                )
        return found

    def verdicts(self) -> dict[str, tuple[int, Verdict]]:
        """By candidate: the look at which it was decided, or the last one, and the verdict.

        The first claim ends the evaluation of a pattern: later contexts do not reopen it. Empty
        before the first look, and where no right answer is known.
        """
        if not self.scored:
            return {}
        found: dict[str, tuple[int, Verdict]] = {}
        for look in range(1, self.look + 1):
            rows, permitted = self.outcomes(look=look), True
            for arm in self.candidates:
                if arm.name not in found or found[arm.name][1].kind not in (
                    Kind.NO_LOSS,
                    Kind.LOSS,
                ):
                    [verdict] = judge(
                        rows,
                        [arm.name],
                        self.design,
                        look,
                        bad=self.bad.name,
                        selects_all=self.selects_all,
                        reference=self.reference.name,
                        permitted=permitted,
                    )
                    found[arm.name] = look, verdict
                permitted = permitted and found[arm.name][1].kind is Kind.NO_LOSS
        return found

    def _only(self, role: Role) -> Arm:
        arms = [arm for arm in self.arms if arm.role is role]
        if len(arms) != 1:
            raise QualityError(f"an evaluation has one {role.value} arm, this one {len(arms)}")
        return arms[0]
