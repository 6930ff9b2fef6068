"""Ask every arm what is planned, until every pattern is decided; stopped at any moment, it resumes.

What is asked next follows from the plan and from the blocks that are done, never from how far this
process came: so an evaluation that was killed goes on to be the one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from sglang_indexcache.errors import QualityError, ServerUnavailableError
from sglang_indexcache.evaluate import refusals
from sglang_indexcache.evaluate.arms import Arms, Ask, Turn
from sglang_indexcache.evaluate.continuations import closed, continue_it, is_open
from sglang_indexcache.evaluate.evaluation import CONTROL_LOOK, Evaluation, Planned
from sglang_indexcache.evaluate.journal import EvaluationJournal, Record
from sglang_indexcache.evaluate.plan import Material
from sglang_indexcache.evaluate.scoring import score
from sglang_indexcache.evaluate.tasks import Context
from sglang_indexcache.evaluate.verdict import Kind, seen_to_lose
from sglang_indexcache.stats.pairs import Cell

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before a context is asked again; once more than there are, it is missing."""
_DECIDED = (Kind.NO_LOSS, Kind.LOSS)


def _nothing(*_: object) -> None:
    pass


@dataclass
class Run:
    """One evaluation under way.

    Attributes:
        serving: how the arms are served.
        material: what contexts are made of.
        journal: of this evaluation, open.
        ask: how answers are had.
        tell: is given one line when something happens that a user should know.
        on_block: is called whenever another block is done.
        on_rate: is called with the tokens a second of the first context of each length.
    """

    serving: Arms
    material: Material
    journal: EvaluationJournal
    ask: Ask = score
    tell: Callable[[str], None] = print
    on_block: Callable[[], None] = _nothing
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
        number = 0
        for look, group in groupby(self._start.planned, key=lambda one: one.look):
            for block in _blocks(list(group), self.serving.block):
                if not {one.context for one in block} <= self._recorded.done:
                    self._block(block, reverse=bool(number % 2))
                number += 1
            if self._judge(look):
                break
        self.journal.finish()
        return self.journal.evaluation()

    def _block(self, block: list[Planned], *, reverse: bool) -> None:
        self._look_for_loss({(one.task, one.length) for one in block})
        turns = {one.context: self._turns(one) for one in block}
        every = list(dict.fromkeys(turn for one in block for turn in turns[one.context]))
        # A context is made once for all arms; a block is small.
        contexts = {one.context: self._made(one) for one in block}
        together = self.serving.together(every)
        for group in reversed(together) if reverse else together:
            for one in block:
                asked = [turn for turn in group if turn in turns[one.context]]
                self._context(one, contexts[one.context], asked)
        self.journal.finish_block([one.context for one in block])
        refusals.check_pattern_is_used(self.journal.evaluation(), self._recorded)
        refusals.check_cut(self._recorded)
        self.on_block()

    def _made(self, planned: Planned) -> Context:
        """The context; with what the reference says behind it where no right answer is known."""
        context, known = self.material.make(planned), self._recorded.continued
        if not is_open(context) or planned.context in self._recorded.missing:
            return context
        if planned.context not in known:
            found = self._patiently(continue_it, planned, context, [Turn(self._start.reference)])
            if found is None:
                refusals.check_missing(self.journal.evaluation(), self._recorded)
                return context
            self.journal.keep_continuation(planned.context, found[0].ids)
        return closed(context, known[planned.context])

    def _turns(self, planned: Planned) -> list[Turn]:
        """Who is asked: what is not decided, and the bad pattern until it was seen to lose."""
        found = [Turn(self._start.reference)]
        found += [Turn(arm) for arm in self._start.candidates if arm.name not in self._decided]
        if (planned.task, planned.length) not in self._seen:
            found.append(Turn(self._start.bad))
        if planned.again:
            found.append(Turn(self._start.reference, repeat=1))
        return found

    def _look_for_loss(self, cells: set[Cell]) -> None:
        """Note in which of these cells the bad pattern was seen to lose.

        There it is asked no more, so what was seen stays so, in this process and the next.
        """
        evaluation = self.journal.evaluation()
        bad, reference = evaluation.bad.name, evaluation.reference.name
        rows = [
            row
            for row in evaluation.outcomes()
            if (row.task, row.length) in cells - self._seen and row.length > evaluation.selects_all
        ]
        if any(row.arm == bad for row in rows):
            self._seen |= seen_to_lose(rows, bad, reference, evaluation.design.alpha)

    def _context(self, planned: Planned, context: Context, turns: Sequence[Turn]) -> None:
        """Ask what is not recorded yet."""
        left = [
            turn
            for turn in turns
            if (turn.arm.name, turn.repeat, planned.context) not in self._recorded.records
        ]
        if not left or planned.context in self._recorded.missing:
            return
        started = time.monotonic()
        found = self._patiently(self.ask, planned, context, left)
        seconds = time.monotonic() - started
        if found is None:
            refusals.check_missing(self.journal.evaluation(), self._recorded)
            return
        computed = sum(one.computed for one in found)
        for turn, one in zip(left, found, strict=True):
            share = seconds * one.computed / max(computed, 1)
            said = tuple(one.said)
            self.journal.append(
                Record(turn.arm.name, turn.repeat, planned.context, said, one.computed, share)
            )
        if planned.length not in self._measured and seconds > 0:
            self._measured.add(planned.length)
            self.on_rate(planned.length, computed / seconds)

    def _patiently(
        self, ask: Ask, planned: Planned, context: Context, turns: Sequence[Turn]
    ) -> list[Any] | None:
        """What was answered; None if the context is missing, which is then recorded."""
        for pause in (*PAUSES, None):
            try:
                return self.serving.ask(ask, context, turns)
            except ServerUnavailableError as error:
                failure = error
            if pause is not None:
                self.tell(f"{planned.context} is asked again in {pause:g} s: {failure}")
                time.sleep(pause)
        away = [server.url for server in self.serving.servers if not server.is_ready()]
        if away:
            raise QualityError(
                f"{' and '.join(sorted(set(away)))} stopped answering: {failure}. What was asked "
                "is kept: start the same command again once it answers."
            ) from failure
        arms = ", ".join(turn.arm.name for turn in turns)
        self.tell(f"{planned.context} is left out of every arm: {failure}")
        self.journal.lose(planned.context, arms, str(failure))
        return None

    def _judge(self, look: int) -> bool:
        """Whether every pattern is decided, after all contexts of a look."""
        evaluation = self.journal.evaluation()
        if look == CONTROL_LOOK:
            refusals.check_control(evaluation)
            return False
        refusals.check_floor(evaluation)
        refusals.check_noise(evaluation)
        verdicts = evaluation.verdicts()
        for name, (at, verdict) in verdicts.items():
            if verdict.kind is Kind.INVALID:
                raise QualityError(verdict.sentence)
            if at == look:
                self.tell(f"look {look} of {evaluation.design.looks}  {name}: {verdict.kind.value}")
        self._decided = {name for name, (_, found) in verdicts.items() if found.kind in _DECIDED}
        return bool(verdicts) and len(self._decided) == len(verdicts)


def _blocks(planned: list[Planned], size: int) -> Iterator[list[Planned]]:
    for start in range(0, len(planned), size):
        yield planned[start : start + size]
