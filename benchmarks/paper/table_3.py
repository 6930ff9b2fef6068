r"""Table 3 in small: what training-aware sharing costs and gains.

    python -m benchmarks.paper.table_3 --quick
    python -m benchmarks.training tiny-dsa --output runs/dense --stages 3
    python -m benchmarks.paper.table_3 --checkpoint runs/dense/checkpoint [--seeds 0 1 2]

Every configuration starts from the same dense-trained checkpoint and goes through the same
warm-up and sparse training; a seed decides the documents that are seen. The training-free rows
serve the all-F run of the same seed with a pattern that it was not trained for. All are scored on
the same held-out documents, so each is also compared with the all-F run of its seed. An
interrupted run goes on; seeds may be run apart, even side by side, and are then collected by a
run over all of them. Without ``--checkpoint`` it starts from the small model as shipped, which has
been trained to its end. Writes training_aware.json, .md and .png; ``--redraw`` makes the last two
again from the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from benchmarks.paper import SMALL
from benchmarks.records import RUNS, estimate, markdown, read_arguments
from benchmarks.training.batches import TEXT
from benchmarks.training.recipe import Recipe, load_recipe
from benchmarks.training.scores import Scorer
from benchmarks.training.tasks import TEXT_CHARACTERS, chance
from benchmarks.training.trainer import Trainer
from sglang_indexcache.lab.runs.plots import make_figure, save_figure
from sglang_indexcache.lab.stats.bounds import half_width
from sglang_indexcache.library.digest import checkpoint_digest
from sglang_indexcache.library.writing import write_json, write_whole

NAME = "training_aware"
QUICK = {"seeds": [0], "steps": 2, "rows": 2, "text_characters": 400_000}
RETRIEVAL = ("recall", "needles")
"""The tasks, and what "retrieval" is the mean of. Tracking is left out: the dense model did not
learn it (``results/small_checkpoint``), so all that it shows of sharing is noise at chance."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: in the table.
        trained: pattern that is trained.
        served: pattern that is evaluated.
        cross_layer: L_multi, or each indexer for its own layer only.
    """

    name: str
    trained: str
    served: str
    cross_layer: bool = True

    @property
    def folder(self) -> str:
        """Folder of the training run; rows with the same training share it."""
        loss = "multi" if self.cross_layer else "own"
        return f"{file_name(self.trained)}-{loss}"


def file_name(pattern: str) -> str:
    """Turn a pattern as the user wrote it into the name of a file."""
    return pattern.replace(":", "-").replace("/", "-")


def rows(searched: str, searched_quarter: str) -> list[Row]:
    """Return the table's lines; ``searched`` are patterns at ratio 1/2 and 1/4."""
    half, quarter = "uniform:1/2", "uniform:1/4"
    return [
        Row("DSA, all F", "full", "full"),
        Row("1/2 uniform, L_multi", half, half),
        Row("1/2 searched, L_multi", searched, searched),
        Row("1/2 uniform, own layer only", half, half, cross_layer=False),
        Row("1/4 uniform, L_multi", quarter, quarter),
        Row("1/2 uniform, training-free", "full", half),
        Row("1/2 searched, training-free", "full", searched),
        Row("1/4 uniform, training-free", "full", quarter),
        Row("1/4 searched, training-free", "full", searched_quarter),
    ]


Documents = dict[str, list[float]]
"""Of every held-out document the text loss, or the accuracy of a task."""


def run_row(row: Row, seed: int, arguments: argparse.Namespace) -> Documents:
    """Train (unless that is done) and evaluate one line with one seed."""
    recipe = recipe_of(row, seed, arguments)
    made_of = f"{recipe.model_dump_json()} {checkpoint_digest(arguments.checkpoint)}"
    training = hashlib.sha256(made_of.encode()).hexdigest()[:8]
    folder = arguments.work / f"seed{seed}" / f"{row.folder}-{training}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):
        if not (folder / "checkpoint" / "config.json").exists():
            Trainer(recipe, folder).run()
    tasks = evaluated(folder, row.served, arguments)["tasks"]
    return {task: tasks[task]["per_row"] for task in (TEXT, *RETRIEVAL)}


def recipe_of(row: Row, seed: int, arguments: argparse.Namespace) -> Recipe:
    """Return how one line's model is trained."""
    changes: dict[str, Any] = {
        "model": {"checkpoint": arguments.checkpoint},
        "pattern": row.trained,
        "cross_layer": row.cross_layer,
        "seed": seed,
    }
    if arguments.steps is not None:
        stages = load_recipe(arguments.recipe).stages
        changes["stages"] = [
            stage.model_copy(update={"steps": arguments.steps}) for stage in stages
        ]
    return load_recipe(arguments.recipe, changes)


def scores_of(documents: Documents) -> dict[str, float]:
    """Return the means over documents, all of which have as many questions; and ``retrieval``."""
    means = {task: statistics.fmean(values) for task, values in documents.items()}
    return with_mean({"text_loss": means.pop(TEXT), **means})


def with_mean(scores: dict[str, float]) -> dict[str, float]:
    """Add ``retrieval`` to the scores, the mean of :data:`RETRIEVAL`."""
    return {**scores, "retrieval": statistics.mean(scores[task] for task in RETRIEVAL)}


