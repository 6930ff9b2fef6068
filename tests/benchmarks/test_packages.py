"""Downloads that studies share: several at once, one that fails, one that was stopped."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.smollm2.packages import fetch

SLOW = "import time; file = open('text', 'w'); time.sleep(0.2); file.write('whole')"


def test_two_studies_that_want_the_same_file_both_get_it(tmp_path: Path) -> None:
    def read(_: int) -> str:
        return fetch([sys.executable, "-c", SLOW], tmp_path / "cache" / "name==1").read_text()

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(read, range(3))] == ["whole"] * 3
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["name==1"]


@pytest.mark.parametrize("failing", ["raise SystemExit(1)", SLOW + "; raise KeyboardInterrupt"])
def test_nothing_is_kept_of_a_download_that_fails(failing: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot download name==1: see"):
        fetch([sys.executable, "-c", failing], tmp_path / "name==1")
    assert not [*tmp_path.iterdir()]
    assert fetch([sys.executable, "-c", SLOW], tmp_path / "name==1").read_text() == "whole"
