"""Tables and curves of a layer-stack result: absolute on a GPU, shares and ratios on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_indexcache.bench.layer_stack import (
    STAGES,
    LayerStackResult,
    Phase,
    Row,
    StackCheck,
)
from sglang_indexcache.bench.results import METRICS, Metric, paper_speedup
from sglang_indexcache.bench.shapes import ModelShape, checkpoint_of
from sglang_indexcache.bench.tables import NOT_MEASURED, Grid, where_and_when
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.support.lengths import format_length

RATIOS = (2, 4, 8)
_PHASES: tuple[Phase, ...] = ("prefill", "decode")


def _title(result: LayerStackResult, *, kernels: bool = True) -> str:
    device = "CPU" if result.device == "cpu" else result.device
    who = f"kernels {result.kernels!r}, " if kernels else ""
    return (
        f"{result.shape.name}, {device}, {who}{result.kv} cache, "
        f"{result.layers} of {result.shape.layers} layers run"
    )


def _name(row: Row) -> str:
    several = f" x {row.requests}" if row.requests > 1 else ""
    return f"{row.phase} {format_length(row.length)}{several}"


def _by_length(result: LayerStackResult) -> list[Row]:
    """They may have been measured in another order."""
    return sorted(result.rows, key=lambda row: row.length)


def line(row: Row) -> str:
    """One row while others are still to come."""
    return f"{_name(row)}: indexer {row.indexer_share:.0%}"


def breakdown_grid(result: LayerStackResult) -> Grid:
    """Where the time of an F layer goes, and what an S layer reaches of the ideal."""
    header = ("", *STAGES, "indexer", "S layer, ideal / measured", "neighbours share")
    rows = []
    for row in _by_length(result):
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
        rows = [row for row in _by_length(result) if row.phase == phase]
        header = ("", *(_name(row) for row in rows))
        cells = []
        for ratio in (ratio for ratio in RATIOS if ratio <= result.shape.layers):
            pattern = Pattern.uniform(result.shape.layers, ratio)
            counts = len(pattern.full_layers), len(pattern.shared_layers)
            speeds = [row.seconds(sum(counts), 0) / row.seconds(*counts) for row in rows]
            cells.append((f"1/{ratio}", *(f"{speed:.2f}x" for speed in speeds)))
        if not rows:
            continue
        title = f"{phase} speed-up over all F, {result.shape.layers} layers: {_title(result)}"
        grids.append(Grid(title, header, tuple(cells)))
    return grids


def comparison_grid(results: Sequence[LayerStackResult]) -> Grid:
    """The paper's three metrics for every set of kernels, of a model of all layers.

    Speed-ups are over all F with the engine's kernels, or with the first ones where those did not
    run. "Full" is the largest batch of decode at each length, and "not measured" where a set of
    kernels did not come to it.

    Args:
        results: of one shape on one card, one for each set of kernels.
    """
    shape = results[0].shape
    lengths = sorted({row.length for result in results for row in result.rows})
    baseline = next((r for r in results if r.kernels.startswith("engine")), results[0])
    rows: list[tuple[str, ...]] = []
    for metric, name in METRICS.items():
        rows.append((name,))
        points = [(length, _at_once(results, metric, length)) for length in lengths]
        for result in results:
            for ratio in (1, *RATIOS[:2]):
                pattern = Pattern.uniform(shape.layers, ratio)
                what = "all F" if ratio == 1 else f"IndexCache 1/{ratio}"
                cells = [_compared(result, baseline, metric, point, pattern) for point in points]
                rows.append((f"{what}, {result.kernels}", *cells))
        rows += _paper(shape, metric, lengths)
    title = (
        f"{_title(results[0], kernels=False)}; speed-up over all F with {baseline.kernels}, "
        "layers only"
    )
    return Grid(title, ("", *map(format_length, lengths)), tuple(rows))


def check_grids(check: StackCheck) -> list[Grid]:
    """The comparison, and every set's breakdown."""
    if not check.results:
        return []
    return [comparison_grid(check.results), *map(breakdown_grid, check.results)]


def _at_once(results: Sequence[LayerStackResult], metric: Metric, length: int) -> int:
    """Requests of a metric: one, or what the full KV cache held, whoever measured that."""
    if metric != "full":
        return 1
    return max(row.requests for r in results for row in r.rows if row.length == length)


def _compared(
    result: LayerStackResult,
    baseline: LayerStackResult,
    metric: Metric,
    point: tuple[int, int],
    pattern: Pattern,
) -> str:
    value = _value(result, metric, *point, pattern)
    if value is None:
        return NOT_MEASURED
    base = _value(baseline, metric, *point, Pattern.full(len(pattern)))
    speed = None
    if base is not None:
        speed = base / value if metric == "prefill" else value / base
    ratio = NOT_MEASURED if speed is None else f"{speed:.2f}x"
    return ratio if result.device == "cpu" else f"{value:.3g} ({ratio})"


def _value(
    result: LayerStackResult, metric: Metric, length: int, requests: int, pattern: Pattern
) -> float | None:
    """Seconds of a prefill, or tokens per second."""
    wanted = ("prefill" if metric == "prefill" else "decode", length, requests)
    for row in result.rows:
        if (row.phase, row.length, row.requests) == wanted:
            seconds = row.seconds(len(pattern.full_layers), len(pattern.shared_layers))
            return seconds if metric == "prefill" else requests / seconds
    return None


def _paper(shape: ModelShape, metric: Metric, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """What the paper measured of whole servers, where it has this shape."""
    rows = []
    for ratio in RATIOS[:2]:
        pattern = Pattern.uniform(shape.layers, ratio)
        cited = paper_speedup(dict(checkpoint_of(shape).shape), pattern, metric)
        cells = [cited.get(format_length(length)) for length in lengths]
        if any(cells):
            name = f"IndexCache 1/{ratio}, paper's servers (H100)"
            rows.append((name, *("" if cell is None else f"{cell:.2f}x" for cell in cells)))
    return rows


def report(result: LayerStackResult) -> str:
    """Everything about one result in Markdown."""
    grids = [breakdown_grid(result), *speedup_grids(result)]
    return "\n".join([*(grid.to_markdown() for grid in grids), conditions(result)])


def conditions(result: LayerStackResult) -> str:
    """Where it was measured and what else ran."""
    lines = where_and_when(result.environment, started_here=True)
    clock = "processor time" if result.device == "cpu" else "the device's"
    lines.append(
        f"Medians of {result.repeats}, chunks of {result.chunk} tokens; seconds are {clock}. "
        f"Load average before: {result.environment.load_before:g}."
    )
    return "\n".join(lines) + "\n"


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
