"""Files that a search writes to its folder: library entries, its numbers as JSON, a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from sglang_indexcache.errors import LibraryError
from sglang_indexcache.lab.runs.provenance import versions
from sglang_indexcache.lab.search.figure import draw_pairs
from sglang_indexcache.lab.search.judged import Faithfulness
from sglang_indexcache.lab.search.ledger import Step
from sglang_indexcache.lab.search.methods.pairwise import Pairwise, pair_matrix
from sglang_indexcache.lab.search.methods.proposal import Sureness
from sglang_indexcache.lab.search.run import Found, Search
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.files import Citation, Entry, MethodRecord, Quality, load_entry
from sglang_indexcache.library.writing import write_json, write_whole

_HERE = "indexcache search"
_CHOSEN, _HELD_OUT = "documents that chose it", "held-out documents"


class OutputFolder:
    """Folder with ``<name>-<retention>.yaml`` and ``search.json``, kept up to date.

    If pairs of layers proposed patterns, their matrix is drawn at the end: ``pairs.png``.

    Args:
        identity: hashes and kind of evaluator, which identify the journal.
        figures: format of the figure, such as "png".
    """

    def __init__(
        self,
        folder: Path,
        search: Search,
        setup: Setup,
        identity: Mapping[str, Any],
        figures: str = "png",
    ) -> None:
        self._figures = figures
        self._folder, self._search, self._setup = folder, search, setup
        self._identity = dict(identity)
        self._origin = {
            "documents": setup.calibration.reading,
            "seed": setup.seed,
            "versions": versions(),
        }

    def update(self, event: Step | Found) -> None:
        """Write the files that ``event`` changed."""
        if isinstance(event, Found):
            self._write(self._entry(event))
            return
        write_json(self._folder / "search.json", self._summary())

    def finish(self) -> None:
        """Write all result files."""
        search = self._search
        if not (search.path or search.found):
            return
        for result in search.found.values():
            self._write(self._entry(result))
        write_json(self._folder / "search.json", self._summary())
        if search.found and search.method.pairs:
            self._draw(search.method.pairs)

    def _draw(self, method: Pairwise) -> None:
        """Draw the matrix, with the blocks of the pattern in the middle."""
        patterns = [result.pattern for result in self._search.found.values()]
        draw_pairs(
            pair_matrix(self._search.ledger, method),
            self._folder / f"pairs.{self._figures}",
            patterns[len(patterns) // 2],
            method.label,
        )

    def path_of(self, result: Found) -> Path:
        """Return the path of a mark's pattern file."""
        return self._folder / f"{self._name_of(result)}.yaml"

    def _name_of(self, result: Found) -> str:
        return f"{self._setup.name}-{result.mark.label.replace('/', 'of')}"

    def _write(self, entry: Entry) -> None:
        """Write an entry, and keep later measurements of the same pattern in its file."""
        path = self._folder / f"{entry.name}.yaml"
        with suppress(LibraryError):  # there is no such file yet
            before = load_entry(path)
            if before.pattern == entry.pattern:
                quality = (*entry.quality, *before.evaluated)
                measured = {"quality": quality, "latency": before.latency}
                entry = entry.model_copy(update=measured)
        data = entry.model_dump(mode="json", exclude_defaults=True)
        text = yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)
        write_whole(path, text)

    def _entry(self, result: Found) -> Entry:
        """Make the library entry of one mark, without times: equal searches give equal files."""
        setup, search = self._setup, self._search
        by = search.method.objective
        return Entry(
            name=self._name_of(result),
            model=setup.model,
            pattern=str(result.pattern),
            full_layers=len(result.pattern.full_layers),
            retention=result.mark.label,
            method=MethodRecord(
                name=search.method.in_words,
                objective=f"{by} of {setup.objective}" if by else "",
                data=setup.data,
                details=self._details(result),
            ),
            source=Citation(title=_HERE, where="this file's method.details"),
            quality=tuple(self._quality(result)),
        )

    def _quality(self, result: Found) -> Iterator[Quality]:
        """Yield loss, recall and divergence, on held-out documents if there are any."""
        measured, uniform = result.faithfulness, result.uniform
        if measured is None:
            return
        where = _HELD_OUT if result.held_out else _CHOSEN
        kinds = self._setup.calibration.judged_on
        beside = _numbers_of(uniform) if uniform else {}
        for name, (score, full) in _numbers_of(measured).items():
            blind = beside[name][0] if beside else None
            title = f"{name}, {where} ({kinds})"
            yield Quality(benchmark=title, score=score, all_full=full, uniform=blind, where=_HERE)

    def _details(self, result: Found) -> dict[str, Any]:
        details: dict[str, Any] = {**self._identity, **self._origin}
        details["judged_on"] = {
            "text": self._setup.data,
            "tokens": self._setup.calibration.judged_on,
        }
        if self._search.path:
            details["added_loss_standard_error"] = _number(result.standard_error)
            details["loss_curve"] = [
                {"flipped": step.layer, "loss": step.loss} for step in self._search.path
            ]
        if result.layers:
            details["layers"] = {n: _sureness(sure) for n, sure in result.layers.items()}
        for name, measured in (("on_its_own", result.judged), ("held_out", result.held_out)):
            if measured:
                details[name] = measured.numbers()
        if self._search.search_tokens:
            details["cost"] = self._cost()
        return details

    def _cost(self) -> dict[str, Any]:
        search = self._search
        return {
            "tokens": search.search_tokens,
            "full_evaluations": round(search.search_tokens / search.ledger.full_evaluation, 3),
            "exhaustive_greedy_tokens": search.exhaustive,
            "share_of_exhaustive": round(search.search_tokens / search.exhaustive, 5),
        }

    def _summary(self) -> dict[str, Any]:
        """Return the whole search as plain data, complete or not."""
        search = self._search
        safe = search.safe
        return {
            "complete": search.is_complete,
            "name": self._setup.name,
            "method": search.method.in_words,
            "identity": self._identity,
            "objective": self._setup.objective,
            "data": self._setup.data,
            **self._origin,
            "start": {"pattern": str(search.constraints.start), "loss": _number(search.start_loss)},
            "cost": self._cost() if search.is_complete else None,
            "smallest_that_keeps_recall": safe.mark.label if safe else None,
            "steps": [_step(step) for step in search.path],
            "marks": [_mark(result) for result in search.found.values()],
        }


