"""The paper's figures from our results: relative speed-up, indexer share, scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_indexcache.bench.results import LatencyResult, Metric, paper_speedup
from sglang_indexcache.bench.tables import label
from sglang_indexcache.study.plots import make_figure, pattern_color, save_figure
from sglang_indexcache.support.lengths import format_length

_PANELS: dict[Metric, str] = {
    "prefill": "prefill",
    "decode": "decode, one request",
    "full": "decode, full KV cache",
}


def draw_speedups(result: LatencyResult, path: Path) -> None:
    """Bars of relative speed-up, DSA = 100 % (paper, figure "Relative speedup").

    The whisker spans the rounds; the short black line is what Amdahl's law allows; a diamond is
    the paper's own figure, where it has one for this shape and context.
    """
    metrics = result.metrics
    figure, axes = _panels(len(metrics), sharey=True)
    width = 0.8 / len(result.configurations)
    for axis, metric in zip(axes, metrics, strict=True):
        for number, configuration in enumerate(result.configurations):
            offset = (number - (len(result.configurations) - 1) / 2) * width
            for place, length in enumerate(result.lengths):
                speed = result.speedup(configuration.name, metric, length)
                middle, x = speed.median, place + offset
                spread = [[middle - speed.low], [speed.high - middle]]
                axis.bar(
                    x,
                    middle,
                    width * 0.92,
                    color=pattern_color(configuration.parsed),
                    yerr=spread if number else None,
                    error_kw={"lw": 0.8, "capsize": 2},
                    label=label(result, configuration) if place == 0 else None,
                )
                if number and speed.ideal is not None:
                    ends = (x - width / 2, x + width / 2)
                    first = place == 0 and number == 1
                    name = "allowed by Amdahl's law from the indexers' share" if first else None
                    axis.plot(ends, [speed.ideal] * 2, color="black", lw=1.2, label=name)
                cited = paper_speedup(result.model.shape, configuration.parsed, metric)
                if format_length(length) in cited:
                    paper = cited[format_length(length)]
                    name = "paper (H100)" if number == 1 and place == 0 else None
                    axis.plot(x, paper, color="black", marker="D", ms=4, ls="none", label=name)
        axis.axhline(1, color="black", lw=0.6, ls=":")
        axis.set_xticks(range(len(result.lengths)), [format_length(n) for n in result.lengths])
        axis.set_title(_PANELS[metric], fontsize=10, loc="left")
        axis.set_xlabel("context, tokens")
    axes[0].set_ylabel("speed (every indexer = 1)")
    figure.suptitle(f"{describe(result)}; whiskers: lowest to highest", fontsize=9)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, fontsize=8, frameon=False, loc="outside lower center", ncols=5)
    save_figure(figure, path)


def describe(result: LatencyResult) -> str:
    """What was measured where, in a line."""
    where = result.environment.gpus[0] if result.environment.gpus else "CPU"
    return f"{result.model.name} on {where}, medians of {result.rounds} rounds"


def draw_shares(curves: Mapping[str, Mapping[int, float]], path: Path, title: str = "") -> None:
    """The indexers' share of the time by context length (paper, figure in the introduction).

    Args:
        curves: share by length, by name (prefill, decode, ...).
        path: a .png file.
        title: what was measured where.
    """
    figure, [axis] = _panels(1)
    axis.set_title(title, fontsize=9, loc="left")
    for name, curve in curves.items():
        lengths = sorted(curve)
        axis.plot(lengths, [100 * curve[n] for n in lengths], marker="o", ms=4, label=name)
    _context_axis(axis, sorted({n for curve in curves.values() for n in curve}))
    axis.set_ylabel("indexers' share of the time, %")
    axis.set_ylim(0, 100)
    axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path)


def share_curves(result: LatencyResult) -> dict[str, dict[int, float]]:
    """The baseline's indexer share by metric and length, where the server told it."""
    curves: dict[str, dict[int, float]] = {}
    for metric in result.metrics:
        shares = {n: result.indexer_share(metric, n) for n in result.lengths}
        if None not in shares.values():
            curves[_PANELS[metric]] = {n: share for n, share in shares.items() if share}
    return curves


def _context_axis(axis: Any, lengths: Sequence[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [format_length(n) for n in lengths])
    axis.minorticks_off()
    axis.set_xlabel("context, tokens")


def _panels(count: int, **shared: Any) -> tuple[Any, list[Any]]:
    width, height = (3.9 * count, 3.8) if count > 1 else (5.6, 3.6)
    return make_figure(width, height, columns=count, **shared)
