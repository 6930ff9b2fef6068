"""Record of an evaluation, on disk before it counts, and the evaluation that follows from it.

The journal has a line with all measurements for each arm and context, and another line when all
arms have finished a context; only then does the context count. So after a kill, a resumed run gives
the same result as an uninterrupted one, at the cost of one context. Verdicts, tables and pictures
are pure functions of the :class:`Evaluation` that these lines define.
"""

from __future__ import annotations

import json
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
from sglang_indexcache.lab.stats.pairs import Answer

NAME = "journal.jsonl"
MEASURED = ("question", "depth", "right", "tokens", "logprobs", "trace")
"""Fields of an answer that are kept in a line; the rest follows from arm, context and plan."""


@dataclass(frozen=True)
class Evaluation:
    """State of an evaluation, the only input of verdicts and reports.

    Attributes:
        facts: facts to print with a verdict: ``model`` (name), ``checkpoint`` (digest),
            ``material`` (digest of tokenizer, text and files), ``server`` (SGLang's facts that may
            not differ between arms), ``versions``, ``commit``, ``flags`` (of the command),
            ``started`` (UTC). JSON values.
        selects_all: ``index_topk``: no pattern can matter at or below this length. None for another
            harness's answers, whose patterns were not verified.
        arms: the reference, then candidates in the order of judging, then the bad arm.
        planned: contexts in the order of asking.
        answers: answers of all arms, in the order of asking, for contexts that every arm has
            finished.
        tokens: number of tokens that servers computed, without tokens from a cache.
        finished: whether nothing is left to ask, because every pattern is decided or the plan is
            done.
        notices: further sentences that a reader must know.
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
        """Whether the servers themselves confirmed each answer's pattern."""
        return self.selects_all is not None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks in the order of the plan, without tasks that only the control asks."""
        return tuple(dict.fromkeys(planned.task for planned in self.long))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths in tokens, rising, without the control's."""
        return tuple(sorted({planned.length for planned in self.long}))

    @property
    def long(self) -> list[Planned]:
        """The plan without the control."""
        return [planned for planned in self.planned if planned.look != CONTROL_LOOK]

    @property
    def reference(self) -> Arm:
        """Arm with which the others are compared."""
        return next(arm for arm in self.arms if arm.role is Role.REFERENCE)

    @property
    def bad(self) -> Arm | None:
        """Arm that must be seen to lose; None for logs without one."""
        return next((arm for arm in self.arms if arm.role is Role.BAD), None)

    @property
    def candidates(self) -> tuple[Arm, ...]:
        """Candidates in the order of judging."""
        return tuple(arm for arm in self.arms if arm.role is Role.CANDIDATE)

    @property
    def compared_arms(self) -> list[Arm]:
        """Arms to compare with the reference."""
        return [arm for arm in self.arms if arm.role is not Role.REFERENCE]

    @property
    def look(self) -> int:
        """The last planned look with all contexts asked; 0 before the first."""
        name = self.reference.name
        answered = {row.context for row in self.answers if row.arm == name}
        unanswered = (row for row in self.planned if row.context not in answered)
        first = min((max(row.look, 1) for row in unanswered), default=self.design.looks + 1)
        return first - 1

    def until(self, look: int) -> list[Answer]:
        """Return the answers for contexts that count at a look."""
        counts = {planned.context for planned in self.planned if planned.look <= look}
        return [row for row in self.answers if row.context in counts]


class Record:
    """Content of a journal's lines; additions go to the journal first.

    Attributes:
        answers: answers by arm (its name and repeat) and context, with the number of tokens that
            servers computed and the seconds.
        done: contexts that every arm has finished.
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
            for _ in journal.parsed(self.take):  # applies each line; a damaged one is named
                pass

    def take(self, line: Mapping[str, Any]) -> None:
        """Add the content of one journal line to this record."""
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
        """Add a line, which is on disk when this returns."""
        assert self._journal is not None
        self._journal.write(line)
        self.take(line)

    def append(self, answers: Sequence[Answer], computed: int, seconds: float) -> None:
        """Add one arm's answers for one context."""
        first = answers[0]
        rows = [{name: getattr(answer, name) for name in MEASURED} for answer in answers]
        key = {"arm": first.arm, "repeat": first.repeat, "context": first.context}
        self.add({**key, "said": rows, "computed": computed, "seconds": round(seconds, 3)})

    def evaluation(self) -> Evaluation:
        """Return the evaluation from all contexts that count so far."""
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
    """Open and lock a folder's record to continue it; ``checkpoint`` is the checkpoint's digest.

    Raises:
        QualityError: the journal belongs to another evaluation, is damaged before its last line, or
            is in use.
    """
    identity = {
        "checkpoint": checkpoint,
        "plan": asdict(plan),
        "material": material,
        "arms": [[arm.name, arm.pattern, arm.role.value] for arm in arms],
        "server": dict(server),
    }
    identity = json.loads(json.dumps(identity))  # in the form in which it is read back
    with Journal(folder / NAME, identity, "evaluation", QualityError) as journal:
        yield Record(identity, journal)


def load(folder: Path) -> Evaluation:
    """Load a folder's evaluation, or raise a QualityError if it is missing or damaged."""
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
