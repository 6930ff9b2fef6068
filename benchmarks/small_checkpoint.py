"""What the small trained checkpoint can do, and how it was trained.

    python -m benchmarks.small_checkpoint RUN_FOLDER [--rows 64] [--lengths 128 256 512]

Held-out text loss and retrieval accuracy with everything attended, with the selection it was
trained for, and with a starved selection: if sharing indices is to mean anything, accuracy must
fall when too few tokens are selected. RUN_FOLDER is one of ``benchmarks.training``. Writes
results/small_checkpoint/{result.json, table.md, curves.png, starved.png}.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.training.scores import Scorer
from sglang_indexcache.data.retrieval import TASKS, chance
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json, write_whole

RESULTS = Path(__file__).parent / "results" / "small_checkpoint"
RETRIEVAL = tuple(TASKS)
TOPKS = (64, 16, 4, 2, 1)
DENSE = "dense"

Cell = dict[str, Any]


def cells(checkpoint: Path, lengths: list[int], topks: list[int], rows: int) -> list[Cell]:
    """One evaluation for each length and selection; dense first."""
    found = []
    scorer = Scorer(checkpoint)
    for length in lengths:
        for topk in (None, *topks):
            scores = scorer.scores(length, rows, topk, dense=topk is None)
            found.append({"length": length, "topk": topk or DENSE, **summary(scores)})
            print(found[-1], flush=True)
    return found


def summary(scores: dict[str, Any]) -> Cell:
    """Text loss, unigram loss, and accuracies with the half width of their 95 % intervals."""
    tasks = scores["tasks"]
    found: Cell = {"text_loss": tasks["text"]["loss"], "unigram_loss": scores["unigram_loss"]}
    for task in RETRIEVAL:
        around = tasks[task]["per_document_95"]
        half = None if around is None else (around[1] - around[0]) / 2
        found[task] = {"accuracy": tasks[task]["accuracy"], "half_width": half}
    return found


def table(found: list[Cell]) -> str:
    """Markdown; each length ends with what guessing among a document's values gives."""
    lines = [
        "| tokens | selected | text loss, nats | " + " | ".join(RETRIEVAL) + " |",
        "|---|---|---|" + "---|" * len(RETRIEVAL),
    ]
    for length, cells_there in groupby(found, key=lambda cell: cell["length"]):
        lines += [_line(cell) for cell in cells_there]
        guessed = " | ".join(f"{100 * chance(task, length):.1f} %" for task in RETRIEVAL)
        lines.append(f"| {length} | chance | | {guessed} |")
    return "\n".join(lines) + "\n"


def _line(cell: Cell) -> str:
    accuracies = " | ".join(_percent(cell[task]) for task in RETRIEVAL)
    return f"| {cell['length']} | {cell['topk']} | {cell['text_loss']:.3f} | {accuracies} |"


def _percent(score: dict[str, float | None]) -> str:
    text = f"{100 * (score['accuracy'] or 0.0):.1f} %"
    half = score["half_width"]
    return text if half is None else f"{text} ± {100 * half:.1f}"


def draw_curves(log: list[dict[str, Any]], unigram: float, path: Path) -> None:
    """LM and distillation loss of every logged step, held-out values, and the stages' borders."""
    figure, (loss_axis, accuracy_axis) = make_figure(10, 6, rows=2, sharex=True)
    steps = [e for e in log if "index" in e]
    with_lm = [e for e in steps if "lm" in e]  # the warm-up stage makes no logits
    tests = [e for e in log if "held_out_text" in e]
    loss_axis.plot(
        _get(with_lm, "total_step"), _get(with_lm, "lm"), lw=0.6, label="LM, training mix"
    )
    distilled = [e for e in steps if e["index"] > 0]
    loss_axis.plot(
        _get(distilled, "total_step"), _get(distilled, "index"), lw=0.8, label="distillation"
    )
    loss_axis.plot(
        _get(tests, "total_step"), _get(tests, "held_out_text"), ".-", label="held-out text"
    )
    loss_axis.axhline(unigram, color="grey", ls=":", label="unigram")
    loss_axis.set_ylabel("nats")
    loss_axis.set_yscale("log")
    for task in RETRIEVAL:
        some = [e for e in tests if f"held_out_{task}" in e]
        accuracy_axis.plot(_get(some, "total_step"), _get(some, f"held_out_{task}"), label=task)
    accuracy_axis.set_ylabel("held-out accuracy")
    accuracy_axis.set_ylim(-0.03, 1.03)
    accuracy_axis.set_xlabel("step")
    starts = {e["stage"]: (e["total_step"] - e["step"], e["kind"]) for e in reversed(steps)}
    for start, kind in starts.values():
        for axis in (loss_axis, accuracy_axis):
            axis.axvline(start, color="black", lw=0.5)
        accuracy_axis.text(start, 0.5, kind, fontsize=8, rotation=90, ha="right", va="center")
    for axis in (loss_axis, accuracy_axis):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def _get(entries: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in entries]


def draw_starved(found: list[Cell], path: Path) -> None:
    """Retrieval accuracy against the number of selected tokens, a panel for each task."""
    figure, axes = make_figure(11, 3.4, columns=len(RETRIEVAL), sharey=True)
    for axis, task in zip(axes, RETRIEVAL, strict=True):
        for length in sorted({cell["length"] for cell in found}):
            mine = [c for c in found if c["length"] == length and c["topk"] != DENSE]
            dense = next(c for c in found if c["length"] == length and c["topk"] == DENSE)
            (line,) = axis.plot(
                [c["topk"] for c in mine],
                [c[task]["accuracy"] for c in mine],
                "o-",
                label=f"{length} tokens",
            )
            axis.axhline(dense[task]["accuracy"], color=line.get_color(), ls=":", lw=1)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("selected tokens (dotted: all)")
        axis.set_title(task)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy")
    axes[0].legend(fontsize=8)
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Evaluate, write, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--topks", type=int, nargs="+", default=list(TOPKS))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    found = cells(arguments.run / "checkpoint", arguments.lengths, arguments.topks, arguments.rows)
    log = [json.loads(line) for line in (arguments.run / "metrics.jsonl").open()]
    output: Path = arguments.output
    result = {
        "what": "held-out text loss and retrieval accuracy of the small trained checkpoint",
        "documents_per_task": arguments.rows,
        "machine": machine(),
        "cells": found,
        "training": log,
    }
    write_json(output / "result.json", result)
    write_whole(output / "table.md", table(found))
    draw_curves(log, found[0]["unigram_loss"], output / "curves.png")
    draw_starved(found, output / "starved.png")
    print(table(found))


if __name__ == "__main__":
    main()
