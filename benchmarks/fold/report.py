"""The record, the tables and the figure of what the work folders hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.fold.arms import arms
from benchmarks.records import RESULTS, estimate, markdown
from benchmarks.smollm2.measure import compared
from sglang_indexcache.stats.bounds import half_width
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json, write_whole

FULL, GATE, SHARING = "full", ("all L", "all F folded, c = 4"), "uniform 1/2"
COLORS = {
    "sharing": "#c0392b",
    "searched sharing": "#1e8449",
    "folding": "#1f5fa8",
    "both": "#7d3c98",
}
LONG = RESULTS / "smollm2" / "long.json"
SEARCHED_BY = "one-pass"
"""The search whose patterns stand beside folding: the package's quickest."""
TEXT, RIGHT, LOSS = "text loss", "recall right", "recall loss"
FIELDS = {TEXT: "loss", RIGHT: "recall", LOSS: "recall_loss"}
"""The measures as the records of ``benchmarks.smollm2`` name them."""
LEAST_PAIRS = 4
"""Rows under which an interval says nothing."""

Facts = dict[str, Any]


def paired(lines: Iterable[Facts], arm: str, other: str, measure: str) -> Facts | None:
    """Compare one arm's measure with another's: the mean over rows, half of its 95 % interval."""
    by_row: dict[int, dict[str, float]] = {}
    for line in lines:
        if measure in line:
            by_row.setdefault(line["row"], {})[line["arm"]] = line[measure]
    pairs = [row[arm] - row[other] for row in by_row.values() if {arm, other} <= row.keys()]
    if not pairs:
        return None
    half = half_width(pairs) if len(pairs) >= LEAST_PAIRS else None
    return {"mean": sum(pairs) / len(pairs), "half_width": half, "rows": len(pairs)}


def answers(path: Path, model: Facts) -> Facts:
    """Return every configuration's losses over all F, and the gate's comparisons."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]  # behind the identity
    measures = sorted({name for line in lines for name in line} - {"arm", "row"})
    topk, length = map(int, path.stem.split("-")[1:])
    facts: Facts = {"topk": topk, "length": length, "rows": lines, "arms": []}
    facts["full"] = {
        name: _mean([line[name] for line in lines if line["arm"] == FULL]) for name in measures
    }
    for arm in arms(model["layers"]).values():
        changes = {name: paired(lines, arm.name, FULL, name) for name in measures}
        if all(changes.values()):
            work = arm.work(model["heads"])
            about = {"name": arm.name, "letters": arm.letters, "decode": arm.decode}
            facts["arms"].append({**about, "kind": arm.kind, "work": work, "over_full": changes})
    facts["arms"] += searched(model, topk, length)
    facts["gate"] = {
        arm: {name: paired(lines, arm, SHARING, name) for name in measures} for arm in GATE
    }
    return facts


def searched(model: Facts, topk: int, length: int) -> list[Facts]:
    """Return what searched patterns lose on this checkpoint in the same cell of ``smollm2.long``.

    They are asked on rows of the same books, in the same way, by the same forward.
    """
    record = json.loads(LONG.read_text())
    if record["checkpoint"] != model["digest"]:
        return []
    cells = (cell for cell in record["cells"] if (cell["length"], cell["topk"]) == (length, topk))
    arms = []
    for base, *lines in (cell["lines"] for cell in cells):
        for line in (line for line in lines if SEARCHED_BY in line["name"]):
            retention, letters = line["name"].split()[0], line["pattern"]
            over_full = {}
            for name, field in FIELDS.items():
                change, half = compared(line, base, field)
                over_full[name] = {"mean": change, "half_width": half, "rows": len(line["rows"])}
            arm = {"name": f"searched {retention}", "letters": letters, "decode": ""}
            work = letters.count("F") / len(letters)
            arms.append({**arm, "kind": "searched sharing", "work": work, "over_full": over_full})
    return arms


def missed_of(folder: Path) -> list[Facts]:
    """Read every asked text's misses, by way, layer and factor."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def report(works: list[Path], output: Path, command: str) -> None:
    """Write ``result.json``, ``README.md`` and ``loss.png`` of all the models together.

    A model of the committed record that is not among ``works`` stays as it is.
    """
    models = []
    for work in works:
        model = json.loads((work / "model.json").read_text())
        asked_on = work / "machine.json"
        asked_machine = json.loads(asked_on.read_text()) if asked_on.exists() else machine()
        model |= {"command": command, "machine": asked_machine}
        model["missed"] = missed_of(work / "missed")
        model["answers"] = [answers(path, model) for path in sorted(work.glob("answers-*.jsonl"))]
        models.append(model)
    names = {model["name"] for model in models}
    earlier = json.loads((RESULTS / "fold" / "result.json").read_text())["models"]
    models += [model for model in earlier if model["name"] not in names]
    record = {"models": models}
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "result.json", record)
    write_whole(output / "README.md", page(record))
    draw(record, output / "loss.png")


