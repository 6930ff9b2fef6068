"""Which pattern each row of a forward obeys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, eq=False)
class RowPatterns:
    """The patterns in a forward, of equal length.

    Attributes:
        patterns: the different ones, at least one.
        masks: ``[layers, T]`` bool, on the device of the forward: which rows are F at each pattern
            position. None where all rows obey the only pattern.
    """

    patterns: tuple[Pattern, ...]
    masks: torch.Tensor | None = None

    @classmethod
    def one(cls, pattern: Pattern) -> RowPatterns:
        """All rows obey ``pattern``."""
        return cls((pattern,))

    @classmethod
    def of(
        cls, patterns: Sequence[Pattern], lengths: Sequence[int], like: torch.Tensor
    ) -> RowPatterns:
        """Requests one after the other.

        What each request is goes to the device in one copy that nothing waits for, and is spread
        over the rows there: while the forward before still runs, this one can be prepared.

        Args:
            patterns: of each request.
            lengths: the rows of each request. Rows behind the last pad the batch; nobody reads what
                they attend to, so they are F everywhere.
            like: ``[T, ...]``, on the device of the forward.

        Raises:
            StaleIndexError: the requests have more rows than there are.
        """
        different = tuple(dict.fromkeys(patterns))
        if len(different) == 1:
            return cls(different)
        count, device = like.shape[0], like.device
        lengths = [*lengths[: len(patterns)]]
        lengths.append(count - sum(lengths))
        if lengths[-1] < 0:
            raise StaleIndexError(
                f"requests have {sum(lengths[:-1])} rows, and their forward has {count}"
            )
        columns = [*map(full_layers, patterns), full_layers(Pattern.full(len(different[0])))]
        host = torch.cat(
            [torch.tensor([lengths], device="cpu"), torch.stack(columns, dim=1).long()]
        )
        table = to_device(host, device)
        requests = torch.arange(len(lengths), device=device)
        owners = requests.repeat_interleave(table[0], output_size=count)
        return cls(different, table[1:].bool()[:, owners])

    def cut(self, start: int, stop: int, count: int) -> RowPatterns:
        """Rows ``start`` to ``stop`` as a batch of their own, padded to ``count`` rows."""
        if self.masks is None:
            return self
        part = self.masks[:, start:stop]
        return RowPatterns(self.patterns, pad(part, (0, count - part.shape[1]), value=True))


@lru_cache(maxsize=256)
def full_layers(pattern: Pattern) -> torch.Tensor:
    """``[layers]`` bool, on the host: which positions of ``pattern`` are F."""
    positions = range(len(pattern))
    return torch.tensor([pattern.is_full(position) for position in positions], device="cpu")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device``, copied without a wait for what the device does meanwhile.

    Only from pinned memory can a GPU copy by itself.
    """
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


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

    Rows that pad it come last. Without requests (an idle rank, a warm-up) the server's pattern
    decides which indexers run, as in static mode.

    Raises:
        StaleIndexError: it is not known of a batch with requests.
    """
    if active.plan.mode == "static" or not (patterns := patterns_of_requests(batch)):
        return RowPatterns.one(active.pattern)
    return RowPatterns.of(patterns, _lengths(batch), batch.positions)


def rows_by_pattern(batch: ForwardBatch, active: ActivePattern) -> dict[Pattern, int]:
    """How many rows of ``batch`` obey which pattern, those that pad it left out."""
    patterns = patterns_of_requests(batch) if active.plan.mode == "live" else []
    if not patterns:
        return {active.pattern: sum(_lengths(batch))}
    counts: Counter[Pattern] = Counter()
    for pattern, length in zip(patterns, _lengths(batch), strict=False):
        counts[pattern] += length
    return counts


def _lengths(batch: ForwardBatch) -> list[int]:
    """The rows of each request; a graph's replay lists none, and pads their number."""
    rids = getattr(batch, "rids", None)
    requests = batch.batch_size if rids is None else len(rids)
    extended = getattr(batch, "extend_seq_lens_cpu", None)
    if batch.forward_mode.is_decode() or extended is None:
        return [1] * requests
    return list(extended[:requests])
