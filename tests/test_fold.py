"""The folded indexer against float64 brute force, pair by pair, and against transformers' own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.fold import (
    IndexRow,
    SlopeSums,
    check_can_fold,
    folded,
    largest,
    read_row,
    select,
)
from tests.oracle import load_eager

SIZES = ((1, 1, 1, 3, 1), (2, 7, 13, 5, 3), (1, 300, 300, 9, 8), (3, 1, 41, 32, 16))
"""Batch, queries, keys, heads, width."""


def random_row(size: tuple[int, ...], seed: int, *, padded: bool = False) -> IndexRow:
    """Weights of both signs; the last query sees all keys. Padded: some rows lack their start."""
    batch, queries, keys, heads, width = size
    draw = torch.Generator().manual_seed(seed)
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    visible = visible.expand(batch, -1, -1).clone()
    if padded:
        for number in range(batch):
            visible[number, :, : number * keys // 4] = False
    return IndexRow(
        torch.randn(batch, queries, heads, width, generator=draw),
        torch.randn(batch, keys, width, generator=draw) + 0.3,
        torch.randn(batch, queries, heads, generator=draw),
        visible,
    )


def brute_scores(row: IndexRow, slopes: torch.Tensor | None) -> torch.Tensor:
    """Return ``[B, S, T]`` float64, one pair and one head at a time; -inf where nothing is seen."""
    batch, queries, heads, _ = row.queries.shape
    scores = torch.full(row.visible.shape, -torch.inf, dtype=torch.float64)
    for b in range(batch):
        for s in range(queries):
            for t in row.visible[b, s].nonzero()[:, 0].tolist():
                x = (row.queries[b, s].double() * row.keys[b, t].double()).sum(-1)
                per_head = x.clamp_min(0) if slopes is None else slopes.double() * x
                scores[b, s, t] = sum(
                    float(row.weights[b, s, h]) * float(per_head[h]) for h in range(heads)
                )
    return scores


def best(scores: torch.Tensor, count: int) -> set[int]:
    """The best of one query's scores, by sorting pairs in Python; unseen ones are no answer."""
    ranked = sorted((-value, place) for place, value in enumerate(scores.tolist()))
    return {place for value, place in ranked[:count] if value < float("inf")}


def selected(picks: torch.Tensor, visible: torch.Tensor) -> set[int]:
    """Return a query's picks that it sees; a pick must not stand there twice."""
    places = picks.tolist()
    assert len(set(places)) == len(places)
    assert places == sorted(places)
    return {place for place in places if visible[place]}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("size", [SIZES[0], SIZES[1], SIZES[3]])
def test_selections_are_those_of_brute_force(size: tuple[int, ...], padded: bool) -> None:
    row = random_row(size, seed=1, padded=padded)
    slopes = torch.rand(size[3], generator=torch.Generator().manual_seed(2))
    exact, line = brute_scores(row, None), brute_scores(row, slopes)
    for topk in (1, 4, 50):
        for factor in (1, 2, 3):
            alone, twice = select(row, topk, slopes), select(row, topk, slopes, factor)
            plain = select(row, topk, None)
            assert twice.dtype == torch.int32
            assert twice.shape == (*size[:2], min(topk, size[2]))
            for b in range(size[0]):
                for s in range(size[1]):
                    visible = row.visible[b, s]
                    assert selected(alone[b, s], visible) == best(line[b, s], topk)
                    assert selected(plain[b, s], visible) == best(exact[b, s], topk)
                    if factor > 1:
                        candidates = best(line[b, s], factor * topk)
                        candidates_alone = torch.full_like(exact[b, s], -torch.inf)
                        candidates_alone[list(candidates)] = exact[b, s, list(candidates)]
                        assert selected(twice[b, s], visible) == best(candidates_alone, topk)


def test_blocks_change_nothing() -> None:
    row = random_row(SIZES[2], seed=3)
    slopes = torch.rand(9, generator=torch.Generator().manual_seed(4))
    parts = list(row.blocks(7))
    assert sum(part.queries.shape[1] for part in parts) == 300
    for factor in (1, 2):
        at_once = select(row, 5, slopes, factor)
        by_parts = torch.cat([select(part, 5, slopes, factor) for part in parts], dim=1)
        assert torch.equal(at_once, by_parts)


