"""The paper's bar figure from our results: relative speed-up."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.bench.results import LatencyResult, Metric, paper_speedup
from sglang_indexcache.bench.tables import label
from sglang_indexcache.study.plots import make_figure, pattern_color, save_figure
from sglang_indexcache.support.lengths import format_length

PANELS: dict[Metric, str] = {
    "prefill": "prefill",
    "decode": "decode, one request",
    "full": "decode, full KV cache",
}


def draw_speedups(result: LatencyResult, path: Path) -> None:
    """Bars of relative speed-up, every indexer = 1 (paper, figure "Relative speedup").

    The whisker spans the rounds; the short black line is what Amdahl's law allows; a diamond is
    the paper's own figure, where it has one for this shape and context.
    """
    metrics = result.metrics
    width = 3.9 * len(metrics) if metrics[1:] else 5.6
    figure, axes = make_figure(width, 3.8, columns=len(metrics), sharey=True)
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
        axis.set_title(PANELS[metric], fontsize=10, loc="left")
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
