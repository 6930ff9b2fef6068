"""One-shot sensitivities: what each layer costs alone decides the order in which layers are shared.

Blind to how flips add up: two neighbours that can each be spared, but not both, go together. So it
is a start for a refinement, which has most of the budget left, rather than an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.constraints import Constraints, flipped
from sglang_indexcache.search.ledger import Ledger, Step
from sglang_indexcache.search.methods.fast import first_subset, least_subset
from sglang_indexcache.search.targets import Targets

_LOOKING_SHARE = 1 / 3
"""Share of the method's budget for what layers cost alone: the rest does more for a refinement."""


@dataclass(frozen=True)
class OneShot:
    """Flip layers in ascending order of what each costs alone, flipped from the start."""

    in_words = "one-shot sensitivities"

    def descend(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, budget: int
    ) -> Iterator[Step | Pattern]:
        """See :class:`~sglang_indexcache.search.methods.Method`; goes straight to the marks."""
        start, tokens = constraints.start, ledger.tokens_of_batches
        yield ledger.step(start, start, None, candidates=1)
        layers = constraints.candidates(start)
        left = budget - ledger.full_evaluation * (1 + _measured(constraints, targets))
        looks = first_subset(tokens, len(layers), int(_LOOKING_SHARE * left))
        subset = ledger.all_batches[:looks]
        ranked: list[int] = []
        if layers:
            singles = [flipped(start, layer) for layer in layers]
            added = ledger.candidates(start, singles, subset).mean(axis=1)
            ranked = [layers[int(i)] for i in added.argsort(kind="stable")]
        for mark in targets.marks:
            shared = ranked[: len(start.full_layers) - mark.full_layers]
            yield Pattern.from_layers(len(start), set(start.full_layers) - set(shared))

    def least(self, constraints: Constraints, targets: Targets, batch_tokens: Sequence[int]) -> int:
        """See :class:`~sglang_indexcache.search.methods.Method`.

        Raises:
            SearchError: a loss budget, along which it does not walk.
        """
        targets.refuse_loss_budget("one-shot sensitivities")
        looks = len(constraints.candidates(constraints.start))
        subset = sum(batch_tokens[: least_subset(len(batch_tokens))])
        measured = 1 + _measured(constraints, targets)
        return looks * subset + measured * sum(batch_tokens)


def _measured(constraints: Constraints, targets: Targets) -> int:
    """Marks whose pattern is not the start's."""
    most = len(constraints.start.full_layers)
    return sum(mark.full_layers < most for mark in targets.marks)
