"""Calibration data: documents in, token sequences out, the same ones every time.

The paper's "calibration set": B mini-batches on which every candidate pattern is evaluated. A
sequence is one document, or a piece of one: never two, which would attend to each other.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.data.conversations import Conversation
from sglang_indexcache.lab.data.documents import MACHINE, Document, read_documents, what_is_left_out
from sglang_indexcache.lab.data.marking import Marked, Marker, Mask, is_held_out
from sglang_indexcache.lab.search.difference import ENOUGH
from sglang_indexcache.lab.search.passages import with_passages

FIRST_LOOK = 100
"""Documents that are looked at to see whether the data marks answers."""
HELD_OUT = 128
"""Documents that check a pattern, where the data holds out so many.

Of the shipped checkpoint's 1/4, 2 documents of 96 carry what it loses. 32 documents hold neither in
half of all checks, 128 in 7 % (``benchmarks/results/search/interval.json``).
"""


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
    Score.RECALL: "tokens in the later half of each text, and in its passages that come again,",
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

    def counted(self, answers: Mask) -> Mask:
        """Mark the predictions of one sequence that count; ``answers`` is ``[length]`` bool.

        By :attr:`Score.RECALL` they are what :func:`with_passages` marked.

        Returns:
            ``[length - 1]`` bool; entry i is the prediction of token i + 1, whose query sees
            i + 1 tokens.
        """
        query = np.arange(len(answers) - 1)
        mask: Mask = query >= self.topk
        if self.score in (Score.ANSWERS, Score.RECALL):
            return mask & answers[1:]
        if self.score is Score.LATE:
            return mask & (query >= len(query) // 2)
        return mask

    def in_words(self) -> str:
        """Say which tokens count."""
        counts = _COUNTS[self.score]
        return f"{counts} whose query sees more than {self.topk} tokens" if self.topk else counts


@dataclass(frozen=True, eq=False)
class Calibration:
    """Token sequences, cut into batches.

    Attributes:
        sequences: each ``[length]`` token ids; lengths may differ.
        held_out: batches at the end that a search must not search on.
        counted: for each sequence ``[length - 1]`` bool, the predictions that a loss counts
            (entry i predicts token i + 1); all of them if not given.
        source, reading: where the text came from and what became of the documents, in words.

    Raises:
        SearchError: a batch without a counted prediction.
    """

    sequences: tuple[tuple[int, ...], ...]
    per_batch: int
    source: str
    held_out: int = 0
    counted: tuple[Mask, ...] = ()
    objective: Objective = field(default_factory=Objective)
    reading: str = ""

    def __post_init__(self) -> None:
        if not self.counted:
            all_predictions = tuple(np.ones(len(ids) - 1, dtype=bool) for ids in self.sequences)
            object.__setattr__(self, "counted", all_predictions)
        for number, masks in enumerate(self.batch_counted):
            if not any(mask.any() for mask in masks):
                raise SearchError(f"no prediction of calibration batch {number} counts")

    @property
    def batches(self) -> list[tuple[tuple[int, ...], ...]]:
        """The sequences of each batch."""
        return [self.sequences[i : i + self.per_batch] for i in self._starts]

    @property
    def batch_counted(self) -> list[tuple[Mask, ...]]:
        """The masks of each batch's sequences."""
        return [self.counted[i : i + self.per_batch] for i in self._starts]

    @property
    def batch_tokens(self) -> tuple[int, ...]:
        """Tokens of each batch."""
        return tuple(sum(map(len, batch)) for batch in self.batches)

    @property
    def digest(self) -> str:
        """SHA-256 over tokens, what counts and the batching: equal if and only if the data is."""
        content = hashlib.sha256(f"{self.per_batch}\n".encode())
        for sequence, mask in zip(self.sequences, self.counted, strict=True):
            content.update((",".join(map(str, sequence)) + "\n").encode())
            content.update(np.packbits(mask).tobytes())
        return content.hexdigest()

    @property
    def size(self) -> str:
        """Batches that are searched on, and the lengths of their sequences, in words."""
        lengths = [len(ids) for ids in self.sequences]
        shortest, longest = min(lengths), max(lengths)
        length = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
        return f"{len(self._starts) - self.held_out} batches of {self.per_batch} x {length} tokens"

    @property
    def counts(self) -> str:
        """Counted predictions of a batch, in words."""
        totals = [sum(int(mask.sum()) for mask in masks) for masks in self.batch_counted]
        return f"{min(totals)}" if min(totals) == max(totals) else f"{min(totals)} to {max(totals)}"

    def held_out_alone(self) -> Calibration:
        """Return the batches that a search must not search on."""
        start = len(self.sequences) - self.held_out * self.per_batch
        sequences, masks = self.sequences[start:], self.counted[start:]
        return replace(self, sequences=sequences, counted=masks, held_out=0)

    @property
    def _starts(self) -> range:
        return range(0, len(self.sequences), self.per_batch)


