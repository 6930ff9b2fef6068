"""The forecast: its arithmetic, the file that is committed, and that a slower loop is found."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.kernels import (
    composition,
    device_check,
    forecast,
    gate_counts,
    hot_loops,
    topk_counts,
)
from benchmarks.kernels.hot_loops import ALLOWED_SLOWDOWN, HOT_LOOPS, Modelled, slower
from benchmarks.kernels.machine import SHARED_LIMIT
from benchmarks.kernels.predictions import IN_ORDER, LISTS_KEPT, compare
from benchmarks.kernels.sass import Instruction
from benchmarks.kernels.workloads import workloads
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import build as building
from sglang_indexcache.kernels import dispatch
from tests.benchmarks.sass_text import code

COMMITTED: dict[str, Any] = json.loads(forecast.RESULT.read_text())
GOALS = {
    "indexer_prefill_32",
    "indexer_prefill_64",
    "indexer_decode",
    "mla_prefill_20",
    "mla_decode_20_bf16",
    "mla_decode_20_fp8",
}


def loop_of(clocks: tuple[float, float]) -> Modelled:
    return Modelled("k", "u", (1, 1), {}, clocks, 0.5, 0.5, 168, 185_344, 1)


# -- the committed file --------------------------------------------------------------------------


def test_every_goal_has_a_row() -> None:
    assert {row["goal"] for row in COMMITTED["rows"]} >= GOALS
    for row in COMMITTED["rows"]:
        assert row["ratio"] == pytest.approx(row["engine_us"] / row["ours_us"], rel=0.02)
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["bound_by"]
        assert row["engine_source"]


def test_it_is_the_forecast_of_its_own_loops() -> None:
    """Nobody wrote a row by hand: the file's clocks give the file's times."""
    loops = {
        name: loop_of(tuple(entry["clocks"])) for name, entry in COMMITTED["hot_loops"].items()
    }
    for made, row in zip(
        forecast.rows_of(loops, COMMITTED["engine"]), COMMITTED["rows"], strict=True
    ):
        assert made.to_json() | {"bound_by": ""} == row | {"bound_by": ""}
    bound = forecast.best_pages_first(loops, COMMITTED["engine"])
    assert bound == COMMITTED["best_pages_first"]
    for one in bound:
        assert one["least_us"] < one["ours_us"], one["shape"]


def test_no_loop_is_slower_than_it_was_without_a_reason() -> None:
    now = {name: entry["clocks"] for name, entry in COMMITTED["hot_loops"].items()}
    assert slower(COMMITTED["hot_loops"], now) == []


def usable() -> str | None:
    try:
        version = ".".join(map(str, building.nvcc_version()))
    except KernelError as error:
        return str(error)
    recorded = COMMITTED["nvcc"]
    return None if version == recorded else f"nvcc {version}; the clocks are those of {recorded}"


@pytest.mark.skipif(usable() is not None, reason=str(usable()))
def test_what_is_compiled_is_as_fast_as_the_forecast_says() -> None:
    """If this fails, make the loop faster, or say why it is slower:
    python -m benchmarks.kernels.forecast --reason LOOP TEXT"""
    loops = hot_loops.model_all()
    assert set(loops) == set(COMMITTED["hot_loops"])
    assert slower(COMMITTED["hot_loops"], {name: loop.clocks for name, loop in loops.items()}) == []
    for loop in loops.values():  # a toolkit may reserve more of it than today's
        assert loop.shared + 512 <= SHARED_LIMIT, loop.kernel


# -- a slower loop is found ----------------------------------------------------------------------


def test_an_instruction_list_that_grew_is_found() -> None:
    """Four comparisons among forty of a loop: 10 % more of the ALU's clocks."""

    def page(comparisons: int) -> list[Instruction]:
        body = ["FMNMX R1, R1, R1, !PT"] * comparisons
        return code(
            "LDG.E R1, [R2]", *body, "QGMMA.64x256x32.F32 R24, gdesc[UR8], R24", "@P0 BRA 0x0"
        )

    hot = hot_loops.HotLoop("f", "k", {"QGMMA": 1}, 2, "page", 384, "s")
    before, same, after = (hot_loops.model(hot, page(n), 168, 1) for n in (160, 162, 176))
    recorded = {"loop": before.to_json() | {"fastest": before.clocks, "reason": ""}}
    assert slower(recorded, {"loop": same.clocks}) == []
    (complaint,) = slower(recorded, {"loop": after.clocks})
    assert complaint.startswith("loop: ")


