"""Abilities of the small trained checkpoint, and how it was trained.

    python -m benchmarks.small_checkpoint RUN_FOLDER [--rows 64] [--lengths 128 256 512]

Held-out text loss and retrieval accuracy with everything attended, with the selection it was
trained for, and with a starved selection: if sharing indices is to mean anything, accuracy must
fall when too few tokens are selected. RUN_FOLDER is one of ``benchmarks.training``. Writes
small_checkpoint/{result.json, table.md, curves.png, starved.png}.
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from benchmarks.records import estimate, markdown, read_arguments
from benchmarks.training.recipe import load_recipe
from benchmarks.training.scores import Scorer
from benchmarks.training.tasks import TASKS, chance
from sglang_indexcache.lab.runs.plots import make_figure, save_figure
from sglang_indexcache.lab.runs.provenance import machine
from sglang_indexcache.library.writing import write_json, write_whole

QUICK = {"lengths": [128], "topks": [64, 1], "rows": 4}
RETRIEVAL = tuple(TASKS)
TOPKS = (64, 16, 4, 2, 1)
DENSE = "dense"
COLORS = {"recall": "#1f5fa8", "needles": "#c0392b", "tracking": "#2e8b57"}

Cell = dict[str, Any]


def cells(checkpoint: Path, lengths: list[int], topks: list[int], rows: int) -> list[Cell]:
    """Evaluate once for each length and selection; dense first."""
    lines = []
    scorer = Scorer(checkpoint)
    for length in lengths:
        for topk in (None, *topks):
            scores = scorer.scores(length, rows, topk, dense=topk is None)
            lines.append({"length": length, "topk": topk or DENSE, **summary(scores)})
            print(lines[-1], flush=True)
    return lines


def summary(scores: dict[str, Any]) -> Cell:
    """Return text loss, unigram loss, and accuracies with their 95 % intervals' half widths."""
    tasks = scores["tasks"]
    cell: Cell = {"text_loss": tasks["text"]["loss"], "unigram_loss": scores["unigram_loss"]}
    for task in RETRIEVAL:
        around = tasks[task]["per_document_95"]
        half = None if around is None else (around[1] - around[0]) / 2
        cell[task] = {"accuracy": tasks[task]["accuracy"], "half_width": half}
    return cell


def table(lines: list[Cell]) -> str:
    """Tabulate; each length ends with what guessing among a document's values gives."""
    rows = []
    for length, cells_there in groupby(lines, key=lambda cell: cell["length"]):
        for cell in cells_there:
            right = [estimate(*cell[task].values(), 100, sign="") for task in RETRIEVAL]
            rows.append((length, cell["topk"], f"{cell['text_loss']:.3f}", *right))
        guessed = (f"{100 * chance(task, length):.1f}" for task in RETRIEVAL)
        rows.append((length, "chance", "", *guessed))
    header = ("tokens", "selected", "text loss, nats", *(f"{task}, %" for task in RETRIEVAL))
    return markdown(header, rows)


