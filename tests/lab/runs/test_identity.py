"""A run's folder belongs to that run."""

from pathlib import Path

import pytest

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.runs.identity import claim, differences


def test_differences_are_named_down_to_the_value_that_differs() -> None:
    then = {"model": "a", "plan": {"seed": 0, "rows": list(range(99)), "task": "x"}}
    now = {"model": "a", "plan": {"seed": 1, "rows": list(range(98)), "task": "x"}, "dp": 2}
    assert list(differences(then, now)) == [
        "dp (None then, 2 now)",
        "plan rows",  # too long to be written out
        "plan seed (0 then, 1 now)",
    ]
    assert list(differences(then, then)) == []


def test_the_option_that_changed_is_named_and_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    then = {"data": "a" * 64, "given": {"--context": 128, "--seed": 0}}
    claim(path, then, "search", SearchError)
    claim(path, then | {"given": {"--context": 160, "--seed": 0}}, "search", SearchError)
    now = {"data": "b" * 64, "given": {"--context": 160, "--seed": 0}}
    with pytest.raises(SearchError, match=r"different: data; --context \(128 then, 160 now\)\. "):
        claim(path, now, "search", SearchError)


def test_a_folder_is_claimed_once_and_continued_with_the_same_options_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "options.json"
    options = {"steps": 3, "rates": (1e-3, 1e-4)}  # tuples become lists in JSON, and stay the same
    claim(path, options, "heal", SearchError)
    claim(path, options, "heal", SearchError)
    with pytest.raises(SearchError, match=r"another heal; different: steps \(3 then, 4 now\)"):
        claim(path, options | {"steps": 4}, "heal", SearchError)
    for damaged in ("[1]", "{", "7"):
        path.write_text(damaged)
        with pytest.raises(SearchError, match="damaged"):
            claim(path, options, "heal", SearchError)
