"""What healing gives back, by the data it is healed on and the length at which it is asked.

    python -m benchmarks.heal_data --work runs/heal-data [--seeds 0 1 2]
    python -m benchmarks.heal_data --work runs/heal-data --redraw

Heals uniform 1/4 of the shipped small checkpoint on sources of the Python library, on prose
(Python's language reference) and on conversations (questions about functions of the library,
answered by their docstrings), none of which has the recall that is asked for, and on documents of
the asked task, as ``benchmarks.heal_study`` does. No text that is asked about is healed on. A seed
decides which documents are seen. A step is a row of 512 tokens, or as many tokens in rows of
another length. Some runs on sources end with a quarter of their tokens in sparse steps, of short
or of long rows; and the searched pattern is healed on sources too.

A run is a folder below ``--work`` with a report for every length that was asked; an interrupted
study goes on, and ``--redraw`` collects the reports that there are. Writes heal_data.json and
.png; with ``--publish``, the committed ones.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import pydoc_data.topics
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.crossed import crossed_half_width
from benchmarks.heal_study import HEAL_LR, healed
from benchmarks.heal_study import heal_data as task_documents
from benchmarks.records import RUNS, markdown, read_arguments
from benchmarks.training.scores import Scorer
from sglang_indexcache.adapter import Adapter
from sglang_indexcache.data.retrieval import HELD_OUT_EVERY, TEXT_CHARACTERS
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.heal import STEPS
from sglang_indexcache.study.plots import make_figure, save_figure
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole
from sglang_indexcache.support.text import machine_text

QUICK = {"seeds": [0]}
PATTERN, SEARCHED, ALL_F = "uniform:1/4", "tiny-dsa-1of4", "full"
SOURCE, PROSE, CONVERSATIONS, TASK = KINDS = ("source", "prose", "conversations", "the task")
FEW = 80
"""Steps of healing that show what its data does; :data:`STEPS` is what healing does by itself."""
LENGTH = 512
"""Tokens of a row, where the length is not what is compared."""
ASKED = {512: 24, 256: 24, 1024: 12, 2048: 8}
"""Held-out documents by their length in tokens."""
TURNS = 6
"""Questions of a conversation."""

Rows = list[list[float]]
"""``[seeds, documents]``"""


@dataclass(frozen=True)
class Run:
    """One healing, or one pattern as it is.

    Attributes:
        pattern: for the pattern library.
        healed_on: the kind of text; None if not healed.
        length: tokens of a row of healing.
        steps: of healing, of :data:`LENGTH` tokens each.
        seed: of its documents.
        sparse_length: tokens of a row in the last quarter of the steps, which are sparse then; 0
            where all steps are dense.
    """

    pattern: str
    healed_on: str | None = None
    length: int = 0
    steps: int = 0
    seed: int = 0
    sparse_length: int = 0

    @property
    def folder(self) -> str:
        """Its name below ``--work``."""
        pattern = self.pattern.replace(":", "-").replace("/", "of")
        if self.healed_on is None:
            return pattern
        data = self.healed_on.replace(" ", "-")
        last = f"-sparse{self.sparse_length}" * bool(self.sparse_length)
        return f"{pattern}-{data}-{self.length}-{self.steps}{last}-seed{self.seed}"

    @property
    def told(self) -> dict[str, Any]:
        """What a line says of it; all seeds share a line."""
        return {name: value for name, value in vars(self).items() if name != "seed"}


def all_cells(seeds: Sequence[int]) -> list[tuple[Run, int]]:
    """Every run with a length at which it is asked."""
    free = [Run(ALL_F), Run(PATTERN), Run(SEARCHED)]

    def healings(kinds: Sequence[str], length: int, steps: int) -> list[Run]:
        return [Run(PATTERN, kind, length, steps, seed) for seed in seeds for kind in kinds]

    kinds = [run for kind in KINDS for run in healings([kind], LENGTH, STEPS)]
    fewer = healings(KINDS, LENGTH, FEW)
    lengths = [run for length in (256, 1024) for run in healings([SOURCE], length, FEW)]
    mixtures = [
        Run(PATTERN, SOURCE, LENGTH, STEPS, seed, sparse_length)
        for seed in seeds
        for sparse_length in (2048, LENGTH)
    ]
    mixtures += healings([SOURCE], 2048, STEPS)
    mixtures += [replace(run, pattern=SEARCHED) for run in healings([SOURCE], LENGTH, STEPS)]
    runs = (*free, *fewer, *kinds, *lengths, *mixtures)
    return [(run, asked) for run in runs for asked in ASKED]


def texts_of(kind: str, seed: int) -> Iterator[dict[str, Any]]:
    """Documents of a kind, in an order of the seed; none of a file that is asked about."""
    *whole, _cut = machine_text(TEXT_CHARACTERS)
    last = HELD_OUT_EVERY - 1
    files = [text for number, text in enumerate(whole) if number % HELD_OUT_EVERY != last]
    if kind == SOURCE:
        found = [{"text": text} for text in files]
    elif kind == PROSE:
        found = [{"text": text} for text in pydoc_data.topics.topics.values()]
    else:
        found = [talk for text in files for talk in _conversations(text)]
    random.Random(seed).shuffle(found)
    yield from found


def _conversations(source: str) -> Iterator[dict[str, Any]]:
    """Questions about what a module defines, some to a conversation."""
    defined = (ast.FunctionDef, ast.ClassDef)
    named = (node for node in ast.walk(ast.parse(source)) if isinstance(node, defined))
    said = [(node.name, ast.get_docstring(node)) for node in named]
    pairs = [(name, inspect.cleandoc(text)) for name, text in said if text]
    for first in range(0, len(pairs), TURNS):
        messages = []
        for name, text in pairs[first : first + TURNS]:
            messages.append({"role": "user", "content": f"What does {name} do?"})
            messages.append({"role": "assistant", "content": text})
        yield {"messages": messages}


def data_of(kind: str, seed: int, work: Path) -> Path:
    """The file of its documents, made if it is not there."""
    if kind == TASK:
        made = argparse.Namespace(work=work, text_characters=TEXT_CHARACTERS)
        return task_documents(seed, STEPS, made)
    path = work / f"{kind}-{seed}.jsonl"
    if not path.exists():
        write_whole(path, "".join(f"{json.dumps(row)}\n" for row in texts_of(kind, seed)))
    return path


def adapter_of(run: Run, work: Path) -> Adapter:
    """The run's adapter, made if it is not there."""
    assert run.healed_on is not None
    rows = max(1, LENGTH // run.length)
    tokens = run.steps * LENGTH
    sparse = tokens // 4 // run.sparse_length if run.sparse_length else 0
    dense = (tokens - sparse * run.sparse_length) // (run.length * rows)
    return healed(
        run.pattern,
        data_of(run.healed_on, run.seed, work),
        work / run.folder / "adapter",
        run.seed,
        length=run.length,
        rows=rows,
        dense_steps=dense,
        sparse_steps=sparse,
        sparse_length=run.sparse_length or None,
        lr=HEAL_LR,
        evaluate_every=dense,
    )


@functools.cache
def scorer_of(pattern: str, healed: bool) -> Scorer:
    """The checkpoint with a pattern; one that may wear adapters is not the untouched one."""
    del healed
    return Scorer(shipped_checkpoint(), pattern, TEXT_CHARACTERS)


def report(run: Run, asked: int, work: Path, make: bool) -> list[float] | None:
    """Recall of each held-out document: what its folder has, or newly asked; None if neither."""
    path = work / run.folder / f"asked-{asked}.json"
    if not path.exists():
        if not make:
            return None
        scorer = scorer_of(run.pattern, run.healed_on is not None)
        if run.healed_on is not None:
            scorer.wear(adapter_of(run, work))
        found = scorer.scores(asked, ASKED[asked], tasks=("recall",))["tasks"]["recall"]
        write_json(path, found["per_row"])
    kept: list[float] = json.loads(path.read_text())
    return kept


def line(told: dict[str, Any], asked: int, rows: Rows, base: Sequence[float]) -> dict[str, Any]:
    """A row of the table: percent, and points over untouched all F with a 95 % interval.

    The interval holds what differs between documents and, from two seeds on, between seeds.
    """
    over = [[100 * (value - before) for value, before in zip(r, base, strict=True)] for r in rows]
    return told | {
        "asked_at": asked,
        "seeds": len(rows),
        "documents": len(base),
        "recall": 100 * statistics.fmean(statistics.fmean(row) for row in rows),
        "over_all_f": statistics.fmean(statistics.fmean(row) for row in over),
        "half_width": crossed_half_width(over),
    }


def collect(seeds: Sequence[int], work: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines of all that was measured, and the names of what was not."""
    groups: dict[str, Rows] = {}
    missing = []
    for run, asked in all_cells(seeds):
        found = report(run, asked, work, make=False)
        if found is None:
            missing.append(f"{run.folder} asked at {asked}")
        else:
            groups.setdefault(json.dumps([run.told, asked]), []).append(found)
    lines = []
    for key, rows in groups.items():
        told, asked = json.loads(key)
        base = groups.get(json.dumps([Run(ALL_F).told, asked]))
        if base is not None:
            lines.append(line(told, asked, rows, base[0]))
    return lines, missing


def name_of(row: dict[str, Any]) -> str:
    """A line of the table in words."""
    plain = {ALL_F: "all F", PATTERN: "uniform 1/4", SEARCHED: "searched 1/4"}[row["pattern"]]
    if row["healed_on"] is None:
        return f"{plain}, as it is"
    told = f"{plain}, {row['steps']} steps on {row['healed_on']} at {row['length']}"
    return told + f", the last quarter sparse at {row['sparse_length']}" * bool(
        row["sparse_length"]
    )


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: a row for each way, a column for each length that was asked."""
    lengths = sorted({row["asked_at"] for row in lines})
    rows = []
    for name in dict.fromkeys(map(name_of, lines)):
        mine = {row["asked_at"]: row for row in lines if name_of(row) == name}
        seeds = sorted({row["seeds"] for row in mine.values() if row["healed_on"]})
        cells = (_cell(mine.get(length)) for length in lengths)
        rows.append((name, *cells, ", ".join(map(str, seeds))))
    return markdown(("", *(f"asked at {n}" for n in lengths), "seeds"), rows)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    if row["pattern"] == ALL_F:
        return f"{row['recall']:.1f} %"
    return f"{row['over_all_f']:+.1f} ± {row['half_width'] or 0.0:.1f}"


def draw(found: dict[str, Any], path: Path) -> None:
    """Points over all F, one panel for each length that was asked."""
    lines = found["lines"]
    lengths = sorted({row["asked_at"] for row in lines})
    shown = [row for row in lines if row["pattern"] != ALL_F]
    names = list(dict.fromkeys(map(name_of, shown)))
    figure, axes = make_figure(4 + 2.6 * len(lengths), 1.4 + 0.34 * len(names), 1, len(lengths))
    for axis, length in zip(axes, lengths, strict=True):
        for place, name in enumerate(names):
            found = [r for r in shown if name_of(r) == name and r["asked_at"] == length]
            for row in found:
                healed = "healed" if row["healed_on"] else "not healed"
                axis.errorbar(
                    row["over_all_f"],
                    place,
                    xerr=row["half_width"],
                    fmt="o",
                    capsize=3,
                    color="C0" if row["healed_on"] else "C1",
                    label=f"{healed}; bars: 95 %, over seeds and documents",
                )
        axis.axvline(0, color="grey", linewidth=0.8)
        axis.set_ylim(len(names) - 0.5, -0.5)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.set_title(f"asked at {length} tokens", fontsize=9)
        axis.set_xlabel("recall, points over all F")
        axis.grid(alpha=0.3)
    handles, texts = axes[0].get_legend_handles_labels()
    unique = dict(zip(texts, handles, strict=True))
    figure.legend(
        unique.values(), unique, loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    save_figure(figure, path)


def main() -> None:
    """Heal and ask what is missing, then write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=RUNS / "heal_data.work", help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--redraw", action="store_true", help="heal and ask nothing")
    arguments = read_arguments(parser, "heal_data", quick=QUICK)
    torch.set_num_threads(1)
    for run, asked in [] if arguments.redraw else all_cells(arguments.seeds):
        report(run, asked, arguments.work, make=True)
    lines, missing = collect(arguments.seeds, arguments.work)
    result = {
        "command": arguments.command,
        "what": "recall; differences from the untouched checkpoint with all F, 95 % intervals",
        "machine": machine() | {"threads": 1},
        "checkpoint": checkpoint_digest(shipped_checkpoint()),
        "tokens_of_a_step": LENGTH,
        "not_measured": missing,
        "lines": lines,
        "recall_of_documents": {
            f"{run.folder} asked at {asked}": found
            for run, asked in all_cells(arguments.seeds)
            if (found := report(run, asked, arguments.work, make=False)) is not None
        },
    }
    write_json(arguments.output.with_suffix(".json"), result)
    draw(result, arguments.output.with_suffix(".png"))
    print(table(lines))


if __name__ == "__main__":
    main()
