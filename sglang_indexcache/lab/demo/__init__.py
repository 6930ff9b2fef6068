"""The small trained checkpoint that examples, tests and a first try serve."""

from __future__ import annotations

from pathlib import Path


def shipped_checkpoint() -> Path:
    """Return the folder of a DSA model: 12 layers in GLM-5's shape, all F (recipe ``tiny-dsa``)."""
    return Path(__file__).parent / "tiny-dsa"
