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

    def low_priority(self) -> int:
        """See :meth:`~sglang_indexcache.client.Client.low_priority`."""


@dataclass(frozen=True)
class Manners:
    """How a search behaves to the servers that it asks.

    Attributes:
        timeout: as for :class:`~sglang_indexcache.search.evaluators.served.ServedEvaluator`.
        at_once: calls that each server has at the same time.
        low_priority: let the servers' other requests go first.

    Raises:
        SearchError: no call at a time.
    """

    timeout: float | None = None
    at_once: int = 1
    low_priority: bool = False

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise SearchError(f"a server has at least one call at a time, got {self.at_once}")


@dataclass
class _Seat:
    """A server's place in the pool.

    Attributes:
        engine: the server.
        evaluator: asks it; None until it has answered for the first time.
        calls: how many are under way.
        failures: calls in a row that failed for now.
        rests_until: when to ask it again, on the monotonic clock.
    """

    engine: Engine
    evaluator: ServedEvaluator | None = None
    calls: int = 0
    failures: int = 0
    rests_until: float = 0.0


ONE_CALL = Manners()
"""One call at a time, which lets nobody else go first."""


class ServerPool:
    """Running servers in live mode, each working on calls of its own.

    Hands each call to a server that is free; safe to call from ``in_flight`` threads. A server
    that is away leaves, its call goes to another, and it is asked again after growing pauses. What
    will not get better by waiting (a refusal, another checkpoint, static mode) ends the search.

    Calls that a server has at once share its batches, so rounding may differ by what else a batch
    held, as it does under any other traffic. Nothing else does: what is asked and decided is the
    same whatever the number of servers and calls.

    Args:
        engines: the servers, one at least.
        calibration: what to measure on.
        manners: how to ask them.
        tell: is given one line whenever a server leaves or comes back.
        patience: seconds for which a call is tried again before the search ends.

    Raises:
        SearchError: servers that differ in what they serve, or that are not in live mode.
        ServerError: a server that knows no low priority, where that was asked for.
        ServerUnavailableError: none of them answers.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        calibration: Calibration,
        manners: Manners = ONE_CALL,
        tell: Callable[[str], None] = print,
        patience: float = PATIENCE,
    ) -> None:
        self.calibration = calibration
        self.batch_tokens = calibration.batch_tokens
        self.in_flight = len(engines) * manners.at_once
        self._manners, self._tell, self._patience = manners, tell, patience
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
            else:
                self._stay(seat)
                return answer
            finally:
                self._put_back(seat)

    def _take(self) -> _Seat:
        """A server with a call to spare; waits for one, or until one that failed is asked again."""
        with self._changed:
            while True:
                now = time.monotonic()
                free = [seat for seat in self._seats if seat.calls < self._manners.at_once]
                ready = [seat for seat in free if seat.rests_until <= now]
                if ready:
                    seat = min(ready, key=lambda seat: (seat.failures, seat.calls))
                    seat.calls += 1
                    return seat
                self._changed.wait(min((seat.rests_until - now for seat in free), default=None))

    def _put_back(self, seat: _Seat) -> None:
        with self._changed:
            seat.calls -= 1
            self._changed.notify_all()

    def _stay(self, seat: _Seat) -> None:
        with self._changed:
            has_failed, seat.failures, seat.rests_until = seat.failures > 0, 0, 0.0
        if has_failed:
            self._tell(f"{seat.engine.url} answers again")

    def _leave(self, seat: _Seat, error: ServerUnavailableError) -> None:
        with self._changed:
            now = time.monotonic()
            if seat.rests_until > now:  # another of its calls failed by the same
                return
            pause = min(FIRST_PAUSE * 2**seat.failures, LONGEST_PAUSE)
            seat.failures, seat.rests_until = seat.failures + 1, now + pause
        self._tell(f"{seat.engine.url} is asked again in {pause:.0f} s: {error}")

    def _evaluator(self, seat: _Seat) -> ServedEvaluator:
        if seat.evaluator is None:
            manners = self._manners
            found = ServedEvaluator(
                seat.engine,
                self.calibration,
                manners.timeout,
                at_once=manners.at_once,
                priority=seat.engine.low_priority() if manners.low_priority else None,
            )
            with self._changed:
                self._checkpoint = self._checkpoint or found.checkpoint
            if found.checkpoint != self._checkpoint:
                raise SearchError(
                    "the servers must serve the same checkpoint; one has "
                    f"{' '.join(self._checkpoint)}, {seat.engine.url} {' '.join(found.checkpoint)}"
                )
            seat.evaluator = found
        return seat.evaluator
