"""What the model says that a card can refute: a range each, and what is wrong outside of it.

Most are ratios of two times that the device check takes anyway (``speed.py``); it writes what it
measured beside what was predicted. The others need a profiler and are for a person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.kernels.hot_loops import Modelled
from benchmarks.kernels.workloads import AGREEING, Workload

OURS, ENGINE_TOPK = "cuda", "sglang v2"
ENGINE_SELECT, ENGINE_MLA = f"deep_gemm + {ENGINE_TOPK}", "flash_mla"
LISTS_KEPT = "cuda, lists kept"
"""Ours again, for a layer that shares the last one's slots."""
IN_ORDER = "cuda, best pages first"
"""Ours again, for a layer that selects from the pages of the last one, and makes its own order."""


def predictions(
    rows: Sequence[Mapping[str, Any]],
    best_first: Sequence[Mapping[str, Any]],
    loops: Mapping[str, Modelled],
    decode_us: Callable[[int, bool], float],
    topk_us: Callable[[int], float],
) -> list[dict[str, Any]]:
    """The list.

    Args:
        rows: of the forecast, as in its JSON.
        best_first: its bound, likewise.
        loops: the hot loops that they follow from.
        decode_us: what attention of so many requests takes, over an FP8 cache or a bfloat16 one.
        topk_us: what top-k of so many rows of 200K takes.
    """
    found = [_speed(one, *timed) for one in rows if (timed := _timed(one)) is not None]
    for over, under, otherwise in (
        ((8, False), (7, False), "the driver has room for 8 clusters of 16 blocks, or none of 16"),
        ((16, False), (15, False), "the driver has room for 16 clusters of 8 blocks"),
        ((1, True), (1, False), "converting FP8 rows is not what their decode adds"),
    ):
        ratio = decode_us(*over) / decode_us(*under)
        found.append(_ratio(over, under, ratio, otherwise))
    found.append(_lists_kept(rows))
    found += [_in_order(best_first, work) for work in AGREEING]
    for rows_over, rows_under, otherwise in (
        (8, 1, "8 clusters of 8 blocks do not run at once, or L2 is what top-k waits for"),
        (16, 15, "cudaOccupancyMaxActiveClusters says another number than 15 of 8 blocks"),
    ):
        works = [Workload("topk", rows, 204_800, 0) for rows in (rows_over, rows_under)]
        ratio = topk_us(rows_over) / topk_us(rows_under)
        name = f"top-k of 200K, {rows_over} rows over {rows_under}"
        found.append(_between(name, works, ratio, otherwise))
    select = loops["select_32"]
    least = select.tensor * select.clocks[0] / select.clocks[1]
    found += [
        _by_hand(
            "tensor cores busy in select_kernel<32, 8>",
            "ncu: sm__pipe_tensor_cycles_active",
            0.8 * least,
            select.tensor,
            "turns do not keep the warpgroups out of step, or the gate is not what they wait for",
        ),
        _by_hand(
            "tensor cores busy in attend_kernel<0>, 4096 rows of 20 heads",
            "ncu: sm__pipe_tensor_cycles_active",
            0.75 * loops["attend_bf16"].tensor,
            loops["attend_bf16"].tensor,
            "products and softmax do overlap, or the gather takes longer than they do",
        ),
        _by_hand(
            "L2 misses of select over DeepGEMM's, 200K",
            "ncu: lts__t_sectors_op_read_lookup_miss",
            1.05,
            4.0,
            "the order of pages does not cost L2",
        ),
        _by_hand(
            "GHz during select",
            "nvidia-smi --query-gpu=clocks.sm -lms 100",
            1.4,
            1.83,
            "the clocks that the forecast assumes",
        ),
    ]
    return found


