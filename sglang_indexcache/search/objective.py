"""What a search minimises: the loss of which predictions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from sglang_indexcache.data.marking import Mask
from sglang_indexcache.errors import SearchError


class Score(StrEnum):
    """Which predictions count, of those whose query sees more than it may select."""

    ANSWERS = "answers"
    LATE = "late"
    ALL = "all"

    @classmethod
    def parse(cls, text: str) -> Score:
        """From what a user writes.

        Raises:
            SearchError: none of the three.
        """
        if text not in list(cls):
            raise SearchError(f"the score is {', '.join(cls)}, got {text!r}")
        return cls(text)


_COUNTS = {
    Score.ANSWERS: "answer tokens",
    Score.LATE: "tokens in the later half of each sequence",
    Score.ALL: "all tokens",
}


@dataclass(frozen=True)
class Objective:
    """Which predictions a loss counts.

    Attributes:
        score: of which tokens.
        topk: tokens that a query selects (``index_topk``). Until it sees more than these, no
            pattern changes what it attends to, so its prediction is never counted.
    """

    score: Score = Score.ALL
    topk: int = 0

    def counted(self, answers: Mask) -> Mask:
        """The predictions of one sequence that count.

        Args:
            answers: ``[length]`` bool, whether a token belongs to an answer.

        Returns:
            ``[length - 1]`` bool; entry i is the prediction of token i + 1, whose query sees
            i + 1 tokens.
        """
        query = np.arange(len(answers) - 1)
        counted: Mask = query >= self.topk
        if self.score is Score.ANSWERS:
            return counted & answers[1:]
        if self.score is Score.LATE:
            return counted & (query >= len(query) // 2)
        return counted

    def in_words(self) -> str:
        """Which tokens count."""
        counts = _COUNTS[self.score]
        return f"{counts} whose query sees more than {self.topk} tokens" if self.topk else counts