def test_a_reason_is_asked_for_and_kept() -> None:
    old = forecast.record_loops({"a": loop_of((100, 200))}, {}, {})
    assert old["a"]["fastest"] == [100, 200]
    worse = {"a": loop_of((100, 200 * ALLOWED_SLOWDOWN + 1))}
    with pytest.raises(KernelError, match=r"a: 100 to 207 clocks.*say why: --reason"):
        forecast.record_loops(worse, old, {})
    told = forecast.record_loops(worse, old, {"a": "exact at last"})
    assert (told["a"]["reason"], told["a"]["fastest"]) == ("exact at last", [100, 200])
    assert forecast.record_loops(worse, told, {}) == told, "it needs to be said once"
    # A file written by hand, or small steps that add up, are found too.
    crept = {"a": told["a"] | {"reason": ""}}
    (complaint,) = slower(crept, {"a": worse["a"].clocks})
    assert complaint == "a: 100 to 207 clocks are recorded, 100 to 200 before"


def test_a_loop_that_is_not_recorded_is_found() -> None:
    assert slower({}, {"new": (1, 2)}) == ["new is not in the results: run the forecast"]


# -- the arithmetic ------------------------------------------------------------------------------


def test_prefill_by_hand() -> None:
    """120K, 32 heads: 8 rounds of 1856 pages, 1000 clocks a page, 10 % more; and where logits pass,
    100 a pair of pages for each of them in the busiest lane beyond two."""
    loops = {"select_32": loop_of((2000, 2000)), "select_32_busy": loop_of((2400, 2400))}
    parts = forecast.prefill_parts(loops, 32, 122_880, "central")
    pages = (122_880 - 4096) / 64
    assert parts["products"] == pytest.approx(pages * 1000 * 1.1)
    rounds = gate_counts.average(122_880, 0.0).rounds_8
    assert 2 < rounds < 6
    assert parts["gate"] == pytest.approx(pages / 2 * 100 * (rounds - 2) * 1.1)
    total = sum(parts.values())
    us = forecast.prefill_us(loops, 32, 122_880, "central")
    assert us == pytest.approx(8 * total / 1.7e3)


def test_no_order_of_pages_can_do_more() -> None:
    """The best first: all is listed until the first check, and little more than k after it."""
    loops = {"select_32": loop_of((2000, 2000)), "select_32_busy": loop_of((2400, 2400))}
    parts = forecast.prefill_parts(loops, 32, 122_880, "central", best_first=True)
    usual = forecast.prefill_parts(loops, 32, 122_880, "central")
    assert (parts["gate"], parts["keep"]) == (0, 0)
    assert parts["products"] == pytest.approx(usual["products"])
    assert parts["finish"] < usual["finish"]
    counts = gate_counts.average(122_880, 0.0, best_first=True)
    assert gate_counts.FIRST_CHECK < counts.offered < gate_counts.FIRST_CHECK + 2048 / 2
    assert 16 * gate_counts.FIRST_CHECK / 122_880 < counts.rounds_8 < 2


def test_where_the_kernel_begins_to_be_faster() -> None:
    """The least context from which it stays so, in steps; and what a server goes by."""
    loops = {
        name: loop_of(tuple(entry["clocks"])) for name, entry in COMMITTED["hot_loops"].items()
    }
    for heads in (32, 64):
        start = forecast.faster_from(loops, COMMITTED["engine"], heads)
        assert start == COMMITTED["faster_from"][str(heads)] == dispatch.FASTER_FROM[heads]
        contexts = (start - 4096, start)
        ours = [forecast.prefill_us(loops, heads, context, "central") for context in contexts]
        theirs = [
            forecast.engine_prefill_us(COMMITTED["engine"], heads, context) for context in contexts
        ]
        assert ours[0] > theirs[0]
        assert ours[1] <= theirs[1]


def test_kernels_and_sharing_by_hand() -> None:
    """A model that is half indexer: 10 layers of which 2 keep it gain 1 / (1 - 0.5 * 0.8)."""
    model = composition.Model("m", 10, 2, 20, {"prefill": 1 / 0.6, "decode": 1 / 0.6}, "us")
    assert model.indexer_share("prefill") == pytest.approx(0.5)
    same = composition.speedups(model, "decode", composition.Times(3, 3))
    assert same["sharing"] == same["both"] == pytest.approx(1 / 0.6)
    assert same["kernels"] == pytest.approx(1)
    assert same["ceiling"] == pytest.approx(2)
    # Twice as fast an indexer; attention is 0.25 of the time, and ours takes 4 / 5, or 3 / 5.
    times = composition.Times(10, 5, 5, 4, 3)
    found = composition.speedups(model, "prefill", times)
    assert found["kernels"] == pytest.approx(1 / (0.25 + 0.25 + 0.2))
    assert found["both"] == pytest.approx(1 / (0.25 + 0.05 + 0.25 * (0.8 * 0.2 + 0.6 * 0.8)))


