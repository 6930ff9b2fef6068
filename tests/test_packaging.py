"""What the wheel needs is there wherever it is built, and an extra brings what it is for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tomllib

from sglang_indexcache.cli.common import EXTRAS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
PARTS = [
    "pyproject.toml",
    PROJECT["project"]["readme"],
    *PROJECT["project"]["license-files"],
    *WHEEL["packages"],
    *WHEEL["force-include"],
]
IMAGES = sorted((ROOT / "docker").glob("Dockerfile*"))
OPTIONAL = PROJECT["project"]["optional-dependencies"]


def packages(requirements: list[str]) -> set[str]:
    found = (re.match(r"[\w-]+", requirement) for requirement in requirements)
    return {match[0] for match in found if match}


@pytest.mark.parametrize("part", PARTS)
def test_images_get_every_part_of_the_wheel(part: str) -> None:
    assert (ROOT / part).exists()
    for image in IMAGES:
        copied = {
            source
            for line in image.read_text().splitlines()
            if line.startswith("COPY ")
            for source in line.split()[1:-1]
        }
        assert part in copied, f"{image.name} does not copy {part}"


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_install_what_serves_and_nothing_else(image: Path) -> None:
    assert re.findall(r"pip install .*?('?\.\S*)$", image.read_text(), re.M) == ["'.[serve]'"]


def test_the_base_is_small() -> None:
    assert packages(PROJECT["project"]["dependencies"]) == {
        *("httpx", "pydantic", "pyyaml", "rich", "typer")
    }


def test_extras_bring_what_they_are_for() -> None:
    assert OPTIONAL["serve"] == ["sglang==0.5.23"]
    assert packages(OPTIONAL["search"]) >= {"numpy", "scipy", "matplotlib", "transformers"}
    assert "sglang" not in packages(OPTIONAL["search"] + OPTIONAL["train"] + OPTIONAL["test"])
    assert set(EXTRAS.values()) <= set(OPTIONAL)
