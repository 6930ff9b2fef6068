"""Calibration data: reproducible token sequences from documents.

This is the paper's "calibration set": B mini-batches on which every candidate pattern is evaluated.
A batch is one sequence, a document or a piece of one, but never two, which would attend to each
other.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.data.marking import Mask
from sglang_indexcache.lab.search.recall import KINDS, TEXT, Kinds


class Score(StrEnum):
    """Choice of predictions that count, among those whose query sees more than it may select."""

    ANSWERS = "answers"
    RECALL = "recall"
    LATE = "late"
    ALL = "all"

    @classmethod
    def parse(cls, text: str) -> Score:
        """Parse a user's choice, or raise a SearchError if it is none of these."""
        if text not in list(cls):
            raise SearchError(f"the score is {', '.join(cls)}, got {text!r}")
        return cls(text)


_COUNTS = {
    Score.ANSWERS: "answer tokens",
    Score.RECALL: "tokens in the later half of each text, in its passages that come again, and in "
    "answers about keys and rules",
    Score.LATE: "tokens in the later half of each sequence",
    Score.ALL: "all tokens",
}


@dataclass(frozen=True)
class Objective:
    """Predictions that a loss counts.

    Attributes:
        topk: number of tokens that a query selects (``index_topk``). A query that sees no more
            attends to everything under any pattern, so its prediction is never counted.
    """

    score: Score = Score.ALL
    topk: int = 0

    def counted(self, kinds: Kinds) -> Kinds:
        """Return the kind of each prediction in one sequence, 0 if it does not count.

        Args:
            kinds: ``[length]``, the kind of each token: answers if the data marks them, or the
                kinds that :func:`~sglang_indexcache.lab.search.recall.with_recall` mixed in.

        Returns:
            ``[length - 1]`` uint8; entry i is for the prediction of token i + 1, whose query sees i
            + 1 tokens. 0 means that it does not count.
        """
        query = np.arange(len(kinds) - 1)
        visible = query >= self.topk
        if self.score in (Score.ANSWERS, Score.RECALL):
            return np.where(visible, kinds[1:], 0).astype(np.uint8)
        if self.score is Score.LATE:
            visible &= query >= len(query) // 2
        return np.where(visible, TEXT, 0).astype(np.uint8)

    def in_words(self) -> str:
        """Return text on which tokens count."""
        counts = _COUNTS[self.score]
        return f"{counts} whose query sees more than {self.topk} tokens" if self.topk else counts


@dataclass(frozen=True, eq=False)
class Calibration:
    """Token sequences, each of which is a batch.

    Attributes:
        sequences: each ``[length]`` token ids; lengths may differ.
        held_out: sequences at the end that a search must not search on.
        kinds: for each sequence ``[length - 1]`` uint8, the kind under which a loss counts each
            prediction (entry i predicts token i + 1), see :mod:`.recall`; all text by default.
        documents: number of the text from which each sequence is cut; different for each by
            default.
        source, reading: text on where the data came from, and what became of the documents.
        warning: advice on what the user should change, or "".
        held_out_reading, held_out_warning: the same for the held-out part alone.

    Raises:
        SearchError: a sequence has no counted prediction.
    """

    sequences: tuple[tuple[int, ...], ...]
    source: str
    held_out: int = 0
    kinds: tuple[Kinds, ...] = ()
    documents: tuple[int, ...] = ()
    objective: Objective = field(default_factory=Objective)
    reading: str = ""
    warning: str = ""
    held_out_reading: str = ""
    held_out_warning: str = ""

    def __post_init__(self) -> None:
        if not self.kinds:
            all_predictions = tuple(np.full(len(s) - 1, TEXT, np.uint8) for s in self.sequences)
            object.__setattr__(self, "kinds", all_predictions)
        if not self.documents:
            object.__setattr__(self, "documents", tuple(range(len(self.sequences))))
        for number, mask in enumerate(self.counted):
            if not mask.any():
                raise SearchError(f"no prediction of calibration batch {number} counts")

    @property
    def counted(self) -> list[Mask]:
        """Masks of the predictions that count, for each sequence."""
        return [kinds > 0 for kinds in self.kinds]

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Number of tokens of each sequence."""
        return tuple(map(len, self.sequences))

    @property
    def digest(self) -> str:
        """SHA-256 over tokens and counted predictions, the same exactly when the data is."""
        content = hashlib.sha256()
        for sequence, kinds in zip(self.sequences, self.kinds, strict=True):
            content.update((",".join(map(str, sequence)) + "\n").encode())
            content.update(kinds.tobytes())
        return content.hexdigest()

    @property
    def size(self) -> str:
        """Text on the number and lengths of the sequences that are searched on."""
        shortest, longest = min(self.batch_tokens), max(self.batch_tokens)
        length = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        return f"{len(self.sequences) - self.held_out} batches of {length} tokens"

    @property
    def counts(self) -> str:
        """Text on the number of counted predictions in a batch."""
        totals = [int(mask.sum()) for mask in self.counted]
        return f"{min(totals)}" if min(totals) == max(totals) else f"{min(totals)} to {max(totals)}"

    @property
    def judged_on(self) -> str:
        """Text on the kinds of tokens that are judged: text and tasks, or answers alone."""
        present = {int(kind) for kinds in self.kinds for kind in np.unique(kinds)} - {0}
        if self.objective.score is Score.ANSWERS:
            return "answers"
        return ", ".join(KINDS[kind] for kind in sorted(present))

    def held_out_alone(self) -> Calibration:
        """Return the held-out sequences, on which a search must not search."""
        start = len(self.sequences) - self.held_out
        return replace(
            self,
            sequences=self.sequences[start:],
            kinds=self.kinds[start:],
            documents=self.documents[start:],
            reading=self.held_out_reading,
            warning=self.held_out_warning,
            held_out=0,
        )
