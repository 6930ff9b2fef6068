"""Sharing composed for models whose rows have the indexer in every layer, on made-up rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.bench.growth import MODELS, GrowthForecast, find
from sglang_indexcache.lab.bench.plan import plan_grid

M3 = MODELS["MiniMax-M3"]


def forwards(
    folder: Path, changed: Mapping[int, float] = {}, kv: str = "", gpus: int = 8
) -> GrowthForecast:
    """A chunk takes 2 ms and 1 us a token of prefix; a step 1 ms and 10 ns, or ``changed``."""
    for phase, first, slope in (("context", 2.0, 1e-3), ("generation", 1.0, 1e-5)):
        changes = changed if phase == "generation" else {}
        rows = [
            {
                "model": M3.name, "tp_size": 8, "kv_cache_dtype": "bfloat16", "batch_size": 1,
                "isl": 8192 if phase == "context" else 1, "step": step,
                "latency": changes.get(step, first + slope * step),
            }
            for step in (0, 2048, 8192, 16_384, 32_768, 65_536)
        ]  # fmt: skip
        path = folder / f"h200_sxm/{M3.table}_{phase}_module_perf.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return GrowthForecast(M3, "h200", gpus, kv, folder, lambda *_: 1000.0)


def test_s_layers_save_what_rows_grow_by(tmp_path: Path) -> None:
    """Three chunks, behind 0, 8,192 and 16,384 tokens; the last is half as long."""
    source = forwards(tmp_path)
    [(name, quarter)] = source.patterns(["mine=1/4"])
    assert name == "mine"
    saved = 42 * 1e-3 * ((8192 - 2048) + (16_384 - 2048) / 2)
    gain = source.gain("prefill", quarter, 20_480)
    assert gain is not None
    assert gain.milliseconds == 3000
    assert gain.gain == pytest.approx(3000 / (3000 - saved))
    step = source.gain("decode", quarter, 50_000)  # between two rows
    assert step is not None
    assert step.gain == pytest.approx(1000 / (1000 - 42 * 1e-5 * (50_000 - 2048)))
    assert step.off == pytest.approx(0, abs=1e-9)
    assert source.gain("decode", quarter, 100) == source.gain("decode", quarter, 2048)


def test_nothing_is_said_beyond_the_rows(tmp_path: Path) -> None:
    source = forwards(tmp_path)
    [(_, half)] = source.patterns(["1/2"])
    assert source.gain("decode", half, 65_537) is None
    assert source.gain("prefill", half, 65_536 + 3 * 8192) is None
    assert source.gain("full", half, 8192) is None


def test_a_row_slower_than_longer_ones_is_left_out(tmp_path: Path) -> None:
    """DeepSeek-V4's steps below 64K tokens took twice as long as at 128K: another top-k."""
    [(_, quarter)] = (source := forwards(tmp_path, {16_384: 500.0})).patterns(["1/4"])
    right = forwards(tmp_path / "right").gain("decode", quarter, 16_384)
    gain_left = source.gain("decode", quarter, 16_384)
    assert gain_left is not None
    assert right is not None
    assert gain_left.gain == pytest.approx(right.gain)


def test_what_a_gain_may_be_off_by_is_a_part_of_the_time_that_is_left(tmp_path: Path) -> None:
    """A kink at 32,768, which its neighbours do not foretell: the error of what lies beyond it."""
    kinked = forwards(tmp_path, {32_768: 1.2, 65_536: 5.0})
    [(_, quarter)] = kinked.patterns(["1/4"])
    gain = kinked.gain("decode", quarter, 40_000)
    late = 1.2 + (5.0 - 1.2) * (40_000 - 32_768) / 32_768
    predicted = (1.16384 * 2 + 5.0) / 3  # between 16,384 and 65,536
    wrong = late * (predicted / 1.2 - 1)
    assert gain is not None
    assert gain.off == pytest.approx(42 * wrong / (1000 - 42 * (late - 1.02048)))


def test_the_reader_is_told_that_it_is_composed_and_was_not_run(tmp_path: Path) -> None:
    source = forwards(tmp_path)
    patterns = source.patterns(["1/2", "1/4", "F" + 56 * "S"])
    assert [len(pattern.full_layers) for _, pattern in patterns] == [29, 15, 1]
    assert "over every indexer, composed: Mini" in plan_grid(source, patterns, [8192]).title
    text = " ".join(source.sources)
    for words in ("has run on no GPU", "sums, measured nowhere", "SGLang 0.5.16", "a lower bound"):
        assert words in text


def test_what_no_rows_are_of_is_refused(tmp_path: Path) -> None:
    assert find("MiniMaxAI/minimax-m3") is M3
    assert find("sgl-project/DeepSeek-V4-Flash-FP8") is MODELS["DeepSeek-V4-Flash"]
    assert find("GLM-5-FP8") is None
    with pytest.raises(BenchError, match=r"NVIDIA measured no layers of .* --tp 4"):
        forwards(tmp_path, gpus=4)
    with pytest.raises(BenchError, match="rows is bf16 or fp8"):
        forwards(tmp_path, kv="fp4")
    for value, message in (("1/0", "no pattern of this model"), ("FS", "has 57 indexers, not 2")):
        with pytest.raises(BenchError, match=message):
            forwards(tmp_path).patterns([value])
