"""Files that a search leaves in its folder: library entries, its numbers as JSON, a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

import yaml

from sglang_indexcache.errors import LibraryError
from sglang_indexcache.lab.runs.plots import FULL, make_figure, pattern_color, save_figure
from sglang_indexcache.lab.runs.provenance import versions
from sglang_indexcache.lab.search.ledger import Step
from sglang_indexcache.lab.search.methods.pairwise import Pairwise, pair_matrix
from sglang_indexcache.lab.search.overlap import draw_overlap
from sglang_indexcache.lab.search.rules import Mark
from sglang_indexcache.lab.search.run import Found, Search
from sglang_indexcache.lab.search.setup import Setup
from sglang_indexcache.library.files import Citation, Entry, MethodRecord, Quality, load_entry
from sglang_indexcache.library.writing import write_json, write_whole
from sglang_indexcache.pattern import Pattern

_PARTIAL, _HERE = "partial", "indexcache search"
_LOSS = "calibration loss, nats per token (lower is better)"
_HELD_OUT = "held-out loss, nats per token (lower is better)"
_LABEL_WIDTH = 46
"""Characters of an axis label's line, in the height of a figure."""


class OutputFolder:
    """``<name>-<retention>.yaml`` and ``search.json``, kept up to date; a figure at the end.

    It is ``losses.png``, or ``pairs.png`` of a search by pairs of layers.

    Args:
        identity: hashes and kind of evaluator: what its journal belongs to.
        figures: the figure's format, in place of "png".
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
        """Write what ``event`` changed."""
        if isinstance(event, Found):
            self._write(self._entry(event))
            return
        write_json(self._folder / "search.json", self._summary())

    def finish(self) -> None:
        """Write everything; of an interrupted search also the last pattern that it committed."""
        search, name = self._search, f"{self._setup.name}-{_PARTIAL}"
        if search.is_complete:
            (self._folder / f"{name}.yaml").unlink(missing_ok=True)
        if not (search.path or search.found):
            return
        if search.path and not search.is_complete:
            step = search.path[-1]
            count = len(step.pattern.full_layers)
            mark = Mark(count, f"{count}/{len(step.pattern)}")
            last = Found(
                mark, step.pattern, step.loss, step.standard_error, step.pattern, step.loss
            )
            self._write(self._entry(last).model_copy(update={"name": name}))
        for result in search.found.values():
            self._write(self._entry(result))
        summary = self._summary()
        write_json(self._folder / "search.json", summary)
        if search.path:
            draw_losses(summary, self._folder / f"losses.{self._figures}")
        elif isinstance(search.options.method, Pairwise):
            self._draw_pairs(search.options.method)

    def _draw_pairs(self, method: Pairwise) -> None:
        """Draw the matrix that decided, with the blocks of the pattern in the middle."""
        patterns = [result.pattern for result in self._search.found.values()]
        draw_overlap(
            pair_matrix(self._search.ledger, method.kind),
            self._folder / f"pairs.{self._figures}",
            patterns[len(patterns) // 2],
            method.label,
        )

    def path_of(self, result: Found) -> Path:
        """Return the pattern file of one mark."""
        return self._folder / f"{self._name_of(result)}.yaml"

    def _name_of(self, result: Found) -> str:
        return f"{self._setup.name}-{result.mark.label.replace('/', 'of')}"

    def _write(self, entry: Entry) -> None:
        """Write an entry; what others measured of the same pattern since stays in its file."""
        path = self._folder / f"{entry.name}.yaml"
        with suppress(LibraryError):  # there is none yet
            before = load_entry(path)
            if before.pattern == entry.pattern:
                quality = (*entry.quality, *before.evaluated)
                measured = {"quality": quality, "latency": before.latency}
                entry = entry.model_copy(update=measured)
        data = entry.model_dump(mode="json", exclude_defaults=True)
        text = yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)
        write_whole(path, text)

    def _entry(self, result: Found) -> Entry:
        """Make the library entry of one mark, without times: the same search, the same file."""
        setup = self._setup
        method = self._search.options.in_words(is_refined=result.is_refined)
        objective = f"language-modelling loss of {setup.objective}" if self._search.path else ""
        return Entry(
            name=self._name_of(result),
            model=setup.model,
            pattern=str(result.pattern),
            full_layers=len(result.pattern.full_layers),
            retention=result.mark.label,
            method=MethodRecord(
                name=method if result.is_final else "unfinished search",
                objective=objective,
                data=setup.data,
                details=self._details(result),
            ),
            source=Citation(title=_HERE, where="this file's method.details"),
            quality=tuple(self._quality(result)),
        )

    def _quality(self, result: Found) -> Iterator[Quality]:
        uniform = result.baselines.get("uniform")
        rows = []
        if self._search.path:
            blind = uniform[1] if uniform else None
            rows.append((_LOSS, result.loss, self._search.start_loss, blind))
        if held_out := result.held_out:
            rows.append((_HELD_OUT, held_out.loss, held_out.start, held_out.uniform))
        for name, loss, full, blind in rows:
            yield Quality(benchmark=name, score=loss, all_full=full, uniform=blind, where=_HERE)

    def _details(self, result: Found) -> dict[str, Any]:
        details: dict[str, Any] = {
            **self._identity,
            **self._origin,
        }
        if self._search.path:
            details["added_loss_standard_error"] = _number(result.standard_error)
            before = {"pattern": str(result.searched), "loss": result.searched_loss}
            details["before_refinement"] = before
            details["loss_curve"] = [
                {"flipped": step.layer, "loss": step.loss, "batches": step.batches}
                for step in self._search.path
            ]
        if held_out := result.held_out:
            added = held_out.added
            details["held_out_added_loss"] = {
                **{"mean": added.mean, "low": added.low, "high": added.high},
                **{"documents": len(added.each), "lost": added.lost, "worst": max(added.each)},
            }
        if result.is_final:
            details["cost"] = self._cost()
        return details

    def _cost(self) -> dict[str, Any]:
        search, exhaustive = self._search, self._search.budget.exhaustive
        return {
            "tokens": search.search_tokens,
            "budget_tokens": search.budget.total,
            "full_evaluations": round(search.search_tokens / search.ledger.full_evaluation, 3),
            "exhaustive_greedy_tokens": exhaustive,
            "share_of_exhaustive": round(search.search_tokens / exhaustive, 5),
        }

    def _summary(self) -> dict[str, Any]:
        """Return the whole search as plain data, complete or not."""
        search = self._search
        return {
            "complete": search.is_complete,
            "name": self._setup.name,
            "method": search.in_words(),
            "identity": self._identity,
            "objective": self._setup.objective,
            "data": self._setup.data,
            **self._origin,
            "start": {"pattern": str(search.constraints.start), "loss": _number(search.start_loss)},
            "cost": self._cost() if search.is_complete else None,
            "steps": [_step(step) for step in search.path],
            "marks": [_mark(result) for result in search.found.values()],
        }


def _step(step: Step) -> dict[str, Any]:
    return {
        "pattern": str(step.pattern),
        "flipped": step.layer,
        "loss": step.loss,
        "standard_error": _number(step.standard_error),
        "batches": step.batches,
        "candidates": step.candidates,
        "tokens_so_far": step.spent,
        "decided": step.decided,
    }


def _mark(result: Found) -> dict[str, Any]:
    def measured(pattern: Pattern, loss: float) -> dict[str, Any]:
        return {"pattern": str(pattern), "loss": _number(loss)}

    return {
        "retention": result.mark.label,
        "full_layers": result.mark.full_layers,
        "final": result.is_final,
        **measured(result.pattern, result.loss),
        "standard_error": _number(result.standard_error),
        "before_refinement": measured(result.searched, result.searched_loss),
        "exchanges": result.exchanges,
        "baselines": {name: measured(*pair) for name, pair in result.baselines.items()},
        "held_out": asdict(result.held_out) if result.held_out else None,
    }


def _number(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON and YAML have no portable form of."""
    return None if math.isnan(value) else value


