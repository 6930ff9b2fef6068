"""Files, commands and options that the pages name are there; and the pages stay short."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from sglang_indexcache.cli import app
from sglang_indexcache.serving.options import OPTIONS
from tests.launch_lines import indexcache_lines, shell_in

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglang_indexcache"
GUIDES = sorted((ROOT / "docs").glob("*.md"))
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
        *(page for page in RESULTS.rglob("*.md") if "<!-- generated:" in page.read_text()),
        *(ROOT / folder / "README.md" for folder in ("csrc", "examples", "benchmarks", "tests")),
        ROOT / "benchmarks" / "training" / "README.md",
        *GUIDES,
    }
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

FILE = re.compile(
    r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|sh|md|yaml|toml|h|cu|cuh))?|[\w.-]+\.py)`"
    r"(?! (?:of |\()commit)"
)
"""But what a page says an earlier commit had."""
COMMAND = re.compile(r"(?<![\w-])indexcache ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)(?=[ `\n.,;:)])")
MODULE = re.compile(r"python -m ((?:benchmarks|sglang_indexcache)(?:\.[a-z]\w*)+)")


@cache
def tracked() -> tuple[set[str], set[str]]:
    """Return every file and folder of the repository as ``/path``, and the names of the folders."""
    process = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path("/") / name for name in process.stdout.splitlines()]
    folders = {parent for file in files for parent in file.parents}
    return {str(f) for f in files} | {f"{f}/" for f in folders}, {f.name for f in folders}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    paths, folders = tracked()
    names = set(FILE.findall(page.read_text()))
    # Folders that the repository has nowhere are a user's, or SGLang's.
    ours = [name for name in names if "/" not in name or name.split("/")[0] in folders]
    assert [name for name in ours if not any(path.endswith(f"/{name}") for path in paths)] == []


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        yield " ".join((*path, name))
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    names = set(commands(typer.main.get_command(app)))
    for name in COMMAND.findall(page.read_text().replace("\n", " ")):
        assert name in names, f"{page.name} names `indexcache {name}`"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_options_that_a_page_shows_exist(page: Path) -> None:
    for line in indexcache_lines(shell_in(page.read_text())):
        assert line.unknown(typer.main.get_command(app)) == [], " ".join(line.words)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_modules_that_a_page_runs_exist(page: Path) -> None:
    for name in MODULE.findall(page.read_text()):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target
            # A study's picture appears with its record; until then its table says "not measured".
            is_due = file.suffix == ".png" and not file.with_suffix(".json").exists()
            assert file.exists() or is_due, f"{page.name} links to {target}"


def anchors(page: Path) -> set[str]:
    """Return what a link into the page may name, as forges make it of a heading."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_into_a_page_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", page.read_text()):
        if "://" not in target:
            file = page.parent / target if target else page
            assert anchor in anchors(file), f"{page.name} links to {target}#{anchor}"


@pytest.mark.parametrize(
    ("page", "most"),
    [(ROOT / "README.md", 150), *((guide, 200) for guide in GUIDES)],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_pages_stay_short(page: Path, most: int) -> None:
    assert len(page.read_text().splitlines()) <= most


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_cell_of_a_table_is_no_paragraph(page: Path) -> None:
    """Generated parts, between their marks, may be longer."""
    generated = re.compile(r"<!-- generated:(.*?) -->.*?<!-- /generated:\1 -->", re.DOTALL)
    by_hand = generated.sub("", page.read_text())
    rows = [line for line in by_hand.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    assert [cell for cell in cells if len(cell.split()) > 40] == []


def test_every_guide_is_found_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert {guide.name for guide in GUIDES} == set(re.findall(r"docs/([\w-]+\.md)", text))


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_a_server_is_started_one_way(guide: Path) -> None:
    assert "python -m sglang.launch_server" not in guide.read_text()


def test_one_table_has_every_flag_of_a_server_and_its_variable() -> None:
    rows = re.findall(
        r"^\| `(--indexcache-\S+)` \| `(\w+)` \|", (ROOT / "docs/patterns.md").read_text(), re.M
    )
    assert sorted(rows) == sorted((option.flag, option.variable) for option in OPTIONS)


DENIED = re.compile(
    "no GPU has run any|no answer was compared|No model was served on a GPU|none has been made"
)
"""Sentences that were true before a card ran our kernels and a server of ours."""


def test_nothing_says_that_no_gpu_ran_what_the_record_says_it_ran() -> None:
    record = json.loads((ROOT / "benchmarks/results/kernels/h100.json").read_text())
    steps = {name: step for run in record["runs"] for name, step in run["steps"].items()}
    served = [
        outcome["outcome"]
        for name, step in steps.items()
        for test, outcome in step.get("tests", {}).items()
        if name.startswith("served") and test.endswith("tokens_are_stocks")
    ]
    assert "passed" in served
    assert steps["grid topk"]["said"]["passed"] > 0
    sources = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]
    assert not [
        str(path.relative_to(ROOT))
        for path in sources
        if path.name not in ("CHANGELOG.md", Path(__file__).name)
        and DENIED.search(path.read_text())
    ]
