"""Several running engines of one checkpoint, used like one; any of them may die and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.lab.client.score import Engine
from sglang_indexcache.serving.protocol import RankState

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds until a failed engine is asked again: the first pause; it doubles each time."""
PATIENCE = 3600.0
"""Seconds for which a failed call is tried again: a large model needs half an hour to load."""

_Answer = TypeVar("_Answer")


class _Slot:
    """An engine in the pool, whose checkpoint is checked before and after every call."""

    def __init__(self, engine: Engine, at_once: int) -> None:
        self._engine, self._at_once = engine, at_once
        self.calls = self.failures = 0
        self.rests_until = 0.0
        self.checkpoint: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return self._engine.name

    def meet(self) -> tuple[str, str]:
        """Return the checkpoint's identity from the engine's first answer."""
        if self.checkpoint is None:
            self.checkpoint = self._read_checkpoint()
        return self.checkpoint

    def states(self) -> list[RankState]:
        return self._engine.states()

    def generate(self, *, timeout: float | None = None, **body: Any) -> Any:
        self._check()
        if timeout is not None:  # the call may wait for the engine's others
            timeout *= self._at_once
        replies = self._engine.generate(timeout=timeout, **body)
        self._check()
        return replies

    def _check(self) -> None:
        before, current = self.meet(), self._read_checkpoint()
        if current != before:
            raise ServerError(
                f"{self.name} was restarted with another checkpoint: {' '.join(current)}, before "
                f"it was {' '.join(before)}. Restart it with the one of --model; the same command "
                "then goes on."
            )

    def _read_checkpoint(self) -> tuple[str, str]:
        """Return the engine's architecture, and which layers have an indexer."""
        [state, *_] = self._engine.states()
        if state.mode != "live":
            raise ServerError(
                f"{self.name} runs in static mode, where shared layers have no indexer. Start it "
                "with --indexcache-mode live."
            )
        return state.checkpoint


class Pool:
    """Pool of running engines in live mode, each of which works on its own calls.

    The pool gives each call to a free engine; it is safe to call from ``in_flight`` threads. If an
    engine cannot be reached, its call goes to another, and the engine is tried again after growing
    pauses. Errors that waiting does not cure (a refusal, another checkpoint, static mode) are
    raised at once.

    Simultaneous calls to an engine share its batches, so rounding may depend on the rest of a
    batch, as under any other traffic.

    Args:
        at_once: number of calls that each engine gets at the same time.
        tell: called with one line whenever an engine fails or comes back.
        patience: seconds for which a failed call is tried again.

    Raises:
        ServerError: the engines serve different checkpoints, or one is not in live mode.
        ServerUnavailableError: no engine answers.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        at_once: int = 1,
        tell: Callable[[str], None] = print,
        patience: float = PATIENCE,
    ) -> None:
        if at_once < 1:
            raise ServerError(f"a server has at least one call at a time, got {at_once}")
        self.in_flight = len(engines) * at_once
        self._at_once, self._tell, self._patience = at_once, tell, patience
        self._changed = threading.Condition()
        self._slots = [_Slot(engine, at_once) for engine in engines]
        self._checkpoint: tuple[str, str] | None = None
        for slot in self._slots:
            try:
                self._meet(slot)
            except ServerUnavailableError as error:
                if slot is self._slots[-1] and self._checkpoint is None:
                    raise
                self._leave(slot, error)

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Architecture, and which layers have an indexer; the same for all engines."""
        assert self._checkpoint is not None, "one of them has answered"
        return self._checkpoint

    def ask(self, question: Callable[[Engine], _Answer]) -> _Answer:
        """Ask a free engine, or another if that one cannot be reached, and return its answer.

        Raises:
            ServerUnavailableError: no engine answered within the pool's patience.
            ServerError: ``question`` raised it.
        """
        failing_since = None
        while True:
            slot = self._take()
            try:
                self._meet(slot)
                answer = question(slot)
            except ServerUnavailableError as error:
                self._leave(slot, error)
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > self._patience:
                    raise ServerUnavailableError(
                        f"{error}. It was tried again for {self._patience / 60:.0f} minutes. What "
                        "was measured is kept: start the same command again once the server "
                        "answers, or with a longer --timeout if it is only slow."
                    ) from error
            else:
                self._stay(slot)
                return answer
            finally:
                self._put_back(slot)

    def _take(self) -> _Slot:
        """Take an engine with room for a call, and wait until one has room or may be retried."""
        with self._changed:
            while True:
                now = time.monotonic()
                free = [slot for slot in self._slots if slot.calls < self._at_once]
                ready = [slot for slot in free if slot.rests_until <= now]
                if ready:
                    slot = min(ready, key=lambda slot: (slot.failures, slot.calls))
                    slot.calls += 1
                    return slot
                self._changed.wait(min((slot.rests_until - now for slot in free), default=None))

    def _put_back(self, slot: _Slot) -> None:
        with self._changed:
            slot.calls -= 1
            self._changed.notify_all()

    def _stay(self, slot: _Slot) -> None:
        with self._changed:
            has_failed, slot.failures, slot.rests_until = slot.failures > 0, 0, 0.0
        if has_failed:
            self._tell(f"{slot.name} answers again")

    def _leave(self, slot: _Slot, error: ServerUnavailableError) -> None:
        with self._changed:
            now = time.monotonic()
            if slot.rests_until > now:  # another call has already reported this
                return
            pause = min(FIRST_PAUSE * 2**slot.failures, LONGEST_PAUSE)
            slot.failures, slot.rests_until = slot.failures + 1, now + pause
        self._tell(f"{slot.name} is asked again in {pause:.0f} s: {error}")

    def _meet(self, slot: _Slot) -> None:
        """Check that an engine serves the same checkpoint as the others."""
        checkpoint = slot.meet()
        with self._changed:
            expected = self._checkpoint = self._checkpoint or checkpoint
        if checkpoint != expected:
            raise ServerError(
                "the servers must serve the same checkpoint; one has "
                f"{' '.join(expected)}, {slot.name} {' '.join(checkpoint)}"
            )
