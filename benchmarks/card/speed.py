"""Check 10: the first times, of kernels (``benchmarks.kernels``) and of our Python in a layer."""

import time

import torch

from benchmarks.card.claims import Report, expect, need
from benchmarks.card.stage import Stage, stub_kernels
from benchmarks.children import Clock
from benchmarks.kernels.device_check import (
    add_rooflines,
    facts,
    faster,
    time_all,
    warm,
)

LAYERS, FORWARDS = 48, 200


def microseconds_of_a_layer() -> float:
    """Of :meth:`IndexCacheBackend._indices`, which an eager or breakable forward runs per layer."""
    need("sglang_indexcache.serving.cuda.backend")
    with stub_kernels():
        stage = Stage("FSSS" * (LAYERS // 4), 0, LAYERS, 1, "cpu", first_overlapped=LAYERS)
        backend = stage.whole
        selected = torch.zeros(1, 8, dtype=torch.int32)
        started = time.perf_counter()
        for _ in range(FORWARDS):
            backend.init_forward_metadata(None)
            for layer in stage.layers:
                backend._indices(layer, None, selected)
        return (time.perf_counter() - started) / (FORWARDS * LAYERS) * 1e6


def run(report: Report) -> None:
    """Ours and the engine's kernels side by side, then the buffer."""
    with report.claim(report.claims[1]) as evidence:
        evidence["us a layer"] = round(microseconds_of_a_layer(), 3)
    with report.claim(report.claims[0]) as evidence:
        clock = Clock(report.left())
        evidence["anchors"] = warm(clock, tiny=report.dry)
        timed = time_all(clock, tiny=report.dry)
        add_rooflines(timed, facts()["name"], tiny=report.dry)
        evidence |= timed | {"faster": faster(timed)}
        raced = [result for result in timed["results"] if result.get("times")]
        expect(raced, f"nothing was timed: {timed['ended_the_process']}")
