"""The code in docs/training.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "training.md"


def test_the_code_for_other_trainers_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 1
    found: dict[str, object] = {}
    exec(compile(blocks[0], str(PAGE), "exec"), found)
    for name in ("wq", "wk", "w"):
        assert found[name].weight.grad.abs().sum() > 0  # type: ignore[attr-defined]
