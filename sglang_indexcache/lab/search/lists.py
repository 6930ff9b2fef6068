"""Lists of selected tokens that a server returns, and ratings of layer pairs from them.

The overlap of lists is the paper's measure (appendix "Top-k Index Overlap"). On a real model it
ignores the places from which text is copied, and its patterns lost half of all recall. So these
places count as well.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import SearchError, ServerError
from sglang_indexcache.lab.client.pool import Pool
from sglang_indexcache.lab.client.score import Engine, Prompt, ask_afresh
from sglang_indexcache.lab.data.marking import Mask
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import Floats, ServedEvaluator

Block = tuple[int, NDArray[np.integer]]
"""Number of a first query, and ``[N, queries, k]``: what the layers select for it and for those
after it; -1 is padding."""

_MASK_BYTES = 256 << 20
"""Bytes for the selection masks of the queries that are counted at a time."""
_BLOCK_BYTES = 64 << 20
"""Bytes of a server's lists that are decoded at a time."""
_ALIKE = 4
"""Number of repeated tokens by which copied text is recognised."""
COPIES = 4
"""Weight of the places that text is copied from, against overlap, in the second rating."""


class OverlapCounter:
    """Sum of ``|T_i ∩ T_j| / k`` over samples, which holds only one N x N matrix.

    Queries that see k (``topk``) tokens or fewer select all of them in every layer, so they are
    left out.
    """

    def __init__(self, num_layers: int, topk: int) -> None:
        self._total = np.zeros((num_layers, num_layers))
        self._topk = topk
        self.queries = 0

    def add(
        self, selected: NDArray[np.integer], start: int = 0, counted: Mask | None = None
    ) -> None:
        """Add one sample, or a block of it.

        Args:
            selected: ``[N, queries, k]`` positions among 0..t that query t selects in layer n, in
                any order; entries below 0 are padding.
            start: t of the block's first query.
            counted: ``[length]``, the sample's queries that count; by default all.
        """
        layers, number, _ = selected.shape
        queries = np.arange(max(self._topk, start), start + number)
        queries = queries if counted is None else queries[counted[queries]]
        length = start + number
        step = max(1, _MASK_BYTES // (4 * layers * length))
        for first in range(0, len(queries), step):
            self._add_queries(selected[:, queries[first : first + step] - start], length)

    def _add_queries(self, selected: NDArray[np.integer], length: int) -> None:
        layers, queries, _ = selected.shape
        mask = np.zeros((queries, layers, length + 1), dtype=np.float32)
        places = np.where(selected < 0, length, selected).transpose(1, 0, 2)
        np.put_along_axis(mask, places.astype(np.int64), 1.0, axis=2)
        mask = mask[:, :, :length]  # the last column collected the padding
        common = np.matmul(mask, mask.transpose(0, 2, 1))
        self._total += common.sum(axis=0, dtype=np.float64) / self._topk
        self.queries += queries

    def matrix(self) -> Floats:
        """Return ``[N, N]`` float64, the mean over all counted queries.

        Raises:
            SearchError: no query saw more than k tokens.
        """
        if not self.queries:
            raise SearchError(
                f"no query saw more than {self._topk} tokens (index_topk), so every layer selects "
                "everything. Use a longer context."
            )
        return self._total / self.queries


class CopyCounter:
    """Counter of the layers whose lists hold the places from which text is copied.

    If a query's last tokens occurred before, heads that copy read that place or the next one.
    """

    def __init__(self, num_layers: int) -> None:
        self._both = np.zeros((num_layers, num_layers))
        self._places = 0

    def add(self, selected: NDArray[np.integer], start: int, sources: NDArray[np.intp]) -> None:
        """Add a block like :meth:`OverlapCounter.add`; ``sources`` are :func:`earlier_places`."""
        block = sources[start : start + selected.shape[1]]
        [rows] = np.nonzero(block >= 0)
        for ahead in (0, 1):
            held = (selected[:, rows] == block[rows, None] + ahead).any(axis=-1).astype(float)
            self._both += held @ held.T
        self._places += 2 * len(rows)

    def lost(self) -> Floats:
        """Return ``[N, N]``; entry (i, j) is the share of places in layer i's list, not in j's."""
        lost: Floats = np.diagonal(self._both)[:, None] - self._both
        return lost / max(self._places, 1)


def earlier_places(ids: Sequence[int], first: int = 0) -> NDArray[np.intp]:
    """Return ``[length]``: the last earlier place of the four tokens up to each token; -1 if none.

    It is -1 for the ``first`` tokens too.
    """
    places, latest = np.full(len(ids), -1), dict[tuple[int, ...], int]()
    for place in range(_ALIKE - 1, len(ids)):
        words = tuple(ids[place - _ALIKE + 1 : place + 1])
        places[place] = latest.get(words, -1) if place >= first else -1
        latest[words] = place
    return places


def kept_list(
    ids: Sequence[int], mask: Mask, lists: Iterable[Block], num_layers: int, topk: int
) -> Floats:
    """Compare layers' selections for counted queries that see more than ``topk`` tokens.

    Args:
        ids: the sequence's tokens.
        mask: ``[length - 1]``, the predictions that count.
        lists: the layers' selections.

    Returns:
        ``[2, N, N]`` float64; entry (0, i, j), j < i, is the share of layer i's list that layer j's
        holds, minus the share of the places from which text is copied that only i's list holds;
        entry (1, i, j) weighs these places :data:`COPIES` times as much. It is 1 on the diagonals
        and 0 above.

    Raises:
        SearchError: no query sees more than ``topk`` tokens.
    """
    overlaps, copies = OverlapCounter(num_layers, topk), CopyCounter(num_layers)
    counted = np.append(mask, False)  # the last query predicts no token
    sources = np.where(counted, earlier_places(ids, first=topk), -1)
    for start, block in lists:
        overlaps.add(block, start, counted)
        copies.add(block, start, sources)
    overlap, lost = overlaps.matrix(), copies.lost()
    return np.stack([np.tril(overlap - lost), np.tril(overlap - COPIES * lost)])


def returned_lists(
    engine: Engine, checkpoint: Checkpoint, pattern: str, ids: tuple[int, ...]
) -> Iterator[Block]:
    """Ask for the layers' selections for a prompt while all indexers run; yield them in blocks.

    SGLang cannot send the reply in parts; it has 16/3 bytes for each entry of a list.

    Args:
        pattern: the pattern that the request names; "" names none.

    Raises:
        ServerError: the server returns no selections, or selections from its cache; later, in a
            block, it returns something other than positions.
    """
    topk, name = int(checkpoint.shape["index_topk"]), engine.name
    reply = ask_afresh(engine, Prompt(ids, pattern), 1, return_indexer_topk=True)
    if (encoded := reply["meta_info"].get("indexer_topk")) is None:
        raise ServerError(
            f"{name} does not return what layers select. Start it with "
            "--enable-return-indexer-topk, or search with --method greedy."
        )
    entries = (len(encoded) * 3 // 4 - encoded[-2:].count("=")) // 4
    layers, remainder = divmod(entries, len(ids) * topk)
    if remainder or layers <= checkpoint.layer_ids[-1]:
        raise ServerError(
            f"{name} returned {entries:,} entries, which are no lists of {topk} (index_topk) for "
            f"{len(ids):,} tokens. Is --model what it serves?"
        )
    return _blocks(encoded, layers, topk, list(checkpoint.layer_ids), name)


def _blocks(encoded: str, layers: int, topk: int, chosen: list[int], name: str) -> Iterator[Block]:
    """Decode base64 of ``[length, layers, k]`` and yield the ``chosen`` layers' lists."""
    query_bytes = 4 * layers * topk
    number = 3 * max(1, _BLOCK_BYTES // (3 * query_bytes))  # 4 characters encode 3 bytes
    characters = 4 * number * query_bytes // 3
    for block, begin in enumerate(range(0, len(encoded), characters)):
        decoded = np.frombuffer(b64decode(encoded[begin : begin + characters]), dtype=np.int32)
        start, lists = block * number, decoded.reshape(-1, layers, topk)[:, chosen]
        if not _are_positions(lists, start):
            raise ServerError(
                f"{name} returned something else than positions in the prompt: its top-k kernel "
                "turns them into places of its cache. Start it with SGLANG_DSA_FUSE_TOPK=0 in its "
                "environment."
            )
        yield start, lists.transpose(1, 0, 2)


def _are_positions(lists: NDArray[np.integer], start: int) -> bool:
    """Return whether ``[queries, N, k]`` from ``start`` on hold distinct, visible positions."""
    first = max(lists.shape[-1] - start, 0)
    ordered = np.sort(lists[first:], axis=-1)
    newest = start + first + np.arange(len(ordered))[:, None]
    within = (ordered[..., 0] >= 0) & (ordered[..., -1] <= newest)
    return bool(within.all() and (np.diff(ordered, axis=-1) > 0).all())


class ReturningEvaluator(ServedEvaluator):
    """A :class:`ServedEvaluator` that can also ask for the selections of layers from servers."""

    def __init__(self, pool: Pool, calibration: Calibration, checkpoint: Checkpoint) -> None:
        super().__init__(pool, calibration)
        self._checkpoint = checkpoint

    def kept_list(self, batch: int) -> Floats:
        """Ask for a sequence's lists, and compare them with :func:`kept_list`."""
        checkpoint, ids = self._checkpoint, self.calibration.sequences[batch]
        what: Any = {"checkpoint": checkpoint, "pattern": str(checkpoint.own), "ids": ids}
        lists = self._pool.ask(partial(returned_lists, **what))
        counted = self.calibration.counted[batch]
        return kept_list(ids, counted, lists, self.num_layers, int(checkpoint.shape["index_topk"]))
