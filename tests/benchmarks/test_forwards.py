"""Composed forwards, on made-up rows and on NVIDIA's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.forwards import Deployment, Forwards
from benchmarks.nvidia_rows import Kind, Layers, RowSplitLayers, Series
from sglang_indexcache.errors import BenchError
from sglang_indexcache.lab.latency.forecast import MODELS, choose_patterns, composed
from sglang_indexcache.pattern import Pattern
from tests.benchmarks.made_up_rows import write_rows

FP8 = Deployment("GLM-5-FP8", "h200")


# -- measured rows, made up: every latency below is a formula of made_up_rows.py ------------


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


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        (("GLM-5-FP8", "h200", 8, 3), "shares the GPUs evenly"),
        (("GLM-5-FP8", "h200", 8, 2), "no layers of zai-org/GLM-5-FP8 with 16 heads on a GPU"),
        (("GLM-5-FP8", "h200", 16, 2), "moe_tp_size 16.* Ask for 2, 4 or 8 GPUs"),
        (("GLM-5-FP8", "h100", 8, 1), "do not fit: GLM-5-FP8 takes 94 GB of each of 8 GPUs, and"),
    ],
)
def test_deployments_that_cannot_be(
    tmp_path: Path, deployment: tuple[str, str, int, int], message: str
) -> None:
    def compose() -> None:
        Deployment(*deployment).check_fits()
        Forwards(Deployment(*deployment), write_rows(tmp_path))

    with pytest.raises(BenchError, match=message):
        compose()


def test_a_wheel_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"cannot read .* reads the tables of aiconfigurator-core"):
        Forwards(FP8, tmp_path)


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.nvidia_rows.find_spec", lambda _: None)
    with pytest.raises(BenchError, match=r"pip install 'aiconfigurator-core==0\.12\.0'"):
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
    forwards = Forwards(Deployment("GLM-5-FP8", "h200"))
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


@pytest.mark.parametrize("place", [0, 4, 13])
def test_the_table_of_bench_plan_has_what_is_composed(place: int) -> None:
    """At its own lengths to rounding, between them to a hundredth."""
    pytest.importorskip("aiconfigurator_core")
    row = composed()[place]
    forwards = Forwards(Deployment(row.model, row.gpu, dp=row.dp))
    pattern = Pattern.uniform(row.layers, 3)
    for phase in ("prefill", "decode"):
        for context, rel in ((65_536, 1e-5), (60_000, 0.01), (120_000, 0.01)):
            got, want = (each.gain(phase, pattern, context) for each in (row, forwards))  # type: ignore[attr-defined]
            assert got.milliseconds == pytest.approx(want.milliseconds, rel=rel)
            assert got.gain == pytest.approx(want.gain, rel=rel)
    split = forwards.gain("prefill", pattern, 65_536, forwards.row_split)
    assert split is not None
    found = row.gain("row split", pattern, 65_536)
    assert found is not None
    assert found.gain == pytest.approx(split.gain, rel=1e-5)
