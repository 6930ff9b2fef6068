"""Our kernels beside the engine's by one yardstick, while no card has run ours.

The engine's times are NVIDIA's measured rows (:mod:`sglang_indexcache.lab.bench.rows`). Ours are
the clocks that a model of Hopper gave for the compiled loops, times the factor that the same model
needs to explain the measured engine: DeepGEMM's logits for the indexer, FlashMLA for attention. So
the clock rate cancels, and what slows the engine and is not in the model is taken to slow ours too.

The model gives two clocks for every loop, the least and the most, as warps may be scheduled. Each
has a factor of its own; a range is over both. The model left the tree; its clocks for today's code
are the constants below. :data:`COUNTED` says which loops those are, and a test compiles the kernels
and fails when one of them is another: then count again. ``benchmarks/kernels`` of commit 7447abc^,
laid over this tree, has ``hot_loops.model_all``: ``select_32`` is :data:`PAGE_PAIR`,
``attend_bf16`` and ``attend_fp8`` are :data:`ATTEND`. ``forecast.prefill_parts``, without its
SILICON, makes :data:`SELECT` of ``select_32`` and ``select_32_busy``, and is :data:`UPKEEP` in all
other parts.

python -m benchmarks.kernels.yardstick
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import RESULTS, read_arguments
from sglang_indexcache.kernels.contract import FP8_ROW_BYTES, INDEX_DIM, LATENT_DIM, PAGE_BYTES
from sglang_indexcache.kernels.indexer.cuda import select_rows
from sglang_indexcache.kernels.sparse_mla.cuda import (
    TILE_KEYS,
    TILE_ROWS,
    cluster_size,
    head_blocks,
    rows_per_tile,
)
from sglang_indexcache.lab.bench.rows import ENGINE, WHEEL, Series, Wheel
from sglang_indexcache.lab.bench.tables import Grid
from sglang_indexcache.shapes import find_gpu
from sglang_indexcache.support.files import write_json

Range = tuple[float, float]
"""The least and the most."""

CARDS = ("h100", "h200")
ROWS, TOPK, INDEX_HEADS = 8192, 2048, 32
"""Of the last chunk of a prompt; GLM-5's. The rows have no kernels with 64 indexer heads."""
HEADS = (8, 16, 20, 32, 64, 128)
REQUESTS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 4096
"""Of decode: attention reads 2,048 tokens of any; the rows know 64 requests only here."""
MULTIPROCESSORS = 132
GPCS = (18, 18, 18, 16, 16, 16, 16, 14)
"""SMs in which a cluster must lie: assumed; that 15 clusters of 8 run at once is published."""
GHZ = 1.7
"""Cancels, but from the factors and the rates as they are printed."""

# -- clocks of the model: the least and the most -------------------------------------------------

