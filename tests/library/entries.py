"""A pattern file that is right, for tests that break it or lay several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

GOOD = {
    "name": "mine",
    "model": {"name": "m", "architectures": ["GlmMoeDsaForCausalLM"], "num_layers": 4},
    "pattern": "FSFS",
    "full_layers": 2,
    "retention": "1/2",
    "method": {"name": "greedy"},
    "source": {"title": "here"},
}


def write(folder: Path, content: Any, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path
