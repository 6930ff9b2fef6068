"""The code in docs/heal.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs" / "heal.md"


def blocks() -> list[str]:
    """Return the page's Python code."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_a_plain_loop_trains_the_indexer() -> None:
    torch.manual_seed(0)
    scope = run(blocks()[0], {})
    for name in ("wq", "wk", "w"):
        assert scope[name].weight.grad.abs().sum() > 0
    assert scope["losses"][-1] < 0.9 * scope["losses"][0]
