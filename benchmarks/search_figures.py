"""The figures of results/search/README.md, each from the record beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_indexcache.study.plots import make_figure, save_figure

TITLES = {
    "answers": "answers",
    "late": "later half",
    "all": "all tokens",
    "uniform": "nothing (uniform)",
}
SHAPES = {"answers": "o", "late": "s", "all": "^", "uniform": "x"}
COLORS = {"answers": "#1f5fa8", "late": "#8e6bb0", "all": "#d98c21", "uniform": "#555555"}


def served(record: dict[str, Any], path: Path) -> None:
    """Draw held-out answers right by retention: searched on three objectives, and interleaved."""
    tasks = list(record["full"]["tasks"])
    kinds = {**record["found"], "uniform": record.get("uniform", record["found"].get("uniform"))}
    kinds = {kind: rows for kind, rows in kinds.items() if rows}
    counts = sorted({int(count) for rows in kinds.values() for count in rows}, reverse=True)
    layers = len(record["full"]["pattern"])
    figure, axes = make_figure(13, 3.5, columns=len(tasks), sharey=True)
    for axis, task in zip(axes, tasks, strict=True):
        full = record["full"]["tasks"][task]
        axis.axhline(100 * full["accuracy"], color="black", ls=":", label=f"all {layers} layers F")
        for shift, (kind, rows) in enumerate(kinds.items()):
            values = [rows[str(count)]["tasks"][task] for count in counts]
            axis.errorbar(
                [place + 0.16 * (shift - 1.5) for place in range(len(counts))],
                [100 * value["accuracy"] for value in values],
                yerr=[100 * value["half_width"] for value in values],
                fmt=SHAPES[kind], ms=5, capsize=3, color=COLORS[kind], label=TITLES[kind],
            )  # fmt: skip
        axis.set_title(f"{task}, {full['documents']} documents", fontsize=10)
        axis.set_xticks(range(len(counts)), [f"{count} of {layers}" for count in counts])
        axis.set_xlabel("layers F")
        axis.set_ylim(-2, 102)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out answers right, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False,
        title="searched on the loss of (bars: 95 % interval of the difference from all F)",
    )  # fmt: skip
    save_figure(figure, path)