def test_the_paper_s_own_gain_comes_out() -> None:
    """19.5 s without sharing and 10.7 s with a quarter; and 13.7 s with half of the indexers."""
    small = composition.MODELS[0]
    share = small.indexer_share("prefill")
    assert 1 / (1 - share * (1 - 24 / 47)) == pytest.approx(19.5 / 13.7, rel=0.03)
    for row in COMMITTED["composition"]:
        assert row["low"] <= row["both"] <= row["high"]
        assert row["sharing"] <= row["both"]


def test_attention_by_hand() -> None:
    math, load = loop_of((4000, 4000)), loop_of((3000, 3000))
    loops = {"attend_bf16": math, "attend_fp8": math, "attend_fp8_load": load}
    # 2731 tiles of three rows, 40 steps each.
    tile = 40 * 4000 + 7000
    assert forecast.mla_prefill_us(loops, 20, "central", reused=True) == pytest.approx(
        2731 / 132 * tile / 1.7e3
    )

    def decode(batch: int, *, fp8: bool = False) -> float:
        return forecast.mla_decode_us(loops, batch, 20, "central", fp8=fp8) * 1.7e3

    # Clusters of 16, 8 and 4: as many as 7, 15 and 31 requests; two, four and eight steps each.
    assert [decode(batch) for batch in (1, 7, 8, 15, 16, 31)] == pytest.approx(
        [18_000, 18_000, 26_000, 26_000, 42_000, 42_000]
    )
    # FP8: the first conversion, then 900 until rows arrive, 656 of transfer and one conversion.
    assert decode(1, fp8=True) == pytest.approx(10_000 + 3000 + 2 * (900 + 656 + 3000))


def test_a_step_takes_what_its_slowest_part_takes() -> None:
    """Few SMs wait for products, all of them for rows: 73,728 bytes each at 5.3 TB/s together."""
    math = loop_of((3000, 3000))
    loops = {"attend_bf16": math, "attend_fp8": math, "attend_fp8_load": loop_of((1600, 1600))}
    few = forecast.mla_step(loops, "central", fp8=False, sms=16, memory=True)
    assert (few.clocks, few.bound_by) == (3000, "products and softmax, one after the other")
    every = forecast.mla_step(loops, "central", fp8=False, sms=132, memory=False)
    assert every.clocks == pytest.approx(73_728 * 132 / 5.3e12 * 1.7e9)
    assert every.bound_by == "the gather of rows"
    fp8 = forecast.mla_step(loops, "pessimistic", fp8=True, sms=16, memory=True)
    assert fp8.clocks == 1300 + 656 + 50 * 64, "FlashMLA's guide: 50 clocks a key"


def test_the_engine_is_as_published() -> None:
    """931 us for 2048 rows of 32K at 64 heads (sglang #11989)."""
    flops = 2048 * 32_768 * 64 * 128 * 2
    rate = forecast.deep_gemm_flops(COMMITTED["engine"], 64)
    assert flops / rate * 1e6 == pytest.approx(931, rel=0.04)
    assert forecast.deep_gemm_flops(COMMITTED["engine"], 32) < rate


# -- the gate ------------------------------------------------------------------------------------


def test_the_gate_s_sizes_are_those_of_the_kernel() -> None:
    header = (Path(building.source_folder()) / "indexer" / "gate.h").read_text()
    values = dict(re.findall(r"constexpr int (k\w+) = (\d+);", header))
    names = ("kListCapacity", "kFirstCheck", "kCheckKeys", "kCheckPart", "kMantissaBits")
    assert tuple(int(values[name]) for name in names) == gate_counts.SIZES


def test_the_roles_are_those_of_the_kernel() -> None:
    folder = Path(building.source_folder()) / "indexer"
    warps = re.search(r"kGateWarps = (\d+);", (folder / "select.cuh").read_text())
    stages = re.search(r"kStages = (\d+);", (folder / "pipeline.cuh").read_text())
    assert warps is not None
    assert stages is not None
    assert (int(warps[1]), int(stages[1])) == (hot_loops.GATE_WARPS, hot_loops.RING_PAGES)


def test_the_busiest_lane() -> None:
    """Of 32 that look at 16 logits each, or at 8."""
    assert gate_counts.busiest_lane(8, 0.0) == 0
    assert gate_counts.busiest_lane(8, 1.0) == 16
    assert gate_counts.busiest_lane(4, 1.0) == 8
    draws = np.random.default_rng(3).binomial(16, 0.1, (100_000, 32)).max(1)
    assert gate_counts.busiest_lane(8, 0.1) == pytest.approx(draws.mean(), abs=0.02)


