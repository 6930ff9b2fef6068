"""Ledger between an algorithm and its evaluator, which caches, counts and journals measurements.

The journal's first line says what was measured (checkpoint, data, evaluator); each other line is
one finished evaluation. It has nothing about the algorithm, which is deterministic: running it
again over a journal gives the same answer as an uninterrupted run, and every method can use every
other method's evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.lab.runs.journal import Journal
from sglang_indexcache.lab.search.difference import standard_error
from sglang_indexcache.lab.search.evaluators import (
    PAIRS,
    Evaluator,
    Floats,
    in_threads,
    pair_forwards,
)
from sglang_indexcache.lab.search.judged import Judged
from sglang_indexcache.pattern import Pattern

CALL_TOKENS = 1 << 20
"""Largest number of tokens in a call with several batches: 13 s at 82,000 tokens a second."""

Cell = tuple[Pattern, int]
"""A pattern on one batch, the smallest unit of measurement."""


def open_journal(path: Path, identity: Mapping[str, Any]) -> Journal:
    """Open a search's journal, locked while it is open.

    Each entry has the ``pattern``, its ``batches``, and their ``losses`` in nats per token (JSON
    keeps every bit of a float64).

    Raises:
        SearchError: see :class:`~sglang_indexcache.lab.runs.journal.Journal`.
    """
    return Journal(path, identity, "search", SearchError)


def _losses_in(entry: Mapping[str, Any]) -> dict[Cell, float]:
    if any(kind in entry for kind in (*PAIRS, "judged")):
        return {}
    pattern = Pattern(entry["pattern"])
    pairs = zip(entry["batches"], entry["losses"], strict=True)
    return {(pattern, batch): loss for batch, loss in pairs}


def _judged_in(entry: Mapping[str, Any]) -> dict[Cell, Judged]:
    if "judged" not in entry:
        return {}
    return {(Pattern(entry["pattern"]), int(entry["batch"])): Judged(**entry["judged"])}


def _pairs_in(entry: Mapping[str, Any]) -> dict[tuple[str, int], Floats]:
    """Return a batch's matrices from a journal entry, which keeps the part below the diagonal."""
    pairs = {}
    for kind in (kind for kind in PAIRS if kind in entry):
        matrices = np.eye(len(entry[kind][0]))[None].repeat(len(entry[kind]), axis=0)
        for matrix, rows in zip(matrices, entry[kind], strict=True):
            for layer, row in enumerate(rows):
                matrix[layer, :layer] = row
        pairs[kind, int(entry["batch"])] = matrices
    return pairs


@dataclass(frozen=True)
class Step:
    """One committed flip of Algorithm 1 (or the start, before any flip).

    Attributes:
        layer: the layer that became S; None for the start.
        loss: mean over all batches, in nats per token.
        standard_error: standard error of the loss added to the start's; NaN for one batch.
        candidates: number of patterns compared.
        spent: number of tokens asked for since the search began.
    """

    pattern: Pattern
    layer: int | None
    loss: float
    standard_error: float
    candidates: int
    spent: int