def test_two_stages_are_exact_where_a_query_sees_no_more_than_the_candidates() -> None:
    row = random_row((1, 40, 40, 4, 8), seed=5)
    hostile = torch.zeros(4)  # ranks by position alone
    exact, twice = select(row, 5, None), select(row, 5, hostile, 4)
    assert torch.equal(exact[:, :20], twice[:, :20])
    assert not torch.equal(exact[:, 20:], twice[:, 20:])


def test_of_equal_scores_the_smaller_positions_are_taken() -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, -torch.inf, -torch.inf]])
    assert largest(scores, 3).nonzero()[:, 1].view(2, 3).tolist() == [[0, 1, 4], [0, 1, 2]]
    assert largest(scores, 4).nonzero()[:, 1].view(2, 4).tolist() == [[0, 1, 2, 4], [0, 1, 2, 3]]


def test_heads_that_cancel_leave_the_order_of_the_others() -> None:
    row = random_row((1, 20, 20, 3, 8), seed=6)
    row.queries[:, :, 1] = row.queries[:, :, 0]
    row.weights[:, :, 1] = -row.weights[:, :, 0]  # exactly nothing, folded or not
    row.weights[:, :, 2].abs_()
    picks = select(row, 4, torch.tensor([0.5, 0.5, 0.5]))
    alone = IndexRow(row.queries[:, :, 2:], row.keys, row.weights[:, :, 2:], row.visible)
    for s in range(20):
        assert selected(picks[0, s], row.visible[0, s]) == best(
            brute_scores(alone, torch.ones(1))[0, s], 4
        )


# -- slopes ---------------------------------------------------------------------------------------


def brute_slopes(row: IndexRow) -> list[float]:
    """Return ``cov(relu(x), x) / var(x)`` by two passes over a list of each head's products."""
    batch, queries, heads, _ = row.queries.shape
    slopes = []
    for h in range(heads):
        xs = [
            float((row.queries[b, s, h].double() * row.keys[b, t].double()).sum())
            for b in range(batch)
            for s in range(queries)
            for t in row.visible[b, s].nonzero()[:, 0].tolist()
        ]
        mean = sum(xs) / len(xs)
        right = sum(max(x, 0.0) for x in xs) / len(xs)
        covariance = sum((max(x, 0.0) - right) * (x - mean) for x in xs)
        slopes.append(covariance / sum((x - mean) ** 2 for x in xs))
    return slopes


def test_slopes_are_those_of_two_passes_over_all_visible_pairs() -> None:
    row = random_row(SIZES[1], seed=7, padded=True)
    sums = SlopeSums(5)
    sums.add(row)
    assert sums.pairs == int(row.visible.sum())
    assert sums.slopes().tolist() == pytest.approx(brute_slopes(row), rel=1e-6)


def test_sums_of_texts_add_up() -> None:
    first, second = random_row(SIZES[1], seed=8), random_row((1, 11, 11, 5, 3), seed=9)
    all_pairs, left, right = SlopeSums(5), SlopeSums(5), SlopeSums(5)
    all_pairs.add(first), all_pairs.add(second), left.add(first), right.add(second)
    together = left + right
    assert together.pairs == all_pairs.pairs
    torch.testing.assert_close(together.sums, all_pairs.sums, rtol=1e-12, atol=0)


def test_a_head_that_relu_passes_has_slope_one_and_one_that_it_stops_zero() -> None:
    row = random_row((1, 30, 30, 3, 4), seed=10)
    row.keys.abs_()
    row.queries.abs_()
    row.queries[:, :, 1] *= -1  # never positive
    row.queries[:, :, 2] = 0  # always alike
    sums = SlopeSums(3)
    sums.add(row)
    assert sums.slopes().tolist() == pytest.approx([1, 0, 0], abs=1e-6)


