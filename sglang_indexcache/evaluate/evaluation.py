"""An evaluation as it was recorded: what was planned, what was answered, what is missing.

Plain values, and nothing that depends on a server or on when it is looked at: the journal is read
into this, and verdicts, tables and pictures are pure functions of it. An :class:`Answer` becomes
an :class:`~sglang_indexcache.stats.pairs.Outcome` on its way to a verdict, and nothing else.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.stats.pairs import Outcome
from sglang_indexcache.stats.power import Design

CONTROL_LOOK = 0
"""Of contexts of at most ``index_topk`` tokens: they are asked before the first look."""
ENDPOINTS = {"answers": "right", "probability": "probability"}
"""What can be compared, chosen before the first request, and the value of an answer it stands for.

``answers``: right or wrong, as greedy decoding has it. ``probability``: with which the model says
the right answer at temperature 1; finer, so it needs fewer contexts, but another question.
"""


class Role(enum.Enum):
    """What an arm is there for."""

    REFERENCE = "reference"
    CANDIDATE = "candidate"
    BAD = "bad"
    """The positive control: known to lose quality, and must be seen to."""


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
            where a file or log does not tell.
        right: 1 if the answer is right to the letter, else 0; another harness's score, 0 to 1.
        tokens: of the right answer.
        logprobs: of those tokens, in nats; empty if it comes from a log.
        trace: sum of every log-probability that came back; two patterns have the same one only
            where they compute the same.
    """

    arm: str
    repeat: int
    context: str
    question: str
    task: str
    length: int
    depth: float | None
    right: float
    tokens: int = 0
    logprobs: tuple[float, ...] = ()
    trace: float | None = None

    @property
    def nll(self) -> float | None:
        """Mean nats for each token of the right answer; None if it comes from a log."""
        return -sum(self.logprobs) / len(self.logprobs) if self.logprobs else None

    @property
    def probability(self) -> float | None:
        """With which sampling at temperature 1 gives the right answer; None from a log."""
        return math.exp(min(sum(self.logprobs), 0.0)) if self.logprobs else None


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
            (digest), ``material`` (digest of tokenizer, text and files), ``server`` (SGLang's
            facts that may not differ between arms), ``versions``, ``commit``, ``flags`` (of the
            command), ``started`` (UTC). JSON values.
        design: as it was fixed before the first request.
        selects_all: ``index_topk``: no pattern can matter at or below this length. None if the
            answers are another harness's, whose patterns nobody verified.
        arms: the reference, then candidates from most to fewest full layers, then the bad one.
        planned: contexts in the order of asking.
        answers: of all arms, in the order of asking; only contexts that every arm is through with.
        endpoint: of :data:`ENDPOINTS`.
        missing: what could not be answered.
        tokens: that servers computed, those from a cache left out.
        seconds: that answers took, all together.
        finished: whether nothing is left to be asked: every pattern is decided or the plan is done.
        notices: what a reader must know besides, each one sentence.
    """

    facts: Mapping[str, Any]
    design: Design
    selects_all: int | None
    arms: tuple[Arm, ...]
    planned: tuple[Planned, ...]
    answers: tuple[Answer, ...] = ()
    endpoint: str = "answers"
    missing: tuple[Missing, ...] = ()
    tokens: int = 0
    seconds: float = 0.0
    finished: bool = False
    notices: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether the servers themselves said which pattern each answer was made with."""
        return self.selects_all is not None

    @property
    def tasks(self) -> tuple[str, ...]:
        """In the order of the plan, without what only the control asks."""
        return tuple(dict.fromkeys(planned.task for planned in self._long))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Rising, those of the control left out."""
        return tuple(sorted({planned.length for planned in self._long}))

    @property
    def _long(self) -> list[Planned]:
        return [planned for planned in self.planned if planned.look != CONTROL_LOOK]

    @property
    def reference(self) -> Arm:
        """What the others are compared with."""
        return self._only(Role.REFERENCE)

    @property
    def bad(self) -> Arm | None:
        """What must be seen to lose; None if a log has no such arm."""
        return self._only(Role.BAD) if self.verified or self._arms(Role.BAD) else None

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """From most to fewest full layers."""
        return self._arms(Role.CANDIDATE)

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

    def outcomes(self, look: int | None = None, value: str = "") -> list[Outcome]:
        """What the statistics take.

        Args:
            look: only contexts that count at this look; all that were asked by default.
            value: of an answer, by its name; the endpoint's by default. Rows without it are left
                out.
        """
        counts = {
            planned.context for planned in self.planned if look is None or planned.look <= look
        } - self.lost
        name = value or ENDPOINTS[self.endpoint]
        return [
            Outcome(
                *(row.context, row.question, row.task, row.length, row.arm, float(number)),
                repeat=row.repeat,
                right=row.right,
            )
            for row in self.answers
            if row.context in counts and (number := getattr(row, name)) is not None
        ]

    def _arms(self, role: Role) -> tuple[Arm, ...]:
        return tuple(arm for arm in self.arms if arm.role is role)

    def _only(self, role: Role) -> Arm:
        arms = self._arms(role)
        if len(arms) != 1:
            raise QualityError(f"an evaluation has one {role.value} arm, this one {len(arms)}")
        return arms[0]
