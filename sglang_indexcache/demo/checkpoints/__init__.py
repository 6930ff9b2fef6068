"""The small trained checkpoint that ships with the package: for the demo, the tests, the search."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.errors import CheckpointError

SHIPPED = "tiny-dsa"
"""12 layers in GLM-5's shape, all F, made by the recipe of the same name."""


def shipped_checkpoint(name: str = SHIPPED) -> Path:
    """The folder of a checkpoint that comes with the package.

    Raises:
        CheckpointError: no such checkpoint.
    """
    folder = Path(__file__).parent / name
    if not (folder / "config.json").exists():
        raise CheckpointError(f"no checkpoint named {name} comes with this package")
    return folder
