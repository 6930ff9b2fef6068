"""Ways in which ranks share the rows of a prefill, on made-up layers and on NVIDIA's rows."""

from __future__ import annotations

import pytest

from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.latency.forecast import (
    Deployment,
    Forwards,
    plan,
    plan_grid,
    plan_to_json,
)
from sglang_indexcache.lab.latency.row_split import ContextParallelLayers, RowSplitLayers, share_of
from sglang_indexcache.lab.latency.rows import Kind, LatencyEstimate, Layers, Series
from sglang_indexcache.pattern import Pattern

RANKS, PREFIXES = 8, (0, 100_000)
SIZES = (512, 1024, 8192)


def index_ms(tokens: int, prefix: float) -> float:
    """Milliseconds of a made-up indexer: 1 for a million pairs."""
    return tokens * (prefix + tokens / 2) / 1e6


def made_up() -> Layers:
    """Layers whose attention takes a microsecond a row, and an F layer its indexer besides."""
    prefill = {
        (kind, size): Series({x: size * 1e-3 + index_ms(size, x) * (kind == "F") for x in PREFIXES})
        for kind in ("F", "S")
        for size in SIZES
    }
    return Layers("made up", prefill, {})  # type: ignore[arg-type]


def gather(milliseconds: float) -> Series:
    return Series({0: milliseconds, 1 << 40: milliseconds})


def milliseconds(layers: RowSplitLayers | ContextParallelLayers, kind: Kind, prefix: int) -> float:
    latency = layers.chunk(kind, 8192, prefix)
    assert isinstance(latency, LatencyEstimate)
    return latency.value


@pytest.mark.parametrize("prefix", [0, 40_000])
def test_a_share_has_as_many_pairs_as_any(prefix: int) -> None:
    rows, before = share_of(8192, prefix, RANKS)
    assert (rows, RANKS * index_ms(rows, before)) == (1024, index_ms(8192, prefix))


def test_a_split_indexer_takes_its_share_and_the_gather() -> None:
    """So does what every rank still does for all rows; an S layer takes what it took."""
    split = RowSplitLayers(made_up(), RANKS, gather(0.2), 8192, lambda rows: rows * 1e-4)
    again = (8192 - 1024) * 1e-4
    expected = 8.192 + index_ms(8192, 50_000) / RANKS + 0.2 + again
    assert milliseconds(split, "F", 50_000) == pytest.approx(expected)
    assert milliseconds(split, "S", 50_000) == pytest.approx(8.192)


def test_what_does_not_pay_is_not_split() -> None:
    split = RowSplitLayers(made_up(), RANKS, gather(1000.0), 8192, lambda _: 0.0)
    assert milliseconds(split, "F", 0) == pytest.approx(8.192 + index_ms(8192, 0))


def test_context_parallel_ranks_attend_with_their_share_as_well() -> None:
    parallel = ContextParallelLayers(made_up(), RANKS, gather(0.1), 656)
    expected = 1.024 + index_ms(8192, 50_000) / RANKS + 0.1
    assert milliseconds(parallel, "F", 50_000) == pytest.approx(expected)
    assert milliseconds(parallel, "S", 50_000) == pytest.approx(1.124)


def test_nothing_is_said_beyond_the_rows() -> None:
    split = RowSplitLayers(made_up(), RANKS, gather(0.2), 8192, lambda _: 0.0)
    assert split.chunk("F", 8192, 99_000) is None
    assert RowSplitLayers(made_up(), RANKS, Series({1: 0.1}), 1, lambda _: 0.0).chunk(
        "F", 8192, 0
    ) is None  # fmt: skip


def test_nvidias_rows_say_what_each_way_gains() -> None:
    """The split gains more with the prompt, sharing adds to it, and the base stays the same."""
    pytest.importorskip("aiconfigurator_core")
    forwards = plan("GLM-5-FP8", "h200", 8, 1, "", ways=("row split", "prefill CP"))
    every, quarter = Pattern.full(78), Pattern("F" * 22 + "S" * 56)
    split = [forwards.gain("prefill", every, n, "row split") for n in (60_000, 200_000)]
    assert split[0] is not None
    assert split[1] is not None
    assert 1 < split[0].gain < split[1].gain
    both = forwards.gain("prefill", quarter, 200_000, "row split")
    alone = forwards.gain("prefill", quarter, 200_000)
    assert both is not None
    assert alone is not None
    assert both.milliseconds == alone.milliseconds
    assert both.gain > max(split[1].gain, alone.gain)
    grid = plan_grid(forwards, [("1/4", quarter)], [200_000])
    names = [row[0] for row in grid.rows]
    assert "every indexer, row split" in names
    assert "1/4, prefill CP" in names
    split = plan_to_json(forwards, [("1/4", quarter)], [200_000])["row_split"]
    assert [(row["way"], row["name"]) for row in split] == [
        (way, name) for way in ("row split", "prefill CP") for name in ("every indexer", "1/4")
    ]
    assert any("every rank still makes all index queries" in text for text in forwards.sources)


def test_a_replica_of_one_rank_has_nothing_to_share() -> None:
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(BenchError, match=r"row split: each replica of GLM-5-FP8.* has one rank"):
        Forwards(Deployment("GLM-5-FP8", "h200", 8, 8)).deal_out("row split")
