"""The pages say what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import readme
from sglang_indexcache.errors import BenchError


@pytest.mark.parametrize("page", readme.PAGES, ids=str)
def test_pages_are_up_to_date(page: Path) -> None:
    text = (readme.ROOT / page).read_text(encoding="utf-8")
    assert "<!-- generated:" in text
    assert readme.fill(text, readme.ROOT / readme.RESULTS) == text, (
        "run python -m benchmarks.readme"
    )


def test_a_part_without_a_result_says_so(tmp_path: Path) -> None:
    text = "a\n<!-- generated:latency-cpu -->\nold\n<!-- /generated:latency-cpu -->\nb\n"
    assert readme.fill(text, tmp_path) == text.replace("old", "not measured")
    with pytest.raises(BenchError, match="no generated part is called"):
        readme.fill(text.replace("latency-cpu", "speed"), tmp_path)
