"""The folder that a search fills while it runs, and the numbers of the other subcommands."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sglang_indexcache.errors import SearchError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.compare import Comparison
from sglang_indexcache.search.entries import Provenance, entry, summary, write_entry
from sglang_indexcache.search.figures import draw_losses
from sglang_indexcache.search.overlap import OverlapCounter, read, served_overlap
from sglang_indexcache.search.path import Step
from sglang_indexcache.search.run import Found, Search
from sglang_indexcache.search.setup import Setup
from sglang_indexcache.search.stability import Agreement
from sglang_indexcache.search.targets import Mark
from sglang_indexcache.support.files import write_json

_SECONDS_BETWEEN_PLOTS = 10.0
_PARTIAL = "partial"


class OutputFolder:
    """``<name>-<retention>.yaml``, ``search.json``, ``losses.png``, kept up to date.

    Args:
        folder: where.
        search: the one that is reported.
        origin: its provenance.
    """

    def __init__(self, folder: Path, search: Search, origin: Provenance) -> None:
        self._folder, self._search, self._origin = folder, search, origin
        self._plotted = 0.0

    def update(self, event: Step | Found) -> None:
        """Write what ``event`` changed."""
        if isinstance(event, Found):
            write_entry(entry(self._search, event, self._origin), self._folder)
            return
        write_json(self._folder / "search.json", summary(self._search, self._origin))
        if time.monotonic() - self._plotted > _SECONDS_BETWEEN_PLOTS:
            draw_losses(self._search, self._folder / "losses.png")
            self._plotted = time.monotonic()

    def finish(self) -> None:
        """Write everything; of an interrupted search also the last pattern that it committed."""
        partial = self._folder / f"{self._origin.name}-{_PARTIAL}.yaml"
        if self._search.is_complete:
            partial.unlink(missing_ok=True)
        elif self._search.path:
            write_entry(self._last_committed(), self._folder)
        if not self._search.path:
            return
        for found in self._search.found.values():
            write_entry(entry(self._search, found, self._origin), self._folder)
        write_json(self._folder / "search.json", summary(self._search, self._origin))
        draw_losses(self._search, self._folder / "losses.png")

    def _last_committed(self) -> Any:
        step = self._search.path[-1]
        count = len(step.pattern.full_layers)
        mark = Mark(count, f"{count}/{len(step.pattern)}")
        found = Found(mark, step.pattern, step.loss, step.standard_error, step.pattern, step.loss)
        item = entry(self._search, found, self._origin)
        return item.model_copy(update={"name": f"{self._origin.name}-{_PARTIAL}"})


def comparison_data(
    comparisons: Sequence[tuple[str, Comparison]], reference: str, setup: Setup
) -> dict[str, Any]:
    """The numbers of ``indexcache search compare``."""
    return {
        "reference": reference,
        "identity": setup.identity,
        "data": setup.data,
        "comparisons": [
            {
                "name": name,
                "pattern": str(found.pattern),
                "reference_pattern": str(found.reference),
                "loss": found.loss,
                "reference_loss": found.reference_loss,
                "difference": asdict(found.difference),
                "edges": list(found.edges),
                "curve": [asdict(point) for point in found.curve],
                "trend": asdict(found.trend),
                "verdict": found.verdict,
            }
            for name, found in comparisons
        ],
    }


def measure_overlap(setup: Setup, on_batch: Callable[[], None]) -> OverlapCounter:
    """Run every batch with all own indexers and add up what layers have in common.

    Raises:
        SearchError: the evaluator does not show what layers select.
    """
    from sglang_indexcache.search.evaluators.hf import TransformersEvaluator

    evaluator = setup.evaluator
    if not isinstance(evaluator, TransformersEvaluator):
        raise SearchError("overlap is measured with transformers; give --model alone")
    counter = OverlapCounter(evaluator.num_layers, evaluator.topk)
    for batch in range(len(evaluator.batch_tokens)):
        for selected in evaluator.indices(setup.own, batch):
            counter.add(np.stack([layer.numpy() for layer in selected]))
        on_batch()
    return counter


def overlap_data(counter: OverlapCounter, setup: Setup, drawn: Pattern | None) -> dict[str, Any]:
    """The numbers of ``indexcache search overlap``."""
    matrix = counter.matrix()
    reading = read(matrix)
    data: dict[str, Any] = {
        "identity": setup.identity,
        "data": setup.data,
        "queries": counter.queries,
        "summary": reading.in_words(),
        "clusters": [[c[0], c[-1]] for c in reading.clusters],
        "worst_boundary": list(reading.worst_boundary),
        "adjacent": list(reading.adjacent),
        "matrix": [[round(float(v), 6) for v in row] for row in matrix],
    }
    if drawn is not None:
        value = served_overlap(matrix, drawn)
        data["pattern"] = {
            "pattern": str(drawn),
            "mean_overlap_with_source": None if np.isnan(value) else value,
        }
    return data


def stability_data(
    result: Agreement,
    orders: Sequence[Sequence[int]],
    answers: Sequence[Mapping[str, Pattern]],
) -> dict[str, Any]:
    """The numbers of ``indexcache search stability``."""
    return {
        **asdict(result),
        "orders": [list(order) for order in orders],
        "patterns": [{mark: str(p) for mark, p in answer.items()} for answer in answers],
    }
