"""Slopes of a layer's heads, fitted in several ways to what its indexer multiplied on text.

A fit's candidates are the tokens that it looks at: all that a query sees, or the best of them by
the exact score, between which the folded score has to choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from benchmarks.fold.arms import ALL_SLOPES, LEAST_SQUARES, SECANTS, SLOPES
from sglang_indexcache.fold import IndexRow, SlopeSums
from sglang_indexcache.search.fold_slopes import FITTED, best_pairs

RIDGE = 1e-3
"""The ridge of least squares, in units of the mean of the diagonal."""
PART = 32
"""Queries at a time: what bounds the memory."""

Rows = Sequence[IndexRow]
"""One layer's inputs on several texts."""
Fit = Callable[[Rows, int], torch.Tensor]
"""Slopes ``[H]`` from rows and topk."""


def all_slopes(rows: Rows, _: int) -> torch.Tensor:
    """Fit the line through each head's ReLU, over all visible tokens."""
    return _sums(rows).slopes()


def _sums(rows: Rows) -> SlopeSums:
    sums = SlopeSums(rows[0].weights.shape[-1])
    for row in rows:
        sums.add(row)
    return sums


def slopes(rows: Rows, topk: int) -> torch.Tensor:
    """Fit the line through each head's ReLU, over each query's best tokens."""
    return all_slopes([near(row, topk) for row in rows], topk)


def secants(rows: Rows, _: int) -> torch.Tensor:
    """Fit the line through each head's ReLU from its average token to those that it lets through.

    The latter are weighted by what they get. Such a token so leads an average one by as much as
    under ReLU, also where the head stops nearly all: slopes make little of a rare match.
    """
    sums = _sums(rows)
    x, _, right, square = sums.sums / sums.pairs
    passed = square / right.clamp_min(1e-30)
    lead = passed - x
    secant = torch.where(lead > 1e-9 * passed, (passed - right) / lead.clamp_min(1e-30), 1.0)
    return secant.where(right > 0, 0.0).clamp(0.0, 1.0).float()


def near(row: IndexRow, topk: int) -> IndexRow:
    """Let each query see only those of its tokens that ``fold calibrate`` fits to."""
    best = [best_pairs(part, FITTED * topk).visible for part in row.blocks(PART)]
    return replace(row, visible=torch.cat(best, dim=1))


def least_squares(rows: Rows, topk: int) -> torch.Tensor:
    """Return the slopes that fit the exact score best, but for a constant a query."""
    heads = rows[0].weights.shape[-1]
    left, right = torch.zeros(heads, heads).double(), torch.zeros(heads).double()
    for lines, exact, visible in _parts([near(row, topk) for row in rows]):
        flat = centred(lines, visible[:, None]).transpose(0, 1).flatten(1)
        left += (flat @ flat.T).double().cpu()
        right += (flat @ centred(exact, visible).flatten()).double().cpu()
    ridge = RIDGE * left.diagonal().mean() * torch.eye(heads, dtype=torch.float64)
    return torch.linalg.solve(left + ridge, right).float()


def _parts(rows: Rows) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield weighted products ``[Q, H, T]``, exact scores and visible tokens ``[Q, T]``."""
    for row in rows:
        for part in row.blocks(PART):
            products = part.products()[0]
            exact = torch.einsum("qht,qh->qt", products.clamp_min(0), part.weights[0])
            yield products * part.weights[0][..., None], exact, part.visible[0]


def centred(values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return ``[..., T]`` less each row's mean over what it sees; 0 elsewhere."""
    inside = values.masked_fill(~visible, 0.0)
    mean = inside.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp_min(1)
    return (inside - mean).masked_fill(~visible, 0.0)


FITS: dict[str, Fit] = {
    SLOPES: slopes,
    ALL_SLOPES: all_slopes,
    SECANTS: secants,
    LEAST_SQUARES: least_squares,
}
