"""One search from start to finish: descent, patterns at the marks, refinement, comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args, runtime_checkable

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.baselines import baselines
from sglang_indexcache.search.constraints import Constraints
from sglang_indexcache.search.evaluator import Floats, standard_error
from sglang_indexcache.search.ledger import Ledger
from sglang_indexcache.search.methods.fast import FastGreedy
from sglang_indexcache.search.methods.greedy import evaluations, greedy
from sglang_indexcache.search.methods.similarity import most_similar
from sglang_indexcache.search.path import Step, make_step
from sglang_indexcache.search.refinements.beam import beam
from sglang_indexcache.search.refinements.exchange import refine_exhaustively, refine_screened
from sglang_indexcache.search.targets import Mark, Targets

Method = Literal["fast", "greedy", "similarity"]
Refinement = Literal["none", "screened", "swap", "beam"]

DESCENT_SHARE = 0.65
"""Of fast greedy's budget; the rest pays for refinement."""
LEAST_EVALUATIONS_PER_LAYER = 2
"""Fast greedy's budget is never below this: a first look at every layer costs that much where
there are few layers or batches."""


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes:
        method: fast (lazy, racing), greedy (Algorithm 1) or similarity (the appendix's DP).
        refinement: what follows at each mark: none; screened (exchanges, within fast greedy's
            budget); swap (all exchanges, to a local optimum); beam.
        blocks: pipeline blocks of greedy's variant.
        share: fast greedy's budget in shares of what exhaustive greedy would forward.
        beam_width: patterns kept by beam search.
    """

    method: Method = "fast"
    refinement: Refinement = "screened"
    blocks: int = 1
    share: float = 0.1
    beam_width: int = 4

    def __post_init__(self) -> None:
        _check_choice("method", self.method, get_args(Method))
        _check_choice("refinement", self.refinement, get_args(Refinement))
        if not 0 < self.share <= 1:
            raise SearchError(f"the budget's share must be above 0 and at most 1, got {self.share}")
        if self.beam_width < 1:
            raise SearchError(f"the beam must be at least 1 wide, got {self.beam_width}")
        if self.blocks != 1 and self.method != "greedy":
            raise SearchError("pipeline blocks are a variant of --method greedy")

    def in_words(self) -> str:
        """For provenance."""
        name = {
            "fast": "fast greedy (lazy re-evaluation, paired racing)",
            "greedy": "exhaustive greedy (Algorithm 1)",
            "similarity": "similarity matrix, exact dynamic programme",
        }[self.method]
        if self.blocks > 1:
            name += f", {self.blocks} pipeline blocks"
        return name if self.refinement == "none" else f"{name}, {self.refinement} refinement"


@dataclass(frozen=True)
class Found:
    """The pattern of one mark.

    Attributes:
        mark: which.
        pattern: the answer.
        loss: over all calibration batches, nats per token.
        standard_error: of ``loss``.
        searched: the descent's pattern, before refinement.
        searched_loss: its loss over all batches.
        exchanges: that refinement made.
        is_final: refinement is done.
        baselines: blind schedules with as many F layers, and their losses.
    """

    mark: Mark
    pattern: Pattern
    loss: float
    standard_error: float
    searched: Pattern
    searched_loss: float
    exchanges: int = 0
    is_final: bool = False
    baselines: Mapping[str, tuple[Pattern, float]] = field(default_factory=dict)

    @property
    def gained(self) -> float:
        """Nats per token by which refinement lowered the loss."""
        return self.searched_loss - self.loss


@runtime_checkable
class SimilarityEvaluator(Protocol):
    """An evaluator that can measure the appendix's matrix."""

    def similarity(self, batches: list[int]) -> Floats:
        """``[N, N]``; see ``evaluators/hf.py``."""


class Search:
    """One search. Deterministic: over the same ledger contents it gives the same answer.

    Attributes:
        start_loss: of the start pattern over all batches; known after the first event.
        found: the marks passed so far, by F layers.
    """

    def __init__(
        self, ledger: Ledger, constraints: Constraints, targets: Targets, options: Options
    ) -> None:
        self.ledger, self.constraints = ledger, constraints
        self.targets, self.options = targets, options
        self.start_loss = float("nan")
        self.path: list[Step] = []
        self.found: dict[int, Found] = {}
        self.search_tokens = 0
        self.is_complete = False

    @property
    def exhaustive_tokens(self) -> int:
        """What exhaustive greedy would forward for the same targets."""
        return evaluations(self.constraints, self.targets) * self.ledger.full_evaluation

    @property
    def budget(self) -> int:
        """Tokens that fast greedy and its refinement may forward."""
        layers = self.ledger.num_layers
        least = LEAST_EVALUATIONS_PER_LAYER * layers * self.ledger.full_evaluation
        return max(int(self.options.share * self.exhaustive_tokens), least)

    @property
    def expected_tokens(self) -> int | None:
        """Tokens of the whole search, as far as they are known beforehand."""
        if self.options.method == "fast" and self.options.refinement in ("none", "screened"):
            return self.budget
        if self.options.method == "greedy" and self.options.refinement == "none":
            count = evaluations(self.constraints, self.targets, self.options.blocks)
            return count * self.ledger.full_evaluation
        return None

    def run(self) -> Iterator[Step | Found]:
        """Yield each step and each mark as it is passed, then each mark in its final form."""
        begun = self.ledger.spent
        for step in self._descent():
            self.path.append(step)
            self.start_loss = self.start_loss if self.path[1:] else step.loss
            yield step
            mark = self.targets.mark_at(len(step.pattern.full_layers))
            if mark is not None:
                yield self._pass(mark, step.pattern)
        if self.options.method == "similarity":
            yield from self._most_similar()
        elif self.targets.loss_budget is not None:
            yield from self._pass_loss_budget()
        for place, passed in enumerate(list(self.found.values())):
            left = (begun + self.budget - self.ledger.spent) // (len(self.found) - place)
            yield self._keep(self._refined(passed, left))
        self.search_tokens = self.ledger.spent - begun
        for passed in list(self.found.values()):
            yield self._keep(self._compared(passed))
        self.is_complete = True

    def _descent(self) -> Iterator[Step]:
        if self.options.method == "fast":
            budget = int(self.budget * DESCENT_SHARE)
            yield from FastGreedy(self.ledger, self.constraints, self.targets, budget).steps()
        elif self.options.method == "greedy":
            yield from greedy(self.ledger, self.constraints, self.targets, self.options.blocks)
        else:
            start, count = self.constraints.start, len(self.ledger.all_batches)
            yield make_step(self.ledger, start, start, None, batches=count, candidates=1)

    def _most_similar(self) -> Iterator[Found]:
        evaluator = self.ledger.evaluator
        if not isinstance(evaluator, SimilarityEvaluator):
            raise SearchError(
                "the similarity matrix needs attention outputs, which an engine does not hand "
                "out. Use the transformers evaluator (leave --url away)."
            )
        matrix = evaluator.similarity(list(self.ledger.all_batches))
        for mark in self.targets.marks:
            yield self._pass(mark, most_similar(matrix, mark.full_layers, self.constraints))

    def _pass_loss_budget(self) -> Iterator[Found]:
        """The last pattern within the loss budget."""
        pattern = self.path[-1].pattern
        count = len(pattern.full_layers)
        if count not in self.found:
            yield self._pass(Mark(count, f"{count}/{len(pattern)}"), pattern)

    def _pass(self, mark: Mark, pattern: Pattern) -> Found:
        losses = self.ledger.losses(pattern)
        mean, error = float(losses.mean()), standard_error(losses)
        return self._keep(Found(mark, pattern, mean, error, pattern, mean))

    def _keep(self, found: Found) -> Found:
        self.found[found.mark.full_layers] = found
        return found

    def _refined(self, found: Found, budget: int) -> Found:
        pattern, exchanges = found.pattern, 0
        if self.options.refinement == "screened":
            refined = refine_screened(self.ledger, pattern, self.constraints, budget)
            pattern, exchanges = refined.pattern, refined.exchanges
        elif self.options.refinement == "swap":
            refined = refine_exhaustively(self.ledger, pattern, self.constraints)
            pattern, exchanges = refined.pattern, refined.exchanges
        elif self.options.refinement == "beam":
            pattern = self._beamed()[found.mark.full_layers]
        losses = self.ledger.losses(pattern)
        return Found(
            mark=found.mark,
            pattern=pattern,
            loss=float(losses.mean()),
            standard_error=standard_error(losses),
            searched=found.searched,
            searched_loss=found.searched_loss,
            exchanges=exchanges,
            is_final=True,
        )

    def _beamed(self) -> dict[int, Pattern]:
        known = {len(step.pattern.full_layers): step.pattern for step in self.path}
        known |= {count: found.pattern for count, found in self.found.items()}
        fewest = min(self.found)
        return beam(self.ledger, self.constraints, fewest, self.options.beam_width, known)

    def _compared(self, found: Found) -> Found:
        others = baselines(found.mark.full_layers, self.constraints)
        measured = {name: (p, self.ledger.mean(p)) for name, p in others.items()}
        return Found(**{**found.__dict__, "baselines": measured})


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise SearchError(f"{name} {value!r} is unknown; there are {', '.join(allowed)}")