def page(record: Facts) -> str:
    """Write all tables."""
    parts = [
        "# Folding beside sharing\n\n"
        "Written by `python -m benchmarks.fold report`. Differences to all F with 95 % intervals "
        "over paired rows. Work: dot products of queries with keys that are left at 128Ki tokens "
        "and lists of 2,048, counted, not timed.\n\n![recall against work](loss.png)\n"
    ]
    for model in record["models"]:
        parts.append(
            f"## {model['name']}: {model['layers']} layers, {model['heads']} index heads\n"
        )
        if "note" in model:
            parts.append(model["note"] + "\n")
        for answers in model["answers"]:
            size = f"Lists of {answers['topk']} of {answers['length']} tokens."
            parts.append(f"{size}\n\n{answers_table(answers)}")
        for kind, some in _by_question(model["missed"]).items():
            parts.append(f"Share of the exact picks missed, %: {kind}\n\n{missed_table(some)}")
    return "\n".join(parts)


def answers_table(answers: Facts) -> str:
    """Tabulate the answers, a row for each configuration."""
    names = list(answers["full"])
    rows: list[tuple[object, ...]] = [
        ("full", "1.000", "", *(_level(name, answers["full"][name]) for name in names))
    ]
    for arm in answers["arms"]:
        if arm["name"] != FULL:
            cells = [_difference(name, arm["over_full"][name]) for name in names]
            count = arm["over_full"][names[0]]["rows"]
            rows.append((arm["name"], f"{arm['work']:.3f}", count, *cells))
    return markdown(("configuration", "work", "rows", *names), rows)


def missed_table(some: list[Facts]) -> str:
    """Tabulate a row a way: the mean over layers and texts, the worst layer's over texts."""
    rows = []
    for score in some[0]["missed"]:
        cells = []
        for factor in ("1", "2", "4", "8"):
            layers = [
                _mean([line["missed"][score][layer][factor] for line in some])
                for layer in range(len(some[0]["missed"][score]))
            ]
            cells.append(f"{100 * _mean(layers):.1f} ({100 * max(layers):.1f})")
        rows.append((score, *cells))
    return markdown(("way", *(f"c = {c}: mean (worst layer)" for c in (1, 2, 4, 8))), rows)


def _by_question(missed: list[Facts]) -> dict[str, list[Facts]]:
    by_question: dict[str, list[Facts]] = {}
    for line in missed:
        name = f"{line['kind']}, {line['topk']} of {line['tokens']} tokens"
        by_question.setdefault(name, []).append(line)
    return by_question


def draw(record: Facts, path: Path) -> None:
    """Draw recall against the work that is left: a row a model, a column a length."""
    models = record["models"]
    columns = max(len(model["answers"]) for model in models)
    figure, axes = make_figure(4.2 * columns, 3.6 * len(models), len(models), columns)
    for number, model in enumerate(models):
        of_model = axes[number * columns : (number + 1) * columns]
        for answer, axis in zip(model["answers"], of_model, strict=False):
            _panel(axis, answer["arms"])
            axis.set_title(
                f"{model['name']}, {model['heads']} index heads, "
                f"lists of {answer['topk']} of {answer['length']}",
                loc="left", fontsize=9,
            )  # fmt: skip
        for axis in of_model[len(model["answers"]) :]:
            axis.set_visible(False)
        of_model[0].set_ylabel("recall against all F, points", fontsize=8)
    entries = [axis.get_legend_handles_labels() for axis in axes]
    by_kind = {kind: h for some in entries for h, kind in zip(*some, strict=True)}
    figure.legend(
        by_kind.values(), by_kind.keys(), loc="outside lower center", ncols=4, frameon=False
    )
    save_figure(figure, path)


MARKED = {
    "all L": (-24, -3, "all L"),
    "all L, plain": (-48, -3, "all L, plain"),
    "FLLL": (4, -3, "FLLL"),
    "LSSS": (4, -3, "LSSS"),
    "LS": (4, -3, "LS"),
    "all F folded, c = 4": (-8, -11, "c = 4"),
    "all F folded, c = 4, plain": (-20, 5, "c = 4, plain"),
    "searched 1/8": (-8, -10, "1/8"),
    "searched 1/4": (-8, -10, "1/4"),
    "searched 1/2": (-8, -10, "1/2"),
    "uniform 1/2": (-20, -11, "uniform 1/2"),
    "uniform 1/4": (4, -3, "uniform 1/4"),
}
"""Configurations that are named in the figure: where beside the point, and how; tables have all."""


def _panel(axis: Any, arms: list[Facts]) -> None:
    axis.axhline(0, color="black", lw=0.8)
    for kind, color in COLORS.items():
        some = [arm for arm in arms if arm["kind"] == kind]
        for arm in some:
            difference = arm["over_full"][RIGHT]
            axis.errorbar(
                arm["work"], 100 * difference["mean"],
                yerr=100 * (difference["half_width"] or 0.0), fmt="o", ms=4, capsize=2,
                color=color, label=kind if arm is some[0] else None,
            )  # fmt: skip
            if arm["name"] in MARKED:
                *place, label = MARKED[arm["name"]]
                axis.annotate(
                    label,
                    (arm["work"], 100 * difference["mean"]),
                    xytext=place, textcoords="offset points", fontsize=7, color=color,
                )  # fmt: skip
    axis.set_xscale("log")
    axis.set_xlim(0.006, 1)
    axis.get_xaxis().set_major_formatter("{x:g}")
    axis.set_xlabel("indexer work left: dot products at 128Ki tokens", fontsize=8)
    axis.grid(alpha=0.3)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _level(name: str, value: float) -> str:
    return f"{100 * value:.1f} %" if name.endswith("right") else f"{value:.3f}"


def _difference(name: str, change: Facts) -> str:
    return estimate(change["mean"], change["half_width"], 100 if name.endswith("right") else 1)
