r"""What healing gives back, beside serving untrained and training everything.

    python -m benchmarks.heal_study --work runs/heal-study [--only trained healed] [--seeds 0 1 2]
    python -m benchmarks.heal_study --work runs/heal-study --redraw

The shipped small checkpoint under patterns that it was not trained for: served as it is
(training-free), with its indexers healed, and trained further as a whole (a warm-up and a sparse
stage, half the steps each). All F trained further is the control: what more steps do to the model
by themselves. A seed decides the documents that are seen; every step sees one row of 512 tokens.
All are scored on the same held-out documents, as differences from the untouched checkpoint with all
F on the same document. A grid over the stages and learning rates of healing, one seed and pattern,
is what its defaults rest on.

A run is a folder below ``--work``, done when it has a ``report.json``: an interrupted study goes
on. Several processes may work on different ``--only``; ``--redraw`` then collects their reports.
Writes heal.json and .png from the reports that there are.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.crossed import crossed_half_width
from benchmarks.records import RUNS, estimate, markdown, read_arguments
from benchmarks.training.batches import TEXT, Mixture
from benchmarks.training.recipe import Recipe, load_recipe
from benchmarks.training.scores import Scorer
from benchmarks.training.trainer import Trainer
from sglang_indexcache.adapter import Adapter
from sglang_indexcache.checkpoint import Checkpoint
from sglang_indexcache.data.retrieval import TEXT_CHARACTERS, MachineText, TaskWords, chance
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.heal.heal import HealOptions, heal
from sglang_indexcache.library import Library
from sglang_indexcache.study.plots import make_figure, pattern_color, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"seeds": [0], "heal_steps": [20], "only": ["training-free", "healed"], "rows": 2}
PATTERNS = {
    "1/2 uniform": "uniform:1/2",
    "1/4 uniform": "uniform:1/4",
    "1/4 searched": "tiny-dsa-1of4",
}
ALL_F = "all F"
FREE, HEALED, TRAINED = "training-free", "healed", "trained"
WAYS = (FREE, HEALED, TRAINED)
HEAL_STEPS = (20, 80, 320)
GRID_STEPS = 80
TRAINED_STEPS = 160
LENGTH = 512
ROW_MARGIN = 16
"""Tokens that a row has to spare, as text that is cut and read again can have some more."""
DATA: dict[str, Any] = {
    "mixture": {TEXT: 0.35, "recall": 0.35, "needles": 0.3},
    "lengths": [128, 256, 512],
}
DENSE_SHARE, HEAL_LR = 1.0, 5e-3
"""How the study heals, but for the grid: the warm-up of the recipe ``sharing``."""
GRID = "grid"
GRID_POINTS = ((1.0, 1e-3), (1.0, 5e-3), (1.0, 2e-2), (0.5, 5e-3), (0.0, 5e-3))
"""Shares of dense steps and learning rates that it tries."""
ASKED = ("recall", "needles")
"""The retrieval tasks; the small checkpoint did not learn tracking."""

Documents = dict[str, list[float]]
"""A metric of every held-out document."""


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


@dataclass(frozen=True)
class Run:
    """One thing that is scored.

    Attributes:
        name: of the pattern, a key of :data:`PATTERNS` or :data:`ALL_F`.
        way: of :data:`WAYS`.
        steps: of training.
        seed: of the training documents; None where nothing is trained.
        dense: share of healing's steps in its dense warm-up.
        lr: of healing.
    """

    name: str
    way: str
    steps: int = 0
    seed: int | None = None
    dense: float = DENSE_SHARE
    lr: float = HEAL_LR

    @property
    def pattern(self) -> str:
        """For the pattern library."""
        return PATTERNS.get(self.name, "full")

    @property
    def told(self) -> dict[str, Any]:
        """What a report says of it."""
        how = {"dense": self.dense, "lr": self.lr} if self.way == HEALED else {}
        said = {"name": self.name, "way": self.way, "steps": self.steps, "seed": self.seed}
        return said | how

    @property
    def folder(self) -> str:
        """Its name below ``--work``."""
        plain = self.name.replace("/", "of").replace(" ", "-").lower()
        if self.seed is None:
            return plain
        how = f"-dense{self.dense:g}-lr{self.lr:g}" if self.way == HEALED else ""
        return f"{plain}-{self.way}-{self.steps}{how}-seed{self.seed}"


@dataclass(frozen=True)
class Served:
    """What is scored.

    Attributes:
        checkpoint: a folder.
        pattern: for the pattern library.
        adapter: healed indexers, if any.
    """

    checkpoint: Path
    pattern: str
    adapter: Adapter | None = None


def all_runs(seeds: Sequence[int], heal_steps: Sequence[int], trained_steps: int) -> list[Run]:
    """Every run, one seed after the other, so that an unfinished study has whole seeds."""
    found = [Run(name, FREE) for name in (ALL_F, *PATTERNS)]
    for seed in seeds:
        found += [Run(name, HEALED, steps, seed) for steps in heal_steps for name in PATTERNS]
        found += [Run(name, TRAINED, trained_steps, seed) for name in (*PATTERNS, ALL_F)]
    return found


def grid(steps: int) -> list[Run]:
    """Ways to heal: how much of it is dense, and the learning rate."""
    return [Run("1/4 uniform", HEALED, steps, 0, dense, lr) for dense, lr in GRID_POINTS]


def trained_recipe(run: Run, characters: int) -> Recipe:
    """The second half of the small checkpoint's own recipe, shorter and from the checkpoint."""
    both = {"rows": 1, "length": LENGTH, "warmup_steps": run.steps // 16}
    warmup = {**both, "kind": "warmup", "steps": run.steps // 2, "indexer_lr": 5e-3}
    sparse = {**both, "kind": "sparse", "steps": run.steps - run.steps // 2, "optimizer": "muon"}
    changes = {
        "model": {"checkpoint": shipped_checkpoint()},
        "pattern": run.pattern,
        "seed": run.seed,
        "data": DATA | {"text_characters": characters},
        "stages": [warmup, sparse | {"lr": 3e-4, "indexer_lr": 1e-3}],
        "save_every": 40,
        "eval_rows": 1,
    }
    return load_recipe("sharing", changes)


def serve_as_it_is(run: Run, _: Path, __: argparse.Namespace) -> Served:
    """The shipped checkpoint under a pattern."""
    return Served(shipped_checkpoint(), run.pattern)


def train(run: Run, folder: Path, arguments: argparse.Namespace) -> Served:
    """Train everything; what came of it has no other indexers than the pattern's."""
    return Served(Trainer(trained_recipe(run, arguments.text_characters), folder).run(), "full")


def heal_data(seed: int, rows: int, arguments: argparse.Namespace) -> Path:
    """Training documents as a user has them, a JSON object a line.

    Healing holds out one document in four, so there are more than it has steps.
    """
    path: Path = arguments.work / f"data-seed{seed}-{rows}.jsonl"
    if path.exists():
        return path
    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    text = MachineText.read(tokenizer, arguments.text_characters)
    length = LENGTH - ROW_MARGIN
    lengths = [length * size // LENGTH for size in DATA["lengths"]]
    mixture = Mixture(tokenizer, text, TaskWords(tokenizer), DATA["mixture"], lengths, seed)
    lines = [
        json.dumps({"text": tokenizer.decode(document.ids, clean_up_tokenization_spaces=False)})
        for step in range(2 * rows)
        for document in mixture.row(step, 0, length)
    ]
    write_whole(path, "\n".join(lines) + "\n")
    return path


def train_indexers(run: Run, folder: Path, arguments: argparse.Namespace) -> Served:
    """Heal; how to serve what came of it."""
    data = heal_data(run.seed or 0, max(arguments.heal_steps), arguments)
    dense = round(run.dense * run.steps)
    steps = {"dense_steps": dense, "sparse_steps": run.steps - dense}
    output = folder / "adapter"
    adapter = healed(run.pattern, data, output, run.seed or 0, length=LENGTH, lr=run.lr, **steps)
    return Served(shipped_checkpoint(), run.pattern, adapter)


def healed(pattern: str, data: Path, output: Path, seed: int, **more: Any) -> Adapter:
    """The shipped checkpoint's indexers for a pattern; ``more`` are of :class:`HealOptions`."""
    steps = more["dense_steps"] + more["sparse_steps"]
    options = {"held_out": 4, "evaluate_every": steps, "save_every": 40, "dtype": "float32", **more}
    wanted = HealOptions(shipped_checkpoint(), pattern, (str(data),), output, seed=seed, **options)
    return heal(wanted).adapter


Maker = Callable[[Run, Path, argparse.Namespace], Served]
MAKERS: dict[str, Maker] = {
    FREE: serve_as_it_is,
    HEALED: train_indexers,
    TRAINED: train,
}


def report(run: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    """A run's report: the one in its folder, or a new one.

    Raises:
        SystemExit: the one in its folder scored other documents.
    """
    folder = arguments.work / run.folder
    if (kept := kept_report(run, arguments)) is not None:
        return kept
    fresh = not folder.exists()
    began = time.process_time()
    served = MAKERS[run.way](run, folder, arguments)
    seconds = time.process_time() - began
    found = {
        "run": run.told,
        "scored": scored_on(arguments),
        # An interrupted run's time is in two processes.
        "cpu_seconds": seconds if fresh and run.steps else None,
        "documents": scored(served, arguments),
    }
    write_json(folder / "report.json", found)
    return found


def kept_report(run: Run, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """The report in a run's folder, if it is done.

    Raises:
        SystemExit: it scored other documents.
    """
    path = arguments.work / run.folder / "report.json"
    if not path.exists():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    if kept["scored"] != scored_on(arguments):
        raise SystemExit(
            f"{path} scored {kept['scored']}, not {scored_on(arguments)}. Give the same options, "
            "or another --work."
        )
    return kept


def scored_on(arguments: argparse.Namespace) -> dict[str, int]:
    """What decides the held-out documents."""
    return {name: getattr(arguments, name) for name in ("rows", "length", "text_characters")}


def scored(served: Served, arguments: argparse.Namespace) -> Documents:
    """Every metric of every held-out document."""
    scorer = Scorer(served.checkpoint, served.pattern, arguments.text_characters, served.adapter)
    found = scorer.scores(arguments.length, arguments.rows, tasks=(TEXT, *ASKED))["tasks"]
    answers = [loss for task in ASKED for loss in found[task]["loss_per_row"]]
    return {
        "text_loss": found[TEXT]["loss_per_row"],
        "answer_loss": answers,
        **{task: found[task]["per_row"] for task in ASKED},
    }


def summarise(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for all seeds of a run: differences from untouched all F.

    An interval holds what differs between documents and, from two seeds on, between seeds.
    """
    base: Documents = reports[0]["documents"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in reports:
        alike = {key: value for key, value in one["run"].items() if key != "seed"}
        groups.setdefault(json.dumps(alike), []).append(one)
    lines = []
    for alike, same in groups.items():
        line: dict[str, Any] = json.loads(alike)
        line["seeds"] = [one["run"]["seed"] for one in same]
        line["cpu_seconds"] = [one["cpu_seconds"] for one in same]
        for metric in METRICS:
            table = [_over(one["documents"][metric], base[metric]) for one in same]
            line[metric] = {
                "over_all_f": statistics.fmean(statistics.fmean(row) for row in table),
                "half_width": crossed_half_width(table),
            }
        lines.append(line)
    return lines


def _over(values: Sequence[float], base: Sequence[float]) -> list[float]:
    return [value - before for value, before in zip(values, base, strict=True)]


def cost_of_a_step(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """CPU time of a step of each way, as a multiple of a heal step; empty without one.

    Ratios only: the seconds of a shared machine mean nothing. The longest runs alone count, where
    reading data and judging are the smallest part.
    """
    longest = {way: max((x["steps"] for x in lines if x["way"] == way), default=0) for way in WAYS}
    each: dict[str, list[float]] = {}
    for line in lines:
        if line["steps"] == longest[line["way"]]:
            known = [seconds for seconds in line["cpu_seconds"] if seconds]
            each.setdefault(line["way"], []).extend(seconds / line["steps"] for seconds in known)
    middle = {way: statistics.median(found) for way, found in each.items() if found}
    return (
        {way: value / middle[HEALED] for way, value in middle.items()} if HEALED in middle else {}
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: differences from untouched all F, with 95 % intervals."""
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
    """Markdown: the settings of healing that were tried, with one seed and pattern."""
    rows = [
        (f"{round(x['dense'] * x['steps'])} of {x['steps']}", f"{x['lr']:g}", *_cells(x))
        for x in lines
    ]
    return markdown(("dense steps", "learning rate", *_LABELS), rows)


_LABELS = tuple(metric.label for metric in METRICS.values())


def _cells(line: dict[str, Any]) -> Iterator[str]:
    for name, metric in METRICS.items():
        found = line[name]
        yield estimate(found["over_all_f"] or 0.0, found["half_width"], metric.scale)


def draw(found: dict[str, Any], path: Path) -> None:
    """Each measure from no healing to the most steps, and beside it training everything."""
    lines = found["lines"]
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
            some = [x for x in lines if x["name"] == pattern and (x["way"], x["steps"]) in places]
            some = [x for x in some if pattern != ALL_F or x["way"] == TRAINED]
            for way, style in (((FREE, HEALED), "o-"), ((TRAINED,), "D")):
                shown = [line for line in some if line["way"] in way]
                axis.errorbar(
                    [places[x["way"], x["steps"]] + 0.1 * (number - 1.5) for x in shown],
                    [metric.scale * line[name]["over_all_f"] for line in shown],
                    yerr=[metric.scale * (line[name]["half_width"] or 0.0) for line in shown],
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
        title=f"{found['documents_per_task']} documents of each task, {seeds} seeds; "
        "bars: 95 % intervals; diamonds: the whole model trained",
        title_fontsize=8, fontsize=9,
    )  # fmt: skip
    save_figure(figure, path)


def _colors() -> dict[str, str]:
    """Those that the patterns have in every figure."""
    checkpoint = Checkpoint.read(shipped_checkpoint())
    resolve = Library.default().resolve
    return {
        name: pattern_color(resolve(value, checkpoint).pattern)
        for name, value in {**PATTERNS, ALL_F: "full"}.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then write the result and the figure."""
    arguments = parse(argv)
    torch.set_num_threads(1)
    runs = all_runs(arguments.seeds, arguments.heal_steps, arguments.trained_steps)
    tried = grid(arguments.grid_steps)
    if not arguments.redraw:
        for run in tried if GRID in arguments.only else []:
            report(run, arguments)
        for run in runs:
            if run.way in arguments.only:
                report(run, arguments)
    reports = reports_of(runs, arguments)
    if not reports or reports[0]["run"] != runs[0].told:
        raise SystemExit(f"{arguments.work} has no report of {ALL_F} yet: --only {FREE} makes it")
    lines = summarise(reports)
    result = {
        "command": arguments.command,
        "what": "differences from the untouched checkpoint with all F, 95 % intervals",
        "machine": machine() | {"threads": 1},
        "checkpoint": checkpoint_digest(shipped_checkpoint()),
        "length": arguments.length,
        "documents_per_task": arguments.rows,
        "tokens_per_step": LENGTH,
        "data": DATA,
        "chance": {task: chance(task, arguments.length) for task in ASKED},
        "not_measured": [run.folder for run in runs if kept_report(run, arguments) is None],
        "step_time_over_heal": cost_of_a_step(lines),
        "lines": lines,
        "grid": summarise([reports[0], *reports_of(tried, arguments)])[1:],
        "reports": reports,
    }
    write_json(arguments.output.with_suffix(".json"), result)
    draw(result, arguments.output.with_suffix(".png"))
    print(table(lines))


def reports_of(runs: Sequence[Run], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Those that there are."""
    return [found for run in runs if (found := kept_report(run, arguments)) is not None]


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=RUNS / "heal.work", help="of the runs")
    parser.add_argument("--only", nargs="+", choices=(*WAYS, GRID), default=[*WAYS, GRID])
    parser.add_argument("--redraw", action="store_true", help="train and score nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--heal-steps", type=int, nargs="+", default=list(HEAL_STEPS))
    parser.add_argument("--grid-steps", type=int, default=GRID_STEPS)
    parser.add_argument("--trained-steps", type=int, default=TRAINED_STEPS)
    parser.add_argument("--rows", type=int, default=24, help="held-out documents of each task")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--text-characters", type=int, default=TEXT_CHARACTERS)
    return read_arguments(parser, "heal", argv, QUICK)


if __name__ == "__main__":
    main()
