import numpy as np
import pytest

from sglang_indexcache.errors import PatternError, SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.sources import Data, Local, Setup, Synthetic
from tests.cli.test_search import TINY


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


@pytest.mark.parametrize(("context", "length"), [(None, 512), (256, 256)])
def test_the_context_gives_queries_a_choice(context: int | None, length: int) -> None:
    """The checkpoint selects 64 tokens."""
    calibration = Data(context=context, batches=1).calibration(TINY, topk=64)
    assert calibration.context == length
    assert calibration.uncounted == 64


def test_a_short_context_is_said_and_counted_from_where_it_matters() -> None:
    with Local(TINY, Data(context=200, batches=1)).open() as setup:
        assert "short for a model whose queries select 64" in setup.advice
        assert setup.uncounted == 64
        all_full, shared = Pattern.full(12), Pattern("F" + 11 * "S")
        [[mine]] = setup.token_evaluator.token_losses(all_full, [0])
        [[other]] = setup.token_evaluator.token_losses(shared, [0])
        assert np.abs(other - mine)[:64].max() < 1e-5 < np.abs(other - mine)[64:].max()
        assert setup.evaluator.loss(shared, [0]).mean == pytest.approx(other[64:].mean())
        assert "more than 64 tokens" in setup.identity["counted"]
    assert not _setup_at(256).advice


def _setup_at(context: int) -> Setup:
    with Local(TINY, Data(context=context, batches=1)).open() as setup:
        return setup
