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

from benchmarks import recent_window, search_tables, window_search
from benchmarks.kernels import unions, yardstick
from sglang_indexcache.bench import tables
from sglang_indexcache.bench.results import load
from sglang_indexcache.bench.tables import NOT_MEASURED, Grid
from sglang_indexcache.errors import BenchError
from sglang_indexcache.serving.features import FEATURES

ROOT = Path(__file__).parents[1]
PAGES = tuple(
    Path(page)
    for page in (
        "README.md",
        "docs/benchmarks.md",
        "benchmarks/results/quality/README.md",
        "benchmarks/results/search/README.md",
        "benchmarks/results/latency/README.md",
        "docs/serving.md",
        "benchmarks/results/heal.md",
        "docs/patterns.md",
        "benchmarks/results/window/README.md",
        "benchmarks/results/kernels/README.md",
    )
)
RESULTS = Path("benchmarks/results")

_RENAMED = "indexcache make-model", "indexcache demo model"
"""A command in the notes of records, which keep what was typed, and what it is called now."""
_MARKED = re.compile(r"(<!-- generated:([\w-]+) -->\n).*?(<!-- /generated:\2 -->)", re.DOTALL)


def _latency(folder: Path, path: str) -> str:
    result = load(folder / path)
    text = tables.latency_grid(result).to_markdown() + "\n" + tables.conditions(result)
    return text.replace(*_RENAMED)


def _features(_folder: Path, _path: str) -> str:
    """What combines with what, as ``serving/features.py`` has it."""
    header = ("feature", "static", "live", "known by")
    rows = tuple(
        (f"{f.name} (`{f.flag}`)" if f.flag else f.name, f.static, f.live, f.evidence)
        for f in FEATURES
    )
    return Grid("", header, rows).to_markdown()


def _amdahl(folder: Path, path: str) -> str:
    grid = tables.amdahl_grid(load(folder / path))
    return grid.to_markdown() if grid else NOT_MEASURED + "\n"


def _memory(folder: Path, path: str) -> str:
    return tables.memory_grid(load(folder / path)).to_markdown()


def _quality_errors(folder: Path, path: str) -> str:
    """How often simulated evaluations said what is not so, and what is."""
    found = json.loads((folder / path).read_text())
    rows = []
    for row in found["rows"]:
        world, loses = row["world"], row["world"]["loss"] > 0
        wrong, right = ("no_loss", "loss") if loses else ("any_loss", "no_loss")
        times = round(world["loss"] * (1 - 2 * world["noise"]) / world["margin"])
        beside = f"; {world['rows']} rows beside 5 x {world['made']}" if world["rows"] else ""
        rows.append(
            (
                f"{100 * world['discordance']:g} % differ, tied by {world['correlation']:g}"
                + beside,
                f"loses {times} x the margin" if loses else "loses nothing",
                "" if row["pairing"] == "by context" else row["pairing"],
                f"{100 * row[wrong]:.1f} %",
                f"{100 * row[right]:.1f} %",
            )
        )
    title = f"{found['evaluations']:,} simulated evaluations a row"
    header = ("questions", "the pattern", "mistake", "wrong", "right")
    return Grid(title, header, tuple(rows)).to_markdown()


def _quality_worlds(folder: Path, path: str) -> str:
    """How often rare, whole losses were called none."""
    found = json.loads((folder / path).read_text())
    rows = tuple(
        (
            row["world"],
            str(row["contexts"]),
            *(
                f"{100 * row[label][claim]:.1f} %"
                for label in ("at_margin", "at_none")
                for claim in ("no_loss", "loss")
            ),
        )
        for row in found["held_back"]
    )
    title = f"{found['evaluations']:,} simulated evaluations a row"
    header = (
        "what is lost",
        "contexts",
        "loses the margin: no loss (wrong)",
        "a loss",
        "loses nothing: no loss",
        "a loss (wrong)",
    )
    return Grid(title, header, rows).to_markdown()


def _quality_measures(folder: Path, path: str) -> str:
    """With how many documents three measures see a loss, and how they order patterns."""
    from benchmarks import quality_measures

    found = json.loads((folder / path).read_text())
    grids = (quality_measures.table(found), quality_measures.orders(found))
    return "\n".join(grid.to_markdown() for grid in grids)


def _expect(folder: Path, path: str) -> str:
    """What to expect by model, card and context."""
    from benchmarks import expect

    return expect.table(json.loads((folder / path).read_text()))


def _expect_checks(folder: Path, path: str) -> str:
    """How far that can be trusted."""
    from benchmarks import expect

    return expect.checks(json.loads((folder / path).read_text()))


def _healing(folder: Path, path: str) -> str:
    """What healing gives back, beside serving untrained and training everything."""
    from benchmarks import heal_study

    return heal_study.table(json.loads((folder / path).read_text())["lines"])


def _healing_grid(folder: Path, path: str) -> str:
    """The same for other settings of healing."""
    from benchmarks import heal_study

    return heal_study.grid_table(json.loads((folder / path).read_text())["grid"])


def _healing_data(folder: Path, path: str) -> str:
    """What it gives back when its data lack the task that is asked."""
    from benchmarks import heal_data

    return heal_data.table(json.loads((folder / path).read_text())["lines"])


