"""``indexcache heal``: train the kept indexers; torch is imported only when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from sglang_indexcache.cli.common import (
    DOCUMENTS,
    LENGTH,
    Command,
    Output,
    Seed,
    group,
    out,
    writable,
)
from sglang_indexcache.lab.heal import STEPS

app = group("Train the indexers that a pattern keeps, on a frozen model.")

# fmt: off
Model = Annotated[Path, Option("--model", "--model-path", metavar="FOLDER", help=
    "The checkpoint's folder; it is only read.")]
Pattern = Annotated[str, Option("--pattern", metavar="PATTERN", help=
    "Which layers keep their indexer: an F/S string, full, uniform:1/4, a ratio such as 1/4 "
    "(looked up in the library), a library pattern's name or a YAML file.")]
Data = Annotated[list[str], Option("--data", metavar="PATH", help=
    f"What to train on: {DOCUMENTS} Repeat it. One document in four is held out.")]
AdapterFolder = Annotated[Path, Option("--output", "-o", metavar="FOLDER", callback=writable, help=
    "The adapter's folder. Its log and state go to a folder beside it, with .run behind its "
    "name.")]
Context = Annotated[str | None, Option("--context", metavar="LENGTH", help=
    f"Length of a row of packed documents: {LENGTH} Eight times the model's index_topk if not "
    "given.")]
Rows = Annotated[int, Option("--rows", min=1, metavar="N", help="Rows of each step.")]
DenseSteps = Annotated[int, Option("--dense-steps", min=0, metavar="N", help=
    "Steps in which layers attend to everything.")]
SparseSteps = Annotated[int, Option("--sparse-steps", min=0, metavar="N", help=
    "Steps after those, in which layers attend as served.")]
SparseContext = Annotated[str | None, Option("--sparse-context", metavar="LENGTH", help=
    "Length of a row in those, where a few long ones shall follow many short ones; as --context "
    "if not given.")]
Lr = Annotated[float | None, Option("--lr", metavar="RATE", help=
    "Highest learning rate. If not given, a short trial of three decides.")]
HeldOut = Annotated[int, Option("--held-out", min=1, metavar="N", help=
    "Rows that are only judged by.")]
FromDisk = Annotated[bool, Option("--from-disk", help=
    "Read each layer when it runs: for what does not fit.")]
DryRun = Annotated[str | None, Option("--dry-run", metavar="NxGPU", help=
    "Say what each GPU would hold at most, of so many (8xh200; h100, h200 or b200), and do "
    "nothing.")]
Adapter = Annotated[Path, Argument(metavar="FOLDER", help="The folder of an adapter.")]
AdaptedModel = Annotated[Path, Option("--model", "--model-path", metavar="FOLDER", help=
    "The checkpoint that it was trained on.")]
# fmt: on


@app.command(
    "run",
    cls=Command,
    epilog="Example: indexcache heal run --model MODEL --pattern 1/4 --data texts.jsonl -o adapter",
)
def run(
    model: Model,
    pattern: Pattern,
    data: Data,
    output: AdapterFolder,
    context: Context = None,
    rows: Rows = 1,
    dense_steps: DenseSteps = STEPS,
    sparse_steps: SparseSteps = 0,
    sparse_context: SparseContext = None,
    lr: Lr = None,
    held_out: HeldOut = 8,
    from_disk: FromDisk = False,
    seed: Seed = 0,
    dry_run: DryRun = None,
) -> None:
    """Train the indexers that a pattern keeps, on a frozen model: hours, not weeks.

    The model itself only runs forward, in bfloat16 or from an FP8 checkpoint. What is written is
    an adapter: a small folder of indexers, served over the unchanged checkpoint. A run that was
    interrupted goes on with the same command.
    """
    from sglang_indexcache.lab.heal.heal import HealOptions, heal
    from sglang_indexcache.lab.runs.progress import print_plan, resumable
    from sglang_indexcache.library.lengths import parse_length

    options = HealOptions(
        checkpoint=model,
        pattern=pattern,
        data=tuple(data),
        output=output,
        length=None if context is None else parse_length(context),
        sparse_length=None if sparse_context is None else parse_length(sparse_context),
        rows=rows,
        dense_steps=dense_steps,
        sparse_steps=sparse_steps,
        lr=lr,
        held_out=held_out,
        seed=seed,
        from_disk=from_disk,
    )
    if dry_run is not None:
        from sglang_indexcache.lab.heal.dry_run import memory_needed

        print_plan(out, memory_needed(options, dry_run))
        return
    with resumable(out, output.with_name(f"{output.name}.run")):
        heal(options, out)


@app.command(
    "merge", cls=Command, epilog="Example: indexcache heal merge adapter --model MODEL -o merged"
)
def merge_command(adapter: Adapter, model: AdaptedModel, output: Output) -> None:
    """Write a standard checkpoint: the model with the adapter's indexers and pattern.

    Every tensor but the indexers stays as it is, bit for bit. A file without indexers becomes a
    hard link to the model's where the disk allows it, so do not edit it in place.
    """
    from sglang_indexcache.lab.heal.merge import merge

    merge(adapter, model, output, typer.echo)
    typer.echo(f"wrote {output}")
