"""Numbers in sentences."""

from __future__ import annotations


def counted(count: int, name: str) -> str:
    """``1 look``, ``1,200 looks``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"