def _request_patterns(folder: Path, path: str) -> str:
    """What it costs that a request may have a pattern of its own."""
    from benchmarks import request_patterns

    return request_patterns.table(json.loads((folder / path).read_text()))


def _healing_memory(folder: Path, path: str) -> str:
    """Peak memory of a step by the length of its row."""
    from benchmarks import heal_memory

    return heal_memory.table(json.loads((folder / path).read_text())["rows"])


def _window(folder: Path, path: str) -> str:
    """Points against all F, by pattern and window."""
    found = json.loads((folder / path).read_text())["cells"]
    return recent_window.table(found) if found else f"{NOT_MEASURED}\n"


def _window_digest(folder: Path, path: str) -> str:
    """The rows that a first reader needs."""
    found = json.loads((folder / path).read_text())["cells"]
    patterns = ("uniform:1/4", "1/4", "uniform:1/6")
    shown = [
        cell
        for cell in found
        if cell["length"] == 512 and cell["pattern"] in patterns and cell["window"] in (0, 8)
    ]
    return recent_window.table(shown)


def _window_losses(folder: Path, path: str) -> str:
    """Thousandths of a nat over all F, by pattern and window."""
    return recent_window.table(json.loads((folder / path).read_text())["losses"])


def _window_search(folder: Path, path: str) -> str:
    """Thousandths of a nat over all F, by what chose the pattern, and by window."""
    return window_search.table(json.loads((folder / path).read_text())["searches"])


def _window_heal(folder: Path, path: str) -> str:
    """Thousandths of a nat over all F, by steps of healing, and by window."""
    return window_search.healing_table(json.loads((folder / path).read_text())["healings"])


def _yardstick(table: Callable[[dict[str, Any]], str]) -> Callable[[Path, str], str]:
    """A table of our kernels beside the engine's."""
    return lambda folder, path: table(json.loads((folder / path).read_text()))


PARTS: dict[str, tuple[Callable[[Path, str], str], str]] = {
    "features": (_features, ""),
    "latency-cpu": (_latency, "latency/cpu/latency.json"),
    "amdahl-cpu": (_amdahl, "latency/cpu/latency.json"),
    "memory-cpu": (_memory, "latency/cpu/latency.json"),
    "latency-cpu-dp-attention": (_latency, "latency/cpu-dp-attention/latency.json"),
    "amdahl-cpu-dp-attention": (_amdahl, "latency/cpu-dp-attention/latency.json"),
    "search-47": (search_tables.landscapes, "search/synthetic-47.json"),
    "search-78": (search_tables.landscapes, "search/synthetic-78.json"),
    "search-races": (search_tables.races, "search/races.json"),
    "search-levels": (search_tables.levels, "search/objectives.json"),
    "search-searched": (search_tables.searched, "search/objectives.json"),
    "search-ranks": (search_tables.ranks, "search/objectives.json"),
    "search-served": (search_tables.served, "search/tiny-dsa/served.json"),
    "search-shipped": (search_tables.shipped, "search/tiny-dsa"),
    "quality-errors": (_quality_errors, "quality/statistics.json"),
    "quality-worlds": (_quality_worlds, "quality/statistics.json"),
    "quality-measures": (_quality_measures, "quality/measures.json"),
    "healing": (_healing, "heal.json"),
    "healing-grid": (_healing_grid, "heal.json"),
    "healing-data": (_healing_data, "heal_data.json"),
    "healing-memory": (_healing_memory, "heal_memory.json"),
    "expect": (_expect, "expect.json"),
    "expect-checks": (_expect_checks, "expect.json"),
    "request-patterns": (_request_patterns, "request_patterns.json"),
    "window": (_window, "window/result.json"),
    "window-digest": (_window_digest, "window/result.json"),
    "window-losses": (_window_losses, "window/result.json"),
    "window-search": (_window_search, "window_search/result.json"),
    "window-heal": (_window_heal, "window_search/result.json"),
    "yardstick-factors": (_yardstick(yardstick.factors_table), "kernels/yardstick.json"),
    "yardstick-prefill": (_yardstick(yardstick.prefill_table), "kernels/yardstick.json"),
    "yardstick-decode": (_yardstick(yardstick.decode_table), "kernels/yardstick.json"),
    "unions": (_yardstick(unions.table), "kernels/unions.json"),
}
"""Generated parts: what makes them, and from which file below benchmarks/results."""


def render(name: str, results: Path) -> str:
    """One generated part; "not measured" where its file is missing.

    Raises:
        BenchError: no part has this name, or its file is malformed.
    """
    if name not in PARTS:
        raise BenchError(f"no generated part is called {name!r}; there are {', '.join(PARTS)}")
    make, path = PARTS[name]
    if path and not (results / path).exists():
        return f"{NOT_MEASURED}\n"
    return make(results, path)


def fill(text: str, results: Path) -> str:
    """``text`` with every marked part made anew."""
    return _MARKED.sub(lambda found: found[1] + render(found[2], results) + found[3], text)


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    only_check = parser.parse_args().check
    for page in PAGES:
        path = ROOT / page
        before = path.read_text(encoding="utf-8")
        after = fill(before, ROOT / RESULTS)
        if after != before:
            if only_check:
                raise SystemExit(f"{page} is out of date: python -m {__spec__.name}")
            path.write_text(after, encoding="utf-8")


if __name__ == "__main__":
    main()
