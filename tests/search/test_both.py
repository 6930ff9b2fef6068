"""Two searches from opposite ends: layers that are free to share only together are found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.search_landscape import SyntheticEvaluator
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import BatchLosses
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import Fast
from sglang_indexcache.search.methods.forward import Both, Forward
from sglang_indexcache.search.options import Options
from sglang_indexcache.search.run import Search
from tests.search.helpers import free, landscape, searched, targets

LAYERS, PAIRS = 24, ((4, 5), (9, 10), (15, 16), (20, 21))
ALONE, PLAIN = 1.0, 0.2


class Pairs:
    """Some pairs of layers cost nothing shared together and much alone; all others a little each.

    The best pattern with 12 F layers shares all four pairs and four single layers: 4 x 0.2 nats.
    """

    in_flight, num_layers = 1, LAYERS
    batch_tokens = (1000,) * 32

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> BatchLosses:
        shared = set(pattern.shared_layers)
        cost = PLAIN * len(shared - {layer for pair in PAIRS for layer in pair})
        cost += sum(ALONE for pair in PAIRS if len(shared & set(pair)) == 1)
        levels = 2.0 + 0.1 * np.sin(np.asarray(batches, dtype=float))
        return BatchLosses(levels + cost, 1000 * LAYERS * len(batches))


def found(options: Options, *goals: str) -> Search:
    search = Search(Ledger(Pairs()), free(LAYERS), targets(LAYERS, *goals), options)
    for _ in search.run():
        pass
    return search


@pytest.mark.parametrize("refine", [False, True])
def test_both_finds_hidden_pairs_that_fast_misses(refine: bool) -> None:
    fast, both = (found(Options(method, refine=refine), "12") for method in (Fast(), Both()))
    [one], [two] = fast.found.values(), both.found.values()
    assert two.loss - both.start_loss == pytest.approx(4 * PLAIN)  # the optimum
    assert all(set(pair) <= set(two.pattern.shared_layers) for pair in PAIRS)
    assert one.loss - fast.start_loss > 2 * (two.loss - both.start_loss)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_as_good_as_the_better_of_the_two(seed: int) -> None:
    goal = targets(LAYERS, "1/2", "1/4", "1/8")
    searches = []
    for method in (Both(), Fast(), Forward()):
        search = Search(
            landscape(LAYERS, seed, batches=32), free(LAYERS), goal, Options(method, refine=False)
        )
        for _ in search.run():
            pass
        searches.append(search)
    both, *alone = searches
    assert list(both.found) == list(alone[0].found)
    for count, pattern in both.found.items():
        assert pattern.loss <= min(search.found[count].loss for search in alone) + 1e-12
    assert both.search_tokens <= both.budget.total == 2 * alone[0].budget.total


def test_the_path_holds_both_ways_and_the_budget_both_needs() -> None:
    goal, ledger = targets(LAYERS, "1/2", "1/4"), Ledger(Pairs())
    least = Both().least(free(LAYERS), goal, ledger.tokens_of_batches)
    events = list(Both().descend(ledger, free(LAYERS), goal, least))
    assert ledger.spent <= least
    counts = [len(event.pattern.full_layers) for event in events if isinstance(event, Step)]
    assert counts == [*range(24, 5, -1), 24, *range(2, 13)]


def test_the_log_says_which_way_it_walks(tmp_path: Path) -> None:
    _, told = searched(tmp_path, SyntheticEvaluator(12, 16), "1/4", method="both", share=0.6)
    down, up = told.split("way up: each flip makes one more layer F")
    assert "way down: each flip makes one more layer S" in down
    assert "-> F" in up.split("loss")[0]
    assert "-> F" not in down
    assert "-> S" not in up


def test_it_is_the_default_where_the_budget_allows_it() -> None:
    goal, tokens = targets(47, "1/2", "1/4"), (1000,) * 32
    options, why = Options.best(free(47), goal, tokens)
    assert (options.method, why) == (Both(), "")
    assert options.budget(free(47), goal, tokens).share == pytest.approx(0.2, abs=0.001)
    options, why = Options.best(free(47), goal, tokens, share=0.25)
    assert (options.method, why) == (Both(), "")
    options, why = Options.best(free(47), goal, tokens, share=0.1)
    assert options.method == Fast()
    assert "--budget 0.1 leaves each of two searches less" in why
