import pytest

from sglang_indexcache.search.options import Options


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