def compare(
    predicted: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every prediction with what was measured; None where a side of it was not timed.

    Args:
        predicted: of the forecast's JSON.
        results: of ``device_check.time_all``.
    """
    times = {
        (result["workload"], name): each["median_us"]
        for result in results
        for name, each in result.get("times", {}).items()
    }
    found = []
    for one in predicted:
        sides = [times.get(tuple(one[side])) for side in ("over", "under") if side in one]
        known = len(sides) == 2 and all(sides)
        measured = sides[0] / sides[1] if known else None  # type: ignore[operator]
        holds = None if measured is None else one["low"] <= measured <= one["high"]
        found.append({**one, "measured": measured, "holds": holds})
    return found


def _timed(one: Mapping[str, Any]) -> tuple[Workload, str] | None:
    """The workload of a row of the forecast, and the engine's contender; None if none is timed."""
    goal, first = str(one["goal"]), int(str(one["shape"]).split()[0])
    if goal == "topk":
        return Workload("topk", first, 204_800, 0), ENGINE_TOPK
    if goal.startswith("indexer"):
        context = int(str(one["shape"]).split(", ")[1].removesuffix("K")) * 1024
        if goal.startswith("indexer_decode"):
            return Workload("select_decode", first, context, 32), ENGINE_SELECT
        return Workload("select_prefill", first, context, int(goal.split("_")[2])), ENGINE_SELECT
    if goal in ("mla_prefill_20", "mla_prefill_64"):
        return Workload("mla_prefill", 4096, 122_880, int(goal.split("_")[2])), ENGINE_MLA
    if goal.startswith("mla_decode"):
        return Workload("mla_decode", first, 122_880, 20, fp8=goal.endswith("fp8")), ENGINE_MLA
    return None


def _speed(one: Mapping[str, Any], work: Workload, engine: str) -> dict[str, Any]:
    return {
        "name": f"{one['goal']}: {one['shape']}, engine over ours",
        "over": [str(work), engine],
        "under": [str(work), OURS],
        "low": one["low"],
        "high": one["high"],
        "otherwise": f"not bound by what the forecast says ({one['bound_by']})",
    }


def _ratio(
    over: tuple[int, bool], under: tuple[int, bool], ratio: float, otherwise: str
) -> dict[str, Any]:
    works = [Workload("mla_decode", batch, 122_880, 20, fp8=fp8) for batch, fp8 in (over, under)]
    name = f"decode attention, {_requests(*over)} over {_requests(*under)}"
    return _between(name, works, ratio, otherwise)


def _between(name: str, works: Sequence[Workload], ratio: float, otherwise: str) -> dict[str, Any]:
    """Of our times of two workloads: the model's ratio, and what is nearer to it than to 1."""
    halfway = (1 + ratio) / 2
    far = ratio + (ratio - 1) / 2
    return {
        "name": name,
        "over": [str(works[0]), OURS],
        "under": [str(works[1]), OURS],
        "low": round(min(halfway, far), 2),
        "high": round(max(halfway, far), 2),
        "otherwise": otherwise,
    }


def _lists_kept(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What packing adds to a layer whose slots no other layer has packed."""
    times = {one["goal"]: float(one["ours_us"]) for one in rows}
    ratio = times["mla_prefill_20"] / times["mla_prefill_20_lists_kept"]
    work = str(Workload("mla_prefill", 4096, 122_880, 20))
    return {
        "name": "prefill attention, 20 heads, lists packed over lists kept",
        "over": [work, OURS],
        "under": [work, LISTS_KEPT],
        "low": round((1 + ratio) / 2, 2),
        "high": round(ratio + (ratio - 1) / 2, 2),
        "otherwise": "packing the lists takes another part of attention than assumed",
    }


def _in_order(best_first: Sequence[Mapping[str, Any]], work: Workload) -> dict[str, Any]:
    """What the order brings where layers agree: up to twice what the model of single logits says.

    The workload's best logits lie next to each other, so that more of a page's pass at once.
    """
    start, end = f"{work.rows} rows, {work.context // 1024}K,", f"{work.heads} heads"
    one = next(b for b in best_first if b["shape"].startswith(start) and b["shape"].endswith(end))
    gain = float(one["ours_us"]) / float(one["least_us"]) - 1
    return {
        "name": f"{one['shape']}: pages in their usual order over the best first",
        "over": [str(work), OURS],
        "under": [str(work), IN_ORDER],
        "low": 1.0,
        "high": round(1 + 2 * gain, 2),
        "otherwise": "making the order takes what it brings, or the gate is not waited for",
    }


def _requests(batch: int, fp8: bool) -> str:
    return f"{batch} request{'s'[: batch > 1]} with {'FP8' if fp8 else 'bfloat16'} rows"


def _by_hand(name: str, how: str, low: float, high: float, otherwise: str) -> dict[str, Any]:
    return {
        "name": name,
        "by_hand": how,
        "low": round(low, 2),
        "high": round(high, 2),
        "otherwise": otherwise,
    }
