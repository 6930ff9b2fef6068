"""Which pattern each row of a forward obeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True)
class RowPatterns:
    """The patterns in a forward, of equal length.

    Attributes:
        patterns: the different ones, at least one.
        rows: ``[T]`` int64: for each row its place in ``patterns``. None where all rows obey the
            only one.
    """

    patterns: tuple[Pattern, ...]
    rows: torch.Tensor | None = None

    @classmethod
    def one(cls, pattern: Pattern) -> RowPatterns:
        """All rows obey ``pattern``."""
        return cls((pattern,))

    @classmethod
    def of(
        cls, patterns: Sequence[Pattern], lengths: Sequence[int], like: torch.Tensor
    ) -> RowPatterns:
        """Requests one after the other.

        Args:
            patterns: of each request.
            lengths: the rows of each request. Rows behind the last go with the first pattern.
            like: ``[T, ...]``, on the device of the forward.
        """
        different = tuple(dict.fromkeys(patterns))
        if len(different) == 1:
            return cls(different)
        places = torch.tensor([different.index(pattern) for pattern in patterns])
        counts = torch.tensor(lengths[: len(patterns)])
        rows = torch.zeros(like.shape[0], dtype=torch.int64)
        rows[: int(counts.sum())] = places.repeat_interleave(counts)
        return cls(different, rows.to(like.device))

    def cut(self, start: int, stop: int) -> RowPatterns:
        """Rows ``start`` to ``stop``, as a batch of their own."""
        return RowPatterns(self.patterns, None if self.rows is None else self.rows[start:stop])

    def full_rows(self, position: int) -> torch.Tensor:
        """``[T]`` bool: the rows whose pattern is F at ``position``; for several patterns only."""
        return self._full_rows[position]

    @cached_property
    def _full_rows(self) -> torch.Tensor:
        """``[layers, T]`` bool, made in one step for all layers of a forward."""
        assert self.rows is not None, "one pattern needs no mask"
        full = [[p.is_full(layer) for p in self.patterns] for layer in range(len(self.patterns[0]))]
        return torch.tensor(full, device=self.rows.device)[:, self.rows]


class RequestIds(list[str]):
    """The ids of a batch's requests, with their patterns.

    A ForwardBatch is copied field by field on its way to the backend; this field goes along.
    """

    def __init__(self, requests: Sequence[Req]) -> None:
        super().__init__(request.rid for request in requests)
        self.patterns: list[Pattern] = [request.indexcache_pattern for request in requests]


def patterns_of_requests(batch: ForwardBatch) -> list[Pattern]:
    """Live mode: the pattern of each of the batch's requests.

    Raises:
        StaleIndexError: it is not known of a batch with requests.
    """
    if not batch.rids:
        return []
    if not isinstance(batch.rids, RequestIds):
        raise StaleIndexError("a batch came without the patterns of its requests")
    return batch.rids.patterns


def patterns_of_rows(batch: ForwardBatch, active: ActivePattern) -> RowPatterns:
    """Which pattern each row of ``batch`` obeys.

    Rows that pad it come last, and go with the first request. Without requests (an idle rank, a
    warm-up) the server's pattern decides which indexers run, as in static mode.

    Raises:
        StaleIndexError: it is not known of a batch with requests.
    """
    if active.plan.mode == "static" or not (patterns := patterns_of_requests(batch)):
        return RowPatterns.one(active.pattern)
    if batch.forward_mode.is_decode():
        lengths = [1] * len(patterns)
    else:
        lengths = list(batch.extend_seq_lens_cpu or [])
    return RowPatterns.of(patterns, lengths, batch.positions)