def prepare(
    source: str,
    marker: Marker,
    *,
    context: int,
    batches: int,
    per_batch: int = 1,
    held_out: int | None = 0,
    seed: int = 0,
    topk: int = 0,
    score: Score | None = None,
) -> Calibration:
    """Read, tokenise, choose and split.

    A sequence is a whole document of at most ``context`` tokens. Longer text is cut into
    consecutive windows, a longer conversation after the last response that fits; a longer document
    with answers is left out, because an answer would lose its evidence. Whether a document is held
    out says a digest of its tokens (:func:`~.marking.is_held_out`), so all
    windows of a text are on one side. Of each part the first that have at least half of ``context``
    are taken, the longest of the others only if the source ends before there are enough, and
    shuffled. So neither part changes between runs or machines. By :attr:`Score.RECALL` the end of
    each sequence is replaced by passages of it.

    Args:
        source: as for :func:`~sglang_indexcache.lab.data.documents.read_documents`.
        context: most tokens of a sequence, at least 2.
        held_out: batches of the held-out part; None for :data:`HELD_OUT`, or as many as there are
            from :data:`~sglang_indexcache.lab.search.difference.ENOUGH` on.
        topk: tokens that a query selects.
        score: which predictions count; None for the answers if one of the first
            :data:`FIRST_LOOK` documents has some, else the later half, with passages.

    Raises:
        SearchError: nothing to read, too little of it, or nothing in it that counts.
    """
    most_held_out = HELD_OUT if held_out is None else held_out
    _check_sizes(context, batches, per_batch, most_held_out)
    objective = Objective(score or _default_score(source), topk)
    quota = {False: batches * per_batch, True: most_held_out * per_batch}
    reading = _Reading(source, marker, context, objective)
    parts = _choose(reading, quota)
    if held_out is None:
        held_out = max(ENOUGH, len(parts[True]) // per_batch)
        quota[True] = held_out * per_batch
        del parts[True][quota[True] :]
    if any(len(parts[part]) < quota[part] for part in parts):
        raise reading.too_little(quota, {part: len(parts[part]) for part in parts})
    short = sum(2 * len(piece) < context for part in parts.values() for piece in part)
    for part in (False, True):
        random.Random(seed).shuffle(parts[part])
    pieces = [piece for part in (False, True) for piece in parts[part]]
    return Calibration(
        tuple(piece.ids for piece in pieces),
        per_batch,
        "Python standard library sources" if source == MACHINE else Path(source).name,
        held_out,
        counted=tuple(objective.counted(piece.answers) for piece in pieces),
        objective=objective,
        reading=reading.in_words(short, len(pieces)),
    )


def _check_sizes(context: int, batches: int, per_batch: int, held_out: int) -> None:
    """Raise SearchError for sizes of which no calibration can be made."""
    if context < 2 or batches < 1 or per_batch < 1 or held_out < 0:
        raise SearchError(
            "calibration needs a context of at least 2 tokens and at least one sequence in at "
            f"least one batch; got context {context}, {batches} batches of {per_batch}"
        )


def _default_score(source: str) -> Score:
    first = islice(read_documents(source), FIRST_LOOK)
    return Score.ANSWERS if any(document.has_answers for document in first) else Score.RECALL


def _choose(reading: _Reading, quota: dict[bool, int]) -> dict[bool, list[Marked]]:
    """Choose at most as many sequences of each part as are wanted; read no further."""
    parts: dict[bool, list[Marked]] = {part: [] for part in quota}
    shorter: dict[bool, list[tuple[int, int, Marked]]] = {part: [] for part in quota}
    for order, (part, piece) in enumerate(reading.pieces()):
        if 2 * len(piece) < reading.context:
            heapq.heappush(shorter[part], (len(piece), -order, piece))
            if len(shorter[part]) > quota[part]:
                heapq.heappop(shorter[part])  # the shortest, of equal ones the last
        elif len(parts[part]) < quota[part]:
            parts[part].append(piece)
        if all(len(parts[part]) == quota[part] for part in parts):
            reading.is_enough = True
            return parts
    for part, pieces in parts.items():
        longest = sorted(shorter[part], reverse=True)
        pieces += [piece for _, _, piece in longest[: quota[part] - len(pieces)]]
    return parts


@dataclass
class _Reading:
    """The sequences that a source gives, and an account of what it does not.

    Attributes:
        objective: a sequence has at least one prediction that counts by it.
        unmarked: left out because answers count and they have none.
        blind: left out because nothing that counts sees more than ``topk`` tokens.
        too_long: left out because a cut would part an answer from its evidence.
        is_enough: reading stopped because these gave enough.
    """

    source: str
    marker: Marker
    context: int
    objective: Objective
    documents: int = 0
    unmarked: int = 0
    blind: int = 0
    too_long: int = 0
    shortened: int = 0
    windowed: int = 0
    is_enough: bool = False

    def pieces(self) -> Iterator[tuple[bool, Marked]]:
        """Yield every sequence in the documents' order, and whether its document is held out."""
        for document in read_documents(self.source):
            self.documents += 1
            if self.objective.score is Score.ANSWERS and not document.has_answers:
                self.unmarked += 1
                continue
            marked = self.marker.marked(document)
            if len(marked) <= self.context:
                pieces = [marked]
            elif not document.has_answers:
                self.windowed += 1
                starts = range(0, len(marked), self.context)
                pieces = [marked.piece(start, self.context) for start in starts]
            else:
                pieces = self._shortened(document)
            if self.objective.score is Score.RECALL:
                pieces = [with_passages(piece) for piece in pieces]
            counting = [p for p in pieces if self.objective.counted(p.answers).any()]
            self.blind += bool(pieces) and not counting
            part = is_held_out(marked.ids)
            yield from ((part, piece) for piece in counting)

    def _shortened(self, document: Document) -> list[Marked]:
        """Cut a conversation after a response; return nothing of what cannot be cut."""
        if isinstance(document, Conversation):
            cut = self.marker.cut(document, self.context)
            if cut is not None:
                self.shortened += 1
                return [cut]
        self.too_long += 1
        return []

    def in_words(self, short: int, total: int) -> str:
        """Give the account, with how many chosen sequences have under half of the context."""
        topk, context = self.objective.topk, self.context
        facts = {
            f"{self.unmarked} left out without answers": self.unmarked,
            f"{self.blind} left out because nothing that counts sees more than {topk} tokens": (
                self.blind
            ),
            f"{self.too_long} left out with answers and more than {context} tokens": self.too_long,
            f"{self.shortened} conversations cut after a response": self.shortened,
            f"{self.windowed} texts cut into windows": self.windowed,
            f"{short} of {total} sequences under half of {context} tokens": short,
        }
        read = f"{self.documents} documents read"
        if self.is_enough:
            read += " (reading stopped there: these give enough)"
        sentences = [read, *(fact for fact, n in facts.items() if n), what_is_left_out(self.source)]
        return "; ".join(filter(None, sentences))

    def too_little(self, quota: dict[bool, int], taken: dict[bool, int]) -> SearchError:
        """Say why there are not enough sequences."""
        if self.objective.score is Score.ANSWERS and self.unmarked == self.documents:
            return SearchError(
                f"no document of {self.source} marks an answer. Give chat messages, a prompt with "
                "its response, or text with answers; or count other tokens (--score late)."
            )
        length = "longer" if self.too_long else "shorter"
        advice = f"Give more text, or ask for fewer batches or a {length} context."
        if self.windowed and any(quota[part] and not taken[part] for part in taken):
            advice = (
                "All windows of one text are on one side, so that nothing is searched on that "
                "checks the search. Give several files or documents."
            )
            if taken[False] == quota[False]:
                advice += " A search can also do without the check: --held-out 0."
        return SearchError(
            f"{self.source} gives too little: of {quota[False]} sequences of up to {self.context} "
            f"tokens to search on there are {taken[False]}, and of {quota[True]} to hold out "
            f"{taken[True]} ({self.in_words(0, 0)}). {advice}"
        )
