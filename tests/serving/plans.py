"""Plans for tests that only care for some of their fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.settings import Plan


def plan(text: str = "FSFS", **fields: Any) -> Plan:
    """A static plan of pattern ``text`` for a GLM-5 that ships every indexer; ``fields`` differ."""
    pattern, layers = Pattern(text), tuple(range(len(Pattern(text))))
    own = Pattern.full(len(Pattern(text)))
    return replace(Plan(pattern, "test", "static", own, layers, "GlmMoeDsaForCausalLM"), **fields)
