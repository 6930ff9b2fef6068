import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.search.methods.greedy import Greedy
from sglang_indexcache.search.methods.similarity import Similarity
from sglang_indexcache.search.options import Options, busy_share, cost
from sglang_indexcache.search.refinements import Unrefined
from sglang_indexcache.search.refinements.exchange import Screened
from sglang_indexcache.search.run import Search
from tests.search.helpers import free, landscape, targets


@pytest.mark.parametrize(
    ("method", "refinement", "words"),
    [
        ("fast", "none", "fast greedy (lazy re-evaluation, paired racing)"),
        (
            "greedy:4",
            "beam:8",
            "exhaustive greedy (Algorithm 1), 4 pipeline blocks, beam refinement",
        ),
    ],
)
def test_options_in_words(method: str, refinement: str, words: str) -> None:
    assert Options.parse(method, refinement).in_words() == words


def test_the_papers_search() -> None:
    """47 layers down to one: N(N-1)/2 passes over 768 sequences of 200K, and the start."""
    bill = cost(
        free(47), targets(47, "1"), Options(Greedy(), Unrefined()), sequences=768, context=200_000,
        tokens_per_second=1e6, gpus=8,
    )  # fmt: skip
    assert bill.evaluations == 1082
    assert bill.sequences == 1082 * 768
    assert bill.tokens == 1082 * 768 * 200_000
    assert bill.hours == pytest.approx(bill.tokens / 1e6 / 3600)
    assert bill.gpu_hours == pytest.approx(8 * bill.hours)


@pytest.mark.parametrize("layers", [12, 47])
def test_fast_never_costs_more_than_predicted(layers: int) -> None:
    goal = targets(layers, "1/2", "1/4")
    search = Search(landscape(layers, batches=32), free(layers), goal, Options())
    for _ in search.run():
        pass
    bill = cost(free(layers), goal, Options(), sequences=32, context=1000)
    assert search.search_tokens <= bill.tokens
    assert bill.hours is None


def test_servers_share_the_hours_but_not_the_gpu_hours() -> None:
    facts = (free(12), targets(12, "1/4"), Options(), 32, 1000, 100.0, 8)
    one, four = cost(*facts), cost(*facts, 4)
    assert four.hours == pytest.approx((one.hours or 0) / 4)
    assert four.gpu_hours == pytest.approx(one.gpu_hours)


@pytest.mark.parametrize(
    ("per_batch", "ranks", "share"), [(8, 8, 1.0), (1, 8, 0.125), (9, 8, 9 / 16), (16, 8, 1.0)]
)
def test_a_short_batch_leaves_ranks_idle(per_batch: int, ranks: int, share: float) -> None:
    assert busy_share(per_batch, ranks) == share


def test_bad_numbers() -> None:
    with pytest.raises(SearchError, match="above zero"):
        busy_share(0, 8)
    with pytest.raises(SearchError, match="above zero"):
        cost(free(4), targets(4, "1"), Options(), sequences=0, context=1)
    with pytest.raises(SearchError, match="no cost model"):
        cost(free(4), targets(4, "1"), Options(Similarity()), sequences=1, context=1)


@pytest.mark.parametrize("seed", range(4))
def test_greedy_is_refined_too_and_its_bill_says_so(seed: int) -> None:
    """It spends more than the budget itself, which once left nothing for the refinement."""
    goal = targets(24, "1/4")
    plain, refined = (
        Search(landscape(24, seed, batches=16), free(24), goal, Options(Greedy(), refinement))
        for refinement in (Unrefined(), Screened())
    )
    for search in (plain, refined):
        for _ in search.run():
            pass
        assert search.search_tokens <= (search.expected_tokens or 0)
    assert refined.search_tokens > plain.search_tokens
    [before], [after] = plain.found.values(), refined.found.values()
    assert after.loss <= before.loss
    assert (after.exchanges > 0) == (after.loss < before.loss)


def test_refinement_repairs_what_greedy_ran_into() -> None:
    """On some of these landscapes greedy alone ends in a trap."""
    gained = []
    for seed in range(6):
        search = Search(
            landscape(24, seed, batches=8, coupling=20.0),
            free(24),
            targets(24, "1/4"),
            Options(Greedy(), Screened()),
        )
        for _ in search.run():
            pass
        gained += [found.gained for found in search.found.values()]
    assert max(gained) > 0
    assert min(gained) >= 0