def curves(record: dict[str, Any], path: Path) -> None:
    """Draw both losses of every logged step, held-out values, and the stages' borders."""
    log, unigram = record["training"], record["cells"][0]["unigram_loss"]
    figure, (loss_axis, accuracy_axis) = make_figure(10, 6.2, rows=2, sharex=True)
    steps = [e for e in log if "index" in e]
    with_lm = [e for e in steps if "lm" in e]  # the warm-up stage makes no logits
    tests = [e for e in log if "held_out_text" in e]
    distilled = [e for e in steps if e["index"] > 0]
    loss_axis.plot(
        _get(with_lm, "total_step"), _get(with_lm, "lm"), lw=0.6, color="#8db8e0",
        label="language model, training mix",
    )  # fmt: skip
    loss_axis.plot(
        _get(distilled, "total_step"), _get(distilled, "index"), lw=0.8, color="#d98c21",
        label="distillation, all layers",
    )  # fmt: skip
    loss_axis.plot(
        _get(tests, "total_step"), _get(tests, "held_out_text"), ".-", color="#1f5fa8",
        label="language model, held-out text",
    )  # fmt: skip
    loss_axis.axhline(unigram, color="grey", ls=":", label="word frequencies alone")
    loss_axis.set_ylabel("loss, nats a token")
    loss_axis.set_yscale("log")
    loss_axis.set_yticks(
        [1.5, 2, 3, 4, 6, 10, 20, 40], ["1.5", "2", "3", "4", "6", "10", "20", "40"]
    )
    loss_axis.minorticks_off()
    for task, color in COLORS.items():
        evaluated = [e for e in tests if f"held_out_{task}" in e]
        values = [100 * value for value in _get(evaluated, f"held_out_{task}")]
        accuracy_axis.plot(_get(evaluated, "total_step"), values, color=color, label=task)
    accuracy_axis.set_ylabel("held-out answers right, %")
    accuracy_axis.set_ylim(-3, 103)
    accuracy_axis.set_xlabel("step; each stage is tested on documents of its own length")
    stages = load_recipe("tiny-dsa").stages
    starts = {e["stage"]: e["total_step"] - e["step"] for e in reversed(steps)}
    needles = [e for e in tests if "held_out_needles" in e]
    for last, first in pairwise(needles):
        old, new = stages[last["stage"]].length, stages[first["stage"]].length
        if old < new:
            accuracy_axis.annotate(
                f"needles: in {new} tokens,\nno longer in {old}",
                (first["total_step"], 100 * first["held_out_needles"]),
                (starts[first["stage"]] - 60, 3),
                ha="right",
                fontsize=8,
                arrowprops={"arrowstyle": "->", "lw": 0.8},
            )
    before = None
    for number, start in sorted(starts.items()):
        for axis in (loss_axis, accuracy_axis):
            axis.axvline(start, color="black", lw=0.5)
        length = stages[number].length
        under = "" if length == before else f"\n {length} tokens"
        caption = "\n" * (number % 2 == 0 and not under) + f" {stages[number].kind}{under}"
        loss_axis.annotate(
            caption, (start, 1.12), fontsize=8, xycoords=("data", "axes fraction"), va="top"
        )
        before = length
    for axis in (loss_axis, accuracy_axis):
        axis.legend(fontsize=8, loc="upper center" if axis is loss_axis else "center left")
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def _get(entries: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in entries]


def starved(result: dict[str, Any], path: Path) -> None:
    """Draw retrieval accuracy against the number of selected tokens, a panel for each task."""
    lines, rows = result["cells"], result["documents_per_task"]
    figure, axes = make_figure(11, 3.8, columns=len(RETRIEVAL), sharey=True)
    lengths = sorted({cell["length"] for cell in lines})
    counts = sorted({cell["topk"] for cell in lines if cell["topk"] != DENSE})
    for axis, task in zip(axes, RETRIEVAL, strict=True):
        for length, color in zip(lengths, ("#9ccfb2", "#2e8b57", "#123b6b"), strict=False):
            mine = [c for c in lines if c["length"] == length and c["topk"] != DENSE]
            dense = next(c for c in lines if c["length"] == length and c["topk"] == DENSE)
            axis.errorbar(
                [c["topk"] for c in mine], [100 * c[task]["accuracy"] for c in mine],
                yerr=[100 * (c[task]["half_width"] or 0.0) for c in mine],
                fmt="o-", ms=4, capsize=2, color=color, label=f"{length} tokens",
            )  # fmt: skip
            axis.axhline(100 * dense[task]["accuracy"], color=color, ls=":", lw=1)
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(count) for count in counts])
        axis.minorticks_off()
        axis.set_xlabel("tokens that each query selects")
        axis.set_title(task, fontsize=10, loc="left")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out answers right, %")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lengths),
        frameon=False, title=f"documents of (dotted: every token selected; bars: 95 % intervals "
        f"over {rows} documents)", title_fontsize=8, fontsize=9,
    )  # fmt: skip
    save_figure(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Evaluate, write, draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--topks", type=int, nargs="+", default=list(TOPKS))
    parser.add_argument("--rows", type=int, default=64)
    arguments = read_arguments(parser, "small_checkpoint", argv, QUICK)
    lines = cells(arguments.run / "checkpoint", arguments.lengths, arguments.topks, arguments.rows)
    log = [json.loads(line) for line in (arguments.run / "metrics.jsonl").open()]
    output: Path = arguments.output
    result = {
        "command": arguments.command,
        "what": "held-out text loss and retrieval accuracy of the small trained checkpoint",
        "documents_per_task": arguments.rows,
        "machine": machine(),
        "cells": lines,
        "training": log,
    }
    write_json(output / "result.json", result)
    write_whole(output / "table.md", table(lines))
    curves(result, output / "curves.png")
    starved(result, output / "starved.png")
    print(table(lines))


if __name__ == "__main__":
    main()
