"""Overlap of the selections of two layers (paper, appendix "Top-k Index Overlap")."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import states_of
from sglang_indexcache.ask.score import Prompt, ask
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.errors import SearchError, ServerError
from sglang_indexcache.library import FoundOverlap
from sglang_indexcache.models import family_of
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.study.plots import make_figure, save_figure

Select = Callable[[tuple[int, ...]], NDArray[np.integer]]
"""``[N, length, k]``, what layers select for a sequence while all indexers run; -1 is nothing."""

_MASK_BYTES = 256 << 20
"""Memory for the selection masks of the queries that are counted at a time."""


class OverlapCounter:
    """Adds up ``|T_i ∩ T_j| / k`` sample by sample; holds one N x N matrix and nothing else.

    Queries that see k (``topk``) tokens or fewer select all of them in every layer, so they are
    left out.
    """

    def __init__(self, num_layers: int, topk: int) -> None:
        self._total = np.zeros((num_layers, num_layers))
        self._topk = topk
        self._blind = 0.0
        self.queries = 0

    def add(self, selected: NDArray[np.integer]) -> None:
        """Add one sample: ``[N, length, k]`` positions that layer n's query t selects, of 0..t.

        They come in any order, and entries below 0 are padding.
        """
        layers, length, _ = selected.shape
        self._blind += float((self._topk / np.arange(self._topk + 1, length + 1)).sum())
        step = max(1, _MASK_BYTES // (4 * layers * length))
        for start in range(self._topk, length, step):
            self._add_queries(selected[:, start : start + step], length)

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
        """``[N, N]`` float64: the mean over all queries counted.

        Raises:
            SearchError: no query saw more than k tokens.
        """
        self._check_queries()
        return self._total / self.queries

    def chance(self) -> float:
        """Return the mean share that lists drawn blindly would share; see :meth:`matrix`."""
        self._check_queries()
        return self._blind / self.queries

    def _check_queries(self) -> None:
        if not self.queries:
            raise SearchError(
                f"no query saw more than {self._topk} tokens (index_topk), so every layer selects "
                "everything. Use a longer context."
            )


def check_one_list(checkpoint: Checkpoint) -> None:
    """Refuse models whose layers have a list for each group of heads.

    Raises:
        SearchError: it is one.
    """
    if family_of(checkpoint.architecture).grouped:
        raise SearchError(
            f"in a {checkpoint.architecture} each group of heads selects by itself, and overlap is "
            "counted for layers with one list. Compare patterns by their loss instead (search)."
        )


def overlap_in_words(matrix: Floats) -> str:
    """Describe an ``[N, N]`` overlap matrix, N >= 2."""
    adjacent = np.diagonal(matrix, 1)
    low, worst = adjacent.min(), int(adjacent.argmin())
    return (
        f"Adjacent layers have {low:.2f} to {adjacent.max():.2f} of their selection in common. "
        f"The sharpest boundary is between layers {worst} and {worst + 1} ({low:.2f}). "
        f"The first and the last layer have {matrix[0, -1]:.2f} in common."
    )


def by_layer(matrix: Floats, pattern: Pattern) -> tuple[float | None, ...]:
    """Return each layer's recall: the share of its selection in the list that it is served.

    Of an S layer that is its F layer's, of an F layer that of the F layer before it; None of the
    first.
    """
    before = (None, *pattern.sources[:-1])
    served = [before[n] if pattern.is_full(n) else pattern.sources[n] for n in range(len(pattern))]
    return tuple(
        None if source is None else float(matrix[layer, source])
        for layer, source in enumerate(served)
    )


def found_overlap(
    select: Callable[[tuple[int, ...], Pattern], NDArray[np.integer]],
    pattern: Pattern,
    sequences: Sequence[tuple[int, ...]],
    topk: int,
    data: str,
) -> FoundOverlap:
    """Measure the overlap for a pattern file in runs of the pattern, as a server does.

    Args:
        select: ``[N, length, k]``, what layers would select themselves in a run of a pattern.

    Raises:
        SearchError: no query saw more than k tokens.
    """
    counter = OverlapCounter(len(pattern), topk)
    for ids in sequences:
        counter.add(select(ids, pattern))
    shares = by_layer(counter.matrix(), pattern)
    rounded = tuple(None if share is None else round(share, 4) for share in shares)
    chance = round(counter.chance(), 4)
    return FoundOverlap(layers=rounded, chance=chance, queries=counter.queries, data=data)


def served_lists(server: Client, checkpoint: Checkpoint) -> Select:
    """Ask a running server what its layers select: ``--enable-return-indexer-topk`` of SGLang.

    Args:
        server: without IndexCache, or with all of the checkpoint's indexers at work.

    Raises:
        ServerError: it serves another checkpoint, or shares indices; later, in an answer: it
            returns no selections, or something else than positions.
    """
    checkpoint_pattern, pattern = str(checkpoint.own), ""
    for state in states_of(server.server_info(), server.name)[:1]:
        if state.checkpoint_pattern != checkpoint_pattern:
            raise ServerError(
                f"{server.name} serves a checkpoint with indexers in {state.checkpoint_pattern}, "
                f"the one in --model has them in {checkpoint_pattern}: these are two"
            )
        if state.mode == "static" and state.pattern != checkpoint_pattern:
            raise ServerError(
                f"{server.name} shares indices ({state.pattern}), so its S layers select nothing. "
                "Start it with --indexcache-mode live, or with --indexcache-pattern full."
            )
        pattern = checkpoint_pattern
    topk = int(checkpoint.shape["index_topk"])

    def select(ids: tuple[int, ...]) -> NDArray[np.integer]:
        [reply] = ask(server, [Prompt(ids, pattern)], new_tokens=1, return_indexer_topk=True)
        if (encoded := reply["meta_info"].get("indexer_topk")) is None:
            raise ServerError(
                f"{server.name} does not return what layers select. Start it with "
                "--enable-return-indexer-topk."
            )
        entries = np.frombuffer(b64decode(encoded), dtype=np.int32)
        layers, remainder = divmod(entries.size, len(ids) * topk)
        if remainder or layers <= checkpoint.layer_ids[-1]:
            raise ServerError(
                f"{server.name} returned {entries.size:,} entries, which are no lists of {topk} "
                f"(index_topk) for {len(ids):,} tokens. Is --model what it serves?"
            )
        lists = entries.reshape(len(ids), layers, topk)[:, list(checkpoint.layer_ids)]
        if not _are_positions(lists[topk:]):
            raise ServerError(
                f"{server.name} returned something else than positions in the prompt: its top-k "
                "kernel turns them into places of its cache. Start it with SGLANG_DSA_FUSE_TOPK=0 "
                "in its environment."
            )
        return lists.transpose(1, 0, 2)

    return select


def _are_positions(lists: NDArray[np.integer]) -> bool:
    """Whether ``[queries, N, k]``, from the first query with a choice on, are what each can see."""
    ordered = np.sort(lists, axis=-1)
    newest = lists.shape[-1] + np.arange(len(lists))[:, None]
    within = (ordered[..., 0] >= 0) & (ordered[..., -1] <= newest)
    return bool(within.all() and (np.diff(ordered, axis=-1) > 0).all())


def numbers(counter: OverlapCounter) -> dict[str, Any]:
    """Everything as plain data."""
    matrix = counter.matrix()
    return {
        "queries": counter.queries,
        "chance": round(counter.chance(), 6),
        "summary": overlap_in_words(matrix),
        "matrix": [[round(float(v), 6) for v in row] for row in matrix],
    }


def draw_overlap(
    matrix: Floats,
    path: Path,
    pattern: Pattern | None = None,
    label: str = "share of the selection in common",
) -> None:
    """Draw a heatmap of ``[N, N]`` with the pattern's blocks on it (paper, appendix).

    ``label`` says what an entry is, from 0 to 1.
    """
    from matplotlib.patches import Rectangle

    count = len(matrix)
    size = min(9.0, 3.6 + 0.09 * count)
    figure, [axis] = make_figure(size, size * 0.86)
    empty = np.triu(matrix == 0, 1)  # a matrix of pairs has only one half
    image = axis.imshow(
        np.where(empty, np.nan, matrix), cmap="viridis", vmin=0, vmax=1, origin="lower"
    )
    bar = figure.colorbar(image, ax=axis, fraction=0.045, pad=0.03)
    bar.set_label(label, fontsize=9)
    for group in pattern.groups if pattern else ():
        corner = (group.layers[0] - 0.5, group.layers[0] - 0.5)
        side = len(group.layers)
        box = Rectangle(corner, side, side, fill=False, edgecolor="#ff4d3d", lw=1.6, clip_on=False)
        axis.add_patch(box)
    interval = 1 if count <= 16 else 5
    axis.set_xticks(range(0, count, interval))
    axis.set_yticks(range(0, count, interval))
    axis.tick_params(labelsize=8)
    axis.set_xlabel("layer")
    axis.set_ylabel("layer")
    if pattern is not None:
        axis.set_title("boxes: layers that share one selection", fontsize=9, loc="left")
    save_figure(figure, path)
