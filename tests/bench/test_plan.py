"""The planner: against the paper where it measured, against arithmetic elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sglang_indexcache.bench.plan import RooflineRates, memory, predict, read_rates
from sglang_indexcache.bench.results import paper_speedup, save
from sglang_indexcache.bench.roofline import GPUS, busy_experts, prefill_layer, sum_selected
from sglang_indexcache.bench.shapes import PRESETS, ModelShape, checkpoint_of
from sglang_indexcache.cli import app
from sglang_indexcache.errors import BenchError
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from tests.bench.test_tables import result as latency_result

FLASH = PRESETS["30b"]
FOUR_DOZEN = FLASH.model_copy(update={"layers": 48})  # the made-up servers' layers


def library(ratio: str) -> Pattern:
    return Library.default().resolve(ratio, checkpoint_of(FLASH)).pattern


@pytest.mark.parametrize("ratio", ["1/2", "1/4"])
@pytest.mark.parametrize("length", [60_000, 120_000, 200_000])
def test_the_papers_prefill(ratio: str, length: int) -> None:
    """Within a tenth of Table 1, from rates alone (at 10K launches and scheduling dominate)."""
    shape = dict(checkpoint_of(FLASH).shape)
    cited = paper_speedup(shape, library(ratio), "prefill")[f"{length // 1000}K"]
    rates = RooflineRates(FLASH, GPUS["h100"], "bf16")
    found = predict(FLASH, rates, library(ratio), length, 800_000)
    assert found.prefill == pytest.approx(cited, rel=0.1)


def test_the_paper_is_cited_for_its_own_shape_only() -> None:
    shape = dict(checkpoint_of(FLASH).shape)
    quarter = Pattern.uniform(47, 4)  # as fast as the searched one: it has as many F layers
    assert paper_speedup(shape, quarter, "decode")["200K"] == pytest.approx(86 / 58)
    assert paper_speedup(shape, quarter, "full")["200K"] == pytest.approx(297 / 197)
    assert paper_speedup(shape, Pattern.uniform(47, 3), "prefill") == {}
    five = PRESETS["glm-5"]
    assert paper_speedup(dict(checkpoint_of(five).shape), Pattern.uniform(78, 4), "prefill") == {}


@given(
    st.sampled_from(list(PRESETS.values())),
    st.integers(1, 8),
    st.lists(st.integers(20_000, 1_000_000), min_size=2, max_size=4, unique=True),
)
def test_more_sharing_and_longer_contexts_gain_more(
    shape: object, ratio: int, lengths: list[int]
) -> None:
    assert shape in PRESETS.values()
    rates = RooflineRates(shape, GPUS["h200"])  # type: ignore[arg-type]
    layers = shape.layers  # type: ignore[attr-defined]
    fewer, more = Pattern.uniform(layers, ratio), Pattern.uniform(layers, ratio + 1)
    speeds = []
    for length in sorted(lengths):
        one = predict(shape, rates, fewer, length, 2_000_000)  # type: ignore[arg-type]
        two = predict(shape, rates, more, length, 2_000_000)  # type: ignore[arg-type]
        assert 1 <= one.prefill <= two.prefill
        assert 1 <= one.decode <= two.decode
        assert 1 <= one.full <= two.full
        speeds.append(one.prefill)
    assert speeds == sorted(speeds)


def test_the_all_full_pattern_gains_nothing() -> None:
    rates = RooflineRates(FLASH, GPUS["h100"])
    found = predict(FLASH, rates, Pattern.full(47), 100_000, 800_000)
    assert (found.prefill, found.decode, found.full) == (1.0, 1.0, 1.0)


def test_indexer_work_at_200k() -> None:
    """163.8 TFLOP of scores a layer (2 * 200K^2 / 2 * 32 * 128), 160 GB that the top-k reads."""
    one = prefill_layer(FLASH, GPUS["h100"], 200_000)
    projections = 2 * 200_000 * FLASH.indexer_parameters / (0.6 * 989e12)
    reads = 160e9 / (0.8 * 3.35e12)
    assert one.indexer == pytest.approx(163.8e12 / 1145e12 + reads + projections, rel=1e-3)
    assert one.full == pytest.approx(one.indexer + one.shared)


@given(st.integers(1, 300), st.integers(1, 100))
def test_selected_tokens(length: int, topk: int) -> None:
    assert sum_selected(length, topk) == sum(min(seen, topk) for seen in range(1, length + 1))


def test_memory_is_that_of_the_layouts() -> None:
    found = memory(FLASH, Pattern.uniform(47, 4), "fp8")
    assert found.index_k_full == 47 * 132
    assert found.index_k == 12 * 132
    assert found.tokens_gained == pytest.approx((47 * 788) / (47 * 656 + 12 * 132) - 1)


def test_rates_of_servers_that_told_no_share(tmp_path: Path) -> None:
    """As on a GPU: the share is the one that explains the sparsest pattern's speed-up."""
    measured = latency_result("cuda", share=None)
    model = measured.model.model_copy(update={"shape": dict(checkpoint_of(FOUR_DOZEN).shape)})
    save(measured.model_copy(update={"model": model}), tmp_path / "latency.json")
    rates = read_rates(tmp_path / "latency.json", FOUR_DOZEN)
    quarter = predict(FOUR_DOZEN, rates, Pattern.uniform(48, 4), 200_000, 400_000)
    assert (quarter.prefill, quarter.decode, quarter.full) == pytest.approx((1.5, 1.5, 1.5))
    half = predict(FOUR_DOZEN, rates, Pattern.uniform(48, 2), 200_000, 400_000)
    share = (1 - 1 / 1.5) / 0.75
    assert half.prefill == pytest.approx(1 / (1 - share / 2))
    assert rates.indexer_share("prefill", 60_000, 1) is None
    fewer_heads = FOUR_DOZEN.model_copy(update={"index_heads": 8})
    for other in (FLASH, fewer_heads):
        with pytest.raises(BenchError, match="another shape"):
            read_rates(tmp_path / "latency.json", other)


