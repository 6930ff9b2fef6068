"""The paper's greedy layer selection: Algorithm 1, and its pipeline-block variant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.rules import Constraints, Targets, flipped, stage_starts


@dataclass(frozen=True)
class Greedy:
    """:func:`greedy` as a row of :data:`~sglang_indexcache.search.methods.METHODS`.

    Attributes:
        blocks: pipeline blocks of its variant.
    """

    blocks: int = 1
    searches: ClassVar[int] = 1

    @property
    def in_words(self) -> str:
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        variant = f", {self.blocks} pipeline blocks" if self.blocks > 1 else ""
        return f"exhaustive greedy (Algorithm 1){variant}"

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step]:
        """See :class:`~sglang_indexcache.search.methods.Method`."""
        return greedy(ledger, constraints, targets, self.blocks)

    def least(self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`; this is its whole cost.

        Raises:
            SearchError: more blocks than layers, or a target below the F layers that blocks keep.
        """
        starts = stage_starts(len(constraints.start), self.blocks)
        kept = constraints.fixed | {layer for layer in starts if constraints.start.is_full(layer)}
        if targets.loss_budget is None and targets.fewest < len(kept):
            raise SearchError(
                f"{self.blocks} pipeline blocks keep their first layers F, so that "
                f"{len(kept)} F layers are the fewest, and not {targets.fewest}"
            )
        return evaluations(constraints, targets, self.blocks) * sum(batch_tokens)


def greedy(
    ledger: Ledger, constraints: Constraints, targets: Targets, blocks: int = 1
) -> Iterator[Step]:
    """Flip F layers to S one by one, each time the flip that leaves the lowest loss.

    With one block this is the paper's Algorithm 1; ties go to the lowest layer. With P blocks it
    is the variant of section "Layer Selection Algorithm", paragraph "Complexity": the layers are
    cut into P blocks, each block's first layer stays F, and in each round the best flip of a block
    is committed before the next block is searched.

    Args:
        ledger: measures and remembers.
        constraints: which layers may be flipped.
        targets: where to end.
        blocks: P.

    Yields:
        The start, then every committed flip.

    Raises:
        SearchError: more blocks than layers.
    """
    starts = stage_starts(ledger.num_layers, blocks)
    bounds = [*starts, ledger.num_layers]
    pattern = constraints.start
    yield (step := ledger.step(pattern, pattern, None, candidates=1))
    limit = step.loss * (1 + targets.loss_budget) if targets.loss_budget is not None else None
    while len(pattern.full_layers) > targets.fewest:
        before = pattern
        for start, stop in pairwise(bounds):
            inside = [
                layer
                for layer in constraints.candidates(pattern)
                if start <= layer < stop and (layer != start or blocks == 1)
            ]
            if not inside or len(pattern.full_layers) == targets.fewest:
                continue
            layer = best_flip(ledger, pattern, inside)
            after = flipped(pattern, layer)
            step = ledger.step(constraints.start, after, layer, candidates=len(inside))
            if limit is not None and step.loss > limit:
                return
            pattern = step.pattern
            yield step
        if pattern == before:
            return


def best_flip(ledger: Ledger, pattern: Pattern, layers: Sequence[int]) -> int:
    """The layer whose flip to S leaves the lowest mean loss (Algorithm 1, line 4)."""
    added = ledger.candidates(pattern, [flipped(pattern, layer) for layer in layers])
    return layers[int(added.mean(axis=1).argmin())]


def evaluations(constraints: Constraints, targets: Targets, blocks: int = 1) -> int:
    """Full evaluations that :func:`greedy` asks for at most, the start included."""
    bounds = [*stage_starts(len(constraints.start), blocks), len(constraints.start)]
    pattern, total = constraints.start, 1
    left = [
        sum(
            start <= layer < stop and (layer != start or blocks == 1)
            for layer in constraints.candidates(pattern)
        )
        for start, stop in pairwise(bounds)
    ]
    flips = len(pattern.full_layers) - targets.fewest
    while flips > 0 and any(left):
        for block, count in enumerate(left):
            if count and flips > 0:
                total, flips = total + count, flips - 1
                left[block] -= 1
    return total
