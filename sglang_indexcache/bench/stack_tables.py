"""Tables and curves of a layer-stack result: absolute on a GPU, shares and ratios on a CPU."""

from __future__ import annotations

from sglang_indexcache.bench.layer_stack import STAGES, LayerStackResult, Phase, Row
from sglang_indexcache.bench.prompts import format_length
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.pattern import Pattern

RATIOS = (2, 4, 8)
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def _title(result: LayerStackResult) -> str:
    device = "CPU" if result.device == "cpu" else result.device
    return (
        f"{result.shape.name}, {device}, kernels {result.kernels!r}, {result.kv} cache, "
        f"{result.layers} of {result.shape.layers} layers run"
    )


def _name(row: Row) -> str:
    several = f" x {row.requests}" if row.requests > 1 else ""
    return f"{row.phase} {format_length(row.length)}{several}"


def line(row: Row) -> str:
    """One row while others are still to come."""
    return f"{_name(row)}: indexer {row.indexer_share:.0%}"


def breakdown_grid(result: LayerStackResult) -> Grid:
    """Where the time of an F layer goes, and what an S layer reaches of the ideal."""
    header = ("", *STAGES, "indexer", "S layer, ideal / measured", "neighbours share")
    rows = []
    for row in result.rows:
        total = sum(row.full_layer.values())
        if result.device == "cpu":
            cells = [f"{row.full_layer[name] / total:.0%}" for name in STAGES]
        else:
            cells = [f"{1e3 * row.full_layer[name]:.3g} ms" for name in STAGES]
        overlap = "" if row.neighbour_overlap is None else f"{row.neighbour_overlap:.0%}"
        rows.append(
            (_name(row), *cells, f"{row.indexer_share:.0%}", f"{row.realised:.0%}", overlap)
        )
    return Grid(f"one F layer: {_title(result)}", header, tuple(rows))


def speedup_grids(result: LayerStackResult) -> list[Grid]:
    """Speed-ups of uniform patterns over all layers, by context."""
    grids = []
    for phase in _PHASES:
        rows = [row for row in result.rows if row.phase == phase]
        header = ("", *(_name(row) for row in rows))
        cells = []
        for ratio in (ratio for ratio in RATIOS if ratio <= result.shape.layers):
            pattern = Pattern.uniform(result.shape.layers, ratio)
            counts = len(pattern.full_layers), len(pattern.shared_layers)
            speeds = [row.seconds(sum(counts), 0) / row.seconds(*counts) for row in rows]
            cells.append((f"1/{ratio}", *(f"{speed:.2f}x" for speed in speeds)))
        title = f"{phase} speed-up over all F, {result.shape.layers} layers: {_title(result)}"
        grids.append(Grid(title, header, tuple(cells)))
    return grids


def share_curves(result: LayerStackResult) -> dict[str, dict[int, float]]:
    """The indexer's share of an F layer by phase and context."""
    fewest = min(row.requests for row in result.rows)
    return {
        phase: {
            row.length: row.indexer_share
            for row in result.rows
            if row.phase == phase and row.requests in (1, fewest)
        }
        for phase in _PHASES
    }


def cost_curves(result: LayerStackResult) -> tuple[dict[str, dict[int, float]], str]:
    """Prefill cost of the whole model by context, and its unit."""
    rows = [row for row in result.rows if row.phase == "prefill"]
    on_gpu = result.device != "cpu"
    unit = 1.0 if on_gpu else min(row.seconds(result.shape.layers, 0) for row in rows)
    curves = {}
    for name, ratio in (("DSA", 1), *((f"IndexCache 1/{r}", r) for r in RATIOS[:2])):
        pattern = Pattern.uniform(result.shape.layers, ratio)
        counts = len(pattern.full_layers), len(pattern.shared_layers)
        curves[name] = {row.length: row.seconds(*counts) / unit for row in rows}
    return curves, "prefill, s" if on_gpu else "prefill time, relative to DSA at the shortest"