DEEP_GEMM: Range = (1162.5, 1327.3)
"""256 keys x 128 columns of 32 heads (sgl-deep-gemm 0.2.3.post2)."""
FLASH_MLA: Range = (2176, 2659)
"""64 keys of 64 heads (sgl-kernel's sparse prefill for sm_90a)."""
SELECT: dict[int, tuple[Range, Range]] = {
    32_768: ((432_945, 460_722), (445_979, 473_368)),
    65_536: ((739_913, 780_074), (765_619, 805_220)),
    131_072: ((1_317_818, 1_374_117), (1_369_370, 1_424_884)),
    194_560: ((1_859_524, 1_946_101), (1_936_368, 2_021_738)),
}
"""By prefix: all page loops of a tile, by the least clocks and by the most; each for scores around
zero, and for scores around ten deviations, which crowd into few bins of the gate."""
UPKEEP: dict[int, Range] = {
    32_768: (143_666, 207_596),
    65_536: (163_134, 342_217),
    131_072: (223_667, 644_866),
    194_560: (283_380, 723_361),
}
"""What the gate does beside the loops, for the same two kinds of scores; counted by hand, at
7447abc^. Since then make_room and collect_row of the sources lost one assignment each."""
PAGE_PAIR: Range = (1127.4, 1177.9)
"""Two pages of 64 keys x 256 columns: what a page loop takes if nothing passes the gate."""
ATTEND: Range = (3157.8, 3278.1)
"""64 keys of a tile, bfloat16 or FP8; FP8 rows are converted meanwhile."""
COUNTED_OF = (13, 0, 88)
"""The nvcc whose code was counted."""
COUNTED: dict[tuple[str, str], str] = {
    ("select_kernel<32, 8>", "page"): "216, 9967a3d0e65c",
    ("select_kernel<32, 8>", "gate"): "136, 95d387aba9e0",
    ("select_kernel<32, 8>", "upkeep"): "5904, a823f9630ea7",
    ("attend_kernel<0>", "step"): "832, 4ee7566d4d5f",
    ("attend_kernel<0>", "gather"): "268, 5cd975f96491",
    ("attend_kernel<1>", "step"): "835, fbbffb6d4260",
    ("attend_kernel<1>", "conversion"): "1188, 20acbe255ed9",
}
"""Instructions of each loop as it was counted, and a digest of them in their order.

"upkeep" is no loop but the rest of that kernel, with the numbers that stand in it: how often a
check comes, how long a list is. Other things lie there, too. So if it changes, compare gate.h,
select.h and block.cuh, and count :data:`UPKEEP` again if its part was touched."""
ENDS = 10_000.0
"""Before the first step and after the last, in decode: assumed."""
PACK_MS: Range = (0.15, 0.20)
"""Packing the lists of 8,192 rows: assumed."""
MEMORY_PART = 0.9
"""Of the data sheet's bandwidth: assumed."""
GEMM_TFLOPS = 1470
"""DeepGEMM's best FP8 product on an H800 (DeepGEMM #74); no loop of ours may imply more."""
ATTENTION_TFLOPS = 740
"""FlashAttention-3's best bfloat16 attention on an H100 (its paper)."""

# -- the engine ------------------------------------------------------------------------------------


class Engine:
    """One card's measured rows, in milliseconds."""

    def __init__(self, card: str) -> None:
        self.card = card
        self._wheel = Wheel(card)
        self.logits = self._kernel("glm5_mqa_logits")
        self.topk = [self._kernel("glm5_topk", score_mode=mode) for mode in ("top_last", "flat")]
        attention = self._kernel("glm5_dsa_attn").points
        self.attention = float(np.mean([ms for prefix, ms in attention.items() if prefix >= TOPK]))
        self.bandwidth = find_gpu(card).bandwidth

    def _kernel(self, name: str, **more: str) -> Series:
        table = f"sparse_attention/{ENGINE}/{name}_module_perf"
        return self._wheel.series(table, "step", {"batch_size": 1, "isl": ROWS, **more})

    def select(self, prefix: int) -> Range:
        """Logits and the legacy top-k, which prefill runs by default, for two kinds of scores."""
        least, most = (self.logits.points[prefix] + topk.points[prefix] for topk in self.topk)
        return least, most

    def layer(self, heads: int, kv: str) -> dict[int, float]:
        """Return a decode step of one S layer's attention module by requests: products included."""
        layers = self._wheel.layers(
            "zai-org/GLM-5-FP8", "zai-org/GLM-5.2-FP8", heads, "fp8_block", kv
        )
        found = {n: layers.step("S", n, CONTEXT) for n in REQUESTS}
        return {n: each.value for n, each in found.items() if each is not None}

    def decode_attention(self, heads: int, kv: str) -> dict[int, Range]:
        """Return what of that is attention, as far as the rows tell.

        At most all of it. At least what the module takes more than with one request, and the time
        in which the memory gives the rows.
        """
        layer = self.layer(heads, kv)
        read = TOPK * row_bytes(kv) / self.bandwidth * 1e3
        return {n: (max(ms - layer[1], n * read), ms) for n, ms in layer.items()}

    def factors(self) -> dict[str, Range]:
        """Measured time over modelled, for the least clocks and for the most."""
        longer = {x: ms for x, ms in self.logits.points.items() if x >= min(SELECT)}
        a_token = np.polyfit(list(longer), list(longer.values()), 1)[0]
        blocks = ROWS * INDEX_HEADS / 128 / 256 / MULTIPROCESSORS  # a token's, on one SM
        steps = ROWS * TOPK / TILE_KEYS / MULTIPROCESSORS
        return {
            "indexer": _over(a_token / blocks, DEEP_GEMM),
            "attention": _over(self.attention / steps, FLASH_MLA),
        }


