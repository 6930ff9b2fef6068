"""One yardstick for our kernels and the engine's: what it rests on, and what it may not say."""

import json
import re
from importlib.util import find_spec

import numpy as np
import pytest

from benchmarks.kernels import unions, yardstick
from benchmarks.records import RESULTS
from sglang_indexcache.lab.bench.rows import ENGINE, Wheel

PAGE = RESULTS / "kernels" / "README.md"
COMMITTED = json.loads((RESULTS / "kernels" / "yardstick.json").read_text())
UNION = yardstick.unions(json.loads((RESULTS / "kernels" / "unions.json").read_text()))
needs_rows = pytest.mark.skipif(
    find_spec("aiconfigurator_core") is None, reason="needs the plan extra"
)


@pytest.mark.parametrize("card", yardstick.CARDS)
def test_no_loop_of_ours_is_faster_than_the_best_published_products(card: str) -> None:
    implied = COMMITTED["cards"][card]["implied"]
    assert implied["indexer_tflops"] < yardstick.GEMM_TFLOPS
    assert implied["attention_tflops"] < yardstick.ATTENTION_TFLOPS


def test_the_bound_refuses_what_was_published_once() -> None:
    """Factors of 1.1 and 1 stood under the old forecast, where DeepGEMM's own was 1.3 to 1.5."""
    implied = yardstick.rates({"indexer": (1.1, 1.1), "attention": (1.0, 1.0)})
    assert implied["indexer_tflops"] > yardstick.GEMM_TFLOPS


@needs_rows
@pytest.mark.parametrize("card", yardstick.CARDS)
def test_the_factor_gives_the_engine_s_own_time(card: str) -> None:
    """DeepGEMM's modelled clocks, times the factor, are what 161,792 more tokens cost it."""
    engine = yardstick.Engine(card)
    longer = engine.logits.points[194_560] - engine.logits.points[32_768]
    for clocks, factor in zip(yardstick.DEEP_GEMM, engine.factors()["indexer"], strict=True):
        pieces = 8192 * 32 * 161_792 / (128 * 256)
        assert pieces / 132 * clocks * factor / 1.7e6 == pytest.approx(longer, rel=0.03)


@needs_rows
def test_a_kernel_with_the_engine_s_clocks_is_as_fast_as_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yardstick, "ATTEND", yardstick.FLASH_MLA)
    engine = yardstick.Engine("h200")
    ours = yardstick.attend(64, UNION, engine.factors()["attention"], kept=True)
    assert ours == pytest.approx((engine.attention, engine.attention))


@needs_rows
def test_the_record_is_what_the_rows_give() -> None:
    record = json.loads(json.dumps(yardstick.record(UNION)))
    assert record == {name: COMMITTED[name] for name in record}


@needs_rows
@pytest.mark.parametrize("card", yardstick.CARDS)
def test_what_the_page_says_that_the_rows_do_not_hold(card: str) -> None:
    """The page's tables have no line that the rows do not hold."""
    import pyarrow.parquet as parquet

    folder = Wheel(card)._folder / "sparse_attention" / ENGINE
    names = ["op_name", "kernel_source", "model", "num_heads"]
    tables = [parquet.read_table(file, columns=names) for file in folder.glob("*.parquet")]
    rows = [row for table in tables for row in table.group_by(names).aggregate([]).to_pylist()]
    ours = [row for row in rows if not row["op_name"].startswith("dsv4")]
    modules = {row["kernel_source"] for row in ours if row["op_name"].startswith("dsa")}
    alone = {(row["kernel_source"], row["model"]) for row in ours}
    alone = {(kernel, model) for kernel, model in alone if kernel not in modules}
    kernels = ("deep_gemm.fp8_mqa_logits", "fast_topk_transform_fused", "flash_mla_sparse_fwd")
    assert alone == {(kernel, "zai-org/GLM-5") for kernel in kernels}
    assert not [kernel for kernel in modules if re.search("triton|q8", kernel)]
    bare = [row for row in ours if row["op_name"].endswith("skip_indexer")]
    assert {row["num_heads"] for row in bare} == {8, 16, 32, 64}
    models = {row["kernel_source"]: row["model"] for row in rows if row not in ours}
    for kernel in ("deep_gemm.fp8_paged_mqa_logits", "topk_transform_v2"):
        assert "DeepSeek-V4" in models[kernel]


def test_the_union_of_lists_is_that_of_sets() -> None:
    draw = np.random.default_rng(3)
    lists = np.stack([draw.permutation(40)[:8] for _ in range(30)])
    for rows in (1, 3, 8):
        sizes = unions.union_sizes(lists, rows, 40)
        starts = range(8, 30 - rows + 1, rows)
        want = [len({int(x) for row in lists[at : at + rows] for x in row}) / 8 for at in starts]
        np.testing.assert_allclose(sizes, want)


def test_the_page_is_short_and_calls_a_model_a_model() -> None:
    text = PAGE.read_text()
    assert len(text.splitlines()) <= 150
    assert "modelled" in text
    assert "goal" not in text.lower()
