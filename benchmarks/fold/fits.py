"""Slopes and least squares from texts, kept text by text so that any of them can be added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.fold.arms import LEAST_SQUARES, PLAIN, SLOPES, indexers, replaced
from sglang_indexcache.fold import IndexRow, SlopeSums

RIDGE = 1e-3
"""The ridge of the least squares, in units of the mean of the diagonal."""


@dataclass
class TextSums:
    """One text's sums, one entry a layer.

    Attributes:
        slopes: those that slopes follow from.
        products: ``[H, H]`` float64, of the heads' weighted products, centred in each row.
        scores: ``[H]`` float64, of those with the exact score, likewise centred.
    """

    slopes: list[SlopeSums]
    products: list[torch.Tensor]
    scores: list[torch.Tensor]


def centred(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``[..., T]`` less each row's mean over what it sees; 0 elsewhere."""
    seen = values.masked_fill(~visible, 0.0)
    mean = seen.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return (seen - mean).masked_fill(~visible, 0.0)


def sums_of(model: Any, ids: torch.Tensor, *, least_squares: bool = True) -> TextSums:
    """One forward of all F over ``[1, T]`` tokens."""
    found = TextSums([], [], [])

    def forward(_: int, row: IndexRow) -> None:
        heads = row.weights.shape[-1]
        slopes = SlopeSums(heads)
        slopes.add(row)
        found.slopes.append(slopes)
        left = torch.zeros(heads, heads, dtype=torch.float64)
        right = torch.zeros(heads, dtype=torch.float64)
        for part in row.blocks(128) if least_squares else ():
            seen = part.visible
            exact = centred(part.exact(), seen)
            weighted = part.products() * part.weights[..., None]
            lines = centred(weighted, seen[:, :, None].expand_as(weighted))
            flat = lines.transpose(1, 2).flatten(2)[0]
            left += (flat @ flat.T).double()
            right += (flat @ exact.flatten(1)[0]).double()
        found.products.append(left)
        found.scores.append(right)

    with replaced(model, forward), torch.no_grad():
        model.model(ids, use_cache=False)
    return found


def slopes_from(texts: list[TextSums]) -> torch.Tensor:
    """``[layers, H]`` of all these texts together."""
    layers = zip(*(text.slopes for text in texts), strict=True)
    return torch.stack([_total(list(layer)).slopes() for layer in layers])


def least_squares_from(texts: list[TextSums]) -> torch.Tensor:
    """``[layers, H]``: what fits the row-centred exact score best, with a small ridge."""
    found = []
    for layer in range(len(texts[0].products)):
        left = torch.stack([text.products[layer] for text in texts]).sum(0)
        right = torch.stack([text.scores[layer] for text in texts]).sum(0)
        ridge = RIDGE * left.diagonal().mean() * torch.eye(len(left), dtype=torch.float64)
        found.append(torch.linalg.solve(left + ridge, right).float())
    return torch.stack(found)


def fits_from(model: Any, texts: list[TextSums]) -> dict[str, torch.Tensor]:
    """``[layers, H]`` in every way."""
    heads = indexers(model)[0].n_heads
    return {
        PLAIN: torch.ones(len(texts[0].slopes), heads),
        SLOPES: slopes_from(texts),
        LEAST_SQUARES: least_squares_from(texts),
    }


def _total(sums: list[SlopeSums]) -> SlopeSums:
    total = sums[0]
    for one in sums[1:]:
        total = total + one
    return total
