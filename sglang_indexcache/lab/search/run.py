"""One search from start to finish: patterns at the marks, the smallest safe one, and a check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from sglang_indexcache.lab.search.difference import standard_error
from sglang_indexcache.lab.search.judged import Faithfulness
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods import METHODS, Method
from sglang_indexcache.lab.search.methods.greedy import evaluations
from sglang_indexcache.lab.search.methods.proposal import Sureness
from sglang_indexcache.lab.search.rules import Mark, Targets, uniform_within
from sglang_indexcache.pattern import Pattern

PROBES = 2
"""Largest number of retentions between two targets that are tried."""


@dataclass(frozen=True)
class Found:
    """The pattern that was found for one mark.

    Attributes:
        loss: loss over all calibration batches, in nats per token; NaN if no loss decided.
        standard_error: standard error of the loss added to the start's, paired over batches.
        layers: sureness of each F layer; empty if nothing was run.
        judged: comparison with all F on the batches that chose it; None if nothing was run there.
        held_out: comparison with all F on held-out batches; None before it is measured, or with
            fewer than two documents.
        uniform: the same for uniform interleaving with as many F layers, or None.
        is_compared: whether the comparison on held-out batches, if there are any, is done.
    """

    mark: Mark
    pattern: Pattern
    loss: float = float("nan")
    standard_error: float = float("nan")
    layers: Mapping[int, Sureness] = field(default_factory=dict)
    judged: Faithfulness | None = None
    held_out: Faithfulness | None = None
    uniform: Faithfulness | None = None
    is_compared: bool = False

    @property
    def faithfulness(self) -> Faithfulness | None:
        """The best known comparison: on held-out batches, else on the batches that chose it."""
        return self.held_out or self.judged


class Search:
    """One search. It is deterministic: with the same ledger contents it gives the same answer.

    Attributes:
        start_loss: of the start pattern over all batches; NaN if no loss decides.
        path: the start and every committed flip.
        found: the marks passed so far, by their number of F layers, most first; they include a
            probe between two targets that keeps recall.
        search_tokens: number of tokens asked for until every pattern was chosen.
    """

    def __init__(self, ledger: Ledger, targets: Targets, method: Method | None = None) -> None:
        self.ledger, self.constraints, self.targets = ledger, targets.constraints, targets
        self.method = METHODS["greedy"] if method is None else method
        self.start_loss = float("nan")
        self.path: list[Step] = []
        self.found: dict[int, Found] = {}
        self.search_tokens = 0
        self.is_complete = False

    @property
    def exhaustive(self) -> int:
        """Number of tokens that Algorithm 1 would ask for."""
        return evaluations(self.targets) * self.ledger.full_evaluation

    @property
    def expected_tokens(self) -> int:
        """Largest number of tokens for everything except retentions between targets."""
        ledger = self.ledger
        held_out = [ledger.batch_tokens[batch] for batch in ledger.held_out_batches]
        least = self.method.least(self.targets, ledger.tokens_of_batches)
        return least + check_tokens(self.targets, held_out)

    def run(self) -> Iterator[Step | Found]:
        """Yield each step and each mark as it is passed, then each mark in its final form."""
        begun = self.ledger.spent
        for event in self.method.descend(self.ledger, self.targets):
            if isinstance(event, Step):
                self.path.append(event)
                self.start_loss = self.start_loss if self.path[1:] else event.loss
                yield event
                if mark := self.targets.mark_at(len(event.pattern.full_layers)):
                    yield self._keep(self._by_loss(mark, event.pattern))
            else:
                yield self._keep(self._judged(event.mark, event.pattern, event.layers))
        if self.method.judges:
            yield from self._probe()
        self.search_tokens = self.ledger.spent - begun
        for passed in list(self.found.values()):
            yield self._keep(self._compared(passed))
        self.is_complete = True

    @property
    def safe(self) -> Found | None:
        """Pattern with the fewest F layers that keeps recall, as far as that is known."""
        safe = (f for f in self.found.values() if f.faithfulness and f.faithfulness.loses_little)
        return min(safe, key=lambda result: result.mark.full_layers, default=None)

    def _by_loss(self, mark: Mark, pattern: Pattern) -> Found:
        losses = self.ledger.losses(pattern)
        error = standard_error(losses - self.ledger.losses(self.constraints.start))
        return Found(mark, pattern, float(losses.mean()), error)

    def _judged(self, mark: Mark, pattern: Pattern, layers: Mapping[int, Sureness]) -> Found:
        """Add the comparison with all F to a pattern that was run on all batches."""
        judged = None
        if self.method.judges:
            judged = self._faithfulness(pattern, self.ledger.all_batches)
        return Found(mark, pattern, layers=layers, judged=judged)

    def _faithfulness(self, pattern: Pattern, batches: Sequence[int]) -> Faithfulness | None:
        documents = self.ledger.documents_of(batches)
        if len(set(documents)) < 2:
            return None
        judged, full = (self.ledger.judged(p, batches) for p in (pattern, self.constraints.start))
        return Faithfulness.of(judged, full, documents)

    def _keep(self, result: Found) -> Found:
        results = self.found | {result.mark.full_layers: result}
        self.found = dict(sorted(results.items(), reverse=True))
        return result

    def _probe(self) -> Iterator[Found]:
        """Search between the smallest target that keeps recall and the next, by halving."""
        if not any(result.judged for result in self.found.values()):
            return  # one document shows nothing about recall
        good = self.safe
        above = len(self.constraints.start.full_layers) if good is None else good.mark.full_layers
        below = max((f for f in self.found if f < above), default=above)
        for _ in range(PROBES):
            count = (above + below) // 2
            if count in (above, below):
                return
            mark = Mark(count, f"{count}/{len(self.constraints.start)}")
            proposal = self.method.between(self.ledger, self.targets, mark)
            if proposal is None:
                return
            result = self._judged(mark, proposal.pattern, proposal.layers)
            if result.judged is not None and result.judged.loses_little:
                above = count
                yield self._keep(result)
            else:
                below = count

    def _compared(self, result: Found) -> Found:
        """Judge a pattern, and uniform interleaving, on held-out batches."""
        held_out = self._faithfulness(result.pattern, self.ledger.held_out_batches)
        uniform = uniform_within(result.mark.full_layers, self.constraints)
        beside = None
        if held_out is not None and uniform is not None:
            beside = self._faithfulness(uniform, self.ledger.held_out_batches)
        return replace(result, is_compared=True, held_out=held_out, uniform=beside)


def check_tokens(targets: Targets, held_out: Sequence[int]) -> int:
    """Return the number of tokens for comparing the found patterns on held-out batches.

    All F is run there, and for each target its pattern and uniform interleaving. ``held_out`` has
    the tokens of each batch.
    """
    return (1 + 2 * len(targets.marks)) * sum(held_out)
