"""What the pages say is there: files, commands, options; and the pages stay short."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from sglang_indexcache.cli import app

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sglang_indexcache"
PAGES = sorted([ROOT / "README.md", ROOT / "csrc" / "README.md", *(ROOT / "docs").glob("*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]

FILE = re.compile(r"`((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|sh|md|yaml|toml|h|cu|cuh))?|[\w.-]+\.py)`")
GENERATED = re.compile(r"<!-- (\S+) -->.*?<!-- /\1 -->", re.DOTALL)
"""Made from records, which name commands as they were then."""
COMMAND = re.compile(r"\bindexcache ((?:[a-z][a-z-]*)(?: [a-z][a-z-]*)?)(?=[ `\n.,;:)])")


@cache
def tracked() -> tuple[set[str], set[str]]:
    """Every file and folder of the repository as ``/path``, and the names of the folders."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path("/") / name for name in listed.stdout.splitlines()]
    folders = {parent for file in files for parent in file.parents}
    return {str(f) for f in files} | {f"{f}/" for f in folders}, {f.name for f in folders}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    paths, folders = tracked()
    named = set(FILE.findall(page.read_text()))
    # Folders that the repository has nowhere are a user's, or SGLang's.
    ours = [name for name in named if "/" not in name or name.split("/")[0] in folders]
    assert [name for name in ours if not any(path.endswith(f"/{name}") for path in paths)] == []


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        yield " ".join((*path, name))
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_commands_that_a_page_names_exist(page: Path) -> None:
    known = set(commands(typer.main.get_command(app)))
    for named in COMMAND.findall(GENERATED.sub("", page.read_text()).replace("\n", " ")):
        assert named in known, f"{page.name} names `indexcache {named}`"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_a_page_has_the_name_of_its_folder_or_of_its_readers() -> None:
    names = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"architecture", "operating"}
    folders = {path.name for path in (*PACKAGE.iterdir(), *ROOT.iterdir()) if path.is_dir()}
    assert names <= folders


@pytest.mark.parametrize(("name", "most"), [("README.md", 150), ("docs/architecture.md", 95)])
def test_the_first_pages_stay_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most
