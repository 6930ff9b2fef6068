"""Print how large everything is beside what was planned: ``make size``.

A report and not a test: a good change may be long, and whoever reads it decides whether it is worth
its lines.
"""

from __future__ import annotations

from pathlib import Path

from tests.cli.test_help import COMMANDS

ROOT = Path(__file__).parent.parent
PLANNED_LINES = {"sglang_indexcache": 24_500, "tests": 27_000, "benchmarks": 7_500}
PLANNED_MODULES, PLANNED_COMMANDS = 150, 18
OF_EVERY_COMMAND = {"help", "install_completion", "show_completion"}
REHEARSAL = ROOT / "tests" / "rehearsal"
"""Counted apart: it grows with SGLang's paths, and not with the package."""


def sizes() -> list[tuple[str, int, int | None]]:
    """Return what is counted, how many there are, and how many were planned."""
    rows: list[tuple[str, int, int | None]] = []
    for folder, planned in PLANNED_LINES.items():
        paths = [path for path in (ROOT / folder).rglob("*.py") if REHEARSAL not in path.parents]
        rows.append((f"lines of {folder}/", _lines(paths), planned))
    rows.append(("lines of tests/rehearsal/", _lines(list(REHEARSAL.rglob("*.py"))), None))
    modules = list((ROOT / "sglang_indexcache").rglob("*.py"))
    rows.append(("modules of sglang_indexcache/", len(modules), PLANNED_MODULES))
    rows.append(("commands", len(COMMANDS), PLANNED_COMMANDS))
    parameters = [parameter.name for command in COMMANDS.values() for parameter in command.params]
    options = [name for name in parameters if name not in OF_EVERY_COMMAND]
    rows.append(("options and arguments", len(options), None))
    return rows


def _lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


if __name__ == "__main__":
    for name, count, planned in sizes():
        print(f"{name:32}{count:8,}" + (f"  of {planned:,}" if planned else ""))
