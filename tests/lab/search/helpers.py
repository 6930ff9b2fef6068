"""Shared by the tests of the search package."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.lab.search.calibration import Calibration
from sglang_indexcache.lab.search.evaluators import Evaluator
from sglang_indexcache.lab.search.ledger import Ledger, Step
from sglang_indexcache.lab.search.methods import METHODS, Method, find_method
from sglang_indexcache.lab.search.methods.greedy import Greedy
from sglang_indexcache.lab.search.rules import Constraints, Targets, parse_targets
from sglang_indexcache.lab.search.run import Search
from sglang_indexcache.lab.search.session import run_search
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.pattern import Pattern
from tests.fixtures.landscape import SyntheticEvaluator


def free(count: int) -> Constraints:
    """Return constraints without a rule but that for layer 0."""
    return Constraints.make(Pattern.full(count))


def targets(count: int, *values: str) -> Targets:
    return parse_targets(values, free(count))


def landscape(count: int, seed: int = 0, batches: int = 8, **arguments: float) -> Ledger:
    return Ledger(SyntheticEvaluator(count, batches, seed, **arguments))  # type: ignore[arg-type]


def finished(ledger: Ledger, goal: Targets, method: Method | None = None) -> Search:
    """Return a search that has run to its end."""
    search = Search(ledger, goal, method)
    for _ in search.run():
        pass
    return search


def greedy(ledger: Ledger, goal: Targets) -> list[Step]:
    """Take every step of the paper's algorithm, the start first."""
    return list(Greedy().descend(ledger, goal))


def made_up(evaluator: Evaluator, held_out: int = 0, name: str = "x") -> Setup:
    """Return the setup of a search of a landscape."""
    count = evaluator.num_layers
    checkpoint = Checkpoint("Synthetic", tuple(range(count)), Pattern.full(count), {})
    sequences = tuple((0,) * tokens for tokens in evaluator.batch_tokens)
    data = Calibration(sequences, "made up", held_out)
    return Setup(checkpoint, data, getattr(evaluator, "digest", ""), name)


def searched(
    output: Path,
    evaluator: Evaluator,
    *goals: str,
    held_out: int = 0,
    method: str = "greedy",
    keep_full: tuple[int, ...] = (),
    methods: Mapping[str, Method] = METHODS,
) -> tuple[Search, str]:
    """Return a search as a user runs it, on a landscape; and what it said."""
    setup = made_up(evaluator, held_out)
    rules = Constraints.make(setup.checkpoint.own, keep_full)
    console = Console(file=io.StringIO(), width=400)
    marks, how = parse_targets(goals or None, rules), find_method(method, methods)
    search = run_search(setup, evaluator, marks, how, output, console)
    return search, console.file.getvalue()  # type: ignore[attr-defined]
