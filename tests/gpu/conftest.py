"""The order of the GPU tests, and what each needs: without it, it is skipped with the reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.fixtures.machine import Need, lacking

ORDER = ("start", "served", "kernels")
"""What a user of a card wants to know first, and what everything else stands on."""
IS_REHEARSAL = bool(os.environ.get("INDEXCACHE_REHEARSAL"))
"""Whether these run on the stage (tests/rehearsal), whose references take short lists."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, sort and skip what is in this folder, but for the tests of the tests themselves."""
    ours = {f"test_{name}.py": place for place, name in enumerate(ORDER)}
    on_card = [item for item in items if item.path.parent == Path(__file__).parent]
    on_card = [item for item in on_card if item.path.name in ours]
    for item in on_card:
        item.add_marker("gpu")
        needs = [need for need in get_args(Need) if need == "card" or item.get_closest_marker(need)]
        if why := lacking(*needs):
            item.add_marker(pytest.mark.skip(reason=why))
    ranked = iter(sorted(on_card, key=lambda item: ours[item.path.name]))
    items[:] = [next(ranked) if item in on_card else item for item in items]


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Yield a place for what a test measures; it is written into the report if there is one."""
    measured: dict[str, Any] = {}
    request.node.gpu_evidence = measured
    return measured


@pytest.fixture(scope="session")
def remembered() -> dict[str, str]:
    """Return a place for what later tests of the same run need not find out again."""
    return {}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shipped checkpoint in the widths that DSA's CUDA kernels are compiled for."""
    from tests.rehearsal.widened import widen

    model = widen(tmp_path_factory.mktemp("served") / "model", heads=64, index_heads=32)
    if IS_REHEARSAL:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "index_topk": 128}))
    return model


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    """Cut source code that training never saw: selection matters on two, one fits into k."""
    from tests.rehearsal.widened import real_text

    # They overlap: some Pythons' libraries leave few held-out tokens, and prefixes are not cached.
    return [tuple(real_text(start, n)) for start, n in ((0, 5000), (1500, 3001), (4000, 700))]
