"""Ask every arm what is planned, until every pattern is decided; stopped at any moment, it resumes.

What is asked next follows from the plan and from the contexts that are done, never from how far
this process came: so an evaluation that was killed goes on to be the one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from sglang_indexcache.errors import QualityError, ServerUnavailableError
from sglang_indexcache.evaluate import refusals
from sglang_indexcache.evaluate.arms import Answered, Asking, Servers
from sglang_indexcache.evaluate.corpus import Corpus
from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Evaluation, Planned
from sglang_indexcache.evaluate.journal import EvaluationJournal
from sglang_indexcache.evaluate.tasks import Context
from sglang_indexcache.evaluate.verdict import DECIDED, Kind, seen_to_lose, verdicts_of
from sglang_indexcache.stats.pairs import Cell

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before a context is asked again; once more than there are, it is missing."""


def _nothing(*_: object) -> None:
    pass


@dataclass
class Run:
    """One evaluation under way.

    Attributes:
        servers: of the arms.
        corpus: what contexts are made of.
        journal: of this evaluation, open.
        tell: is given one line when something happens that a user should know.
        on_context: is called whenever another context is done.
        on_rate: is called with the tokens a second of the first context of each length.
    """

    servers: Servers
    corpus: Corpus
    journal: EvaluationJournal
    tell: Callable[[str], None] = print
    on_context: Callable[[], None] = _nothing
    on_rate: Callable[[int, float], None] = _nothing
    _measured: set[int] = field(default_factory=set, init=False)
    _decided: set[str] = field(default_factory=set, init=False)
    _seen: set[Cell] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._recorded, self._start = self.journal.recorded, self.journal.evaluation()

    def run(self) -> Evaluation:
        """Everything that is left to ask.

        Raises:
            QualityError: see :mod:`~sglang_indexcache.evaluate.refusals`, and what servers do that
                they must not. What was asked is kept.
        """
        for look, group in groupby(self._start.planned, key=lambda one: one.look):
            for planned in group:
                if planned.context not in self._recorded.done:
                    self._ask_context(planned)
            if self._judge(look):
                break
        if not self._recorded.finished:
            self.journal.add({"finished": True})
        return self.journal.evaluation()

    def _ask_context(self, planned: Planned) -> None:
        """Ask what is not recorded yet, of every arm that is not decided."""
        self._look_for_loss((planned.task, planned.length))
        context = self.corpus.make(planned)
        for batch in self.servers.batches(self._askings(planned)):
            left = [
                (arm, repeat)
                for arm, repeat in batch
                if (arm.name, repeat, planned.context) not in self._recorded.answers
            ]
            if left and planned.context not in self._recorded.missing:
                self._ask(context, left)
        self.journal.add({"done": [planned.context]})
        refusals.check_pattern_is_used(self.journal.evaluation(), self._recorded)
        self.on_context()

    def _askings(self, planned: Planned) -> list[Asking]:
        """What is not decided, and the bad pattern until it was seen to lose."""
        reference, bad = self._start.reference, self._start.bad
        arms = [arm for arm in self._start.candidates if arm.name not in self._decided]
        found = [(arm, 0) for arm in (reference, *arms)]
        if bad and (planned.task, planned.length) not in self._seen:
            found.append((bad, 0))
        return found + [(reference, 1)] * planned.again

    def _look_for_loss(self, cell: Cell) -> None:
        """Note whether the bad pattern was seen to lose in this cell.

        There it is asked no more, so what was seen stays so, in this process and the next.
        """
        evaluation = self.journal.evaluation()
        bad, reference = evaluation.bad, evaluation.reference
        if not bad or cell in self._seen or cell[1] <= (evaluation.selects_all or 0):
            return
        rows = [row for row in evaluation.outcomes() if (row.task, row.length) == cell]
        self._seen |= seen_to_lose(rows, bad.name, reference.name, evaluation.design.alpha)

    def _ask(self, context: Context, askings: Sequence[Asking]) -> None:
        started = time.monotonic()
        found = self._patiently(context, askings)
        seconds = time.monotonic() - started
        if found is None:
            refusals.check_missing(self.journal.evaluation(), self._recorded)
            return
        computed = sum(one.computed for one in found)
        for one in found:
            self.journal.append(
                one.answers, one.computed, seconds * one.computed / max(computed, 1)
            )
        if context.length not in self._measured and seconds > 0:
            self._measured.add(context.length)
            self.on_rate(context.length, computed / seconds)

    def _patiently(self, context: Context, askings: Sequence[Asking]) -> list[Answered] | None:
        """What was answered; None if the context is missing, which is then recorded."""
        for pause in (*PAUSES, None):
            try:
                return self.servers.ask(context, askings)
            except ServerUnavailableError as error:
                failure = error
            if pause is not None:
                self.tell(f"{context.name} is asked again in {pause:g} s: {failure}")
                time.sleep(pause)
        away = [server.name for server in self.servers.all if not server.is_ready()]
        if away:
            raise QualityError(
                f"{' and '.join(sorted(set(away)))} stopped answering: {failure}. What was asked "
                "is kept: start the same command again once it answers."
            ) from failure
        names = ", ".join(arm.name for arm, _ in askings)
        self.tell(f"{context.name} is left out of every arm: {failure}")
        self.journal.add({"missing": context.name, "arm": names, "reason": str(failure)})
        return None

    def _judge(self, look: int) -> bool:
        """Whether every pattern is decided, after all contexts of a look."""
        evaluation = self.journal.evaluation()
        if look == CONTROL_LOOK:
            refusals.check_control(evaluation)
            return False
        refusals.check_floor(evaluation)
        refusals.check_noise(evaluation)
        verdicts = verdicts_of(evaluation)
        for name, (at, verdict) in verdicts.items():
            if verdict.kind is Kind.INVALID:
                raise QualityError(verdict.sentence)
            if at == look:
                self.tell(f"look {look} of {evaluation.design.looks}  {name}: {verdict.kind.value}")
        self._decided = {name for name, (_, found) in verdicts.items() if found.kind in DECIDED}
        return len(self._decided) == len(verdicts)
