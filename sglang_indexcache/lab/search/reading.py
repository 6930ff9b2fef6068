"""Sequences from a source, and an account of the data left out."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.data.conversations import Conversation
from sglang_indexcache.lab.data.documents import MACHINE, Document, what_is_left_out
from sglang_indexcache.lab.data.drawn import drawn_documents
from sglang_indexcache.lab.data.marking import Marked, Marker, fingerprint
from sglang_indexcache.lab.data.rows import ROWS, form_of
from sglang_indexcache.lab.search.calibration import Calibration, Objective, Score
from sglang_indexcache.lab.search.recall import TEXT, Kinds, hidden_facts, with_recall
from sglang_indexcache.library.lengths import counted

FIRST_LOOK = 100
"""Number of documents that are checked for marked answers."""
FEW_FILES = 2
"""Largest number of files for which a warning is given if all sequences come from them."""


def prepare(
    source: str,
    marker: Marker,
    *,
    context: int,
    batches: int,
    held_out: int = 0,
    least_held_out: int | None = None,
    seed: int = 0,
    topk: int = 0,
    score: Score | None = None,
) -> Calibration:
    """Draw documents from everywhere, tokenise, cut and split.

    A sequence is a whole document of at most ``context`` tokens. Longer text is cut into windows, a
    longer conversation after the last response that fits; a longer document with answers is left
    out, because an answer would lose its evidence. Documents come in the order of
    :func:`~sglang_indexcache.lab.data.drawn.drawn_documents`, one window of each, and further
    windows of a text only where its source has too few documents. A digest of its tokens decides
    whether a document is held out (:func:`~sglang_indexcache.lab.data.marking.is_held_out`), so all
    windows of a text are on one side, and no seed mixes the two. Each part takes its first
    sequences of at least half of ``context``, and the longest of the others only if the source ends
    before there are enough. :attr:`Score.RECALL` mixes recall of its own text into each sequence.

    Args:
        source: as for :func:`~sglang_indexcache.lab.data.documents.read_documents`.
        context: largest number of tokens in a sequence, at least 2.
        held_out: largest number of held-out sequences.
        least_held_out: smallest number of them; ``held_out`` by default.
        topk: number of tokens that a query selects.
        score: the predictions that count; None means the answers if one of the first
            :data:`FIRST_LOOK` documents has any, else the later half, with recall.

    Raises:
        SearchError: there is nothing to read, too little, or nothing that counts; or what was to
            be held out is a single text.
    """
    if context < 2 or batches < 1 or held_out < 0:
        raise SearchError(
            "calibration needs a context of at least 2 tokens, at least one batch, and no negative "
            f"number held out; got context {context}, {batches} batches and {held_out} held out"
        )
    objective = Objective(score or _default_score(source, seed), topk)
    quota = {False: batches, True: held_out}
    reading = Reading(source, marker, context, objective, seed)
    parts = choose(reading, quota)
    if least_held_out is not None:
        held_out = quota[True] = min(held_out, max(least_held_out, len(parts[True])))
    if any(len(parts[part]) < quota[part] for part in parts):
        raise reading.too_little(quota, {part: len(parts[part]) for part in parts})
    held_out_warning = reading.warning(parts[True]) if parts[True] else ""
    if len({piece.document for piece in parts[True]}) == 1:
        one = "the data holds out one text, of which all windows are one observation"
        if least_held_out == 0:
            held_out, parts[True] = 0, []
            held_out_warning = f"{one}: no pattern is measured on it. Give more files or documents."
        elif held_out > 1:
            raise SearchError(f"{one}. Give more files or documents, or search with --held-out 0.")
    for part in (False, True):
        random.Random(seed).shuffle(parts[part])
    pieces = [*chain.from_iterable(parts[part] for part in (False, True))]
    return Calibration(
        tuple(piece.ids for piece in pieces),
        "Python standard library sources" if source == MACHINE else Path(source).name,
        held_out,
        kinds=tuple(piece.counted for piece in pieces),
        documents=tuple(piece.document for piece in pieces),
        objective=objective,
        reading=reading.in_words(parts),
        warning=reading.warning(parts[False]),
        held_out_reading=reading.in_words({True: parts[True]}),
        held_out_warning=held_out_warning,
    )


def _default_score(source: str, seed: int) -> Score:
    first = islice(drawn_documents(source, seed), FIRST_LOOK)
    has_answers = any(document.has_answers for _, document in first)
    return Score.ANSWERS if has_answers else Score.RECALL


@dataclass(frozen=True, eq=False)
class Piece:
    """A sequence from a document.

    Attributes:
        ids: ``[length]`` token ids.
        counted: ``[length - 1]``, the kind under which each prediction counts.
        document: number of the text from which it is cut.
    """

    ids: tuple[int, ...]
    counted: Kinds
    document: int
    file: Path

    def __len__(self) -> int:
        return len(self.ids)


Parts = dict[bool, list[Piece]]
"""Sequences by whether they are held out."""


def choose(reading: Reading, quota: Mapping[bool, int]) -> Parts:
    """Choose at most ``quota`` sequences for each part, and stop reading when there are enough."""
    parts: Parts = {part: [] for part in quota}
    shorter: dict[bool, list[tuple[int, int, Piece]]] = {part: [] for part in quota}
    for order, (part, piece) in enumerate(reading.pieces()):
        if 2 * len(piece) < reading.context:
            heapq.heappush(shorter[part], (len(piece), -order, piece))
            if len(shorter[part]) > quota[part]:
                heapq.heappop(shorter[part])  # drop the shortest, and among equals the last
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
class Reading:
    """Reading of a source's sequences, with an account of the data left out.

    Attributes:
        objective: rule by which every sequence has at least one prediction that counts.
        texts: number of each document read so far, by its place; they are from ``files``.
        read: fingerprints of their tokens.
        copies: number left out because the same tokens were read before.
        unmarked: number left out because answers count and they have none.
        blind: number left out because nothing that counts sees more than ``topk`` tokens.
        too_long: number left out because a cut would separate an answer from its evidence.
        is_enough: whether reading stopped because there were enough.
    """

    source: str
    marker: Marker
    context: int
    objective: Objective
    seed: int = 0
    texts: dict[str, int] = field(default_factory=dict)
    files: set[Path] = field(default_factory=set)
    read: set[bytes] = field(default_factory=set)
    copies: int = 0
    unmarked: int = 0
    blind: int = 0
    too_long: int = 0
    shortened: int = 0
    windowed: int = 0
    is_enough: bool = False

    def pieces(self) -> Iterator[tuple[bool, Piece]]:
        """Yield a sequence from each document, then the further windows of texts in turn.

        Each comes with whether its document is held out.
        """
        further: deque[tuple[bool, Iterator[Piece]]] = deque()
        for file, document in drawn_documents(self.source, self.seed):
            self.files.add(file)
            number = self.texts.setdefault(document.where, len(self.texts) + 1)
            part, cuts = self._of(document)
            pieces = self._counting(cuts, file, number)
            if (piece := next(pieces, None)) is not None:
                yield part, piece
                further.append((part, pieces))
            else:
                self.blind += bool(cuts)
        while further:
            part, pieces = further.popleft()
            if (piece := next(pieces, None)) is not None:
                yield part, piece
                further.append((part, pieces))

    def _of(self, document: Document) -> tuple[bool, list[Marked]]:
        """Return whether a document is held out, and its cuts in a random order."""
        if self.objective.score is Score.ANSWERS and not document.has_answers:
            self.unmarked += 1
            return False, []
        marked = self.marker.marked(document)
        if (known := fingerprint(marked.ids)) in self.read:
            self.copies += 1
            return False, []
        self.read.add(known)
        if len(marked) <= self.context:
            cuts = [marked]
        elif not document.has_answers:
            self.windowed += 1
            starts = range(0, len(marked), self.context)
            cuts = [marked.piece(start, self.context) for start in starts]
        else:
            cuts = self._shortened(document)
        # Full windows come first.
        order = random.Random(f"{self.seed} {len(self.texts)}")
        cuts.sort(key=lambda cut: (len(cut) == self.context, order.random()), reverse=True)
        return self.marker.is_held_out(document, marked), cuts

    def _counting(self, cuts: Sequence[Marked], file: Path, number: int) -> Iterator[Piece]:
        """Yield the sequences of a document in which anything counts, each made when it is wanted.

        A book has hundreds of windows, of which one is taken.
        """
        for cut in cuts:
            ids, kinds = cut.ids, cut.answers.astype(np.uint8) * TEXT
            if self.objective.score is Score.RECALL:
                # Independent of the seed, so that a text asks the same in every search.
                ids, kinds = with_recall(ids, hidden_facts(str(ids), self.marker.encode))
            if (counted := self.objective.counted(kinds)).any():
                yield Piece(ids, counted, number, file)

    def _shortened(self, document: Document) -> list[Marked]:
        """Cut a conversation after a response; return [] for a document that cannot be cut."""
        if isinstance(document, Conversation):
            cut = self.marker.cut(document, self.context)
            if cut is not None:
                self.shortened += 1
                return [cut]
        self.too_long += 1
        return []

    def in_words(self, parts: Parts) -> str:
        """Return the account as text: the documents drawn, their sources, and those left out."""
        topk, context = self.objective.topk, self.context
        pieces = [piece for part in parts.values() for piece in part]
        short = sum(2 * len(piece) < context for piece in pieces)
        facts = {
            f"{self.unmarked} left out without answers": self.unmarked,
            f"{self.copies} left out as copies of others": self.copies,
            f"{self.blind} left out because nothing that counts sees more than {topk} tokens": (
                self.blind
            ),
            f"{self.too_long} left out with answers and more than {context} tokens": self.too_long,
            f"{counted(self.shortened, 'conversation')} cut after a response": self.shortened,
            f"{counted(self.windowed, 'text')} cut into windows": self.windowed,
            f"{short} of {len(pieces)} sequences under half of {context} tokens": short,
        }
        folders = {file.parent for file in self.files}
        read = (
            f"{counted(len(self.texts), 'document')} read from {counted(len(self.files), 'file')} "
            f"in {counted(len(folders), 'folder')}, drawn by seed {self.seed}"
        )
        if self.is_enough:
            read += " (reading stopped there: these give enough)"
        used = []
        if parts.get(False):
            used = [f"searched on {_spread(parts[False])}"]
        elif parts.get(True):
            used = [f"compared on {_spread(parts[True])}"]
        account = [fact for fact, n in facts.items() if n]
        sentences = [read, *used, *account, what_is_left_out(self.source)]
        return "; ".join(filter(None, sentences))

    def warning(self, pieces: Sequence[Piece]) -> str:
        """Return a warning if all these sequences come from few files or texts, else ""."""
        files, texts = {piece.file for piece in pieces}, {piece.document for piece in pieces}
        # Rows of a file are separate documents, but a text file is a single source.
        is_of_few = len(files) <= FEW_FILES and not any(form_of(file) in ROWS for file in files)
        if not is_of_few and 2 * len(texts) > len(pieces):
            return ""
        return (
            f"all {len(pieces)} sequences come from {_spread(pieces)}: what is found holds for "
            "text like that, and may break others. Give more files, of all the kinds that you "
            "serve."
        )

    def too_little(self, quota: Mapping[bool, int], taken: Mapping[bool, int]) -> SearchError:
        """Return text on why there are not enough sequences."""
        if self.objective.score is Score.ANSWERS and self.unmarked >= len(self.texts):
            return SearchError(
                f"no document of {self.source} marks an answer. Give chat messages, a prompt with "
                "its response, or text with answers; or count other tokens (--score late)."
            )
        length = "longer" if self.too_long else "shorter"
        advice = f"Give more text, or ask for fewer batches or a {length} context."
        if self.blind and not any(taken.values()):
            advice = "Give longer documents, and a longer context (--context)."
        elif self.windowed and any(quota[part] and not taken[part] for part in taken):
            advice = (
                "All windows of one text are on one side, so that nothing is searched on that "
                "checks the search. Give several files or documents."
            )
            if taken[False] == quota[False]:
                advice += " A search can also do without the check: --held-out 0."
        return SearchError(
            f"{self.source} gives too little: of {quota[False]} sequences of up to {self.context} "
            f"tokens to search on there are {taken[False]}, and of {quota[True]} to hold out "
            f"{taken[True]} ({self.in_words({})}). {advice}"
        )


def _spread(pieces: Sequence[Piece]) -> str:
    """Return text on the number of texts and files of sequences, and on the file with most."""
    files = Counter(piece.file for piece in pieces)
    texts = len({piece.document for piece in pieces})
    [(most, count)] = files.most_common(1)
    spread = f"{counted(texts, 'text')} of {counted(len(files), 'file')}"
    is_uneven = len(files) > 1 and 2 * count > len(pieces)
    return f"{spread}, more than half from {most.name}" if is_uneven else spread
