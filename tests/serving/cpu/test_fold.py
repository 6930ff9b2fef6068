"""Folded selection over a paged batch, against float64 brute force, row by row."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.errors import PatternError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cpu.fold import FoldingSelector, selector_of
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.rows import RequestIds, RowPatterns
from tests.serving.cpu.test_select import Problem
from tests.serving.plans import plan

HEADS, TOPK = 3, 16
SLOPES = torch.tensor([0.25, 1.0, 0.0])
LENS = [(1, 1), (7, 7), (1, 17), (40, 40), (5, 200), (0, 0), (1, 333), (30, 70)]
DIGEST = "0123456789ab"


def best(scores: torch.Tensor, count: int) -> list[int]:
    """Return the places of the highest scores, of equal ones the first, ascending."""
    order = sorted(range(len(scores)), key=lambda place: (-float(scores[place]), place))
    return sorted(order[:count])


def brute(problem: Problem, factors: list[int | None]) -> list[list[int]]:
    """Return what each row selects; [] in the rows of a request whose layer is S."""
    selected = []
    starts = torch.tensor([0, *problem.batch.query_lens]).cumsum(0).tolist()
    for b, (queries, keys) in enumerate(
        zip(problem.batch.query_lens, problem.batch.key_lens, strict=True)
    ):
        for number in range(queries):
            row, seen = starts[b] + number, keys - queries + number + 1
            keys_of_row = problem.keys[problem.batch.slots[b, :seen]].double()
            products = problem.q[row].double() @ keys_of_row.T
            weights, factor = problem.weights[row].double(), factors[b]
            exact = weights @ products.clamp_min(0)
            if factor is None:
                selected.append([])
            elif factor == 0:
                selected.append(best(exact, TOPK))
            else:
                places = best((weights * SLOPES.double()) @ products, factor * TOPK)
                selected.append([places[i] for i in best(exact[places], TOPK)]
                                if factor > 1 else places)  # fmt: skip
    return selected


@pytest.mark.parametrize(
    ("factor", "dtype"), [(1, torch.bfloat16), *((n, torch.float32) for n in (1, 2, 4, 64))]
)
def test_each_row_selects_what_brute_force_does(
    generator: torch.Generator, factor: int, dtype: torch.dtype
) -> None:
    """All numbers are small, so that every product and sum is exact.

    In bfloat16 so is the folded score, in float32; the exact one is rounded (``test_select.py``).
    """
    problem = Problem(LENS, HEADS, generator)
    factors: list[int | None] = [factor] * len(LENS)
    keys = problem.keys.to(dtype)
    selected = FoldingSelector(SLOPES, factors)(
        problem.q.to(dtype), problem.weights, lambda slots: keys[slots], problem.batch, TOPK
    )
    assert_selected(selected, brute(problem, factors))


def assert_selected(selected: torch.Tensor, expected: list[list[int]]) -> None:
    assert selected.dtype == torch.int32
    for row, places in enumerate(expected):
        padded = places + [-1] * (TOPK - len(places))
        assert selected[row].tolist() == padded, row


def test_requests_of_one_batch_fold_each_by_its_own_factor(generator: torch.Generator) -> None:
    """And rows that pad the batch, full of NaN, select nothing."""
    problem = Problem(LENS, HEADS, generator)
    factors = [0, 1, None, 2, 4, 1, None, 0]
    rows = problem.batch.num_rows
    q = torch.cat([problem.q, torch.full((3, HEADS, 128), torch.nan)])
    weights = torch.cat([problem.weights, torch.full((3, HEADS), torch.nan)])
    selected = FoldingSelector(SLOPES, factors)(
        q, weights, lambda slots: problem.keys[slots], problem.batch, TOPK
    )
    assert_selected(selected[:rows], brute(problem, factors))
    assert (selected[rows:] == -1).all()


def serve(plan: Plan, patterns: list[Pattern], lens: list[tuple[int, int]]) -> Any:
    """Return a backend in a forward of requests with these patterns, and the forward's batch."""
    active = ActivePattern(plan)
    buffer = IndexBuffer(active)
    lengths = [queries for queries, _ in lens]
    buffer.begin(RowPatterns.of(patterns, lengths, torch.empty(sum(lengths))))
    ids = RequestIds([SimpleNamespace(rid=str(n), indexcache_pattern=p)
                      for n, p in enumerate(patterns)])  # fmt: skip
    backend = SimpleNamespace(
        active=active, index_buffer=buffer, batch=SimpleNamespace(query_lens=lengths)
    )
    return backend, SimpleNamespace(rids=ids)


def factors(backend: Any, batch: Any, layer: int) -> list[int | None]:
    selector = selector_of(backend, batch, layer)
    assert selector is not None
    return list(selector.factors)


def folding_plan(text: str, **fields: Any) -> Plan:
    slopes = tuple((0.5, 1.0, 0.25) for _ in Pattern(text).layers)
    return replace(plan(text, **fields), slopes=slopes)


def test_who_selects_in_a_layer_of_a_mixed_batch() -> None:
    texts = [f"FLSS@{DIGEST}", "FFSS", f"FSFS+c4@{DIGEST}"]
    plan = folding_plan(texts[0], mode="live")
    lens = [(2, 9), (1, 5), (4, 4)]
    backend, batch = serve(plan, [Pattern(text) for text in texts], lens)
    assert factors(backend, batch, 0) == [0, 0, 4]
    assert factors(backend, batch, 1) == [1, 0, None]
    assert factors(backend, batch, 2) == [None, None, 4]
    exact, batch = serve(plan, [Pattern("FFSS")] * 2, lens[:2])
    assert selector_of(exact, batch, 0) is None


def test_a_layer_that_stays_exact_by_the_slopes_does_not_fold() -> None:
    plan = folding_plan(f"FFFF+c2@{DIGEST}")
    plan = replace(plan, slopes=(None, *plan.slopes[1:]))
    backend, batch = serve(plan, [plan.pattern], [(3, 8)])
    assert selector_of(backend, batch, 0) is None
    assert factors(backend, batch, 1) == [2]


def test_a_request_folds_by_the_slopes_of_the_server() -> None:
    bound = folding_plan(f"FLLL@{DIGEST}", mode="live")
    assert Plan.from_json(bound.hf_overrides()["indexcache"]) == bound
    assert bound.folding(Pattern("FSSS")) == Pattern("FSSS")
    assert bound.folding(Pattern("LSLS")) == Pattern(f"LSLS@{DIGEST}")
    assert bound.folding(bound.pattern) == bound.pattern
    rebound = replace(bound, pattern=Pattern(f"FLLL@{'f' * 12}"))
    assert bound.kv_apart != rebound.kv_apart
    with pytest.raises(PatternError, match="folds by other slopes than this server"):
        bound.folding(Pattern(f"LLLL@{'f' * 12}"))
    with pytest.raises(PatternError, match="started without slopes"):
        plan("FFFF", mode="live").folding(Pattern("LLLL"))
    exact = replace(bound, slopes=(bound.slopes[0], None, *bound.slopes[2:]))
    with pytest.raises(PatternError, match="layer 1 folds badly"):
        exact.folding(Pattern("FLSS"))
