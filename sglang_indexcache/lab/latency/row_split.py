"""Prefill where ranks share the query rows: an indexer's alone, or all of attention's.

Without either, each rank of attention's tensor parallelism runs every indexer for all rows. Both
ways are composed from the same rows: a rank's part is a chunk of as many rows as it has, behind a
prefix at which they see as many keys in all as an equal share of the chunk's does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from sglang_indexcache.checkpoint import INDEX_K_BYTES_PER_KEY
from sglang_indexcache.lab.latency.rows import Kind, LatencyEstimate, Layers, Series

Way = Literal["row split", "prefill CP"]
WAYS: dict[Way, str] = {
    "row split": "Row split (--indexcache-split-rows): each rank's indexer scores its share of a "
    "chunk, and NCCL gathers the lists (NVIDIA's rows); every rank still makes all index queries.",
    "prefill CP": "Prefill CP (--attn-cp-size, --enable-prefill-cp): each rank attends with its "
    "share of a chunk, by all heads; latents and index keys are gathered. Of decode, where no "
    "heads are split then, it says nothing.",
}
"""Descriptions of each way: what its time counts."""
NCCL = "comm/nccl/2.29.2/nccl_perf"
"""The table of gathers: bytes that each rank has in the end, and milliseconds."""


class Chunks(Protocol):
    """Layers whose time for a chunk of a prompt is known."""

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds; None where no rows are."""


@dataclass(frozen=True)
class RowSplitLayers:
    """Layers of which each rank's indexer scores a share of the rows, and gets all lists.

    Attributes:
        layers: as every rank runs them by itself.
        list_bytes: of one row.
        projected: milliseconds of a chunk's index queries, which every rank still makes for all
            rows, by tokens.
    """

    layers: Layers
    ranks: int
    gather: Series
    list_bytes: int
    projected: Callable[[int], float]

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer; as unsplit where a split does not pay."""
        plain, shared = (self.layers.chunk(k, tokens, prefix) for k in (kind, "S"))
        if kind == "S" or plain is None or shared is None:
            return plain
        share, before = share_of(tokens, prefix, self.ranks)
        full, bare = (self.layers.chunk(k, share, before) for k in ("F", "S"))
        gathered = self.gather.at(tokens * self.list_bytes)
        if full is None or bare is None or gathered is None:
            return None
        again = LatencyEstimate(self.projected(tokens) - self.projected(share))
        paid = shared + full + gathered + again
        value = paid.value - bare.value
        wrong = paid.value * paid.off + bare.value * bare.off
        return min(plain, LatencyEstimate(value, wrong / value), key=lambda time: time.value)


@dataclass(frozen=True)
class ContextParallelLayers:
    """Layers of which each rank attends with a share of the rows, by all heads.

    Attributes:
        layers: with all heads on one rank.
        key_bytes: of a token's latents and index keys, which the ranks gather.
    """

    layers: Layers
    ranks: int
    gather: Series
    key_bytes: int

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer."""
        part = self.layers.chunk(kind, *share_of(tokens, prefix, self.ranks))
        bytes_gathered = self.key_bytes + (INDEX_K_BYTES_PER_KEY if kind == "F" else 0)
        gathered = self.gather.at(tokens * bytes_gathered)
        return None if part is None or gathered is None else part + gathered


def share_of(tokens: int, prefix: int, ranks: int) -> tuple[int, int]:
    """Return a rank's rows of a chunk, and a prefix at which they see what a share does."""
    rows = max(1, tokens // ranks)
    return rows, prefix + (tokens - rows) // 2