def test_slopes_mend_heads_of_both_signs() -> None:
    """Heads that ReLU passes are outweighed, if merely added, by heads that it stops."""
    row = random_row((1, 200, 200, 6, 8), seed=11)
    row.keys.abs_()
    row.queries.abs_()
    row.queries[:, :, 3:] *= -1
    row.weights.abs_()
    row.weights[:, :, 3:] *= 5
    sums = SlopeSums(6)
    sums.add(row)
    exact = select(row, 16, None)[0, 100:]

    def recall(slopes: torch.Tensor) -> float:
        picks = select(row, 16, slopes)[0, 100:]
        shared = (picks[:, :, None] == exact[:, None]).sum((1, 2)) / 16
        return float(shared.mean())

    assert recall(sums.slopes()) == 1.0
    assert recall(torch.ones(6)) < 0.5


def test_slopes_of_no_text_are_refused() -> None:
    with pytest.raises(CheckpointError, match="no text"):
        SlopeSums(3).slopes()


# -- transformers ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=("glm-5", "deepseek-v3.2"))
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Any:
    return load_eager(checkpoints[request.param])


def picks_by_layer(model: Any, forwards: dict[Any, Any], **inputs: Any) -> list[list[set[int]]]:
    """Return what every layer's indexer answers, or whatever stands in for its forward."""
    answers: dict[int, torch.Tensor] = {}
    indexers = [m.indexer for m in model.modules() if hasattr(m, "indexer")]
    for indexer in indexers:
        run = forwards.get(indexer, type(indexer).forward.__get__(indexer))

        def keep(*args: Any, run: Any = run, layer: int = indexer.layer_idx, **kwargs: Any) -> Any:
            answers[layer] = run(*args, **kwargs)
            return answers[layer]

        indexer.forward = keep
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for indexer in indexers:
            del indexer.forward
    return [[set(q) for row in answers[i].tolist() for q in row] for i in sorted(answers)]


@pytest.mark.parametrize("padded", [False, True])
def test_the_exact_score_selects_as_the_indexer_does(model: Any, padded: bool) -> None:
    ids = torch.randint(10, 512, (2, 90), generator=torch.Generator().manual_seed(12))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :17] = 0
    indexers = [m.indexer for m in model.modules() if hasattr(m, "indexer")]

    def exact(indexer: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            return select(read_row(indexer, *args, **kwargs), indexer.index_topk, None)

        return forward

    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    theirs_by_layer = picks_by_layer(model, {}, **inputs)
    ours = picks_by_layer(model, {indexer: exact(indexer) for indexer in indexers}, **inputs)
    topk = model.config.index_topk
    full = [number for number in range(180) if number % 90 >= topk + 17 * (number >= 90)]
    pairs = [
        (mine[number], theirs[number])
        for mine, theirs in zip(ours, theirs_by_layer, strict=True)
        for number in full
    ]
    # Scores that lie within rounding of each other may change places, and no others do.
    assert sum(len(a ^ b) for a, b in pairs) <= 0.002 * topk * len(pairs)


def test_decoding_with_a_cache_selects_as_one_forward_does(model: Any) -> None:
    ids = torch.randint(10, 512, (1, 70), generator=torch.Generator().manual_seed(13))
    indexers = [m.indexer for m in model.modules() if hasattr(m, "indexer")]
    slopes = torch.rand(indexers[0].n_heads, generator=torch.Generator().manual_seed(14))
    for factor in (1, 2):
        forwards = {indexer: folded(indexer, slopes, factor) for indexer in indexers}
        at_once = picks_by_layer(model, forwards, input_ids=ids, use_cache=False)
        cache = DynamicCache(config=model.config)
        picks_by_layer(model, forwards, input_ids=ids[:, :69], past_key_values=cache)
        last = picks_by_layer(model, forwards, input_ids=ids[:, 69:], past_key_values=cache)
        differing = sum(len(a[-1] ^ b[-1]) for a, b in zip(at_once, last, strict=True))
        assert differing <= 2


def test_another_models_indexer_is_refused() -> None:
    stranger = SimpleNamespace(config=SimpleNamespace(model_type="hy_v4"))
    with pytest.raises(CheckpointError, match="folding knows the indexers of"):
        check_can_fold(stranger)
