"""Plans, and the requests of a batch, for tests that only care for some of their fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.rows import RequestIds


def plan(text: str = "FSFS", **fields: Any) -> Plan:
    """A static plan of pattern ``text`` for a GLM-5 that ships every indexer; ``fields`` differ."""
    pattern, layers = Pattern(text), tuple(range(len(Pattern(text))))
    full = Pattern.full(len(Pattern(text)))
    return replace(Plan(pattern, "test", "static", full, layers, "GlmMoeDsaForCausalLM"), **fields)


def requests(patterns: Iterable[str | Pattern]) -> RequestIds:
    """Return a batch's requests, one a pattern."""
    parsed = [Pattern(p) if isinstance(p, str) else p for p in patterns]
    requests_of = [SimpleNamespace(rid=str(n), indexcache_pattern=p) for n, p in enumerate(parsed)]
    return RequestIds(requests_of)  # type: ignore[arg-type]
