"""The bill of a long run, by hand."""

import io

import pytest
from rich.console import Console

from sglang_indexcache.lab.runs.cost import Cost, Rate, print_plan, time_in_words


def test_hours_are_tokens_at_a_rate_whose_source_is_told() -> None:
    cost = Cost(72_000_000, Rate(10_000, "given by --rate"))
    assert cost.hours == pytest.approx(2.0)
    assert cost.in_words() == (
        "72,000,000 tokens at most, 2 hours at 10,000 tokens a second (given by --rate)"
    )


@pytest.mark.parametrize(
    ("hours", "words"),
    [(3.14, "3.1 hours"), (0.75, "45 minutes"), (0.046, "3 minutes"), (0.002, "7 seconds")],
)
def test_short_times_are_no_share_of_an_hour(hours: float, words: str) -> None:
    assert time_in_words(hours) == words


def test_without_a_rate_it_says_how_to_get_hours() -> None:
    assert Cost(5).hours is None
    assert "give --rate" in Cost(5).in_words()


def test_a_plan_is_written_in_two_columns() -> None:
    console = Console(file=io.StringIO(), width=20)
    print_plan(console, [("data", "documents [of a user]"), ("objective", "loss")])
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "data       documents [of a user]\nobjective  loss\n"
    )
