"""Fit the slopes by which a checkpoint's indexers fold, and count what they miss.

A forward of all F over each text, in transformers: the first texts are fitted to, the others tell
which of the exact picks a folded score would miss. A slope is that of the line through a head's
ReLU over each query's best tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sglang_indexcache.fold import (
    IndexRow,
    SlopeSums,
    check_can_fold,
    largest,
    replaced,
    select,
)
from sglang_indexcache.library import LayerSlopes, Slopes
from sglang_indexcache.search.setup import Setup
from sglang_indexcache.study.provenance import versions

FACTORS = (1, 2, 4)
FITTED = 4
"""To how many lengths of a list, of a query's best tokens, slopes are fitted."""
BADLY = 0.05
"""A layer that misses more than this share of its picks with the most candidates stays exact."""
DIGITS = 6
"""Of a slope; the fit is not as good as that."""


def calibrate(
    model: Path, setup: Setup, path: Path, dtype: str, step: Callable[[], None]
) -> Slopes:
    """Fit to the calibration's texts, judge on those held out, and write the file.

    Args:
        model: the checkpoint's folder.
        path: of the file.
        dtype: a torch dtype's name.
        step: called after each layer of each text.

    Raises:
        CheckpointError: indexers that cannot be folded here.
    """
    sequences = setup.calibration.sequences
    texts = len(sequences) - setup.calibration.held_out
    network = AutoModelForCausalLM.from_pretrained(
        model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    indexers = _indexers(network)
    sums = {layer: SlopeSums(indexer.n_heads) for layer, indexer in indexers.items()}

    def fit(layer: int, row: IndexRow) -> None:
        for part in row.blocks():
            sums[layer].add(best_pairs(part, FITTED * indexers[layer].index_topk))
        step()

    _run(network, indexers, sequences[:texts], fit)
    slopes = {layer: _rounded(layer_sums.slopes()) for layer, layer_sums in sums.items()}
    counts = {layer: torch.zeros(1 + len(FACTORS), dtype=torch.int64) for layer in indexers}

    def judge(layer: int, row: IndexRow) -> None:
        counts[layer] += picks_missed(row, slopes[layer], indexers[layer].index_topk)
        step()

    _run(network, indexers, sequences[texts:], judge)
    layers: list[LayerSlopes | None] = []
    for layer in range(setup.checkpoint.num_layers):
        if layer not in indexers:
            layers.append(None)
            continue
        picks, *missed = counts[layer].tolist()
        shares = {str(c): round(n / picks, DIGITS) for c, n in zip(FACTORS, missed, strict=True)}
        folds = shares[str(FACTORS[-1])] <= BADLY
        numbers = tuple(round(float(slope), DIGITS) for slope in slopes[layer])
        layers.append(LayerSlopes(slopes=numbers, missed=shares, folds=folds))
    result = Slopes(
        name=setup.name,
        architecture=setup.checkpoint.architecture,
        checkpoint=setup.digest,
        layers=tuple(layers),
        record={"data": setup.data, "dtype": dtype, "versions": versions()},
        path=path,
    )
    result.write()
    return result


def best_pairs(row: IndexRow, count: int) -> IndexRow:
    """Let each query see only the ``count`` best of its tokens by exact score.

    Slopes that are fitted to these miss fewer picks than those fitted to all: what a head does to
    tokens that nobody would pick does not matter.
    """
    best = largest(row.exact(), min(count, row.keys.shape[1]))
    return replace(row, visible=row.visible & best)


def picks_missed(row: IndexRow, slopes: torch.Tensor, topk: int) -> torch.Tensor:
    """Count the exact picks of the later half of the queries, and which are no candidates.

    Queries that see few tokens say nothing: all that they see are candidates.

    Returns:
        ``[1 + FACTORS]`` int64: the picks, then the missed ones for each factor.
    """
    counts = torch.zeros(1 + len(FACTORS), dtype=torch.int64)
    for part in row.part(slice(row.queries.shape[1] // 2, None)).blocks():
        folded = part.folded(slopes.to(part.keys.device))
        counts += count_missed(exact_picks(part, topk), folded, topk, FACTORS)
    return counts


def exact_picks(row: IndexRow, topk: int) -> torch.Tensor:
    """Mark the ``topk`` visible tokens with the best exact scores, ``[B, S, T]`` bool."""
    return largest(row.exact(), min(topk, row.keys.shape[1])) & row.visible


def count_missed(
    picks: torch.Tensor, scores: torch.Tensor, topk: int, factors: Sequence[int]
) -> torch.Tensor:
    """Count the exact picks, and those not among the ``factor * topk`` best by ``scores``.

    Args:
        picks: of :func:`exact_picks`.
        scores: ``[B, S, T]`` that choose the candidates, -inf where a token is not visible.

    Returns:
        ``[1 + factors]`` int64: the picks, then the missed ones for each factor.
    """
    length = scores.shape[-1]
    candidates = (largest(scores, min(factor * topk, length)) for factor in factors)
    missed = (int((picks & ~marked).sum()) for marked in candidates)
    return torch.tensor([int(picks.sum()), *missed])


def _rounded(slopes: torch.Tensor) -> torch.Tensor:
    """Return the slopes as the file will have them."""
    return torch.tensor([round(slope, DIGITS) for slope in slopes.tolist()])


def _indexers(model: Any) -> dict[int, Any]:
    """Return a transformers model's indexers by place in a pattern."""
    modules = [module.indexer for module in model.modules() if hasattr(module, "indexer")]
    indexers = {i: indexer for i, indexer in enumerate(modules) if indexer is not None}
    for indexer in indexers.values():
        check_can_fold(indexer)
    return indexers


@torch.no_grad()
def _run(
    model: Any,
    indexers: Mapping[int, Any],
    sequences: Sequence[Sequence[int]],
    see: Callable[[int, IndexRow], None],
) -> None:
    """Run one forward over each sequence; ``see`` gets what every indexer multiplies."""

    def select_exactly(layer: int, row: IndexRow) -> torch.Tensor:
        see(layer, row)
        return select(row, indexers[layer].index_topk, None)

    with replaced(indexers, select_exactly):
        for ids in sequences:
            model.base_model(torch.tensor([ids], device=model.device), use_cache=False)
