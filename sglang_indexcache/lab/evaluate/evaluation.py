"""An evaluation as it is recorded: on disk before it counts, and what that amounts to.

The journal has a line for each arm and context with everything that was measured, and a line once
all arms are through with a context, which only then counts. So whatever a kill leaves, going on
gives what an uninterrupted run would have given, and costs one context. Verdicts, tables and
pictures are pure functions of the :class:`Evaluation` that these lines amount to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.evaluation_plan import (
    CONTROL_LOOK,
    Arm,
    EvaluationPlan,
    Planned,
    Role,
)
from sglang_indexcache.lab.runs.journal import Journal
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Outcome

NAME = "journal.jsonl"
MEASURED = ("question", "depth", "right", "tokens", "logprobs", "trace")
"""Fields of an answer that a line keeps; the rest follows from arm, context and plan."""


@dataclass(frozen=True)
class Answer:
    """One question as one arm answered it: what was measured, and what the journal keeps.

    Attributes:
        repeat: 0; 1 where the reference was asked again.
        question: unique within the context.
        length: tokens as planned.
        depth: where in the context the first line lies that the answer follows from, 0 to 1; None
            where a file or log does not tell.
        right: 1 if the answer is right to the letter, else 0; the share of its tokens that are,
            where a judge would read it; another harness's score, 0 to 1.
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
    def probability(self) -> float | None:
        """Probability of the right answer, 0 to 1; None if it comes from a log."""
        return math.exp(sum(self.logprobs)) if self.logprobs else None


@dataclass(frozen=True)
class Evaluation:
    """State of an evaluation, the only input of verdicts and reports.

    Attributes:
        facts: what was evaluated, to print beside a verdict: ``model`` (name), ``checkpoint``
            (digest), ``material`` (digest of tokenizer, text and files), ``server`` (SGLang's
            facts that may not differ between arms), ``versions``, ``commit``, ``flags`` (of the
            command), ``started`` (UTC). JSON values.
        selects_all: ``index_topk``: no pattern can matter at or below this length. None if the
            answers are another harness's, whose patterns nobody verified.
        arms: the reference, then candidates in the order of being judged, then the bad one.
        planned: contexts in the order of asking.
        answers: of all arms, in the order of asking; only contexts that every arm is through with.
        tokens: that servers computed, those from a cache left out.
        finished: whether nothing is left to be asked: every pattern is decided or the plan is done.
        notices: what a reader must know besides, each one sentence.
    """

    facts: Mapping[str, Any]
    design: Design
    selects_all: int | None
    arms: tuple[Arm, ...]
    planned: tuple[Planned, ...]
    answers: tuple[Answer, ...] = ()
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
        """Tasks in the order of the plan, without those that only the control asks."""
        return tuple(dict.fromkeys(planned.task for planned in self.long))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens, rising, without those of the control."""
        return tuple(sorted({planned.length for planned in self.long}))

    @property
    def long(self) -> list[Planned]:
        """The plan without the control."""
        return [planned for planned in self.planned if planned.look != CONTROL_LOOK]

    @property
    def reference(self) -> Arm:
        """Arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.role is Role.REFERENCE)

    @property
    def bad(self) -> Arm | None:
        """Arm that must be seen to lose; None if a log has no such arm."""
        return next((arm for arm in self.arms if arm.role is Role.BAD), None)

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """Candidates in the order in which they are judged."""
        return tuple(arm for arm in self.arms if arm.role is Role.CANDIDATE)

    @property
    def compared_arms(self) -> list[Arm]:
        """Arms that are compared with the reference."""
        return [arm for arm in self.arms if arm.role is not Role.REFERENCE]

    @property
    def look(self) -> int:
        """The last planned look all of whose contexts were asked; 0 before the first."""
        name = self.reference.name
        answered = {row.context for row in self.answers if row.arm == name}
        unanswered = (row for row in self.planned if row.context not in answered)
        first = min((max(row.look, 1) for row in unanswered), default=self.design.looks + 1)
        return first - 1

    def outcomes(self, look: int | None = None, of: str = "right") -> list[Outcome]:
        """Return the outcomes for the statistics: at a look, or all that were asked.

        ``of`` is the field of an answer; its ``probability`` is not known of a log's.
        """
        counts = {
            planned.context for planned in self.planned if look is None or planned.look <= look
        }
        return [
            Outcome(row.context, row.question, row.task, row.length, row.arm, value, row.repeat)
            for row in self.answers
            if row.context in counts and (value := getattr(row, of)) is not None
        ]


