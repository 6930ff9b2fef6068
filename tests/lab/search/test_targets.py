import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.rules import Constraints, parse_targets, uniform_within
from sglang_indexcache.pattern import Pattern
from tests.lab.search.helpers import free


def test_ratios_and_counts() -> None:
    goals = parse_targets(["1/8", "1/2", "20"], free(47))
    assert [(m.full_layers, m.label) for m in goals.marks] == [
        (24, "1/2"),
        (20, "20/47"),
        (6, "1/8"),
    ]
    assert goals.fewest == 6
    assert goals.mark_at(20) == goals.marks[1]
    assert goals.mark_at(21) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "at least one target"),
        (["quarter"], "neither a ratio"),
        (["0/4"], "not a ratio between 0 and 1"),
        (["5/4"], "not a ratio between 0 and 1"),
        (["0"], "neither a ratio"),
        (["48"], "keeps 48 of 47 indexers, but this search can only reach 1 to 47"),
        (["+1%"], "neither a ratio"),
    ],
)
def test_bad_targets(values: list[str], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        parse_targets(values, free(47))


def test_defaults_that_cannot_be_reached_are_left_out() -> None:
    shared = Constraints.make(Pattern("FFSSFSSSFSSS"))
    assert [mark.label for mark in parse_targets(None, shared).marks] == ["1/4", "1/8"]
    staged = Constraints.make(Pattern("F" * 12), keep_full=[3, 6, 9])
    assert [mark.label for mark in parse_targets(None, staged).marks] == ["1/2"]
    with pytest.raises(SearchError, match=r"give at least one target .* can reach 7 to 12 of 12"):
        parse_targets(None, Constraints.make(Pattern("F" * 12), keep_full=range(1, 7)))


def test_targets_that_the_constraints_bar() -> None:
    rules = Constraints.make(Pattern("FSFFSF"), keep_full=[2, 3])
    assert parse_targets(["3", "4"], rules).fewest == 3
    for value in ("2", "5"):
        with pytest.raises(SearchError, match="can only reach 3 to 4"):
            parse_targets([value], rules)


@pytest.mark.parametrize(
    ("keep_full", "message"),
    [
        ([6], r"layers \[6\] do not exist in a 6-layer model"),
        ([-1], r"layers \[-1\] do not exist"),
        ([1], "ships no indexer there"),
    ],
)
def test_layers_that_cannot_be_kept(keep_full: list[int], message: str) -> None:
    with pytest.raises(SearchError, match=message):
        Constraints.make(Pattern("FSFFFF"), keep_full)


def test_uniform_is_the_papers_where_a_ratio_gives_the_count() -> None:
    assert uniform_within(12, free(47)) == Pattern.uniform(47, 4)
    for count in range(1, 48):
        pattern = uniform_within(count, free(47))
        assert pattern is not None
        assert len(pattern.full_layers) == count


def test_uniform_obeys_the_constraints() -> None:
    rules = Constraints.make(Pattern("FFFFFFFSFFFF"), keep_full=[5])
    patterns = [pattern for count in range(2, 12) if (pattern := uniform_within(count, rules))]
    assert len(patterns) < 10
    assert all(pattern.is_full(5) and not pattern.is_full(7) for pattern in patterns)
