"""One search from start to finish: descent, patterns at the marks, refinement, comparison.

Refinement betters greedy at the same retention: it exchanges an F layer for an S layer while that
helps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from sglang_indexcache.lab.search.difference import Difference
from sglang_indexcache.lab.search.evaluators import Floats, standard_error
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods.fast import least_subset
from sglang_indexcache.lab.search.options import Options
from sglang_indexcache.lab.search.race import race
from sglang_indexcache.lab.search.rules import Constraints, Mark, Targets, baselines
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class HeldOut:
    """A found pattern on batches that no pattern was chosen by: losses in nats per token.

    Attributes:
        start: of the start pattern.
        added: what sharing costs, paired over batches.
        uniform: of uniform interleaving with as many F layers, or None.
    """

    start: float
    loss: float
    added: Difference
    uniform: float | None


@dataclass(frozen=True)
class Found:
    """The pattern of one mark; losses are over all calibration batches, in nats per token.

    They are NaN where no loss decided.

    Attributes:
        standard_error: of what ``loss`` adds to the start's, paired over batches.
        searched: the descent's pattern, before refinement.
        is_refined: refinement measured something for it.
        is_final: refinement is done.
        is_compared: with the baselines and on held-out batches, as far as the search measures.
        baselines: blind schedules with as many F layers, and their losses.
        held_out: the final pattern on the held-out batches; None before, or with fewer than two.
    """

    mark: Mark
    pattern: Pattern
    loss: float
    standard_error: float
    searched: Pattern
    searched_loss: float
    exchanges: int = 0
    is_refined: bool = False
    is_final: bool = False
    is_compared: bool = False
    baselines: Mapping[str, tuple[Pattern, float]] = field(default_factory=dict)
    held_out: HeldOut | None = None


def check_tokens(
    targets: Targets, searched: Sequence[int], held_out: Sequence[int], *, by_loss: bool
) -> int:
    """Return the most tokens that comparing the found patterns takes, beyond the budget.

    ``searched`` are tokens of each batch that is searched on, ``held_out`` of each that is not.
    """
    blind = sum(len(baselines(mark.full_layers, targets.constraints)) for mark in targets.marks)
    return by_loss * blind * sum(searched) + (1 + 2 * len(targets.marks)) * sum(held_out)


class Search:
    """One search. Deterministic: over the same ledger contents it gives the same answer.

    Attributes:
        start_loss: of the start pattern over all batches; known after the first event, NaN if no
            loss decides.
        path: the start and every committed flip.
        found: the marks passed so far by their F layers, most first.
        search_tokens: that were asked for until every pattern was final.

    Raises:
        SearchError: a budget that the search cannot keep; see :meth:`Options.budget`.
    """

    def __init__(self, ledger: Ledger, targets: Targets, options: Options) -> None:
        self.ledger, self.constraints = ledger, targets.constraints
        self.targets, self.options = targets, options
        self.budget = options.budget(targets, ledger.tokens_of_batches)
        self.start_loss = float("nan")
        self.path: list[Step] = []
        self.found: dict[int, Found] = {}
        self.search_tokens = 0
        self.is_complete = False

    @property
    def expected_tokens(self) -> int:
        """Tokens of everything at most."""
        ledger = self.ledger
        held_out = [ledger.batch_tokens[batch] for batch in ledger.held_out_batches]
        by_loss = self.options.method.by_loss
        checks = check_tokens(self.targets, ledger.tokens_of_batches, held_out, by_loss=by_loss)
        return self.budget.total + checks

    @property
    def is_measured(self) -> bool:
        """Whether the found patterns' losses are measured: to decide, or on held-out batches."""
        return self.options.method.by_loss or len(self.ledger.held_out_batches) > 1

    def in_words(self) -> str:
        """Describe what ran, for provenance."""
        is_refined = any(result.is_refined for result in self.found.values())
        return self.options.in_words(is_refined=is_refined)

    def run(self) -> Iterator[Step | Found]:
        """Yield each step and each mark as it is passed, then each mark in its final form."""
        begun, method = self.ledger.spent, self.options.method
        for event in method.descend(self.ledger, self.targets, self.budget.method):
            if isinstance(event, Step):
                self.path.append(event)
                self.start_loss = self.start_loss if self.path[1:] else event.loss
                yield event
                mark = self.targets.mark_at(len(event.pattern.full_layers))
            else:
                mark = event.mark
            if mark is not None:
                yield self._pass(mark, event.pattern)
        end = begun + self.budget.total  # what the method left over is refinement's, too
        for place, passed in enumerate(list(self.found.values())):
            allowance = (end - self.ledger.spent) // (len(self.found) - place)
            yield self._keep(self._refined(passed, allowance))
        self.search_tokens = self.ledger.spent - begun
        if self.is_measured:
            for passed in list(self.found.values()):
                yield self._keep(self._compared(passed))
        self.is_complete = True

    def _pass(self, mark: Mark, pattern: Pattern) -> Found:
        if not self.options.method.by_loss:
            nan = float("nan")
            return self._keep(Found(mark, pattern, nan, nan, pattern, nan))
        losses = self.ledger.losses(pattern)
        mean = float(losses.mean())
        previous = self.found.get(mark.full_layers)
        if previous is not None and previous.loss <= mean:
            return previous
        return self._keep(Found(mark, pattern, mean, self._error(losses), pattern, mean))

    def _error(self, losses: Floats) -> float:
        return standard_error(losses - self.ledger.losses(self.constraints.start))

    def _keep(self, result: Found) -> Found:
        results = self.found | {result.mark.full_layers: result}
        self.found = dict(sorted(results.items(), reverse=True))
        return result

    def _refined(self, result: Found, budget: int) -> Found:
        if not self.options.refine:
            return replace(result, is_final=True)
        before = self.ledger.spent
        pattern, exchanges = refine(self.ledger, self.constraints, result.pattern, budget)
        losses = self.ledger.losses(pattern)
        return replace(
            result,
            pattern=pattern,
            loss=float(losses.mean()),
            standard_error=self._error(losses),
            exchanges=exchanges,
            is_refined=exchanges > 0 or self.ledger.spent > before,
            is_final=True,
        )

    def _compared(self, result: Found) -> Found:
        schedules = baselines(result.mark.full_layers, self.constraints)
        by_loss = self.options.method.by_loss
        measured = {n: (p, self.ledger.mean(p)) for n, p in schedules.items() if by_loss}
        uniform = schedules.get("uniform")
        held_out = self._held_out(result.pattern, uniform)
        return replace(result, is_compared=True, baselines=measured, held_out=held_out)

    def _held_out(self, pattern: Pattern, uniform: Pattern | None) -> HeldOut | None:
        """Measure held-out loss: the lowest of many losses flatters its pattern, this does not."""
        batches = self.ledger.held_out_batches
        if len(batches) < 2:
            return None
        start, losses = (self.ledger.losses(p, batches) for p in (self.constraints.start, pattern))
        uniform_loss = float(self.ledger.losses(uniform, batches).mean()) if uniform else None
        added = Difference.of(losses - start)
        return HeldOut(float(start.mean()), float(losses.mean()), added, uniform_loss)