class Ledger:
    """Ledger of all losses that a search has asked for.

    An algorithm's requests are counted once for each pattern and batch (``spent``), whether they
    were measured now or read from the journal, because an algorithm that decides by its budget must
    decide the same after a restart.

    Args:
        journal: None keeps finished evaluations in memory only.
        held_out: number of batches at the evaluator's end that are not for searching.
        call_tokens: largest number of tokens in one call of the evaluator, which an interruption
            can lose. A call has at least one batch, the unit of a paired comparison.
        documents: number of the text from which each batch is cut; different for each by default.

    Attributes:
        all_batches: batches that are searched on; ``held_out_batches`` check the result.
        spent: number of tokens in all distinct (pattern, batch) pairs that were asked for.
        on_measured: called with the tokens of each evaluation, from any thread, to show progress.

    Raises:
        SearchError: an entry in the journal lacks something.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        journal: Journal | None = None,
        held_out: int = 0,
        call_tokens: int = CALL_TOKENS,
        documents: Sequence[int] = (),
    ) -> None:
        self.evaluator = evaluator
        self.batch_tokens = evaluator.batch_tokens
        batches = tuple(range(len(evaluator.batch_tokens)))
        self.all_batches = batches[: len(batches) - held_out]
        self.held_out_batches = batches[len(batches) - held_out :]
        self.spent = 0
        self.on_measured: Callable[[int], None] = lambda _: None
        self._journal, self._call_tokens = journal, call_tokens
        self._documents = documents or batches
        self._losses: dict[Cell, float] = {}
        self._requested: set[Cell] = set()
        self._pairs: dict[tuple[str, int], Floats] = {}
        self._counted_pairs: set[tuple[str, int]] = set()
        self._judged: dict[Cell, Judged] = {}
        for losses in journal.parsed(_losses_in) if journal else ():
            self._losses |= losses
        for matrices in journal.parsed(_pairs_in) if journal else ():
            self._pairs |= matrices
        for judged in journal.parsed(_judged_in) if journal else ():
            self._judged |= judged

    @property
    def known_tokens(self) -> int:
        """Number of tokens in everything measured, by this process or an earlier one."""
        layers = self.evaluator.num_layers
        cells = {*self._losses, *self._judged}
        return sum(self.batch_tokens[batch] for _, batch in cells) + sum(
            pair_forwards(kind, layers) * self.batch_tokens[batch] for kind, batch in self._pairs
        )

    def documents_of(self, batches: Sequence[int]) -> list[int]:
        """Return the document number of each batch."""
        return [self._documents[batch] for batch in batches]

    @property
    def tokens_of_batches(self) -> tuple[int, ...]:
        """Number of tokens in each batch that is searched on."""
        return self.batch_tokens[: len(self.all_batches)]

    @property
    def full_evaluation(self) -> int:
        """Number of tokens for one pattern on every batch that is searched on."""
        return sum(self.tokens_of_batches)

    def losses(self, pattern: Pattern, batches: Sequence[int] | None = None) -> Floats:
        """Return ``[batches]`` float64 losses of one pattern, on all batches by default."""
        return np.asarray(self.many([pattern], batches)[0])

    def mean(self, pattern: Pattern) -> float:
        """Return the mean loss over all batches, nats per token."""
        return float(self.losses(pattern).mean())

    def many(self, patterns: Sequence[Pattern], batches: Sequence[int] | None = None) -> Floats:
        """Return ``[patterns, batches]`` float64 losses, with as many calls at once as possible."""
        columns = self.all_batches if batches is None else tuple(batches)
        self.spent += self.cost(patterns, columns)
        distinct = dict.fromkeys(patterns)
        if self.evaluator.by_batch:
            cells = [(pattern, batch) for batch in columns for pattern in distinct]
        else:
            cells = [(pattern, batch) for pattern in distinct for batch in columns]
        self._requested.update(cells)
        calls = self._calls([cell for cell in cells if cell not in self._losses])
        in_threads(self._measure, calls, self.evaluator.in_flight)
        return np.array([[self._losses[p, b] for b in columns] for p in patterns])

    def candidates(self, pattern: Pattern, candidates: Sequence[Pattern]) -> Floats:
        """Return the nats that each candidate adds to ``pattern``, ``[candidates, batches]``.

        Raises:
            SearchError: there are several candidates, and none changes any loss, so that the choice
                among them would be arbitrary.
        """
        added: Floats = self.many(candidates) - self.losses(pattern)
        if len(candidates) > 1 and not added.any():
            raise SearchError(
                f"the data cannot tell patterns apart: {len(candidates)} candidates, each with one "
                f"more layer shared than {pattern}, all lose exactly as much. Take a longer "
                "context (--context), or other data."
            )
        return added

    def step(self, start: Pattern, pattern: Pattern, layer: int | None, candidates: int) -> Step:
        """Return a committed pattern as a step, from the losses of the pattern and of the start."""
        error = standard_error(self.losses(pattern) - self.losses(start))
        return Step(pattern, layer, self.mean(pattern), error, candidates, self.spent)

    def judged(self, pattern: Pattern, batches: Sequence[int] | None = None) -> list[Judged]:
        """Return each batch's comparison of a pattern with all F, on all batches by default."""
        return self.judged_each([pattern], batches)[0]

    @property
    def asked(self) -> dict[Cell, Judged]:
        """Comparisons with all F that were asked for, in an order that no restart changes."""
        cells = sorted(self._requested & self._judged.keys(), key=lambda c: (c[1], str(c[0])))
        return {cell: self._judged[cell] for cell in cells}

    def judged_each(
        self, patterns: Sequence[Pattern], batches: Sequence[int] | None = None
    ) -> list[list[Judged]]:
        """Return :meth:`judged` for several patterns, as many batches at a time as possible."""
        columns = self.all_batches if batches is None else tuple(batches)
        self.spent += self.cost(patterns, columns)
        cells = {(pattern, batch) for batch in columns for pattern in patterns}
        self._requested.update(cells)
        missing = [cell for cell in cells if cell not in self._judged]
        missing.sort(key=lambda cell: (cell[1], str(cell[0])))  # evaluators share alike beginnings
        in_threads(self._judge, missing, self.evaluator.in_flight)
        return [[self._judged[p, batch] for batch in columns] for p in patterns]

    def _judge(self, cell: Cell) -> None:
        pattern, batch = cell
        [judged] = self.evaluator.judge(pattern, [batch])
        self._check(pattern, batch, judged.loss + sum(judged.kl.values()))
        entry = {"pattern": str(pattern), "batch": batch, "judged": judged.numbers()}
        if self._journal is not None:
            self._journal.write(entry)
        self._judged |= _judged_in(entry)
        self.on_measured(self.batch_tokens[batch])

    def pairs(self, kind: str, batch: int) -> Floats:
        """Return the matrices of layer pairs on one batch, ``[M, N, N]``; see :data:`PAIRS`.

        They have 1 on their diagonals and 0 above. They count as the number of forwards that they
        take.

        Args:
            kind: one of :data:`PAIRS`, a method of the evaluator.
        """
        tokens = pair_forwards(kind, self.evaluator.num_layers) * self.batch_tokens[batch]
        if (kind, batch) not in self._counted_pairs:
            self._counted_pairs.add((kind, batch))
            self.spent += tokens
        if (kind, batch) not in self._pairs:
            rated = [
                [row[:layer].tolist() for layer, row in enumerate(matrix)]
                for matrix in getattr(self.evaluator, kind)(batch)
            ]
            entry = {"batch": batch, kind: rated}
            if self._journal is not None:
                self._journal.write(entry)
            self._pairs |= _pairs_in(entry)
            self.on_measured(tokens)
        return self._pairs[kind, batch]

    def cost(self, patterns: Sequence[Pattern], batches: Sequence[int]) -> int:
        """Return the tokens by which this request would raise ``spent``."""
        return sum(
            self.batch_tokens[batch]
            for pattern in dict.fromkeys(patterns)
            for batch in batches
            if (pattern, batch) not in self._requested
        )

    def _calls(self, cells: Sequence[Cell]) -> Iterator[tuple[Pattern, tuple[int, ...]]]:
        """Split requests into calls within the limit, with at least one call for every engine.

        An evaluator that works batch by batch gets one batch per call, so that a kill loses little.
        """
        limit = 1 if self.evaluator.by_batch else -(-len(cells) // self.evaluator.in_flight)
        for pattern, group in groupby(cells, key=lambda cell: cell[0]):
            batches: tuple[int, ...] = ()
            tokens = 0
            for _, batch in group:
                size = self.batch_tokens[batch]
                if batches and (len(batches) == limit or tokens + size > self._call_tokens):
                    yield pattern, batches
                    batches, tokens = (), 0
                batches, tokens = (*batches, batch), tokens + size
            yield pattern, batches

    def _measure(self, call: tuple[Pattern, tuple[int, ...]]) -> None:
        """Measure a pattern on some batches; the result is on disk before it counts."""
        pattern, batches = call
        losses = [float(loss) for loss in self.evaluator.loss(pattern, batches)]
        for batch, loss in zip(batches, losses, strict=True):
            self._check(pattern, batch, loss)
        entry = {"pattern": str(pattern), "batches": batches, "losses": losses}
        if self._journal is not None:
            self._journal.write(entry)
        self._losses |= _losses_in(entry)
        self.on_measured(sum(self.batch_tokens[batch] for batch in batches))

    @staticmethod
    def _check(pattern: Pattern, batch: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise SearchError(
                f"under {pattern} the loss on batch {batch} is {loss}. Look at that batch's "
                "text, or run the model in float32."
            )