def draw_losses(summary: Mapping[str, Any], path: Path) -> None:
    """Draw what sharing adds to the loss of all F, along the search and at the retentions.

    Everything is drawn as what it adds on the data that it was measured on, so that calibration
    and held-out data have one scale. A racing search measures most flips on few batches and keeps
    the lowest, so these run low; the patterns found are measured on all batches, and once more on
    held-out documents. The way up from all S is dashed. ``summary`` is what search.json holds.
    """
    figure, [axis] = make_figure(8.6, 4.6)
    pattern, base = summary["start"]["pattern"], summary["start"]["loss"] or 0.0
    layers, start = len(pattern), pattern.count("F")
    total = summary["steps"][0]["batches"]  # the start's, which is measured on all
    axis.axhline(0, color="black", lw=0.8, ls=":", label=f"as it is: {start} of {layers} layers F")
    for walk in _walks(summary["steps"]):
        used = sorted({step["batches"] for step in walk})
        subset = f"{used[0]} to {used[-1]}" if used[1:] else f"{used[0]}"
        up = walk[0]["pattern"][walk[0]["flipped"]] == "F"
        axis.plot(
            [start - step["pattern"].count("F") for step in walk],
            [step["loss"] - base for step in walk],
            color=FULL, ls="--" if up else "-", lw=1.0, marker="o", ms=2.5,
            label=f"each flip on the way {'up' if up else 'down'}, on {subset} of {total} batches",
        )  # fmt: skip
    for mark in summary["marks"]:
        _draw_mark(axis, mark, start - mark["full_layers"], base)
    if summary["marks"]:
        for marker, color, label in (
            ("D", "black", f"pattern found, on the {total} batches that chose it"),
            ("o", "white", "pattern found, on held-out documents (bar: 95 % interval)"),
            ("s", "silver", f"uniform interleaving, on the {total} batches"),
        ):
            edge = "silver" if color == "silver" else "black"
            axis.plot([], [], mec=edge, mfc=color, marker=marker, ls="none", ms=5, label=label)
    axis.set_xlabel(f"layers that lost their indexer, of {layers}")
    label = fill(f"added loss of {summary['objective']}, nats per token", _LABEL_WIDTH)
    axis.set_ylabel(label, fontsize=8)
    axis.set_title(f"{summary['name']}: {summary['data']}", fontsize=9, loc="left")
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=2)
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(y=0.12)
    axis.set_xlim(left=-0.4)
    save_figure(figure, path)


