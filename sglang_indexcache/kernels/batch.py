"""The geometry of one forward batch: which query row belongs to which request and sees how far."""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class PagedBatch:
    """Several requests, their query rows laid end to end, their keys in a paged pool.

    The last ``query_lens[b]`` of a request's ``key_lens[b]`` tokens are its queries: all of them
    in a first prefill, the newest chunk in a chunked one, one in decode.

    Attributes:
        query_lens: query rows of each request, may be 0.
        key_lens: tokens of each request that are in the pool, queries included.
        slots: ``[B, >= max(key_lens)]`` physical slot of every token; row ``b`` is valid up to
            ``key_lens[b]``.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    slots: torch.Tensor

    def __post_init__(self) -> None:
        for queries, keys in zip(self.query_lens, self.key_lens, strict=True):
            if queries > keys:
                raise ValueError(f"a request with {keys} tokens cannot have {queries} query rows")

    @property
    def num_rows(self) -> int:
        """Query rows in all, T."""
        return sum(self.query_lens)

    @cached_property
    def request_of_row(self) -> torch.Tensor:
        """``[T]`` int64: the request of each query row."""
        lens = torch.tensor(self.query_lens, dtype=torch.int64, device=self.slots.device)
        requests = torch.arange(len(self.query_lens), device=self.slots.device)
        return requests.repeat_interleave(lens)

    @cached_property
    def visible(self) -> torch.Tensor:
        """``[T]`` int64: how many tokens of its request each query row may attend to."""
        spans = [
            torch.arange(keys - queries + 1, keys + 1, device=self.slots.device)
            for queries, keys in zip(self.query_lens, self.key_lens, strict=True)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)

    def physical_slots(self, positions: torch.Tensor) -> torch.Tensor:
        """Turn request-local positions into pool slots.

        Args:
            positions: ``[>= T, k]`` integers, -1 for padding; rows beyond T belong to no request
                (dp_attention pads batches to a common size).

        Returns:
            int32 of the same shape, -1 where there is no token.
        """
        result = torch.full_like(positions, -1, dtype=torch.int32)
        if all(queries == 1 for queries in self.query_lens):  # decode: no loop over requests
            own = positions[: self.num_rows]
            found = self.slots.gather(1, own.clamp_min(0).long()).to(torch.int32)
            result[: self.num_rows] = found.masked_fill_(own < 0, -1)
            return result
        start = 0
        for request, queries in enumerate(self.query_lens):
            end = start + queries
            if queries:
                own = positions[start:end]
                slots = self.slots[request].to(torch.int32)
                found = slots.index_select(0, own.clamp_min(0).reshape(-1)).view_as(own)
                result[start:end] = found.masked_fill_(own < 0, -1)
            start = end
        return result