def _over(ms: float, clocks: Range) -> Range:
    least, most = (ms * 1e6 * GHZ / each for each in clocks)
    return least, most


def row_bytes(kv: str) -> int:
    """Return the bytes of one latent row in the cache."""
    return FP8_ROW_BYTES if kv == "fp8" else 2 * LATENT_DIM


# -- ours ------------------------------------------------------------------------------------------


def _ms(clocks: float) -> float:
    return clocks / GHZ / 1e6


def select(prefix: int, factors: Range) -> Range:
    """Logits and selection of a chunk behind ``prefix``: whole rounds of tiles over the SMs."""
    rounds = ceil(ROWS / select_rows(INDEX_HEADS) / MULTIPROCESSORS)
    times = [
        rounds * _ms(loop + upkeep) * factor
        for loops, factor in zip(SELECT[prefix], factors, strict=True)
        for loop, upkeep in zip(loops, UPKEEP[prefix], strict=True)
    ]
    return min(times), max(times)


def attend(heads: int, union: Mapping[int, Range], factors: Range, *, kept: bool) -> Range:
    """Attention of a chunk.

    Args:
        union: keys of neighbouring rows over those of one, by rows.
        kept: the lists were packed for an earlier layer.
    """
    together = rows_per_tile(ROWS, heads, TOPK, MULTIPROCESSORS)
    tiles = ROWS / together * head_blocks(heads) / MULTIPROCESSORS
    pack = (0.0, 0.0) if kept or together == 1 else PACK_MS
    times = [
        tiles * TOPK * gathered / TILE_KEYS * _ms(clocks) * factor + packing
        for clocks, factor in zip(ATTEND, factors, strict=True)
        for gathered, packing in zip(union[together], pack, strict=True)
    ]
    return min(times), max(times)


