"""The plan of a deployment before it is rented; how it is composed is ``benchmarks``'."""

from __future__ import annotations

import pytest

from sglang_indexcache.errors import BenchError, LibraryError
from sglang_indexcache.lab.latency.forecast import (
    NO_RATE,
    Composed,
    choose_patterns,
    find_composed,
    plan_grid,
)
from sglang_indexcache.pattern import Pattern

FEW = Pattern("FSSS")
COSTS = {
    "prefill": [(100.0, 10.0), (300.0, 50.0), None],
    "row split": [(70.0, 4.0), (200.0, 20.0), None],
    "decode": [(10.0, 1.0), (12.0, 2.0), (16.0, 3.0)],
}
MADE_UP = Composed("m", "h200", 1, "glm-5", 4, "title", (1000, 2000, 3000), COSTS, ())


def test_a_pattern_saves_the_indexers_of_its_s_layers() -> None:
    gain = MADE_UP.gain("prefill", FEW, 1000)
    assert gain is not None
    assert (gain.milliseconds, gain.gain) == (100.0, pytest.approx(100 / 70))
    split = MADE_UP.gain("prefill", FEW, 1000, split=True)
    assert split is not None
    assert split.gain == pytest.approx(100 / 58)
    between = MADE_UP.gain("decode", FEW, 2500)
    assert between is not None
    assert (between.milliseconds, between.gain) == (14.0, pytest.approx(14 / 6.5))


@pytest.mark.parametrize("context", [999, 2001, 3000, 3001])
def test_nothing_is_said_beyond_the_rows(context: int) -> None:
    assert MADE_UP.gain("prefill", FEW, context) is None


def test_what_the_reader_is_told() -> None:
    deployment = find_composed("zai-org/glm-5-fp8", "H200", 1)
    patterns, _ = choose_patterns(["1/2", "quarter=1/4"], deployment.shape)
    grid = plan_grid(deployment, patterns, [32_768, 300_000])
    assert "composed" in grid.title
    assert [row[0] for row in grid.rows] == [
        *("Prefill of one prompt a rank", "every indexer, s"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),  # the library's
        *("every indexer, row split", "1/2, row split", "quarter, row split"),
        *("Decode, one request a rank", "every indexer, ms a step"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),
    ]
    assert {row[2] for row in grid.rows if row[1:]} == {NO_RATE}
    sources = " ".join(deployment.sources)
    assert "NVIDIA's rows of SGLang 0.5.14 on H200" in sources
    assert "every rank still makes all index queries" in sources


def test_a_replica_of_one_rank_has_no_rows_to_split() -> None:
    grid = plan_grid(find_composed("GLM-5-FP8", "b200", 8), [("full", Pattern.full(78))], [32_768])
    assert not any("row split" in row[0] for row in grid.rows)


def test_a_ratio_without_a_pattern_is_evenly_spaced_and_said_so() -> None:
    [(name, pattern)], [note] = choose_patterns(["1/4"], "deepseek-v3.2")
    assert (name, str(pattern)) == ("1/4", str(Pattern.uniform(61, 4)))
    assert "No 1/4 pattern of deepseek-v3.2 is known" in note
    with pytest.raises(LibraryError):
        choose_patterns(["glm-6-1of4"], "glm-5")


@pytest.mark.parametrize("asked", [("30b", "h200", 1), ("GLM-5-FP8", "h100", 1)])
def test_what_nobody_composed_is_refused_with_what_there_is(asked: tuple[str, str, int]) -> None:
    with pytest.raises(BenchError, match=r"or its weights do not fit\. There are GLM-5-FP8 on"):
        find_composed(*asked)
