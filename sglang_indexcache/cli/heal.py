"""``indexcache heal``: thin, and free of torch until a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sglang_indexcache.cli.common import Output, command, group, out
from sglang_indexcache.heal import STEPS

app = group("Train the indexers that a pattern keeps, on a frozen model.")

AtLeast0 = Annotated[int, typer.Option(min=0)]
AtLeast1 = Annotated[int, typer.Option(min=1)]


@command(
    app,
    "run",
    epilog="Example: indexcache heal run MODEL --pattern uniform:1/4 --data texts.jsonl -o adapter",
)
def run(
    checkpoint: Path,
    pattern: str,
    data: list[str],
    output: Output,
    context: str | None = None,
    rows: AtLeast1 = 1,
    dense_steps: AtLeast0 = STEPS,
    sparse_steps: AtLeast0 = 0,
    sparse_context: str | None = None,
    lr: float | None = None,
    held_out: AtLeast1 = 8,
    evaluate_every: AtLeast1 = 40,
    dtype: str = "bfloat16",
    from_disk: bool = False,
    seed: int = 0,
    dry_run: bool = False,
    gpus: str = "8xh200",
) -> None:
    """Train the indexers that a pattern keeps, on a frozen model: hours, not weeks.

    The model itself only runs forward, in bfloat16 or from an FP8 checkpoint. What is written is
    an adapter: a small folder of indexers, served over the unchanged checkpoint. A run that was
    interrupted goes on with the same command.

    Several processes: accelerate launch --num_processes N -m sglang_indexcache.cli heal run ...

    Arguments:
        checkpoint (FOLDER): The checkpoint's folder; it is only read.
    Options:
        pattern (PATTERN): Which layers keep their indexer: an F/S string, full, uniform:1/4, a
            ratio such as 1/4 (looked up in the library), a library pattern's name or a YAML file;
            with +w8 behind it, S layers also see the last 8 tokens.
        data (PATH): What to train on: a .jsonl, .parquet or text file, a folder of them, or
            'machine' for this machine's Python sources. Repeat it. One document in four is held
            out.
        output (FOLDER): The adapter's folder. Its log and state go to a folder beside it, with .run
            behind its name.
        context (LENGTH): Length of a row of packed documents: tokens, such as 4096, 16Ki (1024s) or
            200K (1000s). Eight times the model's index_topk if not given.
        rows (N): Rows of each step.
        dense_steps (N): Steps in which layers attend to everything.
        sparse_steps (N): Steps after those, in which layers attend as served.
        sparse_context (LENGTH): Length of a row in those, where a few long ones shall follow many
            short ones; as --context if not given.
        lr (RATE): Highest learning rate. If not given, a short trial of three decides.
        held_out (N): Rows that are only judged by.
        evaluate_every (N): Steps between evaluations.
        dtype (DTYPE): What the frozen model computes in: bfloat16 or float32.
        from_disk: Read each layer when it runs: for what does not fit.
        dry_run: Say what it would take on --gpus, GPU by GPU, and do nothing.
        gpus (NxNAME): GPUs of a dry run: how many, and h100, h200 or b200.
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
        dense_steps=dense_steps,
        sparse_steps=sparse_steps,
        lr=lr,
        held_out=held_out,
        evaluate_every=evaluate_every,
        seed=seed,
        dtype=dtype,
        from_disk=from_disk,
    )
    if dry_run:
        from sglang_indexcache.bench.shapes import find_gpu
        from sglang_indexcache.heal.plan import GpuMachine, counted_gpus
        from sglang_indexcache.heal.plan import dry_run as planned
        from sglang_indexcache.study.cost import print_plan

        count, name = counted_gpus(gpus)
        gpu = find_gpu(name)
        machine = GpuMachine(count, name, gpu.memory, gpu.bf16, gpu.float32, gpu.bandwidth)
        print_plan(out, planned(options, machine))
        return
    with resumable(out, output.with_name(f"{output.name}.run")):
        heal(options, out)


@command(app, "merge", epilog="Example: indexcache heal merge adapter --model MODEL -o merged")
def merge_command(adapter: Path, model: Path, output: Output) -> None:
    """Write a standard checkpoint: the model with the adapter's indexers and pattern.

    Every tensor but the indexers stays as it is, bit for bit. A file without indexers becomes a
    hard link to the model's where the disk allows it, so do not edit it in place.

    Arguments:
        adapter (FOLDER): The folder of an adapter.
    Options:
        model (FOLDER): The checkpoint that it was trained on.
    """
    from sglang_indexcache.heal.merge import merge

    merge(adapter, model, output, typer.echo)
    typer.echo(f"wrote {output}")
