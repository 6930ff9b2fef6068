"""The paper's bar figure from our results: relative speed-up."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.bench.results import LatencyResult, Metric, paper_speedup
from sglang_indexcache.bench.tables import label
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.support.lengths import format_length

_COLORS = ("#9a9a9a", "#6fa8d6", "#1f5fa8", "#123b6b")
_PANELS: dict[Metric, str] = {
    "prefill": "prefill",
    "decode": "decode, per request",
    "full": "decode, full KV cache",
}


def draw_speedups(result: LatencyResult, path: Path) -> None:
    """Bars of relative speed-up, DSA = 100 % (paper, figure "Relative speedup").

    The whisker spans the rounds; the short black line is what Amdahl's law allows; a diamond is
    the paper's own figure, where it has one for this shape and context.
    """
    metrics = result.metrics
    width = 3.9 * len(metrics) if metrics[1:] else 5.6
    figure, axes = make_figure(width, 3.4, columns=len(metrics))
    width = 0.8 / len(result.configurations)
    for axis, metric in zip(axes, metrics, strict=True):
        for number, configuration in enumerate(result.configurations):
            offset = (number - (len(result.configurations) - 1) / 2) * width
            for place, length in enumerate(result.lengths):
                speed = result.speedup(configuration.name, metric, length)
                middle, x = 100 * speed.median, place + offset
                spread = [[middle - 100 * speed.low], [100 * speed.high - middle]]
                axis.bar(
                    x,
                    middle,
                    width * 0.92,
                    color=_COLORS[number % len(_COLORS)],
                    yerr=spread if number else None,
                    error_kw={"lw": 0.8, "capsize": 2},
                    label=label(result, configuration) if place == 0 else None,
                )
                if number and speed.ideal is not None:
                    ends = (x - width / 2, x + width / 2)
                    name = "Amdahl" if place == 0 and number == 1 else None
                    axis.plot(ends, [100 * speed.ideal] * 2, color="black", lw=1.2, label=name)
                cited = paper_speedup(result.model.shape, configuration.parsed, metric)
                if format_length(length) in cited:
                    paper = 100 * cited[format_length(length)]
                    name = "paper (H100)" if number == 1 and place == 0 else None
                    axis.plot(x, paper, color="#c0392b", marker="D", ms=4, ls="none", label=name)
        axis.axhline(100, color="black", lw=0.6, ls=":")
        axis.set_xticks(range(len(result.lengths)), [format_length(n) for n in result.lengths])
        axis.set_title(_PANELS[metric], fontsize=10, loc="left")
        axis.set_xlabel("context, tokens")
    axes[0].set_ylabel("relative to DSA, %")
    axes[0].legend(fontsize=8, frameon=False, loc="upper left")
    save_figure(figure, path)
