"""``indexcache heal``: thin, and free of torch until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_indexcache.cli.common import (
    CONTEXTS,
    OutputOption,
    PatternOption,
    SeedOption,
    group,
    out,
    writable,
)
from sglang_indexcache.heal import STEPS

app = group("Train the indexers that a pattern keeps, on a frozen model.")


@app.command(
    "run",
    epilog="Example: indexcache heal run MODEL --pattern uniform:1/4 --data texts.jsonl -o adapter",
)
def run(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The checkpoint's folder; it is only read.")
    ],
    pattern: PatternOption,
    data: Annotated[
        list[str],
        typer.Option(
            metavar="PATH",
            help="What to train on: a .jsonl, .parquet or text file, a folder of them, or "
            "'machine' for this machine's Python sources. Repeat it. One document in four is held "
            "out.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            callback=writable,
            help="The adapter's folder. Its log, state and figure go to a folder beside it, of "
            "the same name with .run added.",
        ),
    ],
    context: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH",
            help=f"Length of a row of packed documents: {CONTEXTS}. Eight times the model's "
            "index_topk if not given.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of each step.")] = 1,
    micro_rows: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Rows that run through a layer at a time: more take memory."
        ),
    ] = 1,
    dense_steps: Annotated[
        int, typer.Option(metavar="N", min=0, help="Steps in which layers attend to everything.")
    ] = STEPS,
    sparse_steps: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Steps after those, in which layers attend as served."
        ),
    ] = 0,
    sparse_context: Annotated[
        str | None,
        typer.Option(
            metavar="LENGTH",
            help="Length of a row in those, where a few long ones shall follow many short ones; "
            "as --context if not given.",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Highest learning rate. If not given, a short trial of three decides.",
        ),
    ] = None,
    held_out: Annotated[
        int, typer.Option(metavar="N", min=1, help="Rows that are only judged by.")
    ] = 8,
    evaluate_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps between evaluations.")
    ] = 40,
    patience: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="End a stage after so many evaluations without a lower held-out loss; 0: never.",
        ),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE", help="What the frozen model computes in: bfloat16 or float32."
        ),
    ] = "bfloat16",
    from_disk: Annotated[
        bool,
        typer.Option("--from-disk", help="Read each layer when it runs: for what does not fit."),
    ] = False,
    seed: SeedOption = 0,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what it would take on --gpus, GPU by GPU, and do nothing."
        ),
    ] = False,
    gpus: Annotated[
        str,
        typer.Option(metavar="NxNAME", help="GPUs of a dry run: how many, and h100, h200 or b200."),
    ] = "8xh200",
) -> None:
    """Train the indexers that a pattern keeps, on a frozen model: hours, not weeks.

    The model itself only runs forward, in bfloat16 or from an FP8 checkpoint. What is written is
    an adapter: a small folder of indexers, served over the unchanged checkpoint. A run that was
    interrupted goes on with the same command.

    Several processes: accelerate launch --num_processes N -m sglang_indexcache.cli heal run ...
    """
    from sglang_indexcache.heal.heal import HealOptions, heal
    from sglang_indexcache.study.journal import resumable
    from sglang_indexcache.support.lengths import parse_length

    options = HealOptions(
        checkpoint=checkpoint,
        pattern=pattern,
        data=tuple(data),
        output=output,
        length=None if context is None else parse_length(context),
        sparse_length=None if sparse_context is None else parse_length(sparse_context),
        rows=rows,
        micro_rows=micro_rows,
        dense_steps=dense_steps,
        sparse_steps=sparse_steps,
        lr=lr,
        held_out=held_out,
        evaluate_every=evaluate_every,
        patience=patience,
        seed=seed,
        dtype=dtype,
        from_disk=from_disk,
    )
    if dry_run:
        from sglang_indexcache.bench.shapes import find_gpu
        from sglang_indexcache.heal.plan import dry_run as planned
        from sglang_indexcache.heal.plan import machine_of
        from sglang_indexcache.study.cost import print_plan

        print_plan(out, planned(options, machine_of(gpus, find_gpu)))
        return
    with resumable(out, output.with_name(f"{output.name}.run")):
        heal(options, out)


@app.command("merge", epilog="Example: indexcache heal merge adapter --model MODEL -o merged")
def merge_command(
    adapter: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of an adapter.")],
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="The checkpoint that it was trained on.")
    ],
    output: OutputOption,
) -> None:
    """Write a standard checkpoint: the model with the adapter's indexers and pattern.

    Every tensor but the indexers stays as it is, bit for bit. A file without indexers becomes a
    hard link to the model's where the disk allows it, so do not edit it in place.
    """
    from sglang_indexcache.heal.merge import merge

    merge(adapter, model, output, typer.echo)
    typer.echo(f"wrote {output}")
