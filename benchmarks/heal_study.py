"""Recovery by healing, beside serving untrained and training everything.

The tables and the figure of a settled study, from its record. ``benchmarks/heal_study.py`` of
commit f5319e1 measured the shipped small checkpoint under patterns that it was not trained for:
served as it is (training-free), with its indexers healed, and trained further as a whole (a warm-up
and a sparse stage, half the steps each). All F trained further is the control: what more steps do
to the model by themselves. A seed decided the documents that were seen; every step saw one row of
512 tokens. All were scored on the same held-out documents, as differences from the untouched
checkpoint with all F on the same document. A grid over the stages and learning rates of healing,
one seed and pattern, is what its defaults rest on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.records import estimate, markdown
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.library import Library
from sglang_indexcache.study.plots import make_figure, pattern_color, save_figure

PATTERNS = {
    "1/2 uniform": "uniform:1/2",
    "1/4 uniform": "uniform:1/4",
    "1/4 searched": "tiny-dsa-1of4",
}
ALL_F = "all F"
FREE, HEALED, TRAINED = "training-free", "healed", "trained"


@dataclass(frozen=True)
class Metric:
    """A column of the result.

    Attributes:
        label: with its unit.
        scale: from the stored values.
        better: "lower" or "higher".
    """

    label: str
    scale: float
    better: str


METRICS = {
    "text_loss": Metric("text loss, nats", 1, "lower"),
    "answer_loss": Metric("loss of answer tokens, nats", 1, "lower"),
    "recall": Metric("recall, points", 100, "higher"),
    "needles": Metric("needles, points", 100, "higher"),
}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate differences from untouched all F, with 95 % intervals."""
    rows = [
        (
            *(line["name"], line["way"]),
            *(("", "") if line["way"] == FREE else (line["steps"], len(line["seeds"]))),
            *_cells(line),
        )
        for line in lines[1:]
    ]
    return markdown(("pattern", "way", "steps", "seeds", *_LABELS), rows)


def grid_table(lines: Sequence[dict[str, Any]]) -> str:
    """Tabulate the settings of healing that were tried, with one seed and pattern."""
    rows = [
        (f"{round(x['dense'] * x['steps'])} of {x['steps']}", f"{x['lr']:g}", *_cells(x))
        for x in lines
    ]
    return markdown(("dense steps", "learning rate", *_LABELS), rows)


_LABELS = tuple(metric.label for metric in METRICS.values())


def _cells(line: dict[str, Any]) -> Iterator[str]:
    for name, metric in METRICS.items():
        change = line[name]
        yield estimate(change["over_all_f"] or 0.0, change["half_width"], metric.scale)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw each measure from no healing to the most steps, and beside it training everything."""
    lines = record["lines"]
    steps = sorted({line["steps"] for line in lines if line["way"] == HEALED})
    places = {(FREE, 0): 0, **{(HEALED, count): 1 + at for at, count in enumerate(steps)}}
    trained = {line["steps"] for line in lines if line["way"] == TRAINED}
    places |= {(TRAINED, count): len(places) for count in trained}
    ticks = ["not\nhealed", *(f"{count}\nsteps" for count in steps)]
    ticks += [f"whole\nmodel,\n{count}" for count in trained]
    figure, axes = make_figure(13, 3.9, columns=len(METRICS))
    for axis, (name, metric) in zip(axes, METRICS.items(), strict=True):
        axis.axhline(0, color="black", linewidth=0.8, ls=":")
        for number, (pattern, color) in enumerate(_colors().items()):
            cells = [x for x in lines if x["name"] == pattern and (x["way"], x["steps"]) in places]
            cells = [x for x in cells if pattern != ALL_F or x["way"] == TRAINED]
            for way, style in (((FREE, HEALED), "o-"), ((TRAINED,), "D")):
                points = [line for line in cells if line["way"] in way]
                axis.errorbar(
                    [places[x["way"], x["steps"]] + 0.1 * (number - 1.5) for x in points],
                    [metric.scale * line[name]["over_all_f"] for line in points],
                    yerr=[metric.scale * (line[name]["half_width"] or 0.0) for line in points],
                    fmt=style, color=color, ms=4.5, capsize=2, lw=1.2,
                    label=pattern if way != (TRAINED,) or pattern == ALL_F else None,
                )  # fmt: skip
        axis.set_xticks(list(places.values()), ticks, fontsize=8)
        axis.set_title(f"{metric.label} ({metric.better} is better)", fontsize=9, loc="left")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("over all F, untouched")
    handles, names = axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    seeds = max(len(line["seeds"]) for line in lines)
    figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=4, frameon=False,
        title=f"{record['documents_per_task']} documents of each task, {seeds} seeds; "
        "bars: 95 % intervals; diamonds: the whole model trained",
        title_fontsize=8, fontsize=9,
    )  # fmt: skip
    save_figure(figure, path)


def _colors() -> dict[str, str]:
    """Return the colours that the patterns have in every figure."""
    checkpoint = Checkpoint.read(shipped_checkpoint())
    resolve = Library.default().resolve
    return {
        name: pattern_color(resolve(value, checkpoint).pattern)
        for name, value in {**PATTERNS, ALL_F: "full"}.items()
    }
