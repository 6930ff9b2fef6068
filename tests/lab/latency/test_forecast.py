"""The planner, on made-up rows and on NVIDIA's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_indexcache.errors import BenchError, CheckpointError, LibraryError
from sglang_indexcache.lab.latency.forecast import (
    MODELS,
    NO_RATE,
    Deployment,
    Forwards,
    choose_patterns,
    find_model,
    plan,
    plan_grid,
    plan_to_json,
)
from sglang_indexcache.lab.latency.rows import Kind, Layers, RowSplitLayers, Series
from sglang_indexcache.library.sizes import checkpoint_of
from sglang_indexcache.models import SHAPES
from sglang_indexcache.pattern import Pattern
from tests.lab.latency.made_up import write_rows

FP8 = Deployment("GLM-5-FP8", "h200")


# -- measured rows, made up: every latency below is a formula of tests/lab/latency/made_up.py -----


def test_a_prompt_is_the_sum_of_its_chunks(tmp_path: Path) -> None:
    """Three chunks; F 2 ms + 1 us a token of prefix, S 2 ms, around a layer what its parts take."""
    prompt = Forwards(FP8, write_rows(tmp_path)).prefill(20, 3 * 8192)
    assert prompt is not None
    indexed = sum(2 + 1e-3 * prefix for prefix in (0, 8192, 16384))
    layers = 20 * indexed + 58 * 3 * 2
    products = 2 * 0.01 * 78 + 0.01 * 75  # of shared experts or dense MLPs, and of routers
    around = 2 * 0.25 * 78 + 1.0 * 75 + products + 0.01
    norms = 78 * 2 * 1e3 * 8192 * 6144 * 8 / (4.8e12 * 0.8)
    # Products are scaled from the nearest that was measured, which here has another size.
    assert prompt.value == pytest.approx(layers + 3 * (around + norms), rel=0.02)
    assert prompt.off == pytest.approx(0, abs=1e-9)


def test_a_step_between_rows(tmp_path: Path) -> None:
    """F 100 us + 1 us a thousand tokens, S 50 us: their difference is what an indexer takes."""
    forwards = Forwards(FP8, write_rows(tmp_path))
    ends = [forwards.decode(count, 100_000) for count in (78, 0)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert ends[0].value - ends[1].value == pytest.approx(78 * (0.050 + 0.100), rel=1e-6)


def test_nothing_is_said_beyond_the_rows(tmp_path: Path) -> None:
    source = Forwards(FP8, write_rows(tmp_path))
    quarter = Pattern.uniform(78, 4)
    assert source.gain("prefill", quarter, 131_072 + 8192) is not None
    assert source.gain("prefill", quarter, 131_072 + 3 * 8192) is None
    assert source.gain("decode", quarter, 300_000) is None


def test_rows_that_contradict_others_are_counted_and_left_out(tmp_path: Path) -> None:
    """The S layer of 32K is made slower than its F layer: neighbours stand for it."""
    right = Forwards(FP8, write_rows(tmp_path / "b"))
    assert right.layers.left_out == 0
    wrong = Forwards(FP8, write_rows(tmp_path / "a", {("S", 8192, 32_768): 99.0}))
    assert "1 rows that contradict others are left out" in wrong.sources[0]
    assert wrong.prefill(20, 65_536) == right.prefill(20, 65_536)
    # Before the longest prefix nothing is longer: the F layer beside it tells.
    assert Forwards(FP8, write_rows(tmp_path / "c", {("S", 8192, 131_072): 299.0})).layers.left_out


def test_where_held_out_rows_are_missed_by_a_tenth_there_is_no_rate(tmp_path: Path) -> None:
    """A kink that no neighbour foretells: beside it nothing is said, elsewhere as before."""
    kink = {("F", 8192, prefix): 200.0 for prefix in (65_536, 131_072)}
    source = Forwards(FP8, write_rows(tmp_path, kink))
    none = Pattern.full(78)
    assert source.gain("prefill", none, 16_384) is not None
    assert source.gain("prefill", none, 131_072) is None
    grid = plan_grid(source, [("full", none)], [16_384, 131_072])
    assert grid.rows[2][1:] == ("1.00x", NO_RATE)


def test_what_the_reader_is_told(tmp_path: Path) -> None:
    source = Forwards(FP8, write_rows(tmp_path))
    patterns, _ = choose_patterns(["1/2", "quarter=1/4"], "glm-5")
    grid = plan_grid(source, patterns, [32_768])
    assert "composed" in grid.title
    assert [row[0] for row in grid.rows] == [
        *("Prefill of one prompt a rank", "every indexer, s"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),  # the library's
        *("every indexer, row split", "1/2, row split", "quarter, row split"),
        *("Decode, one request a rank", "every indexer, ms a step"),
        *("1/2 (40 of 78 F)", "quarter (22 of 78 F)"),
    ]
    sources = " ".join(source.sources)
    assert "NVIDIA's rows of SGLang 0.5.14 on H200" in sources
    assert "S layers of zai-org/GLM-5.2-FP8" in sources
    assert "every rank still makes all index queries" in sources


def test_programs_are_told_the_same(tmp_path: Path) -> None:
    source = Forwards(FP8, write_rows(tmp_path))
    patterns, _ = choose_patterns(["quarter=1/4"], "glm-5")
    rows = plan_to_json(source, patterns, [32_768])["gains"]
    parts = ("prefill", "row split", "decode")
    asked = [(part, name) for part in parts for name in ("every indexer", "quarter")]
    assert [(row["metric"], row["name"]) for row in rows] == asked
    quarter = source.gain("decode", patterns[0][1], 32_768)
    assert quarter is not None
    assert (rows[-1]["speedup"], rows[-1]["every_indexer_ms"]) == (
        quarter.gain,
        quarter.milliseconds,
    )
    assert (rows[-1]["full_layers"], rows[0]["speedup"]) == (22, 1.0)


def test_weights_that_do_not_fit_are_refused_before_any_row_is_read(tmp_path: Path) -> None:
    message = "do not fit: GLM-5-FP8 takes 94 GB of each of 8 GPUs, and H100 SXM has 80"
    with pytest.raises(BenchError, match=message):
        plan("glm-5-fp8", "h100", data=tmp_path / "missing")


def test_a_ratio_without_a_pattern_is_evenly_spaced_and_said_so() -> None:
    [(name, pattern)], [note] = choose_patterns(["1/4"], "deepseek-v3.2")
    assert (name, str(pattern)) == ("1/4", str(Pattern.uniform(61, 4)))
    assert "No 1/4 pattern of deepseek-v3.2 is known" in note
    with pytest.raises(LibraryError):
        choose_patterns(["glm-6-1of4"], "glm-5")


def test_models_by_name() -> None:
    assert find_model("zai-org/glm-5-fp8") == "GLM-5-FP8"
    with pytest.raises(BenchError, match="nobody has published measured layers of models/glm"):
        find_model("models/glm")
    for name in ("zai-org/GLM-5.2-FP8", "glm-5.2"):
        with pytest.raises(BenchError, match="shares already, as it was trained to, so no pattern"):
            find_model(name)
    with pytest.raises(BenchError, match="there is no folder /nowhere/GLM-5-FP8 here"):
        find_model("/nowhere/GLM-5-FP8")


FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("shape", "fields", "name"),
    [
        ("glm-5", {"quantization_config": FP8_BLOCKS}, "GLM-5-FP8"),
        ("glm-5", {}, "GLM-5"),
        ("deepseek-v3.2", {"quantization_config": FP8_BLOCKS}, "DeepSeek-V3.2"),
        ("glm-5", {"index_topk_freq": 4, "index_skip_topk_offset": 3}, "shares already"),
        ("glm-5", {"n_routed_experts": 168}, "nobody has published measured layers"),
        ("30b", {}, "nobody has published measured layers"),
        ("glm-5", {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantised: awq 4"),
    ],
)
def test_a_folder_is_known_by_its_config(
    tmp_path: Path, shape: str, fields: dict[str, object], name: str
) -> None:
    architecture = checkpoint_of(shape).architecture
    config = {**SHAPES[shape], "architectures": [architecture], **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if name in MODELS:
        assert find_model(str(tmp_path)) == name
    else:
        with pytest.raises((BenchError, CheckpointError), match=name):
            find_model(str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("glm-5-fp8", "a100", 8, 1), "no rates are known for 'a100'"),
        (("glm-5-fp8", "h200", 8, 3), "shares the GPUs evenly"),
        (("glm-5-fp8", "h200", 8, 2), "no layers of zai-org/GLM-5-FP8 with 16 heads on a GPU"),
        (("glm-5-fp8", "h200", 16, 2), "moe_tp_size 16.* Ask for 2, 4 or 8 GPUs"),
        (("30b", "h200", 8, 1), "measured layers of 30b. There are rows of GLM-5-FP8, GLM-5"),
    ],
)
def test_deployments_that_cannot_be(
    tmp_path: Path, arguments: tuple[str, str, int, int], message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        plan(*arguments, write_rows(tmp_path))


def test_a_wheel_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .* reads the tables of aiconfigurator-core"):
        Forwards(FP8, tmp_path)


def test_a_missing_wheel_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_indexcache.lab.latency.rows.find_spec", lambda _: None)
    with pytest.raises(BenchError, match=r"pip install '\.\[plan\]'"):
        Forwards(FP8)


# -- the row split -------------------------------------------------------------------------------

RANKS, PREFIXES, SIZES = 8, (0, 100_000), (512, 1024, 8192)


def index_ms(tokens: int, prefix: float) -> float:
    """Milliseconds of a made-up indexer: 1 for a million pairs."""
    return tokens * (prefix + tokens / 2) / 1e6


def split_layers(gather: float, projected: float = 0.0) -> RowSplitLayers:
    """Layers whose attention takes a microsecond a row, and an F layer its indexer besides."""
    kinds: tuple[Kind, Kind] = ("F", "S")
    prefill = {
        (kind, size): Series({x: size * 1e-3 + index_ms(size, x) * (kind == "F") for x in PREFIXES})
        for kind in kinds
        for size in SIZES
    }
    gathers = Series({1: gather, 1e9: gather})
    layers = Layers("made up", prefill, {})
    return RowSplitLayers(layers, RANKS, gathers, 8192, lambda rows: rows * projected)


@pytest.mark.parametrize(
    ("layers", "kind", "prefix", "expected"),
    [
        # An eighth of the scores, the gather, and the queries of all rows but a share.
        (split_layers(0.2, 1e-4), "F", 50_000, 8.192 + index_ms(8192, 50_000) / 8 + 0.9168),
        (split_layers(0.2, 1e-4), "S", 50_000, 8.192),
        (split_layers(1000.0), "F", 0, 8.192 + index_ms(8192, 0)),  # what does not pay is not split
        (split_layers(0.2), "F", 99_000, None),  # beyond the rows
    ],
)
def test_an_f_layer_of_shared_rows(
    layers: RowSplitLayers, kind: Kind, prefix: int, expected: float | None
) -> None:
    found = layers.chunk(kind, 8192, prefix)
    assert (found and found.value) == (expected and pytest.approx(expected))


def test_a_replica_of_one_rank_has_nothing_to_share(tmp_path: Path) -> None:
    forwards = Forwards(FP8, write_rows(tmp_path))
    assert isinstance(forwards.row_split, RowSplitLayers)
    object.__setattr__(forwards, "deployment", Deployment("GLM-5-FP8", "h200", 8, 8))
    assert Forwards.row_split.func(forwards) is forwards.layers  # type: ignore[attr-defined]


# -- NVIDIA's rows, where the wheel is installed -----------------------------------------------


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
@pytest.mark.parametrize("model", ["GLM-5-FP8", "DeepSeek-V3.2"])
def test_measured_rows_give_the_papers_gains(model: str, gpu: str) -> None:
    """They are at least 1.3x at 1/4 from 100K on, in either phase, as the paper says of GLM-5."""
    pytest.importorskip("aiconfigurator_core")
    source = Forwards(Deployment(model, gpu))
    patterns, _ = choose_patterns(["1/2", "1/4"], source.deployment.measured.shape)
    for metric in ("prefill", "decode"):
        gains = []
        for context in (32_000, 64_000, 128_000):
            half, quarter = (source.gain(metric, p, context) for _, p in patterns)  # type: ignore[arg-type]
            assert half is not None
            assert quarter is not None
            assert 1 < half.gain < quarter.gain
            gains.append(quarter.gain)
        assert gains == sorted(gains)
        assert gains[-1] >= 1.3
    at_most = source.gain("prefill", patterns[1][1], 200_000)
    assert (at_most is None) == (model == "DeepSeek-V3.2")  # its rows end at 163,840


def test_nvidias_rows_say_what_the_row_split_gains() -> None:
    """The split gains more with the prompt, sharing adds to it, and the base stays the same."""
    pytest.importorskip("aiconfigurator_core")
    forwards = plan("GLM-5-FP8", "h200")
    every, quarter = Pattern.full(78), Pattern("F" * 22 + "S" * 56)
    shorter, longer = (
        forwards.gain("prefill", every, n, forwards.row_split) for n in (60_000, 200_000)
    )
    both = forwards.gain("prefill", quarter, 200_000, forwards.row_split)
    alone = forwards.gain("prefill", quarter, 200_000)
    assert shorter
    assert longer
    assert both
    assert alone
    assert 1 < shorter.gain < longer.gain
    assert both.milliseconds == alone.milliseconds
    assert both.gain > max(longer.gain, alone.gain)


def test_every_measured_model_has_rows() -> None:
    pytest.importorskip("aiconfigurator_core")
    for name in MODELS:
        assert Forwards(Deployment(name, "h200")).layers.prefill