def test_the_gate_keeps_the_largest() -> None:
    """An ascending row offers everything; equal values are cut again and again."""
    rising = np.arange(1, 20_001, dtype=np.float32)
    found = gate_counts.count(rising, 2048)
    assert found.offered == 20_000
    assert found.left >= 2048
    falling = gate_counts.count(rising[::-1].copy(), 2048)
    assert falling.offered < 20_000
    assert gate_counts.count(np.ones(60_000, np.float32), 2048).cuts >= 3


# -- top-k ---------------------------------------------------------------------------------------


def test_top_k_s_sizes_are_those_of_the_kernel() -> None:
    folder = Path(building.source_folder()) / "topk"
    text = "".join((folder / name).read_text() for name in ("row.cuh", "topk.cu"))
    values = dict(re.findall(r"constexpr int (k\w+) = (\d+);", text))
    names = ("kVectors", "kFineShift", "kCapacity", "kThreads")
    assert tuple(int(values[name]) for name in names) == topk_counts.SIZES
    assert int(values["kLeastShare"]) == forecast.LEAST_SHARE


def test_top_k_lists_what_may_be_among_the_best() -> None:
    """Never less than k; little more of a random row; all of one whose logits are equal."""
    random = np.random.default_rng(3).standard_normal(65_536).astype(np.float32)
    for cluster in (1, 4, 8):
        assert 2048 <= topk_counts.count(random, 2048, cluster).listed < 3 * 2048
    for shifted in (random - 9, random * 1e6):
        assert 2048 <= topk_counts.count(shifted, 2048, 8).listed < 3 * 2048
    equal = topk_counts.count(np.ones(65_536, np.float32), 2048, 8)
    assert equal.listed == 65_536
    assert equal.rounds >= 3, "the digits of positions"


def test_top_k_by_hand() -> None:
    """200K on eight blocks: a chunk each of 100 KiB, 48 bytes a clock, and latencies in series."""
    steps = forecast.TOPK_CLOCKS
    rounds = topk_counts.average(204_800, 2048, 8).rounds
    once = steps.first_load + steps.bound + (2 + rounds) * steps.cluster + steps.peers
    once += rounds * steps.round + steps.write
    total = once + 4 * 25_600 / 48 + 3000
    loops = {"topk_chunk": loop_of((4000, 4000)), "topk_last_chunk": loop_of((3000, 3000))}
    us = forecast.decode_topk_us(loops, 1, 204_800, "central")
    assert us == pytest.approx(1.2 + total / 1.7e3)
    assert [forecast.topk_cluster(rows, 204_800) for rows in (1, 15, 16, 31, 32, 66, 67)] == [
        *(8, 8, 4, 4, 2, 2, 1)
    ]
    assert forecast.topk_cluster(1, 10_240) == 2


# -- a card --------------------------------------------------------------------------------------


def test_predictions_are_of_what_is_timed() -> None:
    timed = {str(work) for work in workloads()}
    names = {"cuda", IN_ORDER, LISTS_KEPT, *device_check.ENGINE_ANCHORS}
    measurable = [one for one in COMMITTED["predictions"] if "over" in one]
    assert len(measurable) >= len(GOALS)
    for one in measurable:
        for workload, name in (one["over"], one["under"]):
            assert workload in timed
            assert name in names
    for one in COMMITTED["predictions"]:
        assert one["low"] < one["high"]
        assert one["otherwise"]
        assert ("over" in one) != ("by_hand" in one)


def test_measured_beside_predicted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A dry run of the comparison, with times that are made up."""
    predicted = [
        {"name": "a", "over": ["w", "engine"], "under": ["w", "cuda"], "low": 1.5, "high": 2.0},
        {"name": "b", "over": ["w", "engine"], "under": ["v", "cuda"], "low": 1.5, "high": 2.0},
        {"name": "c", "over": ["x", "engine"], "under": ["w", "cuda"], "low": 1.5, "high": 2.0},
        {"name": "d", "by_hand": "ncu", "low": 0.1, "high": 0.2},
    ]
    results = [
        {"workload": "w", "times": {"cuda": {"median_us": 10.0}, "engine": {"median_us": 18.0}}},
        {"workload": "v", "times": {"cuda": {"median_us": 4.0}}},
        {"workload": "x", "problem": "out of memory"},
    ]
    found = compare(predicted, results)
    assert [one["measured"] for one in found] == [1.8, 4.5, None, None]
    assert [one["holds"] for one in found] == [True, False, None, None]
    file = tmp_path / "forecast.json"
    file.write_text(json.dumps({"predictions": predicted}))
    monkeypatch.setattr(device_check, "RESULT", file)
    assert device_check.compare_with_forecast({"results": results}) == found


def test_hot_loops_are_of_kernels_that_exist() -> None:
    assert set(HOT_LOOPS) == set(COMMITTED["hot_loops"])
    assert {hot.folder for hot in HOT_LOOPS.values()} == set(building.FOLDERS)
