"""What the wheel needs is there wherever it is built, and an extra brings what it is for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from sglang_indexcache.cli.common import EXTRAS
from sglang_indexcache.serving.seams import SUPPORTED_VERSION

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
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "EXPOSE", "ENTRYPOINT", "CMD"}
OPTIONAL = PROJECT["project"]["optional-dependencies"]


def packages(requirements: list[str]) -> set[str]:
    found = (re.match(r"[\w-]+", requirement) for requirement in requirements)
    return {match[0] for match in found if match}


def steps(image: Path) -> list[tuple[str, str]]:
    """Each instruction of a recipe and what follows it."""
    lines = [line for line in image.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n *", "", "\n".join(lines))
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines()]


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_are_recipes(image: Path) -> None:
    instructions = [instruction for instruction, _ in steps(image)]
    assert set(instructions) <= INSTRUCTIONS
    assert instructions[-1] in ("CMD", "ENTRYPOINT")


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_get_every_part_of_the_wheel(image: Path) -> None:
    copied = {
        source
        for instruction, rest in steps(image)
        if instruction == "COPY"
        for source in rest.split()[:-1]
    }
    assert {*PARTS} <= copied
    assert {source for source in copied if not (ROOT / source).exists()} == set()


def test_images_hold_the_supported_version() -> None:
    version = re.compile(r"(?<![\d.])\d+\.\d+\.\d+(?![\d.])")  # and not an address
    found = {image.name: set(version.findall(image.read_text())) for image in IMAGES}
    assert found == {"Dockerfile": {SUPPORTED_VERSION}, "Dockerfile.cpu": set()}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_images_install_what_serves_and_nothing_else(image: Path) -> None:
    assert re.findall(r"pip install .*?('?\.\S*)$", image.read_text(), re.M) == ["'.[serve]'"]


def test_the_base_is_small() -> None:
    assert packages(PROJECT["project"]["dependencies"]) == {
        *("httpx", "pydantic", "pyyaml", "rich", "typer")
    }


def test_extras_bring_what_they_are_for() -> None:
    assert OPTIONAL["serve"] == [f"sglang=={SUPPORTED_VERSION}"]
    assert packages(OPTIONAL["eval"]) >= {"numpy", "scipy", "matplotlib", "transformers"}
    assert OPTIONAL["search"] == ["sglang-indexcache[eval]", "torch>=2.6"]
    assert packages(OPTIONAL["heal"]) >= {"accelerate", "matplotlib", "pyarrow", "torch"}
    assert "torch" not in packages(OPTIONAL["plots"] + OPTIONAL["eval"])
    assert "sglang" not in packages(OPTIONAL["search"] + OPTIONAL["heal"] + OPTIONAL["test"])
    assert set(EXTRAS.values()) <= set(OPTIONAL)
