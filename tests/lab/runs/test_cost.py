"""Words for a long run, by hand."""

import io

import pytest
from rich.console import Console

from sglang_indexcache.lab.runs.cost import print_plan, time_in_words


@pytest.mark.parametrize(
    ("hours", "words"),
    [(3.14, "3.1 hours"), (0.75, "45 minutes"), (0.046, "3 minutes"), (0.002, "7 seconds")],
)
def test_short_times_are_no_share_of_an_hour(hours: float, words: str) -> None:
    assert time_in_words(hours) == words


def test_a_plan_is_written_in_two_columns() -> None:
    console = Console(file=io.StringIO(), width=20)
    print_plan(console, [("data", "documents [of a user]"), ("objective", "loss")])
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "data       documents [of a user]\nobjective  loss\n"
    )
