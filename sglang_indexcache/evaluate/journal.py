"""What was answered, on disk before it counts, and the evaluation that it amounts to.

A line for each arm and context with everything that was measured; a line once all arms are through
with a context, which only then counts. So whatever a kill leaves, going on gives what an
uninterrupted run would have given, and costs one context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import Answer, Arm, Evaluation, Missing, Planned, Role
from sglang_indexcache.evaluate.plan import EvaluationPlan
from sglang_indexcache.study import journal

NAME = "journal.jsonl"
MEASURED = ("question", "depth", "right", "tokens", "logprobs", "trace")
"""Of an answer, what a line keeps; the rest follows from its arm, its context and the plan."""

Key = tuple[str, int, str]
"""Arm, repeat, context."""


class Recorded:
    """What a journal's lines amount to.

    Args:
        identity: what the journal belongs to, see :func:`identity`.

    Attributes:
        answers: of every arm and context.
        missing: contexts that an arm could not answer.
        done: contexts that every arm is through with.
        facts: what was noted at the start.
        finished: whether nothing is left to ask.
    """

    def __init__(
        self, identity: Mapping[str, Any], lines: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self._identity = identity
        self._plan = EvaluationPlan.of(identity["plan"])
        self._planned = {one.context: one for one in self._plan.planned}
        self.arms = tuple(
            Arm(name, pattern, Role(role)) for name, pattern, role in identity["arms"]
        )
        self.answers: dict[Key, tuple[Answer, ...]] = {}
        self.missing: dict[str, Missing] = {}
        self.done: set[str] = set()
        self.facts: dict[str, Any] = {}
        self.finished = False
        self._took: dict[Key, tuple[int, float]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one more line."""
        if "said" in line:
            key = line["arm"], line["repeat"], line["context"]
            planned = self._planned[line["context"]]
            self.answers[key] = tuple(_answer(one, planned, *key[:2]) for one in line["said"])
            self._took[key] = line["computed"], line["seconds"]
        elif "missing" in line:
            self.missing[line["missing"]] = Missing(line["missing"], line["arm"], line["reason"])
        elif "done" in line:
            self.done |= set(line["done"])
        elif "facts" in line:
            self.facts = self.facts or dict(line["facts"])
        elif "finished" in line:
            self.finished = bool(line["finished"])
        else:
            raise KeyError("nothing that a journal of an evaluation has")

    def evaluation(self) -> Evaluation:
        """All that counts so far."""
        order = {arm.name: place for place, arm in enumerate(self.arms)}
        place = {name: number for number, name in enumerate(self._planned)}
        counted = sorted(
            (key for key in self.answers if key[2] in self.done),
            key=lambda key: (place[key[2]], order[key[0]], key[1]),
        )
        facts = {name: value for name, value in self.facts.items() if name != "notices"}
        facts |= {name: self._identity[name] for name in ("checkpoint", "server", "material")}
        return Evaluation(
            facts,
            self._plan.design,
            self._plan.selects_all,
            self.arms,
            self._plan.planned,
            tuple(answer for key in counted for answer in self.answers[key]),
            self._plan.endpoint,
            tuple(one for one in self.missing.values() if one.context in self.done),
            sum(self._took[key][0] for key in counted),
            sum(self._took[key][1] for key in counted),
            self.finished,
            tuple(self.facts.get("notices", ())),
        )


class EvaluationJournal(journal.Journal):
    """An evaluation's journal, locked while it is open.

    Raises:
        QualityError: the file is another evaluation's, damaged before its last line, or in use.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder / NAME, identity, "evaluation", QualityError)
        self.recorded = Recorded(identity)
        try:
            list(self.parsed(self.recorded.add))
        except BaseException:
            self.close()
            raise

    def add(self, line: Mapping[str, Any]) -> None:
        """One line, as :class:`Recorded` takes it; on disk when this returns."""
        self.write(line)
        self.recorded.add(line)

    def append(self, answers: Sequence[Answer], computed: int, seconds: float) -> None:
        """One arm's answers behind one context."""
        first = answers[0]
        said = [{name: getattr(answer, name) for name in MEASURED} for answer in answers]
        where = {"arm": first.arm, "repeat": first.repeat, "context": first.context}
        self.add({**where, "said": said, "computed": computed, "seconds": round(seconds, 3)})

    def note(self, facts: Mapping[str, Any]) -> None:
        """What to print beside a verdict; only the first time counts."""
        if not self.recorded.facts:
            self.add({"facts": dict(facts)})

    def evaluation(self) -> Evaluation:
        """All that counts so far."""
        return self.recorded.evaluation()


def identity(
    plan: EvaluationPlan,
    arms: Sequence[Arm],
    *,
    checkpoint: str,
    material: str,
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """What a journal belongs to.

    Args:
        plan: what is asked.
        arms: of what.
        checkpoint: its digest.
        material: digest of what contexts are made of.
        server: SGLang's facts.
    """
    return {
        "checkpoint": checkpoint,
        "plan": plan.identity,
        "material": material,
        "arms": [[arm.name, arm.pattern, arm.role.value] for arm in arms],
        "server": dict(server),
    }


def load(folder: Path) -> Evaluation:
    """The evaluation in a folder, finished or not; it may be going on meanwhile.

    Raises:
        QualityError: there is none, or its journal is damaged.
    """
    path = folder / NAME
    if not path.exists():
        raise QualityError(f"{folder} has no {NAME}: it is no output of `indexcache eval run`")
    whole = path.read_bytes().rpartition(b"\n")[0]  # the last line may be half written
    try:
        first, *lines = map(json.loads, whole.split(b"\n"))
        return Recorded(first["identity"], lines).evaluation()
    except (KeyError, TypeError, ValueError) as error:
        raise QualityError(
            f"{path} is damaged, or is not the journal of an evaluation ({error})"
        ) from error


def _answer(line: Mapping[str, Any], planned: Planned, arm: str, repeat: int) -> Answer:
    return Answer(
        *(arm, repeat, planned.context, line["question"], planned.task, planned.length),
        line["depth"],
        line["right"],
        tokens=line["tokens"],
        logprobs=tuple(line["logprobs"]),
        trace=line["trace"],
    )