def _walks(path: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Split ``path`` into the flips of each walk, most F layers first; a start begins one."""
    walks: list[list[Mapping[str, Any]]] = []
    for step in path:
        if step["flipped"] is None:
            walks.append([])
        else:
            walks[-1].append(step)
    return [sorted(walk, key=lambda step: -step["pattern"].count("F")) for walk in walks if walk]


def _draw_mark(axis: Any, mark: Mapping[str, Any], step: int, base: float) -> None:
    """Draw what a retention's pattern adds: on the batches that chose it, held out; and uniform."""
    color = pattern_color(Pattern(mark["pattern"]))
    axis.plot(step, mark["loss"] - base, color=color, marker="D", ms=5, ls="none", zorder=4)
    axis.annotate(
        mark["retention"],
        (step, 0.97),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="top",
        color=color,
        fontsize=9,
    )
    if held_out := mark["held_out"]:
        added = held_out["added"]
        bar = [[added["mean"] - added["low"]], [added["high"] - added["mean"]]]
        axis.errorbar(
            step + 0.15, added["mean"], bar, color=color,
            marker="o", mfc="white", ms=5, capsize=3, lw=1, ls="none", zorder=5,
        )  # fmt: skip
    if uniform := mark["baselines"].get("uniform"):
        pale = pattern_color(Pattern(uniform["pattern"]))
        axis.plot(step, uniform["loss"] - base, color=pale, marker="s", ms=5, ls="none", zorder=3)
