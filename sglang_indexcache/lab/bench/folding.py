"""Prefill time of folded layers, composed: arithmetic on NVIDIA's rows of single kernels.

NVIDIA's rows have no kernel that folds. They have what it replaces, GLM-5's logits, and what stands
in their place: a product with one query a token, and top-k. Ours was timed on an H100 alone
(``benchmarks/results/kernels``), beside SGLang's logits and top-k and no other part of a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.bench.rows import ENGINE, Kind, Layers, Series, Wheel
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.shapes import ModelShape

HEADS = 32
"""Index heads of the model whose logits were timed alone."""
KEYS = 65_536
"""Keys of the rows' widest product; one with more keys or fewer takes as much a key."""
WIDTH_BYTES = 2
"""Bytes of a float32 score, which top-k reads, beyond bfloat16, which the rows' product writes."""

_ARITHMETIC = (
    "Folding is arithmetic, for these rows have no kernel that folds: an L layer's chunk takes an "
    "F layer's, less its logits, plus one product of the rows that writes float32, as the kernel "
    "does that IndexCache serves L layers with. No chunk is faster than the fastest of an F layer, "
    "where launches bind. In decode the same bytes are read, so a folded layer's step counts as an "
    "F layer's."
)
_CANDIDATES = (
    "+cN adds its candidates' exact scores at the rate of those logits, and a second top-k. No row "
    "has gathering their keys or a first top-k beyond the list's length: these are left out, so "
    "the gain is at most that."
)


def explain(patterns: Iterable[Pattern]) -> list[str]:
    """Say in sentences what is assumed of those that fold; nothing if none does."""
    folded = [pattern for pattern in patterns if pattern.is_folded]
    more = [_CANDIDATES] if any(pattern.suffix.factor > 1 for pattern in folded) else []
    return [_ARITHMETIC, *more] if folded else []


def fold(
    layers: Layers, wheel: Wheel, shape: ModelShape, weights: str, bandwidth: float, factor: int
) -> Layers:
    """Return layers whose F ones fold in prefill, for ``factor`` lists of candidates; 1 is L.

    Where a chunk sees no more tokens than that, nothing is folded: the exact score ranks all.

    Args:
        weights: format of the product, as the rows name it.
        bandwidth: bytes a second of the GPU's memory that are reached.

    Raises:
        BenchError: NVIDIA timed no such kernels alone.
    """
    if shape.index_n_heads != HEADS:
        raise BenchError(
            f"folding cannot be composed: NVIDIA timed logits of {HEADS} heads (GLM-5's) alone, "
            f"not of {shape.index_n_heads}. Ask for patterns of F and S without +cN."
        )
    product = wheel.series(
        f"gemm/{ENGINE}/gemm_perf",
        "m",
        {"n": KEYS, "k": shape.index_head_dim, "gemm_dtype": weights},
    )
    candidates = factor * shape.index_topk
    folded: dict[tuple[Kind, int], Series] = {}
    for (kind, tokens), full in layers.prefill.items():
        if kind == "S":
            folded[kind, tokens] = full
        if kind == "S" or (scores := product.at(tokens)) is None:
            continue
        table = f"sparse_attention/{ENGINE}/glm5_{{}}_module_perf"
        about = {"batch_size": 1, "isl": tokens}
        logits = wheel.series(table.format("mqa_logits"), "step", about)
        topk = wheel.series(table.format("topk"), "step", {**about, "score_mode": "top_last"})
        second = topk.at(max(0, candidates - tokens)) if factor > 1 else None
        indexed = [y for x, y in full.points.items() if x + tokens > shape.index_topk]
        points = {}
        for prefix, latency in full.points.items():
            keys = prefix + tokens
            if keys <= candidates:
                points[prefix] = latency
            elif prefix in logits.points and (factor == 1 or second is not None):
                exact = logits.points[prefix]
                matrix = scores.value * keys / KEYS + 1e3 * tokens * keys * WIDTH_BYTES / bandwidth
                points[prefix] = max(latency - exact + matrix, min(indexed))
                if second is not None:
                    visible = prefix + tokens / 2
                    points[prefix] += exact * min(1, candidates / visible) + second.value
        folded["F", tokens] = Series(points)
    return replace(layers, prefill=folded)