def clusters(size: int) -> int:
    """Return how many clusters of so many blocks run at once."""
    return sum(gpc // size for gpc in GPCS)


def decode(requests: int, heads: int, kv: str, factors: Range, bandwidth: float) -> Range:
    """Attention of one row each: a list is split over a cluster."""
    size = cluster_size(requests, heads, TOPK, clusters)
    waves = ceil(requests * head_blocks(heads) / clusters(size))
    memory = requests * TOPK * row_bytes(kv) / (bandwidth * MEMORY_PART) * 1e3
    times = [
        _ms(waves * ENDS) * factor
        + max(_ms(waves * ceil(TOPK / TILE_KEYS / size) * clocks) * factor, memory)
        for clocks, factor in zip(ATTEND, factors, strict=True)
    ]
    return min(times), max(times)


def rates(factors: Mapping[str, Range]) -> dict[str, float]:
    """Return what the fastest of our loops implies: TFLOPS, and TB/s that it reads from L2."""
    pair = min(_ms(c) * f for c, f in zip(PAGE_PAIR, factors["indexer"], strict=True)) / 1e3
    step = min(_ms(c) * f for c, f in zip(ATTEND, factors["attention"], strict=True)) / 1e3
    columns = select_rows(INDEX_HEADS) * INDEX_HEADS
    products = 2 * 128 * columns * INDEX_DIM
    attention = 2 * TILE_ROWS * TILE_KEYS * (LATENT_DIM + 512)
    return {
        "indexer_tflops": MULTIPROCESSORS * products / pair / 1e12,
        "attention_tflops": MULTIPROCESSORS * attention / step / 1e12,
        "indexer_l2": MULTIPROCESSORS * 2 * PAGE_BYTES / pair / 1e12,
    }


# -- the table -------------------------------------------------------------------------------------


def lines(engine: Engine, union: Mapping[int, Range]) -> Iterator[dict[str, Any]]:
    """Every shape: microseconds of both, and how many times faster ours would be."""
    factors = engine.factors()

    def line(operation: str, shape: str, theirs: Range, ours: Range) -> dict[str, Any]:
        times = {"engine_us": theirs, "ours_us": ours}
        found = {name: [round(1e3 * ms, 1) for ms in each] for name, each in times.items()}
        ratio = round(theirs[0] / ours[1], 2), round(theirs[1] / ours[0], 2)
        return {"operation": operation, "shape": shape, **found, "faster": ratio}

    for prefix in SELECT:
        shape = f"behind {prefix:,} tokens"
        yield line("select", shape, engine.select(prefix), select(prefix, factors["indexer"]))
    for heads in HEADS:
        padded = engine.attention * head_blocks(heads)
        packed = rows_per_tile(ROWS, heads, TOPK, MULTIPROCESSORS) > 1
        for kept in (False, True) if packed else (False,):
            ours = attend(heads, union, factors["attention"], kept=kept)
            shape = f"{heads} heads" + (", lists kept" if kept else "")
            yield line("attention", shape, (padded, padded), ours)
    for kv in ("bfloat16", "fp8"):
        for heads in HEADS:
            if heads in (20, 128):  # no S layers among the rows
                continue
            for n, theirs in engine.decode_attention(heads, kv).items():
                ours = decode(n, heads, kv, factors["attention"], engine.bandwidth)
                yield line(f"decode, {kv}", f"{heads} heads, {n}", theirs, ours)


def unions(measured: Mapping[str, Any]) -> dict[int, Range]:
    """Return the settings' means over layers, the least and the most, by rows of a tile."""
    means = [
        {int(rows): float(np.mean(by_layer)) for rows, by_layer in each["union"].items()}
        for each in measured["rows"]
    ]
    return {rows: (min(m[rows] for m in means), max(m[rows] for m in means)) for rows in means[0]}


def record(union: Mapping[int, Range]) -> dict[str, Any]:
    """Return what is written."""
    cards = {}
    for card in CARDS:
        engine = Engine(card)
        factors = engine.factors()
        gathered = ROWS * TOPK * row_bytes("bfloat16") / engine.attention / 1e9
        implied = {name: round(rate, 1) for name, rate in rates(factors).items()}
        cards[card] = {
            "factors": {name: [round(f, 2) for f in each] for name, each in factors.items()},
            "implied": implied | {"engine_gather_l2": round(gathered, 1)},
            "lines": list(lines(engine, union)),
        }
    return {"engine": f"{ENGINE}, {WHEEL} {version(WHEEL)}", "cards": cards}


def _span(span: Sequence[float]) -> str:
    least, most = (f"{each:.1f}" for each in span)
    return least if least == most else f"{least} to {most}"


def factors_table(found: Mapping[str, Any]) -> str:
    """Measured time over modelled, and the rates that ours then imply."""
    header = ("", "factor, indexer", "factor, attention", "our page loop", "our attention")
    cells = tuple(
        (
            card.upper(),
            *(_span(sorted(one["factors"][name])) for name in ("indexer", "attention")),
            *(f"{one['implied'][f'{n}_tflops']:.0f} TFLOPS" for n in ("indexer", "attention")),
        )
        for card, one in found["cards"].items()
    )
    return Grid("", header, cells).to_markdown()


def prefill_table(found: Mapping[str, Any]) -> str:
    """Write a chunk of 8,192 rows on both cards: milliseconds."""
    cards = [found["cards"][card]["lines"] for card in CARDS]
    header = ["8,192 rows"]
    for card in CARDS:
        header += [f"{card.upper()}: SGLang, ms (measured)", "ours, ms (modelled)", "faster"]
    cells = [
        (
            f"{pair[0]['operation']}, {pair[0]['shape']}",
            *(cell for one in pair for cell in _cells(one)),
        )
        for pair in zip(*cards, strict=True)
        if not pair[0]["operation"].startswith("decode")
    ]
    return Grid("", tuple(header), tuple(cells)).to_markdown()


def _cells(one: Mapping[str, Any]) -> tuple[str, str, str]:
    theirs, ours = (_span([us / 1e3 for us in one[name]]) for name in ("engine_us", "ours_us"))
    return theirs, ours, f"{_span(one['faster'])}x"


def main() -> None:
    """Compose and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    options = read_arguments(parser, "kernels/yardstick.json")
    measured = json.loads((RESULTS / "kernels" / "unions.json").read_text())
    found = {"command": options.command, **record(unions(measured))}
    write_json(Path(options.output), found)
    print(prefill_table(found))


if __name__ == "__main__":
    main()
