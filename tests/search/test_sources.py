import pytest

from sglang_indexcache.errors import PatternError, SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.sources import Data, Synthetic


@pytest.mark.parametrize(
    ("value", "pattern"),
    [("full", "FFFFFFFF"), ("uniform:1/4", "FSSSFSSS"), ("FSFFFFFF", "FSFFFFFF")],
)
def test_a_made_up_landscape_takes_every_form_of_a_pattern(value: str, pattern: str) -> None:
    with Synthetic(8, Data()).open() as setup:
        assert setup.resolve(value) == Pattern(pattern)


def test_a_made_up_landscape_refuses_what_a_checkpoint_does() -> None:
    with Synthetic(8, Data()).open() as setup:
        with pytest.raises(PatternError, match="4 characters and the model has 8"):
            setup.resolve("FSFS")
        with pytest.raises(SearchError, match="has no tokens"):
            _ = setup.token_evaluator


def test_parts_are_sets_of_the_same_size_and_other_data() -> None:
    losses = []
    for part in Data(batches=4).parts(3):
        with Synthetic(8, part).open() as setup:
            assert len(setup.evaluator.batch_tokens) == 4
            losses.append(setup.evaluator.loss(Pattern.full(8), range(4)).mean)
    assert len(set(losses)) == 3