SHORTLIST = 16
"""Exchanges that a round looks at beside the shifts by one layer."""


def refine(
    ledger: Ledger, constraints: Constraints, pattern: Pattern, budget: int
) -> tuple[Pattern, int]:
    """Race promising exchanges against ``pattern``, within the budget ("screened refinement").

    A round measures on a few batches what each F layer is worth and what each S layer would gain
    as F; the exchanges with the best sum, and every shift of an F layer by one, race against the
    pattern as it is. An exchange is made only if the mean over all batches is lower. A round that
    found nothing is repeated on twice as many batches; one that may not fit is not begun.

    Returns:
        A pattern with as many F layers and never a higher loss, and the exchanges made.
    """
    ledger.losses(pattern)  # what it starts from is not part of the budget
    exchanges, end = 0, ledger.spent + budget
    first = least_subset(len(ledger.all_batches))
    while winner := _round(ledger, pattern, constraints, first, end):
        if ledger.mean(winner) < ledger.mean(pattern):
            pattern, exchanges = winner, exchanges + 1
        elif first < len(ledger.all_batches):
            first = min(2 * first, len(ledger.all_batches))
        else:
            break
    return pattern, exchanges


def _round(
    ledger: Ledger, pattern: Pattern, constraints: Constraints, first: int, end: int
) -> Pattern | None:
    """Run a round that looks at ``first`` batches; None if it may spend too much."""
    subset = ledger.all_batches[:first]
    movable = [*constraints.candidates(pattern), *constraints.restorable(pattern)]
    screening = [constraints.flipped(pattern, layer) for layer in movable]
    cost = ledger.cost(screening, subset)
    if not screening or ledger.spent + cost + ledger.full_evaluation > end:
        return None
    contenders = [pattern, *_promising(ledger, pattern, constraints, subset)]
    cost = ledger.cost(contenders, subset) + ledger.full_evaluation
    if ledger.spent + cost > end:
        return None
    return race(ledger, contenders, first, end - ledger.spent - cost).winner


def _promising(
    ledger: Ledger, pattern: Pattern, constraints: Constraints, subset: Sequence[int]
) -> list[Pattern]:
    """Return the exchanges with the lowest predicted loss, and every shift by one layer."""
    outs, intos = constraints.candidates(pattern), constraints.restorable(pattern)
    if not outs or not intos:
        return []
    without, restored = (
        ledger.many([constraints.flipped(pattern, layer) for layer in flips], subset).mean(axis=1)
        for flips in (outs, intos)
    )
    predicted = without[:, None] + restored[None, :]
    best = np.argsort(predicted, axis=None, kind="stable")[:SHORTLIST]
    pairs = [(outs[i // len(intos)], intos[i % len(intos)]) for i in best]
    pairs += [(out, into) for out in outs for into in (out - 1, out + 1) if into in intos]
    return [constraints.exchanged(pattern, out, into) for out, into in dict.fromkeys(pairs)]
