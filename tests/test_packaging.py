"""What the wheel needs is there wherever it is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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


@pytest.mark.parametrize("part", PARTS)
def test_images_get_every_part_of_the_wheel(part: str) -> None:
    assert (ROOT / part).exists()
    for image in (ROOT / "docker").glob("Dockerfile*"):
        copied = {
            source
            for line in image.read_text().splitlines()
            if line.startswith("COPY ")
            for source in line.split()[1:-1]
        }
        assert part in copied, f"{image.name} does not copy {part}"
