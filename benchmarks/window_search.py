"""Does a search, or healing, need less once a recent window is on?

    python -m benchmarks.window_search WORK_FOLDER [--publish | --quick]

Patterns of the small checkpoint are searched with and without a window (``indexcache search run``),
and its blind quarter is healed for some numbers of steps (``indexcache heal run``). All of it is
then measured with and without the window on held-out text that neither saw (``indexcache search
compare``). Healing is by dense steps, which know no window, so one adapter is measured both ways.
Started again it goes on where it was. Writes result.json and found.png.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file, save_file

from benchmarks.recent_window import TINY, indexcache, with_lists
from benchmarks.records import markdown, read_arguments
from sglang_indexcache.study.plots import BLUE, FULL, RED, make_figure, save_figure
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

WINDOW = 8
TOPK = 64
TARGETS = ("1/2", "1/3", "1/4", "1/6")
"""Six, four, three and two F layers of twelve; with one F layer there is nothing to choose."""
BLIND = "uniform:1/4"
HEALED = (20, 80, 320)
"""Dense steps."""
HEALING = ("--context", "512", "--lr", "5e-3", "--held-out", "4", "--dtype", "float32")


def with_window(pattern: str, window: int) -> str:
    """The pattern with a window, or as it is."""
    return f"{pattern}+w{window}" if window else pattern


def searched(work: Path, window: int, batches: int) -> dict[str, str]:
    """By target, the layers of the pattern that a search with this window found."""
    output = work / f"search-w{window}"
    targets = [f"--target={with_window(target, window)}" for target in TARGETS]
    told = output / "search.json"
    if not (told.exists() and json.loads(told.read_text())["complete"]):
        options = ("--model", TINY, "--context", 512, "--batches", batches)
        indexcache("search", "run", *options, *targets, "-o", output)
    found = {}
    for path in sorted(output.glob("*.yaml")):
        entry = yaml.safe_load(path.read_text())
        found[entry["retention"]] = entry["pattern"].partition("+")[0]
    return found


def measured(work: Path, model: Path, patterns: list[str], held_out: int) -> list[dict[str, Any]]:
    """Each pattern's loss, and what it adds to the first of them, on the held-out documents."""
    if not (work / "compare.json").exists():
        options = ("--model", model, "--context", 512, "--held-out", held_out)
        indexcache("search", "compare", *patterns, *options, "-o", work)
    told: list[dict[str, Any]] = json.loads((work / "compare.json").read_text())["comparisons"]
    return told


