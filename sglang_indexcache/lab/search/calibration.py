"""Calibration data: documents in, token sequences out, the same ones every time.

The paper's "calibration set": B mini-batches on which every candidate pattern is evaluated. A batch
is one sequence: a document, or a piece of one, never two, which would attend to each other.
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
    """Choice of the predictions that count, of those whose query sees more than it may select."""

    ANSWERS = "answers"
    RECALL = "recall"
    LATE = "late"
    ALL = "all"

    @classmethod
    def parse(cls, text: str) -> Score:
        """Parse what a user writes; SearchError if it is none of these."""
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
        topk: tokens that a query selects (``index_topk``). Until it sees more than these, no
            pattern changes what it attends to, so its prediction is never counted.
    """

    score: Score = Score.ALL
    topk: int = 0

    def counted(self, kinds: Kinds) -> Kinds:
        """Return the kind of each prediction of one sequence, 0 where it does not count.

        Args:
            kinds: ``[length]``, what its tokens belong to: answers where the data marks them, or
                what :func:`~sglang_indexcache.lab.search.recall.with_recall` mixed in.

        Returns:
            ``[length - 1]`` uint8; entry i is of the prediction of token i + 1, whose query sees
            i + 1 tokens. 0 does not count.
        """
        query = np.arange(len(kinds) - 1)
        visible = query >= self.topk
        if self.score in (Score.ANSWERS, Score.RECALL):
            return np.where(visible, kinds[1:], 0).astype(np.uint8)
        if self.score is Score.LATE:
            visible &= query >= len(query) // 2
        return np.where(visible, TEXT, 0).astype(np.uint8)

    def in_words(self) -> str:
        """Say which tokens count."""
        counts = _COUNTS[self.score]
        return f"{counts} whose query sees more than {self.topk} tokens" if self.topk else counts


@dataclass(frozen=True, eq=False)
class Calibration:
    """Token sequences, a batch each.

    Attributes:
        sequences: each ``[length]`` token ids; lengths may differ.
        held_out: sequences at the end that a search must not search on.
        kinds: for each sequence ``[length - 1]`` uint8, what a loss counts each prediction as
            (entry i predicts token i + 1), see :mod:`.recall`; all as text if not given.
        documents: number of the text that each sequence is cut from; each its own if not given.
        source, reading: where the text came from and what became of the documents, in words.
        warning: what a user should mend, or nothing.
        held_out_reading, held_out_warning: the same of the held-out part by itself.

    Raises:
        SearchError: a sequence without a counted prediction.
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
        """Masks of the predictions that count, of each sequence."""
        return [kinds > 0 for kinds in self.kinds]

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Tokens of each sequence."""
        return tuple(map(len, self.sequences))

    @property
    def digest(self) -> str:
        """SHA-256 over tokens and what counts: the same exactly when the data is."""
        content = hashlib.sha256()
        for sequence, kinds in zip(self.sequences, self.kinds, strict=True):
            content.update((",".join(map(str, sequence)) + "\n").encode())
            content.update(kinds.tobytes())
        return content.hexdigest()

    @property
    def size(self) -> str:
        """Sequences that are searched on, and their lengths, in words."""
        shortest, longest = min(self.batch_tokens), max(self.batch_tokens)
        length = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        return f"{len(self.sequences) - self.held_out} batches of {length} tokens"

    @property
    def counts(self) -> str:
        """Counted predictions of a batch, in words."""
        totals = [int(mask.sum()) for mask in self.counted]
        return f"{min(totals)}" if min(totals) == max(totals) else f"{min(totals)} to {max(totals)}"

    @property
    def judged_on(self) -> str:
        """Kinds of tokens that are judged, in words: text and tasks, or answers alone."""
        present = {int(kind) for kinds in self.kinds for kind in np.unique(kinds)} - {0}
        if self.objective.score is Score.ANSWERS:
            return "answers"
        return ", ".join(KINDS[kind] for kind in sorted(present))

    def held_out_alone(self) -> Calibration:
        """Return the sequences that a search must not search on."""
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
