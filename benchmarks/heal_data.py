"""What healing gives back when its data lack the task that is asked later.

    python -m benchmarks.heal_data --work runs/heal-data [--seeds 0 1 2]

As ``benchmarks.heal_study`` heals uniform 1/4 (320 steps of one row of 512 tokens), but on the
Python standard library's sources alone, and scored on the same held-out documents. The study
itself heals on documents of the kinds that it asks. Writes heal_data.json and .md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.heal_study import (
    ALL_F,
    FREE,
    HEALED,
    LENGTH,
    Run,
    Served,
    scored,
    summarise,
    table,
)
from benchmarks.records import RUNS, read_arguments
from sglang_indexcache.data.documents import MACHINE
from sglang_indexcache.data.machine import TEXT_CHARACTERS
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.heal import STEPS
from sglang_indexcache.heal.heal import HealOptions, heal
from sglang_indexcache.study.provenance import checkpoint_digest, machine
from sglang_indexcache.support.files import write_json, write_whole

QUICK = {"seeds": [0], "rows": 2}
NAME = "1/4 uniform"


def healed(run: Run, folder: Path) -> Served:
    """The run's adapter, with the study's options but for the data."""
    options = HealOptions(
        checkpoint=shipped_checkpoint(),
        pattern=run.pattern,
        data=(MACHINE,),
        output=folder / run.folder,
        length=LENGTH,
        rows=1,
        dense_steps=run.steps,
        held_out=4,
        evaluate_every=run.steps,
        seed=run.seed or 0,
        dtype="float32",
    )
    return Served(shipped_checkpoint(), run.pattern, heal(options).adapter)


def main() -> None:
    """Heal, score, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=RUNS / "heal_data.work", help="of the runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=24, help="held-out documents of each task")
    parser.set_defaults(length=LENGTH, text_characters=TEXT_CHARACTERS)
    arguments = read_arguments(parser, "heal_data", quick=QUICK)
    torch.set_num_threads(1)
    runs = [Run(ALL_F, FREE), Run(NAME, FREE)]
    runs += [Run(NAME, HEALED, STEPS, seed) for seed in arguments.seeds]
    reports = []
    for run in runs:
        free = Served(shipped_checkpoint(), run.pattern)
        served = free if run.way == FREE else healed(run, arguments.work)
        documents = scored(served, arguments)
        reports.append({"run": run.told, "cpu_seconds": None, "documents": documents})
    lines = summarise(reports)
    result = {
        "command": arguments.command,
        "what": "differences from the untouched checkpoint with all F, 95 % intervals",
        "data": "the Python standard library's sources, none of the asked tasks",
        "machine": machine() | {"threads": 1},
        "checkpoint": checkpoint_digest(shipped_checkpoint()),
        "tokens_of_a_document": LENGTH,
        "documents_per_task": arguments.rows,
        "lines": lines,
        "reports": reports,
    }
    write_json(arguments.output.with_suffix(".json"), result)
    write_whole(arguments.output.with_suffix(".md"), table(lines))
    print(table(lines))


if __name__ == "__main__":
    main()
