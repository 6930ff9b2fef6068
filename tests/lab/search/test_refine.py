from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_indexcache.lab.search.rules import Constraints
from sglang_indexcache.lab.search.run import refine
from sglang_indexcache.pattern import Pattern
from tests.lab.search.helpers import free, greedy, landscape, targets
from tests.lab.search.oracle import every_pattern

PLENTY = 10**9


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    count = draw(st.integers(1, 10))
    return Pattern("F" + draw(st.text("FS", min_size=count - 1, max_size=count - 1)))


@settings(deadline=None, max_examples=30)
@given(pattern=patterns(), seed=st.integers(0, 10**6), evaluations=st.integers(0, 60))
def test_refinement_is_never_worse_and_stays_in_its_budget(
    pattern: Pattern, seed: int, evaluations: int
) -> None:
    ledger = landscape(len(pattern), seed, batches=16)
    before = ledger.mean(pattern)
    spent = ledger.spent
    budget = evaluations * ledger.full_evaluation
    refined, exchanges = refine(ledger, free(len(pattern)), pattern, budget)
    assert ledger.mean(refined) <= before
    assert len(refined.full_layers) == len(pattern.full_layers)
    assert ledger.spent - spent <= budget
    assert (exchanges == 0) == (refined == pattern)


@settings(deadline=None, max_examples=30)
@given(pattern=patterns(), seed=st.integers(0, 10**6))
def test_with_plenty_it_ends_where_no_shift_by_one_layer_helps(pattern: Pattern, seed: int) -> None:
    ledger = landscape(len(pattern), seed)
    refined, _ = refine(ledger, free(len(pattern)), pattern, PLENTY)
    for out in refined.full_layers[1:]:
        for into in {out - 1, out + 1} & set(refined.shared_layers):
            layers = set(refined.full_layers) - {out} | {into}
            assert ledger.mean(Pattern.from_layers(len(pattern), layers)) >= ledger.mean(refined)


def test_finds_what_greedy_misses() -> None:
    """Greedy is not the best of all patterns on some landscapes; refinement gets closer."""
    gained = 0
    for seed in range(20):
        ledger = landscape(10, seed)
        step = greedy(ledger, targets(10, "4"))[-1]
        refined, _ = refine(ledger, free(10), step.pattern, PLENTY)
        best = min(ledger.mean(Pattern(text)) for text in every_pattern(10, 4))
        assert best <= ledger.mean(refined) <= step.loss
        gained += ledger.mean(refined) < step.loss
    assert gained > 0


def test_exchanges_obey_the_constraints() -> None:
    rules = Constraints.make(Pattern("FFFFSFSFFF"), keep_full=[3])
    start = Pattern("FSSFSSSSSF")
    for seed in range(10):
        text = str(refine(landscape(10, seed), rules, start, PLENTY)[0])
        assert text[0] == text[3] == "F"
        assert text[4] == text[6] == "S"