def test_rates_need_an_all_full_baseline(tmp_path: Path) -> None:
    measured = latency_result()
    model = measured.model.model_copy(update={"shape": dict(checkpoint_of(FOUR_DOZEN).shape)})
    turned = measured.configurations[::-1]
    other = measured.model_copy(update={"model": model, "configurations": turned})
    save(other, tmp_path / "latency.json")
    with pytest.raises(BenchError, match="baseline of these rates is quarter"):
        read_rates(tmp_path / "latency.json", FOUR_DOZEN)


@given(st.sampled_from(list(PRESETS.values())), st.integers(1, 500))
def test_busy_experts(shape: ModelShape, tokens: int) -> None:
    busy = busy_experts(shape, tokens) - shape.shared_experts
    assert busy <= min(shape.experts, tokens * shape.active_experts) + 1e-9
    assert busy_experts(shape, 1) == pytest.approx(shape.active_experts + shape.shared_experts)
    assert busy_experts(shape, tokens + 1) >= busy_experts(shape, tokens)


def test_the_command() -> None:
    runner = CliRunner()
    good = runner.invoke(
        app, ["bench", "plan", "--model", "30b", "--pattern", "1/4", "--context", "200K"]
    )
    assert good.exit_code == 0, good.output
    assert "roofline of H100 SXM, not a measurement" in " ".join(good.output.split())
    for arguments, message in (
        (["--model", "30b", "--gpu", "a100"], "no rates are known"),
        (["--model", "nothing"], "no shape is called"),
        (["--model", "deepseek-v3.2", "--pattern", "1/4"], "uniform:1/4"),
        (["--model", "30b", "--pattern", "FS"], "too short"),
        (["--model", "30b", "--context", "far"], "a length is a number of tokens"),
        (["--model", "30b", "--context", "900K"], "holds no request"),
        (["--model", "30b", "--kv", "int4"], "fp8 or bf16"),
        (["--model", "30b", "--tp", "0"], "at least one rank"),
    ):
        bad = runner.invoke(app, ["bench", "plan", *arguments])
        assert bad.exit_code == 1, arguments
        assert message in " ".join(bad.output.split()), bad.output
