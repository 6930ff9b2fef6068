import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.methods.greedy import greedy
from sglang_indexcache.search.refinements.beam import beam
from sglang_indexcache.search.refinements.exchange import Screened, Swap
from tests.search.helpers import free, landscape, targets
from tests.search.oracle import every_pattern


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    count = draw(st.integers(1, 10))
    return Pattern("F" + draw(st.text("FS", min_size=count - 1, max_size=count - 1)))


@settings(deadline=None, max_examples=30)
@given(pattern=patterns(), seed=st.integers(0, 10**6))
def test_swap_ends_where_no_exchange_helps(pattern: Pattern, seed: int) -> None:
    ledger = landscape(len(pattern), seed)
    refined, exchanges = Swap().refine(ledger, free(len(pattern)), pattern, {}, 0)
    assert len(refined.full_layers) == len(pattern.full_layers)
    assert ledger.mean(refined) <= ledger.mean(pattern)
    assert (exchanges == 0) == (refined == pattern)
    for out in refined.full_layers[1:]:
        for into in refined.shared_layers:
            kept = set(refined.full_layers) - {out} | {into}
            assert ledger.mean(Pattern.from_layers(len(pattern), kept)) >= ledger.mean(refined)


@settings(deadline=None, max_examples=30)
@given(pattern=patterns(), seed=st.integers(0, 10**6), evaluations=st.integers(0, 60))
def test_screened_is_never_worse_and_stays_in_its_budget(
    pattern: Pattern, seed: int, evaluations: int
) -> None:
    ledger = landscape(len(pattern), seed, batches=16)
    before = ledger.mean(pattern)
    spent = ledger.spent
    budget = evaluations * ledger.full_evaluation
    refined, _ = Screened().refine(ledger, free(len(pattern)), pattern, {}, budget)
    assert ledger.mean(refined) <= before
    assert len(refined.full_layers) == len(pattern.full_layers)
    assert ledger.spent - spent <= budget


def test_finds_what_greedy_misses() -> None:
    """On some landscapes greedy is not the best of all patterns; refinement gets closer."""
    gained = 0
    for seed in range(20):
        ledger = landscape(10, seed)
        step = list(greedy(ledger, free(10), targets(10, "4")))[-1]
        refined, _ = Swap().refine(ledger, free(10), step.pattern, {}, 0)
        best = min(ledger.mean(Pattern(text)) for text in every_pattern(10, 4))
        assert best <= ledger.mean(refined) <= step.loss
        gained += ledger.mean(refined) < step.loss
    assert gained > 0


def test_exchanges_obey_the_constraints() -> None:
    rules = Constraints.make(Pattern("FFFFSFFFFF"), keep_full=[3], force_shared=[6])
    start = Pattern("FSSFSSSSSF")
    for seed in range(10):
        text = str(Swap().refine(landscape(10, seed), rules, start, {}, 0)[0])
        assert text[0] == text[3] == "F"
        assert text[4] == text[6] == "S"


@pytest.mark.parametrize("width", [1, 3])
def test_beam_is_never_worse_than_what_is_known(width: int) -> None:
    for seed in range(10):
        ledger = landscape(12, seed)
        known = {
            len(s.pattern.full_layers): s.pattern
            for s in greedy(ledger, free(12), targets(12, "3"))
        }
        best = beam(ledger, free(12), 3, width, known)
        assert sorted(best) == list(range(3, 13))
        for count, pattern in best.items():
            assert len(pattern.full_layers) == count
            assert ledger.mean(pattern) <= ledger.mean(known[count])


def test_a_beam_that_holds_everything_finds_the_best() -> None:
    ledger = landscape(8, 5)
    best = beam(ledger, free(8), 3, 10**6, {})
    for count in range(3, 9):
        truth = min(ledger.mean(Pattern(text)) for text in every_pattern(8, count))
        assert ledger.mean(best[count]) == truth
