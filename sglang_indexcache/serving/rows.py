"""Patterns of the rows in a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.process import ServingProcess

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(frozen=True, eq=False)
class RowPatterns:
    """The distinct patterns in a forward, all of the same length.

    Attributes:
        masks: ``[layers, T]`` bool, on the forward's device: the rows that are F at each pattern
            position. None if there is only one pattern.
    """

    patterns: tuple[Pattern, ...]
    masks: torch.Tensor | None = None

    @classmethod
    def of(
        cls, patterns: Sequence[Pattern], lengths: Sequence[int], like: torch.Tensor
    ) -> RowPatterns:
        """Make the row patterns of requests whose rows lie one after the other.

        The data of each request are copied to the device once, without waiting, and are spread over
        the rows there. So this forward can be prepared while the previous one still runs.

        Args:
            lengths: number of rows of each request. Rows after the last request are padding; nobody
                reads their attention, so they are F everywhere.
            like: a tensor ``[T, ...]`` on the forward's device.

        Raises:
            StaleIndexError: the requests have more rows than the forward.
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
        layers = len(different[0])
        everyone = [*patterns, Pattern.full(layers)]
        masks = torch.stack([full_layers(pattern) for pattern in everyone], dim=1)
        lengths_of_all = torch.tensor([lengths], device="cpu")
        table = to_device(torch.cat([lengths_of_all, masks.long()]), device)
        requests = torch.arange(len(lengths), device=device)
        owners = requests.repeat_interleave(table[0], output_size=count)
        return cls(different, table[1:, owners].bool())

    def cut(self, start: int, stop: int, count: int) -> RowPatterns:
        """Return rows ``start`` to ``stop`` as a separate batch, padded to ``count`` rows."""
        if self.masks is None:
            return self
        masks = pad(self.masks[:, start:stop], (0, count - (stop - start)), value=True)
        return RowPatterns(self.patterns, masks)


@lru_cache(maxsize=256)
def full_layers(pattern: Pattern) -> torch.Tensor:
    """Return ``[layers]`` bool on the host that marks the F positions of ``pattern``."""
    return torch.tensor([pattern.is_full(n) for n in range(len(pattern))], device="cpu")


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to a device without waiting; a GPU copies from pinned memory asynchronously."""
    return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)


class RequestIds(list[str]):
    """Request ids of a batch, with their patterns attached: copies of a ForwardBatch keep them."""

    def __init__(self, requests: Sequence[Req]) -> None:
        super().__init__(request.rid for request in requests)
        self.patterns: list[Pattern] = [request.indexcache_pattern for request in requests]


def patterns_of_requests(batch: ForwardBatch) -> list[Pattern]:
    """Return the pattern of each request in the batch, in live mode.

    Raises:
        StaleIndexError: it is not known of a batch with requests.
    """
    if not batch.rids:
        return []
    if not isinstance(batch.rids, RequestIds):
        raise StaleIndexError("a batch came without the patterns of its requests")
    return batch.rids.patterns


def patterns_of_rows(batch: ForwardBatch, process: ServingProcess) -> RowPatterns:
    """Return the pattern of each row in ``batch``; the server's without requests (idle, warm-up).

    Raises:
        StaleIndexError: it is not known of a batch with requests.
    """
    if process.plan.mode == "static" or not (patterns := patterns_of_requests(batch)):
        return RowPatterns((process.pattern,))
    return RowPatterns.of(patterns, _lengths(batch), batch.positions)


def _lengths(batch: ForwardBatch) -> list[int]:
    """Return each request's number of rows; a graph's replay has no ids and pads their number."""
    rids = getattr(batch, "rids", None)
    requests = batch.batch_size if rids is None else len(rids)
    extended = getattr(batch, "extend_seq_lens_cpu", None)
    if batch.forward_mode.is_decode() or extended is None:
        return [1] * requests
    return list(extended[:requests])
