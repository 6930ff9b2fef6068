"""The planner: against the paper where it measured, on made-up rows, and on NVIDIA's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.bench.forward import MODELS, Deployment, Forwards
from sglang_indexcache.bench.plan import (
    NO_RATE,
    Composed,
    OwnRows,
    Roofline,
    choose_patterns,
    choose_source,
    plan_grid,
    range_said,
)
from sglang_indexcache.bench.results import amdahl, paper_speedup, save
from sglang_indexcache.bench.roofline import GPUS, prefill_layer, sum_selected
from sglang_indexcache.bench.shapes import PRESETS, ModelShape, checkpoint_of
from sglang_indexcache.errors import BenchError, LibraryError
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from tests.bench.made_up import write_rows
from tests.bench.test_tables import result as latency_result

FLASH, GLM = PRESETS["30b"], PRESETS["glm-5"]
FOUR_DOZEN = FLASH.model_copy(update={"layers": 48})  # the made-up servers' layers
FP8 = Deployment("GLM-5-FP8", "h200")


def library(ratio: str) -> Pattern:
    return Library.default().resolve(ratio, checkpoint_of(FLASH)).pattern


# -- a roofline, for shapes that nobody measured ----------------------------------------------


@pytest.mark.parametrize("ratio", ["1/2", "1/4"])
@pytest.mark.parametrize("length", [60_000, 120_000, 200_000])
def test_the_papers_prefill(ratio: str, length: int) -> None:
    """Within a tenth of Table 1, from rates alone (at 10K launches and scheduling dominate)."""
    shape = dict(checkpoint_of(FLASH).shape)
    cited = paper_speedup(shape, library(ratio), "prefill")[f"{length // 1000}K"]
    found = Roofline(FLASH, "h100").cell("prefill", library(ratio), length)
    assert found is not None
    assert found.gain == pytest.approx(cited, rel=0.1)


def test_a_roofline_knows_nothing_of_decode() -> None:
    assert Roofline(FLASH, "h100").cell("decode", library("1/4"), 200_000) is None


def test_the_paper_is_cited_for_its_own_shape_only() -> None:
    shape = dict(checkpoint_of(FLASH).shape)
    quarter = Pattern.uniform(47, 4)  # as fast as the searched one: it has as many F layers
    assert paper_speedup(shape, quarter, "decode")["200K"] == pytest.approx(86 / 58)
    assert paper_speedup(shape, quarter, "full")["200K"] == pytest.approx(297 / 197)
    assert paper_speedup(shape, Pattern.uniform(47, 3), "prefill") == {}
    five = dict(checkpoint_of(GLM).shape)
    assert paper_speedup(five, Pattern.uniform(78, 4), "prefill") == {}


@given(
    st.sampled_from(list(PRESETS.values())),
    st.integers(1, 8),
    st.lists(st.integers(20_000, 1_000_000), min_size=2, max_size=4, unique=True),
)
def test_more_sharing_and_longer_contexts_gain_more(
    shape: ModelShape, ratio: int, lengths: list[int]
) -> None:
    source = Roofline(shape, "h200")
    speeds = []
    for length in sorted(lengths):
        one, two = (
            source.cell("prefill", Pattern.uniform(shape.layers, r), length)
            for r in (ratio, ratio + 1)
        )
        assert one is not None
        assert two is not None
        assert 1 <= one.gain <= two.gain
        speeds.append(one.gain)
    assert speeds == sorted(speeds)


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


# -- measured rows, made up: every latency below is a formula of tests/bench/made_up.py --------


def test_a_prompt_is_the_sum_of_its_chunks(tmp_path: Path) -> None:
    """Three chunks; F 2 ms + 1 us a token of prefix, S 2 ms, around a layer what its parts take."""
    found = Forwards(FP8, write_rows(tmp_path)).prefill(20, 3 * 8192)
    assert found is not None
    indexed = sum(2 + 1e-3 * prefix for prefix in (0, 8192, 16384))
    layers = 20 * indexed + 58 * 3 * 2
    products = 2 * 0.01 * 78 + 0.01 * 75  # of shared experts or dense MLPs, and of routers
    around = 2 * 0.25 * 78 + 1.0 * 75 + products + 0.01
    norms = 78 * 2 * 1e3 * 8192 * 6144 * 8 / (4.8e12 * 0.8)
    # Products are scaled from the nearest that was measured, which here has another size.
    assert found.value == pytest.approx(layers + 3 * (around + norms), rel=0.02)
    assert found.off == pytest.approx(0, abs=1e-9)


def test_a_step_between_rows(tmp_path: Path) -> None:
    """F 100 us + 1 us a thousand tokens, S 50 us: their difference is what an indexer takes."""
    forwards = Forwards(FP8, write_rows(tmp_path))
    both = [forwards.decode(count, 1, 100_000) for count in (78, 0)]
    assert both[0] is not None
    assert both[1] is not None
    assert both[0].value - both[1].value == pytest.approx(78 * (0.050 + 0.100), rel=1e-6)


def test_nothing_is_said_beyond_the_rows(tmp_path: Path) -> None:
    source = Composed(FP8, write_rows(tmp_path))
    quarter = Pattern.uniform(78, 4)
    assert source.cell("prefill", quarter, 131_072 + 8192) is not None
    assert source.cell("prefill", quarter, 131_072 + 3 * 8192) is None
    assert source.cell("decode", quarter, 300_000) is None


def test_rows_that_contradict_others_are_named_and_left_out(tmp_path: Path) -> None:
    """The S layer of 32K is made slower than its F layer: neighbours stand for it."""
    wrong = Forwards(FP8, write_rows(tmp_path / "a", {("S", 8192, 32_768): 99.0}))
    assert "S, 8,192 tokens behind 32,768: 99 ms, but 2 with more before it" in wrong.contradictions
    right = Forwards(FP8, write_rows(tmp_path / "b"))
    assert wrong.prefill(20, 65_536) == right.prefill(20, 65_536)
    # Before the longest prefix nothing is longer: the F layer beside it tells.
    last = Forwards(FP8, write_rows(tmp_path / "c", {("S", 8192, 131_072): 299.0}))
    assert "but 133 with its indexer" in last.contradictions[0]


def test_where_held_out_rows_are_missed_by_a_tenth_there_is_no_rate(tmp_path: Path) -> None:
    """A kink that no neighbour foretells: beside it nothing is said, elsewhere as before."""
    kink = {("F", 8192, prefix): 200.0 for prefix in (65_536, 131_072)}
    source = Composed(FP8, write_rows(tmp_path, kink))
    none = Pattern.full(78)
    assert source.cell("prefill", none, 16_384) is not None
    assert source.cell("prefill", none, 131_072) is None
    grid = plan_grid(source, [("full", none)], [16_384, 131_072])
    assert grid.rows[2][1:] == ("1.00x", NO_RATE)


def test_what_the_reader_is_told(tmp_path: Path) -> None:
    source = Composed(FP8, write_rows(tmp_path))
    patterns, said = choose_patterns(["1/2", "1/4"], FP8.shape)
    assert [len(pattern.full_layers) for _, pattern in patterns] == [40, 22]  # the library's
    assert not said
    sources = " ".join(source.sources)
    assert "NVIDIA's rows of SGLang 0.5.14 on H200" in sources
    assert "S layers of zai-org/GLM-5.2-FP8" in sources
    assert "off by 0% at worst" in range_said(source, patterns, [32_768])
    assert "DO NOT FIT" not in sources
    on_h100 = Composed(Deployment("GLM-5-FP8", "h100"), write_rows(tmp_path, card="h100_sxm"))
    assert "THE WEIGHTS DO NOT FIT: 94 GB a GPU, H100 SXM has 80" in " ".join(on_h100.sources)


def test_a_ratio_without_a_pattern_is_evenly_spaced_and_said_so() -> None:
    [(name, pattern)], [said] = choose_patterns(["1/4"], PRESETS["deepseek-v3.2"])
    assert (name, str(pattern)) == ("1/4", str(Pattern.uniform(61, 4)))
    assert "No 1/4 pattern of deepseek-v3.2 is known" in said
    with pytest.raises(LibraryError):
        choose_patterns(["glm-6-1of4"], GLM)


def test_models_by_name_and_by_folder(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows")
    assert "GLM-5-FP8" in choose_source("zai-org/glm-5-fp8", "H200", 8, 1, "", data)[1].title
    config = {
        **{name: getattr(GLM, ours) for name, ours in _CONFIG.items()},
        "architectures": ["GlmMoeDsaForCausalLM"], "n_shared_experts": 1,
        "first_k_dense_replace": 3, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "GLM-5-FP8" in choose_source(str(tmp_path), "h200", 8, 1, "", data)[1].title
    shape, source = choose_source("30b", "h200", 1, 1, "", data)
    assert (shape, type(source)) == (FLASH, Roofline)


_CONFIG = {
    "num_hidden_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads",
    "q_lora_rank": "q_lora", "kv_lora_rank": "kv_lora", "qk_nope_head_dim": "nope",
    "qk_rope_head_dim": "rope", "v_head_dim": "v", "index_n_heads": "index_heads",
    "index_head_dim": "index_dim", "index_topk": "topk", "n_routed_experts": "experts",
    "num_experts_per_tok": "active_experts", "moe_intermediate_size": "expert_width",
    "intermediate_size": "dense_width", "vocab_size": "vocab",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("glm-5-fp8", "a100", 8, 1, ""), "no rates are known for 'a100'"),
        (("glm-5-fp8", "h200", 8, 3, ""), "shares the GPUs evenly"),
        (("glm-5-fp8", "h200", 8, 1, "fp4"), "the KV cache is fp8 or bf16"),
        (("glm-5-fp8", "h200", 4, 1, ""), "have no layers of zai-org/GLM-5-FP8 with 16 heads"),
        (("glm-6", "h200", 8, 1, ""), "glm-6 is neither a folder nor a known model"),
    ],
)
def test_deployments_that_cannot_be(
    tmp_path: Path, arguments: tuple[str, str, int, int, str], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        choose_source(*arguments, write_rows(tmp_path))


def test_a_wheel_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .* reads the tables of aiconfigurator-core"):
        Forwards(FP8, tmp_path)


def test_a_missing_wheel_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_indexcache.bench.rows.find_spec", lambda _: None)
    with pytest.raises(BenchError, match=r"pip install 'sglang-indexcache\[plan\]'"):
        Forwards(FP8)


# -- a reader's own rows -----------------------------------------------------------------------


def own_rows(folder: Path, share: float | None = None) -> Path:
    measured = latency_result("cuda", share=share)
    model = measured.model.model_copy(update={"shape": dict(checkpoint_of(FOUR_DOZEN).shape)})
    save(measured.model_copy(update={"model": model}), folder / "latency.json")
    return folder / "latency.json"


def test_what_was_measured_is_taken_as_it_is(tmp_path: Path) -> None:
    own = OwnRows(own_rows(tmp_path), FOUR_DOZEN)
    cell = own.cell("decode", Pattern.uniform(48, 4), 200_000)
    assert cell is not None
    assert cell.gain == pytest.approx(1.5)
    assert own.cell("decode", Pattern.uniform(48, 4), 100_000) is None


def test_other_patterns_follow_by_amdahls_law(tmp_path: Path) -> None:
    """A quarter of the indexers gave 1.5x, so three quarters take 1 - 1/1.5 of the time."""
    cell = OwnRows(own_rows(tmp_path), FOUR_DOZEN).cell("prefill", Pattern.uniform(48, 2), 200_000)
    assert cell is not None
    assert cell.gain == pytest.approx(amdahl((1 / 3) / 0.75, 0.5))


def test_the_difference_is_shown(tmp_path: Path) -> None:
    quarter = Pattern.uniform(48, 4)
    source, own = Roofline(FOUR_DOZEN, "h100"), OwnRows(own_rows(tmp_path), FOUR_DOZEN)
    grid = plan_grid(source, [("1/4", quarter)], [200_000], own)
    cell = source.cell("prefill", quarter, 200_000)
    assert cell is not None
    assert grid.rows[2] == ("1/4, yours", f"1.50x ({1.5 / cell.gain - 1:+.0%})")


def test_own_rows_of_another_shape_or_baseline(tmp_path: Path) -> None:
    path = own_rows(tmp_path)
    with pytest.raises(BenchError, match="measured with another shape than glm-5"):
        OwnRows(path, GLM)
    data = json.loads(path.read_text())
    data["configurations"][0]["pattern"] = str(Pattern.uniform(48, 2))
    path.write_text(json.dumps(data))
    with pytest.raises(BenchError, match="not the full pattern"):
        OwnRows(path, FOUR_DOZEN)
    with pytest.raises(BenchError, match="cannot read"):
        OwnRows(tmp_path / "missing.json", FOUR_DOZEN)


# -- NVIDIA's rows, where the wheel is installed -----------------------------------------------


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
@pytest.mark.parametrize("model", ["GLM-5-FP8", "DeepSeek-V3.2"])
def test_measured_rows_give_the_papers_gains(model: str, gpu: str) -> None:
    """At 1/4 from 100K on at least 1.3x, in prefill and decode, as the paper says of GLM-5."""
    pytest.importorskip("aiconfigurator_core")
    shape, source = choose_source(model, gpu, 8, 1, "")
    patterns, _ = choose_patterns(["1/2", "1/4"], shape)
    for metric in ("prefill", "decode"):
        gains = []
        for context in (32_000, 64_000, 128_000):
            half, quarter = (source.cell(metric, p, context) for _, p in patterns)  # type: ignore[arg-type]
            assert half is not None
            assert quarter is not None
            assert 1 < half.gain < quarter.gain
            gains.append(quarter.gain)
        assert gains == sorted(gains)
        assert gains[-1] >= 1.3
    at_most = source.cell("prefill", patterns[1][1], 200_000)
    assert (at_most is None) == (model == "DeepSeek-V3.2")  # its rows end at 163,840


def test_every_measured_model_has_rows() -> None:
    pytest.importorskip("aiconfigurator_core")
    for name in MODELS:
        assert Forwards(Deployment(name, "h200")).layers.prefill
