"""Threads that measure: first what the search waits for, then what it may ask for next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern

Cell = tuple[Pattern, int]
"""A pattern on one batch: the least that can be measured."""


@dataclass(frozen=True)
class Call:
    """What an evaluator is asked in one go: a pattern on some batches."""

    pattern: Pattern
    batches: tuple[int, ...]

    @property
    def cells(self) -> frozenset[Cell]:
        """One for each batch."""
        return frozenset((self.pattern, batch) for batch in self.batches)


class Crew:
    """Makes calls in ``size`` threads, which live only while there is something to do.

    They are daemons: whoever interrupts a search does not wait for the answer of a server.

    Args:
        size: most calls at the same time.
        make: makes a call and remembers its result; the second argument says whether it was only
            guessed that it will be needed.
        is_known: whether a cell has been measured.
    """

    def __init__(
        self, size: int, make: Callable[[Call, bool], None], is_known: Callable[[Cell], bool]
    ) -> None:
        self._size, self._make, self._is_known = size, make, is_known
        self._changed = threading.Condition()
        self._wanted: deque[Call] = deque()
        self._guessed: deque[Cell] = deque()
        self._pending: set[Cell] = set()  # wanted, or being measured
        self._awaited: set[Cell] = set()
        self._threads = 0
        self._error: BaseException | None = None

    def want(self, cells: Sequence[Cell], cut: Callable[[list[Cell]], Iterable[Call]]) -> None:
        """Return when all ``cells`` are known; ``cut`` makes calls of those that are not.

        Raises:
            BaseException: whatever a call raised that was waited for.
        """
        with self._changed:
            unknown = [cell for cell in cells if not self._is_known(cell)]
            self._awaited, self._error = set(unknown), None
            new = [cell for cell in unknown if cell not in self._pending]
            self._wanted.extend(cut(new))
            self._pending.update(new)
            try:
                while self._awaited:
                    self._start_threads()
                    self._changed.wait()
                    if self._error is not None:
                        raise self._error
            except BaseException:  # Ctrl-C too: nobody waits for the rest
                self._pending.difference_update(*(call.cells for call in self._wanted))
                self._wanted.clear()
                self._guessed.clear()
                raise

    def guess(self, cells: Iterable[Cell]) -> None:
        """Measure these, in this order, while :meth:`want` waits and a thread is idle.

        Not before: what is wanted next would find the threads occupied. Earlier guesses are
        forgotten.
        """
        with self._changed:
            self._guessed = deque(cells)

    def _start_threads(self) -> None:
        useful = min(self._size, self._threads + len(self._wanted) + len(self._guessed))
        for _ in range(useful - self._threads):
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            call, is_guess = job
            error: BaseException | None = None
            try:
                self._make(call, is_guess)
            except BaseException as raised:  # for whoever waits for it
                error = raised
            with self._changed:
                self._pending -= call.cells
                if error is None:
                    self._awaited -= call.cells
                elif not is_guess:
                    self._error = self._error or error
                elif again := self._awaited & call.cells:
                    self._wanted.append(call)
                    self._pending |= again
                self._changed.notify_all()

    def _next(self) -> tuple[Call, bool] | None:
        with self._changed:
            if self._wanted:
                return self._wanted.popleft(), False
            while self._awaited and self._guessed:
                cell = self._guessed.popleft()
                if cell not in self._pending and not self._is_known(cell):
                    self._pending.add(cell)
                    return Call(cell[0], (cell[1],)), True
            self._threads -= 1
            return None
