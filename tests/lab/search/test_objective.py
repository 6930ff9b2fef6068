import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.search.calibration import Objective, Score


@given(
    answers=st.lists(st.booleans(), min_size=1, max_size=40),
    topk=st.integers(0, 20),
    score=st.sampled_from(Score),
)
def test_counts_what_it_says(answers: list[bool], topk: int, score: Score) -> None:
    """Prediction by prediction, in words: token t is predicted by query t - 1, which sees t."""
    mask = Objective(score, topk).counted(np.array(answers, dtype=np.uint8)) > 0
    assert len(mask) == len(answers) - 1
    for token in range(1, len(answers)):
        expected = token > topk
        if score in (Score.ANSWERS, Score.RECALL):
            expected &= answers[token]
        if score is Score.LATE:
            later = range(1, len(answers))[-((len(answers)) // 2) :]
            expected &= token in later
        assert mask[token - 1] == expected


def test_words() -> None:
    assert Objective(Score.ALL).in_words() == "all tokens"
    words = Objective(Score.ANSWERS, 2048).in_words()
    assert words == "answer tokens whose query sees more than 2048 tokens"
    assert Score.parse("late") is Score.LATE
    with pytest.raises(SearchError, match="the score is answers, recall, late, all, got 'early'"):
        Score.parse("early")
