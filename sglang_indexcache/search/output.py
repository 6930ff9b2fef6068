"""What a search leaves in its folder: library entries, its numbers as JSON, a figure."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from sglang_indexcache.library import Citation, Entry, MethodRecord, Quality
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.compare import axis_label
from sglang_indexcache.search.ledger import Step
from sglang_indexcache.search.rules import Mark
from sglang_indexcache.search.run import Found, Search
from sglang_indexcache.search.setup import Setup
from sglang_indexcache.study.plots import FULL, make_figure, pattern_color, save_figure
from sglang_indexcache.study.provenance import versions
from sglang_indexcache.support.files import write_json, write_whole

_SECONDS_BETWEEN_PLOTS = 10.0
_PARTIAL, _HERE = "partial", "indexcache search"
_LOSS = "calibration loss, nats per token (lower is better)"
_HELD_OUT = "held-out loss, nats per token (lower is better)"
_GREY = FULL


class OutputFolder:
    """``<name>-<retention>.yaml``, ``search.json``, ``losses.png``, kept up to date.

    Args:
        folder: where.
        search: the one that is reported.
        setup: what it measures.
        identity: hashes and kind of evaluator: what its journal belongs to.
    """

    def __init__(
        self, folder: Path, search: Search, setup: Setup, identity: Mapping[str, str]
    ) -> None:
        self._folder, self._search, self._setup = folder, search, setup
        self._origin = {
            **identity,
            "documents": setup.calibration.reading,
            "seed": setup.seed,
            "versions": versions(),
        }
        self._plotted = 0.0

    def update(self, event: Step | Found) -> None:
        """Write what ``event`` changed."""
        if isinstance(event, Found):
            self._write(self._entry(event))
            return
        write_json(self._folder / "search.json", self._summary())
        if time.monotonic() - self._plotted > _SECONDS_BETWEEN_PLOTS:
            self._draw()
            self._plotted = time.monotonic()

    def finish(self) -> None:
        """Write everything; of an interrupted search also the last pattern that it committed."""
        search, name = self._search, f"{self._setup.name}-{_PARTIAL}"
        if search.is_complete:
            (self._folder / f"{name}.yaml").unlink(missing_ok=True)
        if not search.path:
            return
        if not search.is_complete:
            step = search.path[-1]
            count = len(step.pattern.full_layers)
            mark = Mark(count, f"{count}/{len(step.pattern)}")
            last = Found(
                mark, step.pattern, step.loss, step.standard_error, step.pattern, step.loss
            )
            self._write(self._entry(last).model_copy(update={"name": name}))
        for found in search.found.values():
            self._write(self._entry(found))
        write_json(self._folder / "search.json", self._summary())
        self._draw()

    def path_of(self, found: Found) -> Path:
        """The pattern file of one mark."""
        return self._folder / f"{self._name_of(found)}.yaml"

    def _name_of(self, found: Found) -> str:
        window = f"-w{found.pattern.window}" if found.pattern.window else ""
        return f"{self._setup.name}-{found.mark.label.replace('/', 'of')}{window}"

    def _draw(self) -> None:
        draw_losses(self._summary(), self._folder / "losses.png")

    def _write(self, entry: Entry) -> None:
        data = entry.model_dump(mode="json", exclude_defaults=True)
        text = yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)
        write_whole(self._folder / f"{entry.name}.yaml", text)

    def _entry(self, found: Found) -> Entry:
        """The library entry of one mark. Holds no times: the same search gives the same file."""
        setup, retention = self._setup, found.mark.label
        method = self._search.options.in_words(is_refined=found.is_refined)
        return Entry(
            name=self._name_of(found),
            model=setup.model,
            pattern=str(found.pattern),
            full_layers=len(found.pattern.full_layers),
            retention=retention,
            method=MethodRecord(
                name=method if found.is_final else "unfinished search",
                objective=f"language-modelling loss of {setup.objective}",
                data=setup.data,
                details=self._details(found),
            ),
            source=Citation(title=_HERE, where="this file's method.details"),
            quality=tuple(self._quality(found)),
        )

    def _quality(self, found: Found) -> Iterator[Quality]:
        uniform = found.baselines.get("uniform")
        rows = [(_LOSS, found.loss, self._search.start_loss, uniform[1] if uniform else None)]
        if held := found.held_out:
            rows.append((_HELD_OUT, held.loss, held.start, held.uniform))
        for name, loss, full, blind in rows:
            yield Quality(benchmark=name, score=loss, all_full=full, uniform=blind, where=_HERE)

    def _details(self, found: Found) -> dict[str, Any]:
        details: dict[str, Any] = {
            **self._origin,
            "added_loss_standard_error": _number(found.standard_error),
            "before_refinement": {"pattern": str(found.searched), "loss": found.searched_loss},
            "loss_curve": [
                {"flipped": step.layer, "loss": step.loss, "batches": step.batches}
                for step in self._search.path
            ],
        }
        if held := found.held_out:
            low, high = held.added - held.half, held.added + held.half
            details["held_out_added_loss"] = {"mean": held.added, "low": low, "high": high}
        if found.is_final:
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
        """The whole search as plain data, complete or not."""
        search = self._search
        return {
            "complete": search.is_complete,
            "name": self._setup.name,
            "method": search.in_words(),
            "objective": self._setup.objective,
            "data": self._setup.data,
            **self._origin,
            "start": {"pattern": str(search.constraints.start), "loss": _number(search.start_loss)},
            "cost": self._cost() if search.is_complete else None,
            "steps": [_step(step) for step in search.path],
            "marks": [_mark(found) for found in search.found.values()],
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


def _mark(found: Found) -> dict[str, Any]:
    def measured(pattern: Pattern, loss: float) -> dict[str, Any]:
        return {"pattern": str(pattern), "loss": loss}

    return {
        "retention": found.mark.label,
        "full_layers": found.mark.full_layers,
        "final": found.is_final,
        **measured(found.pattern, found.loss),
        "standard_error": _number(found.standard_error),
        "before_refinement": measured(found.searched, found.searched_loss),
        "exchanges": found.exchanges,
        "baselines": {name: measured(*pair) for name, pair in found.baselines.items()},
        "held_out": asdict(found.held_out) if found.held_out else None,
    }


def _number(value: float) -> float | None:
    """JSON and YAML have no portable NaN."""
    return None if math.isnan(value) else value


def draw_losses(told: Mapping[str, Any], path: Path) -> None:
    """Loss after each flip with the retentions marked (paper, figure beside Algorithm 1).

    The band is two standard errors of the increase over the start. A racing search measures most
    steps on few batches and keeps the lowest, so its line runs a little low between the marks; the
    marks themselves are measured on all batches. What a mark's pattern adds on held-out batches is
    drawn over the same start. A second search, the way up from all S, has a dashed line.

    Args:
        told: what search.json holds.
        path: a .png file.
    """
    figure, [axis] = make_figure(6.8, 4.0)
    layers, start = len(told["start"]["pattern"]), told["start"]["pattern"].count("F")
    for number, way in enumerate(_ways(told["steps"])):
        steps = [start - step["pattern"].count("F") for step in way]
        line = "on the way" if number == 0 else "on the way up from all S"
        style = "-" if number == 0 else "--"
        axis.plot(
            steps, [step["loss"] for step in way],
            color=_GREY, ls=style, lw=1.4, marker="o", ms=2.5, label=line,
        )  # fmt: skip
        low = [step["loss"] - 2 * (step["standard_error"] or 0.0) for step in way]
        high = [step["loss"] + 2 * (step["standard_error"] or 0.0) for step in way]
        band = "two standard errors" if number == 0 else None
        axis.fill_between(steps, low, high, color=_GREY, alpha=0.2, lw=0, label=band)
    if told["start"]["loss"] is not None:
        axis.axhline(told["start"]["loss"], color="black", lw=0.8, ls=":", label="no layer shared")
    for number, mark in enumerate(told["marks"]):
        _draw_mark(axis, told, mark, start - mark["full_layers"], is_first=number == 0)
    axis.set_xlabel(f"indexers gone, of {layers} layers")
    axis.set_ylabel(axis_label("loss", told["objective"]), fontsize=8)
    axis.set_title(f"{told['name']}: {told['data']}", fontsize=9, loc="left")
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    axis.ticklabel_format(axis="y", useOffset=False)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.margins(y=0.12)
    save_figure(figure, path)


def _ways(path: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The steps of each search that ``path`` holds, most F layers first; each begins anew."""
    ways: list[list[Mapping[str, Any]]] = []
    for step in path:
        if step["flipped"] is None:
            ways.append([])
        ways[-1].append(step)
    return [sorted(way, key=lambda step: -step["pattern"].count("F")) for way in ways]


