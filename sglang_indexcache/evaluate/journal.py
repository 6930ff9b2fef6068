"""What was answered, on disk before it counts, and the evaluation that it amounts to.

A line for each arm and context with everything that was measured; a line once all arms are through
with a block of contexts, which only then counts. So whatever a kill leaves, going on gives what an
uninterrupted run would have given, and costs one context.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import QualityError
from sglang_indexcache.evaluate.evaluation import (
    Answer,
    Arm,
    Evaluation,
    Missing,
    Mode,
    Planned,
    Role,
)
from sglang_indexcache.evaluate.plan import Plan
from sglang_indexcache.evaluate.scoring import Said, answer
from sglang_indexcache.study import journal

NAME = "journal.jsonl"

Key = tuple[str, int, str]
"""Arm, repeat, context."""


@dataclass(frozen=True)
class Record:
    """An arm's answers behind one context.

    Attributes:
        arm: its name.
        repeat: 1 for the reference's second asking.
        context: its name.
        said: to each question.
        computed: tokens that the server computed.
        seconds: that it took.
    """

    arm: str
    repeat: int
    context: str
    said: tuple[Said, ...]
    computed: int
    seconds: float

    @property
    def key(self) -> Key:
        """Unique in an evaluation."""
        return self.arm, self.repeat, self.context


class Recorded:
    """What a journal's lines amount to.

    Attributes:
        records: of every arm and context.
        missing: contexts that an arm could not answer.
        done: contexts that every arm is through with.
        continued: what the reference said behind contexts without a right answer, token ids.
        facts: what was noted at the start.
        finished: whether nothing is left to ask.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.records: dict[Key, Record] = {}
        self.missing: dict[str, Missing] = {}
        self.done: set[str] = set()
        self.continued: dict[str, list[int]] = {}
        self.facts: dict[str, Any] = {}
        self.finished = False
        self._answers: dict[Key, list[Answer]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take one more line."""
        if "said" in line:
            said = tuple(_said(one) for one in line["said"])
            record = Record(**{**line, "said": said})
            self.records[record.key] = record
        elif "missing" in line:
            self.missing[line["missing"]] = Missing(line["missing"], line["arm"], line["reason"])
        elif "continued" in line:
            self.continued[line["continued"]] = list(line["ids"])
        elif "done" in line:
            self.done |= set(line["done"])
        elif "facts" in line:
            self.facts = self.facts or dict(line["facts"])
        elif "finished" in line:
            self.finished = bool(line["finished"])
        else:
            raise KeyError("nothing that a journal of an evaluation has")

    def evaluation(self, identity: Mapping[str, Any]) -> Evaluation:
        """All that counts so far."""
        plan, arms = Plan.of(identity["plan"]), _arms(identity)
        [reference] = [arm.name for arm in arms if arm.role is Role.REFERENCE]
        planned = {one.context: one for one in plan.planned}
        order = {arm.name: place for place, arm in enumerate(arms)}
        place = {name: number for number, name in enumerate(planned)}
        counted = [record for record in self.records.values() if record.context in self.done]
        counted.sort(key=lambda one: (place[one.context], order[one.arm], one.repeat))
        for record in counted:
            if record.key not in self._answers:
                self._answers[record.key] = self._answered(
                    record, planned[record.context], reference
                )
        facts = {name: value for name, value in self.facts.items() if name != "notices"}
        answers = [one for record in counted for one in self._answers[record.key]]
        return Evaluation(
            {
                **facts,
                "checkpoint": identity["checkpoint"],
                "server": identity["server"],
                "material": _material(identity),
            },
            plan.design,
            plan.selects_all,
            arms,
            Mode(identity["mode"]),
            identity["pattern_verified"],
            plan.planned,
            tuple(answers),
            tuple(one for one in self.missing.values() if one.context in self.done),
            sum(record.computed for record in counted),
            sum(record.seconds for record in counted),
            self.finished,
            tuple(self.facts.get("notices", ())),
        )

    def _answered(self, record: Record, planned: Planned, reference: str) -> list[Answer]:
        with_it = self.records.get((reference, 0, record.context))
        if with_it is None or with_it is record:
            known: dict[str, Said] = {}
        else:
            known = {said.question: said for said in with_it.said}
        return [
            answer(said, planned, record.arm, record.repeat, known.get(said.question))
            for said in record.said
        ]


class EvaluationJournal(journal.Journal):
    """An evaluation's journal, locked while it is open.

    Raises:
        QualityError: the file is another evaluation's, damaged before its last line, or in use.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        super().__init__(folder / NAME, identity, "evaluation", QualityError)
        self.identity, self.recorded = identity, Recorded()
        try:
            list(self.parsed(self.recorded.add))
        except BaseException:
            self.close()
            raise

    def append(self, record: Record) -> None:
        """One arm's answers behind one context; on disk when this returns."""
        said = [_short(one) for one in record.said]
        self._add({**asdict(record), "seconds": round(record.seconds, 3), "said": said})

    def lose(self, context: str, arm: str, reason: str) -> None:
        """A context that an arm cannot answer: it counts in none."""
        self._add({"missing": context, "arm": arm, "reason": reason})

    def keep_continuation(self, context: str, ids: Sequence[int]) -> None:
        """What the reference said behind a context, which every arm is then asked about."""
        self._add({"continued": context, "ids": list(ids)})

    def finish_block(self, contexts: Sequence[str]) -> None:
        """Every arm is through with these."""
        self._add({"done": list(contexts)})

    def finish(self) -> None:
        """Nothing is left to ask."""
        if not self.recorded.finished:
            self._add({"finished": True})

    def note(self, facts: Mapping[str, Any]) -> None:
        """What to print beside a verdict; only the first time counts."""
        if not self.recorded.facts:
            self._add({"facts": dict(facts)})

    def evaluation(self) -> Evaluation:
        """All that counts so far."""
        return self.recorded.evaluation(self.identity)

    def _add(self, line: Mapping[str, Any]) -> None:
        self.write(line)
        self.recorded.add(line)


def identity(
    plan: Plan,
    arms: Sequence[Arm],
    mode: Mode,
    *,
    checkpoint: str,
    material: str,
    server: Mapping[str, Any],
    pattern_verified: bool,
) -> dict[str, Any]:
    """What a journal belongs to.

    Args:
        plan: what is asked.
        arms: of what.
        mode: how.
        checkpoint: its digest.
        material: digest of tokenizer and haystack.
        server: SGLang's facts.
        pattern_verified: whether servers say which pattern they run.
    """
    return {
        "checkpoint": checkpoint,
        "plan": plan.identity,
        "material": material,
        "arms": [[arm.name, arm.pattern, arm.role.value] for arm in arms],
        "mode": mode.value,
        "server": dict(server),
        "pattern_verified": pattern_verified,
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
        return Recorded(lines).evaluation(first["identity"])
    except (KeyError, TypeError, ValueError) as error:
        raise QualityError(
            f"{path} is damaged, or is not the journal of an evaluation ({error})"
        ) from error


def _material(identity: Mapping[str, Any]) -> str:
    """What a context's name stands for; empty where an older journal does not tell."""
    made_of = identity.get("material")
    return f"{made_of}-{identity['plan']['questions']}" if made_of else ""


def _arms(identity: Mapping[str, Any]) -> tuple[Arm, ...]:
    return tuple(Arm(name, pattern, Role(role)) for name, pattern, role in identity["arms"])


_DEFAULTS = {
    field.name: [] if field.default is MISSING else field.default
    for field in fields(Said)
    if field.default is not MISSING or field.default_factory is not MISSING
}


def _short(said: Said) -> dict[str, Any]:
    """Without what is as it always is."""
    return {
        name: value
        for name, value in asdict(said).items()
        if name not in _DEFAULTS or value != _DEFAULTS[name]
    }


def _said(line: Mapping[str, Any]) -> Said:
    tops = [[(int(i), float(p)) for i, p in top] for top in line.get("tops", [])]
    return Said(**{**line, "tops": tops})
