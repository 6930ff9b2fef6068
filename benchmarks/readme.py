"""Fill the generated parts of the pages, from benchmarks/results and from tables in the code.

A generated part lies between ``<!-- generated:NAME -->`` and ``<!-- /generated:NAME -->``; NAME is
one of :data:`PARTS`. Run ``python -m benchmarks.readme`` after a measurement; with
``--check`` it changes nothing and fails if something would change.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import expect, quality_tables
from benchmarks.card import record as card
from benchmarks.card import served
from benchmarks.records import NOT_MEASURED, markdown
from benchmarks.smollm2 import everywhere, rerank
from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.latency import tables
from sglang_indexcache.lab.latency.results import LatencyResult
from sglang_indexcache.serving.operating.features import FEATURES

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    Path(page)
    for page in (
        "README.md",
        "docs/benchmarks.md",
        "benchmarks/results/smollm2/real-model.md",
        "benchmarks/results/quality/README.md",
        "benchmarks/results/latency/README.md",
        "docs/serving.md",
        "benchmarks/results/kernels/README.md",
        "benchmarks/card/README.md",
        "benchmarks/results/kernels/h100.md",
    )
)
RESULTS = Path("benchmarks/results")

_RENAMED = "indexcache demo model", "python -m benchmarks.random_model"
"""A command in the notes of records, which keep what was typed, and what it is called now."""
_MARKED = re.compile(r"(<!-- generated:([\w-]+) -->(\n?)).*?(<!-- /generated:\2 -->)", re.DOTALL)

Make = Callable[[Any], str]
"""From a record to Markdown."""


def _latency(record: Any) -> str:
    result = LatencyResult.model_validate(record)
    text = tables.latency_grid(result).to_markdown() + "\n" + tables.conditions(result)
    return text.replace(*_RENAMED)


def _memory(record: Any) -> str:
    return tables.memory_grid(LatencyResult.model_validate(record)).to_markdown()


def _features(_: Any) -> str:
    """Write what combines with what, as ``serving/operating/features.py`` has it."""
    rows = [
        (f"{f.name} (`{f.flag}`)" if f.flag else f.name, f.static, f.live, ", ".join(f.known_by))
        for f in FEATURES
    ]
    return markdown(("feature", "static", "live", "known by"), rows)


def _everywhere(first: Any) -> str:
    """Write the default search on other people's text, on both variants of the real model."""
    path = ROOT / RESULTS / "smollm2/random/everywhere.json"
    return everywhere.in_short(first, json.loads(path.read_text(encoding="utf-8")))


def _rerank(first: Any) -> str:
    """Write S layers that rank again, on both variants of the real model."""
    path = ROOT / RESULTS / "smollm2/random/rerank.json"
    return rerank.table(first, json.loads(path.read_text(encoding="utf-8")))


PARTS: dict[str, tuple[Make, str]] = {
    "everywhere": (_everywhere, "smollm2/everywhere.json"),
    "rerank": (_rerank, "smollm2/rerank.json"),
    "features": (_features, ""),
    "latency-cpu": (_latency, "latency/cpu/latency.json"),
    "memory-cpu": (_memory, "latency/cpu/latency.json"),
    "latency-cpu-dp-attention": (_latency, "latency/cpu-dp-attention/latency.json"),
    "quality-errors": (quality_tables.errors, "quality/statistics.json"),
    "quality-worlds": (quality_tables.worlds, "quality/statistics.json"),
    "quality-signs": (quality_tables.signs, "quality/signs.json"),
    "expect": (expect.table, "expect.json"),
    "expect-baselines": (expect.baselines, "expect.json"),
    "expect-first": (expect.first_screen, "expect.json"),
    "card-line": (card.line, "kernels/h100.json"),
    "card-measured": (card.measured_table, "kernels/h100.json"),
    "card-exact": (card.exact_table, "kernels/h100.json"),
    "card-select": (card.select_table, "kernels/h100.json"),
    "card-attention": (card.attention_table, "kernels/h100.json"),
    "card-others": (card.others_table, "kernels/h100.json"),
    "card-counters": (card.counters_table, "kernels/h100.json"),
    "card-composed": (card.composed_sum, "kernels/h100.json"),
    "table-1": (served.table, served.RECORD),
    "table-1-line": (served.line, served.RECORD),
    "table-1-slices": (served.slices_table, served.RECORD),
    "table-1-rehearsed": (served.rehearsed, served.REHEARSAL_RECORD),
    "card-power": (card.power_line, "kernels/h100.json"),
}
"""Generated parts: what makes them, and from which record below benchmarks/results."""


def render(name: str, results: Path) -> str:
    """Render one generated part; "not measured" where its file is missing.

    Raises:
        BenchError: no part has this name.
    """
    if name not in PARTS:
        raise BenchError(f"no generated part is called {name!r}; there are {', '.join(PARTS)}")
    make, path = PARTS[name]
    if path and not (results / path).exists():
        return f"{NOT_MEASURED}\n"
    return make(json.loads((results / path).read_text(encoding="utf-8")) if path else None)


def fill(text: str, results: Path) -> str:
    """Make every marked part of ``text`` anew; a mark within a line, as a table's, holds one."""

    def block(match: re.Match[str]) -> str:
        part = render(match[2], results)
        return match[1] + (part if match[3] else part.strip()) + match[4]

    return _MARKED.sub(block, text)


def write(*, only_check: bool = False) -> None:
    """Fill the pages.

    Raises:
        SystemExit: with ``only_check``, a page would change; none is then written.
    """
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = fill(before, ROOT / RESULTS)
        if after != before:
            if only_check:
                raise SystemExit(f"{page} is out of date: python -m benchmarks.readme")
            path.write_text(after, encoding="utf-8")


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    write(only_check=parser.parse_args().check)


if __name__ == "__main__":
    main()
