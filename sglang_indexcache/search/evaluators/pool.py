"""Several evaluators of the same checkpoint and data, each measuring another candidate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluator import BatchLosses, Floats, TokenEvaluator


class EvaluatorPool:
    """Hands each question to a member that is free; safe to call from ``in_flight`` threads.

    Raises:
        SearchError: no members, or members that differ in layers or data.
    """

    def __init__(self, members: Sequence[TokenEvaluator]) -> None:
        if not members:
            raise SearchError("a pool needs at least one evaluator")
        shapes = {(member.num_layers, member.batch_tokens) for member in members}
        if len(shapes) != 1:
            raise SearchError("the engines of a pool must serve the same checkpoint and data")
        [(self.num_layers, self.batch_tokens)] = shapes
        self.in_flight = len(members)
        self._free: SimpleQueue[TokenEvaluator] = SimpleQueue()
        for member in members:
            self._free.put(member)

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        """See :class:`~sglang_indexcache.search.evaluator.Evaluator`."""
        with self._member() as member:
            return member.loss(pattern, batches)

    def token_losses(self, pattern: Pattern, batches: Sequence[int]) -> list[list[Floats]]:
        """See :class:`~sglang_indexcache.search.evaluator.TokenEvaluator`."""
        with self._member() as member:
            return member.token_losses(pattern, batches)

    @contextmanager
    def _member(self) -> Iterator[TokenEvaluator]:
        member = self._free.get()
        try:
            yield member
        finally:
            self._free.put(member)