def searches(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What searched and blind patterns add to all F, each with and without the window."""
    work, rows = arguments.work, []
    for window in (0, WINDOW):
        found = searched(work, window, arguments.batches)
        rows += [(f"searched with w = {window}", t, layers) for t, layers in found.items()]
    rows += [("uniform", target, f"uniform:{target}") for target in TARGETS]
    names = [with_window(layers, window) for *_, layers in rows for window in (0, WINDOW)]
    told = measured(work / "searched", TINY, ["full", *dict.fromkeys(names)], arguments.documents)
    by_name = {one["name"]: one for one in told}
    return [
        {
            "how": how,
            "target": target,
            "window": window,
            "pattern": by_name[with_window(layers, window)]["pattern"],
            **_thousandths(by_name[with_window(layers, window)]),
        }
        for how, target, layers in rows
        for window in (0, WINDOW)
    ]


def _thousandths(one: dict[str, Any]) -> dict[str, Any]:
    found = one["difference"]
    return {
        "difference": 1000 * found["mean"],
        "interval": [1000 * found["low"], 1000 * found["high"]],
        "loss": one["loss"],
    }


def healings(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The loss of the blind quarter after some steps of healing, with and without the window."""
    work, rows = arguments.work, []
    for steps in (0, *HEALED[: arguments.healings]):
        model, name = TINY, f"healed-{steps}-0-w0"
        if steps:
            model = wearing(_healed(work / name, steps), work / f"{name}-model")
        patterns = ["full", BLIND, with_window(BLIND, WINDOW)]
        told = measured(work / f"{name}-loss", model, patterns, arguments.documents)
        rows += [
            {"steps": steps, "window": window, "loss": one["loss"], **_thousandths(one)}
            for one, window in zip(told, (0, WINDOW), strict=True)
        ]
        if not steps:
            all_full = told[0]["reference_loss"]
    return [row | {"all_full": all_full} for row in rows]


def _healed(output: Path, steps: int) -> Path:
    if not (output / "adapter.yaml").exists():
        how = ("--dense-steps", steps, "--sparse-steps", 0, "--evaluate-every", steps, *HEALING)
        what = ("--pattern", BLIND, "--data", "machine", "-o", output)
        indexcache("heal", "run", TINY, *what, *how)
    return output


def wearing(adapter: Path, folder: Path) -> Path:
    """The checkpoint with an adapter's indexers, and its own in the other layers."""
    with_lists(folder, TOPK)
    weights = folder / "model.safetensors"
    if weights.is_symlink():
        tensors = load_file(weights) | load_file(adapter / "indexers.safetensors")
        weights.unlink()
        save_file(tensors, weights, metadata={"format": "pt"})
    return folder


def draw(told: dict[str, Any], path: Path) -> None:
    """Left: what patterns add, by F layers. Right: what uniform 1/4 adds, by steps of healing."""
    figure, (left, right) = make_figure(10.4, 4.6, columns=2, sharey=True)
    counts = sorted({one["pattern"].count("F") for one in told["searches"]})
    hows = {"searched with w = 0": RED, f"searched with w = {WINDOW}": BLUE, "uniform": FULL}
    for place, (how, color) in enumerate(hows.items()):
        for window in (0, WINDOW):
            line = [o for o in told["searches"] if (o["how"], o["window"]) == (how, window)]
            line.sort(key=lambda one: one["pattern"].count("F"))
            places = [counts.index(one["pattern"].count("F")) + 0.08 * (place - 1) for one in line]
            label = f"{how}, served with w = {window}"
            _line(left, places, line, window, color, label).set_linestyle("-" if window else "--")
    left.set_xticks(range(len(counts)), [str(count) for count in counts])
    left.set_xlabel("F layers, of 12")
    left.set_ylabel("thousandths of a nat a token over all F")
    steps = sorted({one["steps"] for one in told["healings"]})
    for window, color in ((0, RED), (WINDOW, BLUE)):
        line = [one for one in told["healings"] if one["window"] == window]
        places = [steps.index(one["steps"]) for one in line]
        label = f"{BLIND}, served with w = {window}"
        _line(right, places, line, window, color, label).set_linestyle("none")
    right.set_xticks(range(len(steps)), [str(one) for one in steps])
    right.set_xlim(-0.5, len(steps) - 0.5)
    right.set_xlabel("steps of healing; bars: 95 %")
    for axis in (left, right):
        axis.axhline(0, color="black", lw=0.8, ls=":")
        axis.legend(
            fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2
        )
    left.set_yscale("symlog", linthresh=20)
    ticks = (-10, 0, 10, 20, 50, 100, 200, 500)
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    lowest = min(one["interval"][0] for one in [*told["searches"], *told["healings"]])
    left.set_ylim(lowest - 2, 650)
    save_figure(figure, path)


def _line(
    axis: Any,
    places: Sequence[float],
    line: Sequence[dict[str, Any]],
    window: int,
    color: str,
    label: str,
) -> Any:
    """Draw differences with their intervals; hollow without a window. Return the line."""
    values = [one["difference"] for one in line]
    low = [one["difference"] - one["interval"][0] for one in line]
    high = [one["interval"][1] - one["difference"] for one in line]
    drawn = axis.errorbar(
        places, values, yerr=[low, high], color=color, marker="o", ms=4, capsize=2, lw=1.2,
        markerfacecolor=color if window else "white", label=label,
    )  # fmt: skip
    return drawn[0]


def table(told: list[dict[str, Any]]) -> str:
    """Markdown: a row for F layers and a way to choose them, a column for a window."""
    rows = []
    for target in TARGETS:
        for how in dict.fromkeys(one["how"] for one in told):
            both = [one for one in told if (one["target"], one["how"]) == (target, how)]
            rows.append((both[0]["pattern"].count("F"), how, *map(_in_words, both)))
    return markdown(("F layers", "chosen", "w = 0", f"w = {WINDOW}"), rows)


def _in_words(one: dict[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def healing_table(told: list[dict[str, Any]]) -> str:
    """Markdown: a row for a number of steps; what is over all F of the checkpoint as it is."""
    over: dict[int, list[str]] = {}
    for one in told:
        lost = 1000 * (one["loss"] - one["all_full"])
        over.setdefault(one["steps"], []).append(f"{lost:+.1f}")
    rows = [(steps, *cells) for steps, cells in over.items()]
    return markdown(("steps", "w = 0", f"w = {WINDOW}"), rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--batches", type=int, default=16, help="documents of a search")
    parser.add_argument("--documents", type=int, default=24, help="held out")
    parser.add_argument("--healings", type=int, default=len(HEALED), help="only the first so many")
    quick = {"batches": 2, "documents": 2, "healings": 1}
    arguments = read_arguments(parser, "window_search", quick=quick)
    told = {
        "command": arguments.command,
        "machine": machine(),
        "searches": searches(arguments),
        "healings": healings(arguments),
    }
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_json(arguments.output / "result.json", told)
    draw(told, arguments.output / "found.png")


if __name__ == "__main__":
    main()
