"""What our kernels would take on an H200 beside the engine's, by a model: no card has run them.

    python -m benchmarks.kernels.forecast [--reason LOOP TEXT] [--out FILE]

Compiles ``csrc/``, models the hot loops (``hot_loops.py``), and makes of their clocks and of what
is stated here the time of the benchmark's shapes. The engine's times are published ones, or follow
from them: each says where it is from. Writes ``benchmarks/results/kernels/forecast.json`` and
prints its table; fill ``docs/kernels.md`` with ``python -m benchmarks.readme`` afterwards.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from benchmarks.kernels import composition, engine_loops, gate_counts, hot_loops, topk_counts
from benchmarks.kernels.hot_loops import GATE_ROUNDS, GATE_WARPS, Modelled
from benchmarks.kernels.machine import (
    CLUSTERS,
    GATHER_BYTES_PER_SECOND,
    GATHER_START,
    GHZ,
    MEMORY_BYTES_PER_SECOND,
    MULTIPROCESSORS,
    PORT_BYTES_PER_CLOCK,
    SILICON,
)
from benchmarks.kernels.predictions import predictions
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.build import nvcc_version
from sglang_indexcache.kernels.contract import (
    FP8_ROW_BYTES,
    INDEX_DIM,
    LATENT_DIM,
    PAGE_BYTES,
    PAGE_TOKENS,
)
from sglang_indexcache.kernels.indexer.cuda import select_rows
from sglang_indexcache.kernels.sparse_mla.cuda import cluster_size, rows_per_tile

RESULT = Path(__file__).parents[1] / "results" / "kernels" / "forecast.json"
CONTEXTS = (10_240, 61_440, 122_880, 204_800)
ROWS, TOPK = 8192, 2048
BATCHES = (1, 8, 64)
LEAST_SHARE = 4096
"""``kLeastShare`` of topk.cu."""
LONG = 96 * 1024
"""Contexts from which the goals for prefill hold."""
Mood: TypeAlias = Literal["optimistic", "central", "pessimistic"]
MOODS: tuple[Mood, ...] = ("optimistic", "central", "pessimistic")

# -- the engine ----------------------------------------------------------------------------------

DEEP_GEMM_US, DEEP_GEMM_ROWS, DEEP_GEMM_CONTEXT = 931.0, 2048, 32_768
DEEP_GEMM_FLOPS = 1145e12
"""DeepGEMM's logits, 64 heads, H200: 931 us for 2048 rows of 32K, 1130 to 1145 TFLOPS from 32K to
64K (sglang #11989)."""
SHORT_PART = 0.87
"""Of that rate at 10K: 960 to 1000 TFLOPS at 4K to 8K (sglang #11989)."""
TOPK_BYTES_PER_SECOND, TOPK_START = 3.9e12, 150.0
"""SGLang's v2 top-k reads a long row twice; the rate, and microseconds beside it: assumed."""
TOPK_ONE_READ = 16_384
"""Tokens up to which it reads a row once (sglang, topk_v2.cuh)."""
DECODE_TOPK_US = {61_440: (9.0, 10.0, 14.0), 204_800: (17.0, 19.0, 45.0)}
"""SGLang's v2 top-k for batches of 1, 8 and 64: 17 to 20 us are published for 8 rows of 128K; the
others are scaled from it by what is read: assumed."""
FLASH_MLA_FLOPS = 640e12
"""FlashMLA's sparse prefill, H800 (its README); it pads to 64 heads."""
FLASH_MLA_DECODE_US = {1: 22.8, 8: 22.8, 64: 69.0}
"""22.8 us at few heads, H200 (pegainfer #624); 69 for 64 requests follows from 250 to 280 TFLOPS
for decode (its README, FP8): assumed."""
LAUNCH_US, START_US = 4.0, 3.0
"""Of a launch within a graph, and until its first page is there: assumed."""
ENGINE_MEMORY_PART = 0.90
MEMORY_PART = {"optimistic": 0.92, "central": 0.90, "pessimistic": 0.85}
"""Of the bandwidth that decode's logits reach: assumed. Ours run whole rounds of blocks; when they
ran two and some, 0.85 was assumed."""
ENGINE_RANGE = {"optimistic": 1.15, "central": 1.0, "pessimistic": 0.85}
"""The engine's times in decode, which are published for other shapes."""

# -- the gate ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateClocks:
    """Clocks of the gate's steps in which nothing is multiplied.

    From a cycle model on the pieces of the kernel with eight warps as nvcc 13.0 compiled it, by
    hand: unlike the hot loops they are not found anew. What the present kernel does otherwise
    (``meet``, ``few``, ``rounds``, ``counts``, ``collect``) is counted: instructions, pipes and
    latencies as ``machine.py`` has them. Change them with gate.h.

    Checks and compactions are the three gate warps', and the others could multiply on until the
    ring is full; but the gate is what they wait for, so nothing is taken as overlapped.
    """

    meet: float = 100  # the gate warps, for a check
    few: float = 512 / 96 / 2  # threads of a compaction by the gate over those of the model; half
    # of its clocks are loads in flight, which fewer threads wait for no longer
    bins: float = 134  # a row's 64 bins a lane, summed
    rounds: float = 3 * 250  # 5 exchanges, a vote and 2 exchanges each
    counts: float = 60
    keep: float = 1280  # a compaction: 1024 entries
    pass_of_cut: float = 552  # one of 3.5 radix passes in global memory: 1024 entries
    find_bin: float = 1014  # behind each of them
    collect: float = 300  # 1024 entries to shared memory: 4096 in a load's 600 and 500 of issue
    pass_of_finish: float = 372
    find_bin_at_end: float = 787
    window: float = 1140  # bits of 131072 positions: zero, scan
    bits: float = 432  # 1024 entries
    write_slots: float = 1524  # 1024 entries
    write_positions: float = 700
    row: float = 600


GATE = GateClocks()
RADIX_PASSES = 3.5
LOGIT_MEAN = {"optimistic": 0.0, "central": 0.0, "pessimistic": 10.0}
"""Of unit normal logits: the benchmark draws zero-mean ones; sums of positive scores are not."""

# -- top-k ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopkClocks:
    """Clocks of what the top-k kernel does once a row, beside its loop over the row.

    By hand, from the instructions, pipes and latencies of ``machine.py``: unlike the hot loops they
    are not found anew. Change them with row.cuh.
    """

    first_load: float = 400  # the row's first line, from L2; its length was read while it waited
    bound: float = 650  # the largest of every thread: minimum, maximum, histogram, its digit
    cluster: float = 250  # a barrier of the cluster, 190 published (Luo et al. 2024), and the skew
    peers: float = 260  # a word of each of the other blocks: 180 to 210 published, side by side
    round: float = 620  # histogram of the lists, 8 words of the others a bin, the bin
    write: float = 1500  # bits, ranks, a page number from L2, the slot; a barrier behind it
    window: float = 500  # of a share beyond its first 32768 logits


TOPK_CLOCKS = TopkClocks()
TOPK_SLOWER: dict[Mood, float] = {"optimistic": 0.8, "central": 1.0, "pessimistic": 1.4}
"""Of those, which are latencies in series."""
FOLLOW_US: dict[Mood, float] = {"optimistic": 0.7, "central": 1.2, "pessimistic": 2.5}
"""From the end of the logits to the first instruction of top-k, which is launched early and waits
(programmatic dependent launch): assumed; between launches of a graph 1.3 to 2 are usual."""
SM_BYTES_PER_CLOCK: dict[Mood, float] = {"optimistic": 64, "central": 48, "pessimistic": 36}
"""That one SM reads from L2: 64 is the width of its port, the others are assumed."""

# -- attention -----------------------------------------------------------------------------------

OVERLAP = {"optimistic": 1.2, "central": 1.25, "pessimistic": 1.6}
"""Union of three neighbours' lists over one list. The benchmark's lists keep 90 % from row to row
and are drawn anew every 64 rows: 1.25."""
PACK_US = {"optimistic": 150.0, "central": 170.0, "pessimistic": 200.0}
"""Packing the lists of 8192 rows: assumed."""
STEP_KEYS = 64
CONVERSION_CLOCKS = {"optimistic": 0.0, "central": 0.0, "pessimistic": 50.0 * STEP_KEYS}
"""Of a step's FP8 rows at the least: FlashMLA's guide counts 50 clocks a key for an SM; the model
of the instructions finds fewer."""
TILE_START, DECODE_START, DECODE_END = 7000.0, 5000.0, 5000.0
"""Clocks of a tile beside its steps; in decode before the first step, after the last: assumed."""


@dataclass(frozen=True)
class Row:
    """One line of the forecast.

    Attributes:
        goal: of the design, or a name without a goal.
        shape: in words.
        ours_us, engine_us: central, microseconds.
        low, high: of ``ratio``, engine over ours.
        bound_by: what ours waits for.
        engine_source: where its time is from.
    """

    goal: str
    shape: str
    ours_us: float
    engine_us: float
    low: float
    high: float
    bound_by: str
    engine_source: str

    @property
    def ratio(self) -> float:
        """How many times faster ours are."""
        return self.engine_us / self.ours_us

    def to_json(self) -> dict[str, Any]:
        """For the results."""
        return {
            "goal": self.goal,
            "shape": self.shape,
            "ours_us": round(self.ours_us, 1),
            "engine_us": round(self.engine_us, 1),
            "ratio": round(self.ratio, 2),
            "low": round(self.low, 2),
            "high": round(self.high, 2),
            "bound_by": self.bound_by,
            "engine_source": self.engine_source,
        }


def row(
    goal: str,
    shape: str,
    ours: Mapping[Mood, float],
    engine: Mapping[Mood, float],
    bound_by: str,
    source: str,
) -> Row:
    """A line from the times in each mood."""
    ratios = [engine[mood] / ours[mood] for mood in MOODS]
    return Row(
        goal, shape, ours["central"], engine["central"], min(ratios), max(ratios), bound_by, source
    )


def clocks(loop: Modelled, mood: Mood) -> float:
    """A loop's, by mood."""
    least, most = loop.clocks
    return {"optimistic": least, "central": loop.middle, "pessimistic": most}[mood]


# -- times -----------------------------------------------------------------------------------------


def page_clocks(
    loops: Mapping[str, Modelled], heads: int, counts: gate_counts.Counts, mood: Mood
) -> tuple[float, float]:
    """Clocks of a pair of pages, and how much of them is for logits that pass.

    A line through the two models of the loop, and never below the lesser.
    """
    rounds = counts.rounds_8 if select_rows(heads) == 8 else counts.rounds_4
    (few, low), (many, high) = (
        (rounds_of, clocks(loops[f"select_{heads}{name}"], mood))
        for name, rounds_of in GATE_ROUNDS.items()
    )
    more = max(0.0, rounds - few) * (high - low) / (many - few)
    return low + more, more


def prefill_parts(
    loops: Mapping[str, Modelled],
    heads: int,
    context: int,
    mood: Mood,
    *,
    best_first: bool = False,
) -> dict[str, float]:
    """Clocks of one tile of the fused kernel, the last chunk of a prompt, by part.

    ``best_first`` as of ``gate_counts.average``.
    """
    rows = select_rows(heads)
    visible = context - ROWS / 2
    pages = visible / PAGE_TOKENS
    counts = gate_counts.average(context, LOGIT_MEAN[mood], TOPK, best_first=best_first)
    each, more = page_clocks(loops, heads, counts, mood)
    find = math.ceil(rows / GATE_WARPS) * (GATE.bins + GATE.rounds)
    find_at_end = rows * GATE.bins + GATE.rounds
    full = (gate_counts.CAPACITY - gate_counts.CHECK_KEYS) / 1024
    cut = RADIX_PASSES * (full * GATE.pass_of_cut + GATE.find_bin)
    left, windows = counts.left / 1024, 1 + visible // 131_072
    finish = GATE.row + counts.listed / 1024 * GATE.collect
    finish += RADIX_PASSES * (left * GATE.pass_of_finish + GATE.find_bin_at_end)
    finish += windows * (GATE.window + left * GATE.bits)
    finish += left * (GATE.write_positions if mood == "optimistic" else GATE.write_slots)
    return {
        "products": pages / 2 * (each - more) * SILICON[mood],
        "gate": pages / 2 * more * SILICON[mood],
        "check": counts.checks * (GATE.meet + find + GATE.counts),
        "keep": rows * GATE.few * (counts.keeps * (full + 1) * GATE.keep + counts.cuts * cut),
        "finish": find_at_end + rows * finish,
    }


def prefill_us(
    loops: Mapping[str, Modelled],
    heads: int,
    context: int,
    mood: Mood,
    *,
    best_first: bool = False,
) -> float:
    """Logits and selection of 8192 rows: whole rounds of tiles over the SMs."""
    rounds = math.ceil(ROWS / select_rows(heads) / MULTIPROCESSORS)
    parts = prefill_parts(loops, heads, context, mood, best_first=best_first)
    return rounds * sum(parts.values()) / GHZ[mood] / 1e3


def best_pages_first(
    loops: Mapping[str, Modelled], engine: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What an order of pages can bring at most: every floor final from the first check on."""
    found = []
    for heads in (32, 64):
        for context in (LONG, *(each for each in CONTEXTS if each > LONG)):
            ours = prefill_us(loops, heads, context, "central")
            least = prefill_us(loops, heads, context, "central", best_first=True)
            theirs = engine_prefill_us(engine, heads, context)
            found.append(
                {
                    "shape": f"{ROWS} rows, {context // 1024}K, {heads} heads",
                    "ours_us": round(ours, 1),
                    "ratio": round(theirs / ours, 2),
                    "least_us": round(least, 1),
                    "ratio_at_most": round(theirs / least, 2),
                }
            )
    return found


def faster_from(
    loops: Mapping[str, Modelled], engine: Mapping[str, Any], heads: int, step: int = 4096
) -> int:
    """Tokens of context, a multiple of ``step``, from which we take no longer than the engine."""
    contexts = range(LONG, 2 * ROWS - step, -step)
    slower = (
        context
        for context in contexts
        if prefill_us(loops, heads, context, "central") > engine_prefill_us(engine, heads, context)
    )
    return next(slower, 2 * ROWS - step) + step


def deep_gemm_flops(engine: Mapping[str, Any], heads: int) -> float:
    """Its rate: published for 64 heads; for 32 that over the ratio of the modelled clocks.

    The least clocks of both are compared: the ratio that favours the engine most.
    """
    return float(DEEP_GEMM_FLOPS * engine["64"]["clocks"][0] / engine[str(heads)]["clocks"][0])


def engine_prefill_us(engine: Mapping[str, Any], heads: int, context: int) -> float:
    """DeepGEMM's logits and SGLang's v2 top-k."""
    pairs = ROWS * (context - ROWS / 2)
    rate = deep_gemm_flops(engine, heads) * (SHORT_PART if context < 20_000 else 1)
    reads = 1 if context <= TOPK_ONE_READ else 2
    topk = pairs * 4 * reads / TOPK_BYTES_PER_SECOND * 1e6 + TOPK_START
    return pairs * heads * INDEX_DIM * 2 / rate * 1e6 + topk


def decode_logits_us(batch: int, context: int, part: float) -> float:
    """Bound by memory: every page is read once, and its logits are written."""
    moved = batch * context * (PAGE_BYTES / PAGE_TOKENS + 4) / MEMORY_BYTES_PER_SECOND * 1e6
    return max(LAUNCH_US, moved / part + START_US)


def topk_cluster(rows: int, context: int) -> int:
    """Blocks of a row, as topk.cu has it; a list, and so a block, fits an SM once."""
    sizes = (size for size in (8, 4, 2) if rows <= CLUSTERS[size])
    return next((size for size in sizes if context >= size * LEAST_SHARE), 1)


def decode_topk_us(loops: Mapping[str, Modelled], batch: int, context: int, mood: Mood) -> float:
    """A cluster a row: the first chunk is loaded, then compared; others are loaded meanwhile."""
    size = topk_cluster(batch, context)
    counts, share = topk_counts.average(context, TOPK, size), context / size
    chunk = topk_counts.VECTORS * 4 * topk_counts.THREADS
    steps, slower = TOPK_CLOCKS, TOPK_SLOWER[mood]
    once = steps.first_load + steps.bound + steps.cluster + steps.peers
    once += counts.rounds * (steps.cluster + steps.round)
    once += steps.write + steps.cluster + steps.window * (share // 32_768)
    load = 4 * min(share, chunk) / SM_BYTES_PER_CLOCK[mood]
    last = clocks(loops["topk_last_chunk"], mood)
    compare = (math.ceil(share / chunk) - 1) * clocks(loops["topk_chunk"], mood) + last
    own = (once * slower + load + compare) / GHZ[mood] / 1e3
    streamed = batch * context * 4 / TOPK_BYTES_PER_SECOND * 1e6
    ends = (once * slower + last) / GHZ[mood] / 1e3
    waves = math.ceil(batch / CLUSTERS[size])
    return FOLLOW_US[mood] + waves * max(own, streamed + ends)


@dataclass(frozen=True)
class Step:
    """Clocks of one step of 64 keys in a tile, by what may take them; they run side by side.

    With two stages the rows of one are under way while the math warps work on the other, and a
    third does not fit into shared memory. So a step takes what the slowest of these takes.
    """

    math: float
    gather: float
    load: float

    @property
    def clocks(self) -> float:
        """Of the slowest."""
        return max(self.math, self.gather, self.load)

    @property
    def bound_by(self) -> str:
        """The slowest, in words."""
        names = {
            self.math: "products and softmax, one after the other",
            self.gather: "the gather of rows",
            self.load: "latency and conversion of rows",
        }
        return names[self.clocks]


def mla_step(
    loops: Mapping[str, Modelled], mood: Mood, *, fp8: bool, sms: int, memory: bool
) -> Step:
    """What a step takes.

    Args:
        fp8: rows are converted.
        sms: that gather at once.
        memory: rows come from there (decode), not from L2.
    """
    row = FP8_ROW_BYTES if fp8 else 2 * LATENT_DIM
    source = GATHER_BYTES_PER_SECOND[mood]
    if memory:
        source = min(source, MEMORY_BYTES_PER_SECOND * MEMORY_PART[mood])
    each = min(PORT_BYTES_PER_CLOCK, source / (sms * GHZ[mood] * 1e9))
    convert = max(clocks(loops["attend_fp8_load"], mood), CONVERSION_CLOCKS[mood]) if fp8 else 0.0
    arrive = GATHER_START[mood] + STEP_KEYS * row / PORT_BYTES_PER_CLOCK
    return Step(
        math=clocks(loops["attend_fp8" if fp8 else "attend_bf16"], mood),
        gather=STEP_KEYS * row / each,
        load=arrive + convert,
    )


def mla_prefill_us(
    loops: Mapping[str, Modelled], heads: int, mood: Mood, *, reused: bool = False
) -> float:
    """8192 rows; a tile is the rows that fit into 64 heads, over the union of their lists."""
    together = rows_per_tile(ROWS, heads, TOPK, MULTIPROCESSORS)
    union = OVERLAP[mood] if together > 1 else 1.0
    step = mla_step(loops, mood, fp8=False, sms=MULTIPROCESSORS, memory=False)
    tile = math.ceil(TOPK * union / STEP_KEYS) * step.clocks + TILE_START
    pack = PACK_US[mood] if together > 1 and not reused else 0.0
    return math.ceil(ROWS / together) / MULTIPROCESSORS * tile / GHZ[mood] / 1e3 + pack


def mla_decode_us(
    loops: Mapping[str, Modelled], batch: int, heads: int, mood: Mood, *, fp8: bool
) -> float:
    """A list is split over a cluster; before the first step FP8 rows are converted."""
    size = cluster_size(batch, heads, TOPK, CLUSTERS.__getitem__)
    waves = math.ceil(batch / CLUSTERS[size])
    step = mla_step(loops, mood, fp8=fp8, sms=min(batch * size, MULTIPROCESSORS), memory=True)
    first = clocks(loops["attend_fp8_load"], mood) if fp8 else 0.0
    spent = first + TOPK // STEP_KEYS // size * step.clocks
    return waves * (DECODE_START + spent + DECODE_END) / GHZ[mood] / 1e3


# -- the table -------------------------------------------------------------------------------------


def rows_of(loops: Mapping[str, Modelled], engine: Mapping[str, Any]) -> list[Row]:
    """The forecast."""
    return [
        *_prefill_rows(loops, engine),
        *_decode_rows(loops),
        *_attention_rows(loops),
    ]


def _prefill_rows(loops: Mapping[str, Modelled], engine: Mapping[str, Any]) -> list[Row]:
    found = []
    for heads in (32, 64):
        loop = loops[f"select_{heads}"]
        for context in CONTEXTS:
            goal = f"indexer_prefill_{heads}" + ("" if context >= LONG else "_short")
            parts = prefill_parts(loops, heads, context, "central")
            most = max(parts, key=lambda name: parts[name])
            share = parts[most] / sum(parts.values())
            bound = {"products": f"issue; tensor cores {tensor_part(loop):.0%} busy"}.get(
                most, most
            )
            ours = {mood: prefill_us(loops, heads, context, mood) for mood in MOODS}
            theirs = dict.fromkeys(MOODS, engine_prefill_us(engine, heads, context))
            shape = f"{ROWS} rows, {context // 1024}K, {heads} heads"
            source = "sglang #11989, scaled" + ("" if heads == 64 else " by the modelled clocks")
            found.append(row(goal, shape, ours, theirs, f"{bound} ({share:.0%})", source))
    return found


def _decode_rows(loops: Mapping[str, Modelled]) -> list[Row]:
    found = []
    for context, topks in DECODE_TOPK_US.items():
        for batch, topk in zip(BATCHES, topks, strict=True):
            logits = {mood: decode_logits_us(batch, context, MEMORY_PART[mood]) for mood in MOODS}
            ours = {
                mood: logits[mood] + decode_topk_us(loops, batch, context, mood) for mood in MOODS
            }
            central = decode_logits_us(batch, context, ENGINE_MEMORY_PART) + topk
            theirs = {mood: central * ENGINE_RANGE[mood] for mood in MOODS}
            goal = "indexer_decode" + ("" if context >= LONG else "_short")
            part = logits["central"] / ours["central"]
            bound = f"memory ({part:.0%})" if part > 0.8 else f"latencies of top-k ({1 - part:.0%})"
            shape = f"{_requests(batch)}, {context // 1024}K, 32 or 64 heads"
            found.append(
                row(goal, shape, ours, theirs, bound, "bandwidth; published top-k, scaled")
            )
            if context >= LONG:
                alone = {mood: decode_topk_us(loops, batch, context, mood) for mood in MOODS}
                published = {mood: topk * ENGINE_RANGE[mood] for mood in MOODS}
                shape = f"{batch} row{'s'[: batch > 1]}, {context // 1024}K"
                bound = "reading the row" if batch == BATCHES[-1] else "latencies in series"
                found.append(row("topk", shape, alone, published, bound, "published, scaled"))
    return found


def _attention_rows(loops: Mapping[str, Modelled]) -> list[Row]:
    padded = ROWS * TOPK * 64 * (576 + 512) * 2 / FLASH_MLA_FLOPS * 1e6
    found = []
    prefill = mla_step(loops, "central", fp8=False, sms=MULTIPROCESSORS, memory=False)
    for name, heads, reused in (
        ("mla_prefill_20", 20, False),
        ("mla_prefill_20_lists_kept", 20, True),
        ("mla_prefill_64", 64, False),
    ):
        ours = {mood: mla_prefill_us(loops, heads, mood, reused=reused) for mood in MOODS}
        theirs = dict.fromkeys(MOODS, padded)
        bound = prefill.bound_by
        shape = f"{ROWS} rows, {heads} heads"
        if heads == 64:
            bound += "; auto leaves it to the engine"
        found.append(row(name, shape, ours, theirs, bound, "FlashMLA's README: 640 TFLOPS"))
    for name in ("bf16", "fp8"):
        for batch, central in FLASH_MLA_DECODE_US.items():
            fp8 = name == "fp8"
            ours = {mood: mla_decode_us(loops, batch, 20, mood, fp8=fp8) for mood in MOODS}
            theirs = {mood: central * ENGINE_RANGE[mood] for mood in MOODS}
            sms = batch * cluster_size(batch, 20, TOPK, CLUSTERS.__getitem__)
            step = mla_step(loops, "central", fp8=fp8, sms=sms, memory=True)
            start = (DECODE_START + DECODE_END) / GHZ["central"] / 1e3
            bound = "start and end" if start > ours["central"] / 2 else step.bound_by
            source = "pegainfer #624" if batch < 64 else "FlashMLA's README, scaled"
            shape = f"{_requests(batch)}, 20 heads"
            found.append(row(f"mla_decode_20_{name}", shape, ours, theirs, bound, source))
    return found


def _requests(batch: int) -> str:
    return "1 request" if batch == 1 else f"{batch} requests"


def composition_times(
    loops: Mapping[str, Modelled], engine: Mapping[str, Any]
) -> dict[tuple[str, composition.Phase], list[composition.Times]]:
    """Of a prompt of 200K tokens in chunks, and of a token after it, for one request."""
    chunks = range(ROWS, CONTEXTS[-1] + 1, ROWS)
    start = faster_from(loops, engine, 32)
    theirs = {context: engine_prefill_us(engine, 32, context) for context in chunks}
    padded = ROWS * TOPK * 64 * (576 + 512) * 2 / FLASH_MLA_FLOPS * 1e6
    decode = decode_logits_us(1, CONTEXTS[-1], ENGINE_MEMORY_PART)
    decode += DECODE_TOPK_US[CONTEXTS[-1]][0]
    found: dict[tuple[str, composition.Phase], list[composition.Times]] = {}
    for model in composition.MODELS:
        for mood in sorted(MOODS):  # central first
            ours = (
                prefill_us(loops, 32, context, mood) if context >= start else theirs[context]
                for context in chunks
            )
            full, shared = (
                min(padded, mla_prefill_us(loops, model.heads, mood, reused=reused))
                for reused in (False, True)
            )
            prefill = composition.Times(
                sum(theirs.values()),
                sum(ours),
                *(len(chunks) * us for us in (padded, full, shared)),
            )
            found.setdefault((model.name, "prefill"), []).append(prefill)
            own = decode_logits_us(1, CONTEXTS[-1], MEMORY_PART[mood])
            own += decode_topk_us(loops, 1, CONTEXTS[-1], mood)
            times = composition.Times(decode, min(own, decode))
            found.setdefault((model.name, "decode"), []).append(times)
    return found


def tensor_part(loop: Modelled) -> float:
    """Of the central clocks, the tensor cores' work."""
    return loop.tensor * loop.clocks[0] / loop.middle


def calibration(engine: Mapping[str, Any]) -> dict[str, Any]:
    """DeepGEMM's published time over its modelled clocks, at each clock of the card."""
    blocks = DEEP_GEMM_ROWS * DEEP_GEMM_CONTEXT * 64 / (256 * 128)
    us = DEEP_GEMM_US * MULTIPROCESSORS / blocks * 7.76 / 8
    return {
        "what": "DeepGEMM, 64 heads, 2048 rows of 32K on an H200: 931 us (sglang #11989)",
        "us_of_256_keys_x_128_columns": round(us, 3),
        "published_over_modelled": {
            f"{ghz} GHz": [round(us * ghz * 1e3 / each, 2) for each in engine["64"]["clocks"][::-1]]
            for ghz in GHZ.values()
        },
    }


def record_loops(
    loops: Mapping[str, Modelled], old: Mapping[str, Any], reasons: Mapping[str, str]
) -> dict[str, Any]:
    """``hot_loops`` of the results: what the model says, the fewest clocks ever, and the reasons.

    Raises:
        KernelError: a loop became slower than the file says, and no reason is given.
    """
    entries: dict[str, Any] = {}
    for name, loop in loops.items():
        entry, known = loop.to_json(), old.get(name, {})
        fastest = zip(loop.clocks, known.get("fastest", loop.clocks), strict=True)
        entry["fastest"] = [round(min(pair), 1) for pair in fastest]
        entry["reason"] = reasons.get(name, known.get("reason", ""))
        entries[name] = entry
    now = {name: loop.clocks for name, loop in loops.items()}
    unexplained = {name: now[name] for name in now if name in old and name not in reasons}
    complaints = hot_loops.slower(old, unexplained) or hot_loops.slower(entries, now)
    if complaints:
        raise KernelError(f"slower: {'; '.join(complaints)}; say why: --reason LOOP TEXT")
    return entries


def record(
    loops: Mapping[str, Modelled],
    engine: Mapping[str, Any],
    before: Mapping[str, Any],
    reasons: Mapping[str, str],
) -> dict[str, Any]:
    """The results file.

    Raises:
        KernelError: as :func:`record_loops`.
    """
    entries = record_loops(loops, before.get("hot_loops", {}), reasons)
    rows = [one.to_json() for one in rows_of(loops, engine)]
    bound = best_pages_first(loops, engine)

    def topk_us(rows: int) -> float:
        return decode_topk_us(loops, rows, CONTEXTS[-1], "central")

    def decode_us(batch: int, fp8: bool) -> float:
        return mla_decode_us(loops, batch, 20, "central", fp8=fp8)

    return {
        "status": "forecast by a model; no card has run these kernels",
        "machine": "H200 SXM",
        "nvcc": ".".join(map(str, nvcc_version())),
        "assumptions": {
            "ghz": GHZ,
            "silicon": SILICON,
            "logit_mean": LOGIT_MEAN,
            "union_of_three_lists": OVERLAP,
            "memory_part": MEMORY_PART | {"engine": ENGINE_MEMORY_PART},
            "gather_bytes_per_second": GATHER_BYTES_PER_SECOND,
            "gather_start_clocks": GATHER_START,
            "follow_us": FOLLOW_US,
            "sm_bytes_per_clock": SM_BYTES_PER_CLOCK,
        },
        "calibration": calibration(engine),
        "engine": engine,
        "hot_loops": entries,
        "rows": rows,
        "best_pages_first": bound,
        "composition": composition.rows(composition_times(loops, engine)),
        "faster_from": {str(heads): faster_from(loops, engine, heads) for heads in (32, 64)},
        "predictions": predictions(rows, bound, loops, decode_us, topk_us),
    }


def table(result: Mapping[str, Any]) -> Grid:
    """The forecast, for people."""
    header = ("goal", "shape", "ours, us", "engine, us", "faster by", "range", "bound by")
    cells = tuple(
        (
            one["goal"],
            one["shape"],
            f"{one['ours_us']:.0f}",
            f"{one['engine_us']:.0f}",
            f"{one['ratio']:.2f}x",
            f"{one['low']:.2f} to {one['high']:.2f}",
            one["bound_by"],
        )
        for one in result["rows"]
    )
    return Grid(f"{result['machine']}: {result['status']}", header, cells)


def best_first_table(found: Sequence[Mapping[str, Any]]) -> Grid:
    """The bound, for people."""
    header = ("shape", "forecast, us", "faster by", "bound, us", "faster by at most")
    cells = tuple(
        (
            one["shape"],
            f"{one['ours_us']:.0f}",
            f"{one['ratio']:.2f}x",
            f"{one['least_us']:.0f}",
            f"{one['ratio_at_most']:.2f}x",
        )
        for one in found
    )
    return Grid("A bound: every floor final from the first check on", header, cells)


def main() -> None:
    """Forecast, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument(
        "--reason", nargs=2, action="append", default=[], metavar=("LOOP", "TEXT"),
        help="why a hot loop may be slower than the fewest clocks recorded",
    )  # fmt: skip
    options = parser.parse_args()
    before = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    try:
        engine = engine_loops.deep_gemm() or before.get("engine")
        if engine is None:
            raise KernelError("the engine's figures need sgl-deep-gemm, or an earlier forecast")
        result = record(hot_loops.model_all(), engine, before, dict(options.reason))
    except KernelError as error:
        sys.exit(f"error: {error}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result).to_markdown())
    print(best_first_table(result["best_pages_first"]).to_markdown())
    print(composition.table(result["composition"]).to_markdown())
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
