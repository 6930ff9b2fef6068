"""What a search leaves behind: a library entry for every mark, and its numbers as JSON."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import yaml

from sglang_indexcache.library import Citation, Entry, Method, Quality
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.path import Step
from sglang_indexcache.search.run import Found, Search
from sglang_indexcache.search.sources import Setup
from sglang_indexcache.support.files import write_whole
from sglang_indexcache.support.provenance import versions

_LOSS = "calibration loss, nats per token (lower is better)"


def entry(search: Search, found: Found, origin: Setup) -> Entry:
    """The library entry of one mark. Holds no times: the same search gives the same file."""
    retention = found.mark.label
    uniform = found.baselines.get("uniform")
    return Entry(
        name=f"{origin.name}-{retention.replace('/', 'of')}",
        model=origin.model,
        pattern=str(found.pattern),
        full_layers=len(found.pattern.full_layers),
        retention=retention,
        method=Method(
            name=search.options.in_words() if found.is_final else "unfinished search",
            objective="per-token language-modelling loss",
            data=origin.data,
            details=_details(search, found, origin),
        ),
        source=Citation(title="indexcache search", where="this file's method.details"),
        quality=(
            Quality(
                benchmark=_LOSS,
                score=found.loss,
                all_full=search.start_loss,
                uniform=uniform[1] if uniform else None,
                where="indexcache search",
            ),
        ),
    )


def _details(search: Search, found: Found, origin: Setup) -> dict[str, Any]:
    details: dict[str, Any] = {
        **origin.identity,
        "seed": origin.seed,
        "versions": versions(),
        "loss_standard_error": _number(found.standard_error),
        "before_refinement": {"pattern": str(found.searched), "loss": found.searched_loss},
        "loss_curve": [_curve_point(step) for step in search.path],
    }
    if found.is_final:
        details["cost"] = _cost(search)
    return details


def _curve_point(step: Step) -> dict[str, Any]:
    return {"flipped": step.layer, "loss": step.loss, "batches": step.batches}


def _cost(search: Search) -> dict[str, Any]:
    exhaustive = search.exhaustive_tokens
    return {
        "tokens": search.search_tokens,
        "full_evaluations": round(search.search_tokens / search.ledger.full_evaluation, 3),
        "exhaustive_greedy_tokens": exhaustive,
        "share_of_exhaustive": round(search.search_tokens / exhaustive, 5),
    }


def write_entry(item: Entry, folder: Path) -> Path:
    """Write ``<name>.yaml``; a reader never sees half a file."""
    path = folder / f"{item.name}.yaml"
    data = item.model_dump(mode="json", exclude_defaults=True)
    write_whole(path, yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True))
    return path


def summary(search: Search, origin: Setup) -> dict[str, Any]:
    """The whole search as plain data, complete or not."""
    return {
        "complete": search.is_complete,
        "name": origin.name,
        "method": search.options.in_words(),
        "identity": dict(origin.identity),
        "versions": versions(),
        "data": origin.data,
        "seed": origin.seed,
        "start": {"pattern": str(search.constraints.start), "loss": _number(search.start_loss)},
        "cost": _cost(search) if search.is_complete else None,
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
    }


def _number(value: float) -> float | None:
    """JSON and YAML have no portable NaN."""
    return None if math.isnan(value) else value