def _draw_mark(
    axis: Any, told: Mapping[str, Any], mark: Mapping[str, Any], step: int, *, is_first: bool
) -> None:
    color = pattern_color(Pattern(mark["pattern"]))
    axis.axvline(step, color=color, lw=0.6, alpha=0.5)
    label = "pattern found" if is_first else None
    axis.plot(step, mark["loss"], color=color, marker="D", ms=5, ls="none", label=label, zorder=4)
    axis.annotate(
        mark["retention"],
        (step, 0.0),
        xycoords=("data", "axes fraction"),
        xytext=(3, 4),
        textcoords="offset points",
        color=color,
        fontsize=9,
    )
    if held_out := mark["held_out"]:
        label = "the same, held out (95 %)" if is_first else None
        loss = told["start"]["loss"] + held_out["loss"] - held_out["start"]
        axis.errorbar(
            step + 0.12, loss, held_out["half"], color=color, marker="o", mfc="white", ms=4,
            capsize=3, lw=1, ls="none", label=label, zorder=5,
        )  # fmt: skip
    if uniform := mark["baselines"].get("uniform"):
        label = "uniform interleaving" if is_first else None
        pale = pattern_color(Pattern(uniform["pattern"]))
        axis.plot(
            step, uniform["loss"], color=pale, marker="s", ms=4.5, ls="none", label=label, zorder=3
        )