def _numbers_of(measured: Faithfulness) -> dict[str, tuple[float, float | None]]:
    """Return the numbers for a pattern file, each with all F's value."""
    loss, recall = (
        measured.full_loss + measured.loss.mean,
        measured.full_recall + measured.recall.mean,
    )
    return {
        "loss, nats per token (lower is better)": (loss, measured.full_loss),
        "recall, share of tokens": (recall, measured.full_recall),
        **{f"KL to all F, {kind}, nats": (value, 0.0) for kind, value in measured.kl.items()},
        **{f"likeliest tokens kept, {kind}": (share, 1.0) for kind, share in measured.kept.items()},
    }


def _sureness(sure: Sureness) -> dict[str, Any]:
    without = sure.without.numbers() if sure.without else None
    return {"share_of_proposals": round(sure.share, 4), "loss_added_without": without}


def _step(step: Step) -> dict[str, Any]:
    return {
        "pattern": str(step.pattern),
        "flipped": step.layer,
        "loss": step.loss,
        "standard_error": _number(step.standard_error),
        "candidates": step.candidates,
        "tokens_so_far": step.spent,
    }


def _mark(result: Found) -> dict[str, Any]:
    def numbers(measured: Faithfulness | None) -> dict[str, Any] | None:
        return measured.numbers() if measured else None

    return {
        "retention": result.mark.label,
        "full_layers": result.mark.full_layers,
        "pattern": str(result.pattern),
        "loss": _number(result.loss),
        "standard_error": _number(result.standard_error),
        "layers": {layer: _sureness(sure) for layer, sure in result.layers.items()},
        "judged": numbers(result.judged),
        "held_out": numbers(result.held_out),
        "uniform": numbers(result.uniform),
    }


def _number(value: float) -> float | None:
    """Return a number, or None for NaN, for which JSON and YAML have no portable form."""
    return None if math.isnan(value) else value
