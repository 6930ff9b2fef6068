"""Print how large everything is beside what was planned: ``make size``.

A report and not a test: a good change may be long, and whoever reads it decides whether it is worth
its lines.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import grimp

from tests.cli.test_help import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGE = "sglang_indexcache"
PLUGIN, CPU_PLATFORM = f"{PACKAGE}.serving.plugin", f"{PACKAGE}.serving.cpu"
SOURCES = ("*.py", "*.cu", "*.cuh", "*.h", "*.cpp")
PLANNED_LINES = {PACKAGE: 23_500, "tests": 33_000, "benchmarks": 9_000, "csrc": 5_000}
PLANNED_MODULES, PLANNED_OPTIONS, PLANNED_WORDS = 145, 100, 22_000
PLANNED_FOR_A_SERVER = 7_000
OF_EVERY_COMMAND = {"help", "install_completion", "show_completion"}
RECORDS = ROOT / "benchmarks" / "results"


def sizes() -> list[tuple[str, int, int]]:
    """Return what is counted, how many there are, and how many were planned."""
    rows = [
        (f"lines of {folder}/", _lines(_files(ROOT / folder, *SOURCES)), planned)
        for folder, planned in PLANNED_LINES.items()
    ]
    rows.append(("lines that a server on GPUs needs", _lines(_of_a_server()), PLANNED_FOR_A_SERVER))
    modules = list(_files(ROOT / PACKAGE, "*.py"))
    rows.append((f"modules of {PACKAGE}/", len(modules), PLANNED_MODULES))
    parameters = [parameter.name for command in COMMANDS.values() for parameter in command.params]
    options = [name for name in parameters if name not in OF_EVERY_COMMAND]
    rows.append(("options and arguments", len(options), PLANNED_OPTIONS))
    rows.append(("words of pages outside the records", _words(), PLANNED_WORDS))
    return rows


def _files(folder: Path, *patterns: str) -> Iterable[Path]:
    return (path for pattern in patterns for path in folder.rglob(pattern))


def _of_a_server() -> Iterable[Path]:
    """Yield the modules that are imported from the plugin on, without the CPU platform."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True)
    graph.remove_module(CPU_PLATFORM)
    for module in graph.find_upstream_modules(PLUGIN) | {PLUGIN}:
        path = ROOT / module.replace(".", "/")
        if not module.startswith(f"{CPU_PLATFORM}."):
            yield path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _words() -> int:
    """Count the words of the pages that git follows, without records and the bars of tables."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    pages = [ROOT / name for name in listed.stdout.splitlines()]
    texts = (page.read_text() for page in pages if RECORDS not in page.parents)
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)


def _lines(paths: Iterable[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


if __name__ == "__main__":
    for name, count, planned in sizes():
        print(f"{name:38}{count:8,}  of {planned:,}")
