"""Several servers of one checkpoint as one evaluator; any of them may die and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from sglang_indexcache.errors import SearchError, ServerUnavailableError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators import BatchLosses, Floats
from sglang_indexcache.search.evaluators.served import LiveEngine, ServedEvaluator

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds until a server that failed is asked again: the first, then twice as long each time."""
PATIENCE = 3600.0
"""Seconds for which a call is tried again: a large model needs half an hour to load."""

_Answer = TypeVar("_Answer")


class Engine(LiveEngine, Protocol):
    """An engine that can be named in a message: ``client.Client``."""

    @property
    def url(self) -> str:
        """Where it answers."""


@dataclass
class _Seat:
    """A server's place in the pool.

    Attributes:
        engine: the server.
        evaluator: asks it; None until it has answered for the first time.
        is_taken: a call is under way.
        failures: calls in a row that failed for now.
        rests_until: when to ask it again, on the monotonic clock.
    """

    engine: Engine
    evaluator: ServedEvaluator | None = None
    is_taken: bool = False
    failures: int = 0
    rests_until: float = 0.0


class ServerPool:
    """Running servers in live mode, each working on a call of its own.

    Hands each call to a server that is free; safe to call from ``in_flight`` threads. A server
    that is away leaves, its call goes to another, and it is asked again after growing pauses. What
    will not get better by waiting (a refusal, another checkpoint, static mode) ends the search.

    Args:
        engines: the servers, one at least.
        calibration: what to measure on.
        timeout: as for :class:`~sglang_indexcache.search.evaluators.served.ServedEvaluator`.
        tell: is given one line whenever a server leaves or comes back.
        patience: seconds for which a call is tried again before the search ends.

    Raises:
        SearchError: servers that differ in what they serve, or that are not in live mode.
        ServerUnavailableError: none of them answers.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        calibration: Calibration,
        timeout: float | None = None,
        tell: Callable[[str], None] = print,
        patience: float = PATIENCE,
    ) -> None:
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        self.in_flight = len(engines)
        self._timeout, self._tell, self._patience = timeout, tell, patience
        self._changed = threading.Condition()
        self._seats = [_Seat(engine) for engine in engines]
        self._checkpoint: tuple[str, str] | None = None
        for seat in self._seats:
            try:
                self._evaluator(seat)
            except ServerUnavailableError as error:
                if seat is self._seats[-1] and self._checkpoint is None:
                    raise
                self._leave(seat, error)
        self.num_layers = len(self._checkpoint[1]) if self._checkpoint else 0

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluators.Evaluator`."""
        return self._ask(lambda evaluator: evaluator.loss(pattern, batches))

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluators.TokenEvaluator`."""
        return self._ask(lambda evaluator: evaluator.token_losses(pattern, batches))

    def _ask(self, question: Callable[[ServedEvaluator], _Answer]) -> _Answer:
        failing_since = None
        while True:
            seat = self._take()
            try:
                answer = question(self._evaluator(seat))
            except ServerUnavailableError as error:
                self._leave(seat, error)
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self._patience:
                    raise SearchError(
                        f"{error}. It was tried again for {self._patience / 60:.0f} minutes. What "
                        "was measured is kept: start the same command again once the server "
                        "answers, or with a longer --timeout if it is only slow."
                    ) from error
            except BaseException:
                self._put_back(seat)
                raise
            else:
                if seat.failures:
                    self._tell(f"{seat.engine.url} answers again")
                self._put_back(seat)
                return answer

    def _take(self) -> _Seat:
        """A server that is free; waits for one, or until one that failed is asked again."""
        with self._changed:
            while True:
                now = time.monotonic()
                free = [seat for seat in self._seats if not seat.is_taken]
                ready = [seat for seat in free if seat.rests_until <= now]
                if ready:
                    seat = min(ready, key=lambda seat: seat.failures)
                    seat.is_taken = True
                    return seat
                self._changed.wait(min((seat.rests_until - now for seat in free), default=None))

    def _put_back(self, seat: _Seat) -> None:
        with self._changed:
            seat.is_taken, seat.failures, seat.rests_until = False, 0, 0.0
            self._changed.notify_all()

    def _leave(self, seat: _Seat, error: ServerUnavailableError) -> None:
        pause = min(FIRST_PAUSE * 2**seat.failures, LONGEST_PAUSE)
        self._tell(f"{seat.engine.url} is asked again in {pause:.0f} s: {error}")
        with self._changed:
            seat.is_taken, seat.failures = False, seat.failures + 1
            seat.rests_until = time.monotonic() + pause
            self._changed.notify_all()

    def _evaluator(self, seat: _Seat) -> ServedEvaluator:
        if seat.evaluator is None:
            found = ServedEvaluator(seat.engine, self.calibration, self._timeout)
            with self._changed:
                self._checkpoint = self._checkpoint or found.checkpoint
            if found.checkpoint != self._checkpoint:
                raise SearchError(
                    "the servers must serve the same checkpoint; one has "
                    f"{' '.join(self._checkpoint)}, {seat.engine.url} {' '.join(found.checkpoint)}"
                )
            seat.evaluator = found
        return seat.evaluator