class Record:
    """Content of a journal's lines; whatever is added goes to the journal first.

    Attributes:
        answers: of every arm (its name and repeat) and context, with the tokens that servers
            computed and the seconds that it took.
        done: contexts that every arm is through with.
    """

    def __init__(self, identity: Mapping[str, Any], journal: Journal | None = None) -> None:
        self._identity, self._journal = identity, journal
        self._plan = TypeAdapter(EvaluationPlan).validate_python(identity["plan"])
        self._planned = {context.context: context for context in self._plan.planned}
        self._arms = tuple(
            Arm(name, pattern, Role(role)) for name, pattern, role in identity["arms"]
        )
        self.answers: dict[tuple[str, int, str], tuple[tuple[Answer, ...], int, float]] = {}
        self.done: set[str] = set()
        self.facts: dict[str, Any] = {}
        self.finished = False
        if journal is not None:
            for _ in journal.parsed(self.take):  # takes each, and names the line that is damaged
                pass

    def take(self, line: Mapping[str, Any]) -> None:
        """Take in one line of the journal."""
        if "said" in line:
            key = line["arm"], line["repeat"], line["context"]
            planned = self._planned[line["context"]]
            answers = tuple(
                Answer(
                    *(*key, row["question"], planned.task, planned.length),
                    *(row["depth"], row["right"], row["tokens"]),
                    *(tuple(row["logprobs"]), row["trace"]),
                )
                for row in line["said"]
            )
            self.answers[key] = answers, line["computed"], line["seconds"]
        elif "done" in line:
            self.done |= set(line["done"])
        elif "facts" in line:
            self.facts = self.facts or dict(line["facts"])
        elif "finished" in line:
            self.finished = bool(line["finished"])
        else:
            raise KeyError("nothing that a journal of an evaluation has")

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line; it is on disk when this returns."""
        assert self._journal is not None
        self._journal.write(line)
        self.take(line)

    def append(self, answers: Sequence[Answer], computed: int, seconds: float) -> None:
        """Add one arm's answers behind one context."""
        first = answers[0]
        rows = [{name: getattr(answer, name) for name in MEASURED} for answer in answers]
        key = {"arm": first.arm, "repeat": first.repeat, "context": first.context}
        self.add({**key, "said": rows, "computed": computed, "seconds": round(seconds, 3)})

    def evaluation(self) -> Evaluation:
        """Return all that counts so far."""
        order = {arm.name: place for place, arm in enumerate(self._arms)}
        place = {name: number for number, name in enumerate(self._planned)}
        keys = sorted(
            (key for key in self.answers if key[2] in self.done),
            key=lambda key: (place[key[2]], order[key[0]], key[1]),
        )
        counted = [self.answers[key] for key in keys]
        facts = {name: value for name, value in self.facts.items() if name != "notices"}
        facts |= {name: self._identity[name] for name in ("checkpoint", "server", "material")}
        return Evaluation(
            facts,
            self._plan.design,
            self._plan.selects_all,
            self._arms,
            self._plan.planned,
            tuple(answer for answers, _, _ in counted for answer in answers),
            sum(computed for _, computed, _ in counted),
            sum(seconds for _, _, seconds in counted),
            self.finished,
            tuple(self.facts.get("notices", ())),
        )


@contextmanager
def recorded(
    folder: Path,
    plan: EvaluationPlan,
    arms: Sequence[Arm],
    *,
    checkpoint: str,
    material: str,
    server: Mapping[str, Any],
) -> Iterator[Record]:
    """Open the record of a folder for more, locked; ``checkpoint`` is its digest.

    Raises:
        QualityError: the journal is another evaluation's, damaged before its last line, or in use.
    """
    identity = {
        "checkpoint": checkpoint,
        "plan": asdict(plan),
        "material": material,
        "arms": [[arm.name, arm.pattern, arm.role.value] for arm in arms],
        "server": dict(server),
    }
    identity = json.loads(json.dumps(identity))  # as it is read again
    with Journal(folder / NAME, identity, "evaluation", QualityError) as journal:
        yield Record(identity, journal)


def load(folder: Path) -> Evaluation:
    """Load a folder's evaluation; a QualityError if there is none or its journal is damaged."""
    path = folder / NAME
    if not path.exists():
        raise QualityError(f"{folder} has no {NAME}: it is no output of `indexcache eval run`")
    complete = path.read_bytes().rpartition(b"\n")[0]  # the last line may be half written
    try:
        first, *lines = map(json.loads, complete.split(b"\n"))
        record = Record(first["identity"])
        for line in lines:
            record.take(line)
        return record.evaluation()
    except (KeyError, TypeError, ValueError) as error:
        raise QualityError(
            f"{path} is damaged, or is not the journal of an evaluation ({error})"
        ) from error