def evaluated(folder: Path, pattern: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the report of a run served with a pattern: the one beside it, or a new one."""
    settings = {
        "length": arguments.length,
        "rows": arguments.rows,
        "text": arguments.text_characters,
    }
    path = folder / f"report-{file_name(pattern)}.json"
    if path.exists():
        stored: dict[str, Any] = json.loads(path.read_text())
        if stored["given"] == settings:
            return stored
    scorer = Scorer(folder / "checkpoint", pattern, arguments.text_characters)
    scores = scorer.scores(arguments.length, arguments.rows)
    write_json(path, {"given": settings, **scores})
    return scores


def mean_and_interval(values: list[float]) -> dict[str, float | None]:
    """Return the mean over seeds and its 95 % interval's half width; none for a single seed."""
    return {"mean": statistics.mean(values), "half_width": half_width(values)}


def summarise(runs: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Make one entry a line: every metric with its interval, and the seeds' own values.

    ``over_dsa`` has each metric's difference from the first line (all F) of the same seed: what
    the seeds have in common cancels, so its interval is the one to read.
    """
    baseline = next(iter(runs.values()))
    return [
        {
            "name": name,
            "seeds": seeds,
            **{key: mean_and_interval([seed[key] for seed in seeds]) for key in seeds[0]},
            "over_dsa": {
                key: mean_and_interval(
                    [seed[key] - base[key] for seed, base in zip(seeds, baseline, strict=True)]
                )
                for key in seeds[0]
            },
        }
        for name, seeds in runs.items()
    ]


def table(lines: list[dict[str, Any]], length: int) -> str:
    """Write the table in Markdown; its last line is guessing among a document's values."""
    losses, over = ("text_loss", *RETRIEVAL), ("text_loss", "retrieval", *RETRIEVAL)
    rows = []
    for line in lines:
        cells = [_cell(line[key], key, sign="") for key in losses]
        cells += [_cell(line["over_dsa"][key], key) for key in over]
        rows.append((line["name"], *cells))
    guessed = (f"{100 * chance(task, length):.1f}" for task in RETRIEVAL)
    rows.append(("chance", "", *guessed, *[""] * len(over)))
    names = ["text loss", *(f"{task}, %" for task in RETRIEVAL)]
    names += [f"{key.replace('_', ' ')} over all F" for key in over]
    return markdown(("configuration", *names), rows)


def _cell(value: dict[str, float | None], key: str, sign: str = "+") -> str:
    scale = 1 if key == "text_loss" else 100
    return estimate(value["mean"] or 0.0, value["half_width"], scale, sign=sign)


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw what every line costs over all F of the same seed, with intervals."""
    lines = record["rows"]
    figure, axes = make_figure(9.5, 0.4 * len(lines) + 1.6, columns=2, sharey=True)
    panels = (
        ("text_loss", 1, "text loss over all F, nats per token (lower is better)"),
        ("retrieval", 100, "recall and needles over all F, points (higher is better)"),
    )
    for axis, (key, scale, label) in zip(axes, panels, strict=True):
        axis.axvline(0, color="grey", linewidth=0.8)
        for line in lines[1:]:
            value = line["over_dsa"][key]
            half = scale * (value["half_width"] or 0.0)
            is_free = "training-free" in line["name"]
            axis.errorbar(
                scale * value["mean"], line["name"], xerr=half, fmt="o", color="black",
                markerfacecolor="white" if is_free else "black", capsize=3,
                label="training-free" if is_free else "trained for the pattern",
            )  # fmt: skip
        axis.set_xlabel(label, fontsize=8)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    handles, names = axes[0].get_legend_handles_labels()
    unique = dict(zip(names, handles, strict=True))
    seeds = len(lines[0]["seeds"])
    figure.legend(
        unique.values(), unique.keys(), loc="outside lower center", ncols=2, frameon=False,
        title="small model, trained once for every line and seed; "
        f"{record['documents_per_task']} documents of each task; bars: 95 % intervals of the mean "
        f"over {seeds} seeds, the documents taken as they are", title_fontsize=8, fontsize=8,
    )  # fmt: skip
    save_figure(figure, path)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default=SMALL)
    parser.add_argument(
        "--searched", nargs=2, metavar=("HALF", "QUARTER"), default=["1/2", "1/4"],
        help="in any form that the checkpoint's shape resolves",
    )  # fmt: skip
    parser.add_argument("--work", type=Path, default=RUNS / "training_aware.work")
    parser.add_argument("--steps", type=int, help="of each stage, in place of the recipe's")
    parser.add_argument(
        "--redraw", action="store_true", help="only the table and the figure, from the JSON file"
    )
    parser.add_argument("--recipe", default="sharing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--text-characters", type=int, default=TEXT_CHARACTERS)
    return read_arguments(parser, NAME, argv, QUICK)


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then write the table."""
    arguments = parse(argv)
    output: Path = arguments.output
    if arguments.redraw:
        result = json.loads(output.with_suffix(".json").read_text())
        seeds_of = {
            row["name"]: [with_mean(seed) for seed in row["seeds"]] for row in result["rows"]
        }
        lines = summarise(seeds_of)
    else:
        documents = {
            row.name: [run_row(row, seed, arguments) for seed in arguments.seeds]
            for row in rows(*arguments.searched)
        }
        lines = summarise({name: list(map(scores_of, seeds)) for name, seeds in documents.items()})
        result = {
            "command": arguments.command,
            "what": "the paper's Table 3 in small; 95 % intervals of the mean over seeds",
            "searched": arguments.searched,
            "length": arguments.length,
            "documents_per_task": arguments.rows,
            "documents": documents,
        }
    result |= {"averaged": RETRIEVAL, "rows": lines}
    write_json(output.with_suffix(".json"), result)
    text = table(lines, result["length"])
    write_whole(output.with_suffix(".md"), text)
    draw(result, output.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
