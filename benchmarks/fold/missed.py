"""Count the exact picks that a folded score misses, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from benchmarks.fold.arms import PLAIN, heaviest_exact
from sglang_indexcache.fold import IndexRow
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3
from sglang_indexcache.search.fold_slopes import count_missed, exact_picks

FACTORS = (1, 2, 4, 8)

Score = Callable[[IndexRow, int], torch.Tensor]
"""Scores ``[B, S, T]`` of the queries of a layer."""


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3 with one scale for each vector, as index keys are stored, and back."""
    values, scales = quantize_e4m3(x)
    return values.float() * scales[..., None]


def in_fp8(row: IndexRow, slopes: torch.Tensor) -> torch.Tensor:
    """Return the folded score with query and keys rounded to e4m3."""
    query = torch.einsum("bshd,bsh->bsd", row.queries, row.weights * slopes)
    scores = rounded(query) @ rounded(row.keys).transpose(1, 2)
    return scores.masked_fill(~row.visible, -torch.inf)


def ways(fits: Mapping[str, torch.Tensor], main: str) -> dict[str, Score]:
    """Return every way to fold: by each fit, and by the main one with FP8 or exact heads.

    Args:
        fits: ``[layers, H]`` by name.
        main: one of them.
    """

    def line(slopes: torch.Tensor) -> Score:
        return lambda row, layer: row.folded(slopes[layer])

    def beside(heads: int) -> Score:
        return lambda row, layer: heaviest_exact(row, fits[main][layer], heads)

    scores = {name: line(slopes) for name, slopes in fits.items()}
    scores[f"{main}, e4m3"] = lambda row, layer: in_fp8(row, fits[main][layer])
    scores[f"{main}, one head exact"] = beside(1)
    scores[f"{main}, two heads exact"] = beside(2)
    scores["positive weights only"] = lambda row, layer: replace(
        row, weights=row.weights.clamp_min(0)
    ).folded(fits[PLAIN][layer])
    return scores


def missed(row: IndexRow, layer: int, topk: int, scores: Mapping[str, Score]) -> dict[str, Shares]:
    """Return the share of a layer's exact picks that are no candidates, by way and by factor.

    Args:
        row: of queries that see more than ``topk`` tokens.
    """
    picks, shares = exact_picks(row, topk), {}
    for name, score in scores.items():
        total, *counts = count_missed(picks, score(row, layer), topk, FACTORS).tolist()
        shares[name] = {str(c): count / total for c, count in zip(FACTORS, counts, strict=True)}
    return shares


Shares = dict[str, float]
"""Shares by factor; JSON has text for keys."""
