"""``indexcache train``: thin, and free of torch until a command runs."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_indexcache.cli.common import (
    CONTEXTS,
    ContextOption,
    ModelOption,
    OutputOption,
    PatternOption,
    SeedOption,
    group,
    out,
)
from sglang_indexcache.heal.plan import STEPS

app = group("Train a DSA model for index sharing (paper: training-aware IndexCache).")


class Weights(StrEnum):
    """What a frozen parameter is held in."""

    BF16 = "bf16"
    FP8 = "fp8"


RowsOption = Annotated[int, typer.Option(help="How many documents there are of each task.")]


RowOption = Annotated[
    str | None,
    typer.Option(
        "--context",
        help=f"Length of a row of packed documents: {CONTEXTS}. Four times the model's index_topk "
        "if not given.",
    ),
]


@app.command("run")
def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe's name.")],
    output: OutputOption,
    pattern: Annotated[
        str | None, typer.Option(help="A pattern in any form, in place of the recipe's.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The DSA checkpoint to start from, not the recipe's model.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="A seed in place of the recipe's.")] = None,
    stages: Annotated[
        int | None, typer.Option(help="Stop after so many of the recipe's stages.")
    ] = None,
) -> None:
    """Train by a recipe, or go on where an interrupted run stopped.

    Several processes: accelerate launch --num_processes N -m sglang_indexcache.cli train run ...
    """
    from sglang_indexcache.heal.recipe import load_recipe
    from sglang_indexcache.heal.trainer import Trainer

    given = {
        "pattern": pattern,
        "seed": seed,
        "model": None if model is None else {"checkpoint": model},
    }
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    loaded = load_recipe(recipe, overrides)
    Trainer(loaded if stages is None else loaded.first(stages), output).run()


@app.command("plan")
def plan_command(
    model: Annotated[
        str, typer.Option(help="The checkpoint's folder, or 30b, glm-5 or deepseek-v3.2.")
    ],
    pattern: PatternOption = "1/4",
    million_tokens: Annotated[
        float | None,
        typer.Option(
            help="Train on so many million tokens, with either: as many as heal's default steps if "
            "not given."
        ),
    ] = None,
    context: RowOption = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs share the model.")] = 8,
    gpu: Annotated[str, typer.Option(help="Their data sheet: h100, h200 or b200.")] = "h200",
    gpu_memory: Annotated[
        float | None, typer.Option(help="Memory of one GPU, GB, if not the data sheet's.")
    ] = None,
    mfu: Annotated[float, typer.Option(help="Share of the peak rates that is reached.")] = 0.3,
    float32_tflops: Annotated[
        float | None,
        typer.Option(
            help="Peak rate of float32 products (the loss), TFLOP/s, if not the data sheet's."
        ),
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help="How heal holds the frozen weights.")
    ] = Weights.BF16,
    rows: Annotated[int, typer.Option(help="Rows of each of heal's steps.")] = 4,
    disk_rate: Annotated[
        float, typer.Option(help="Rate at which heal --from-disk reads weights, GB/s.")
    ] = 5.0,
    dense_share: Annotated[
        float, typer.Option(help="Part of heal's tokens in its dense warm-up.")
    ] = 1.0,
) -> None:
    """Memory, GPU-hours and GPUs of heal and of full training: arithmetic, not measured."""
    from rich.box import SIMPLE
    from rich.table import Table

    from sglang_indexcache.bench.roofline import find_gpu
    from sglang_indexcache.bench.shapes import checkpoint_of, shape_of
    from sglang_indexcache.heal.plan import LEFT_OUT, TITLE, Assumptions, plan
    from sglang_indexcache.library import Library
    from sglang_indexcache.support.lengths import parse_length

    shape = shape_of(model)
    chosen = Library.default().resolve(pattern, checkpoint_of(shape)).pattern
    sheet = find_gpu(gpu)
    length = 4 * shape.topk if context is None else parse_length(context)
    assumed = Assumptions(
        gpus=gpus,
        gpu_memory=sheet.memory / 1e9 if gpu_memory is None else gpu_memory,
        million_tokens=STEPS * rows * length / 1e6 if million_tokens is None else million_tokens,
        length=length,
        rows=rows,
        mfu=mfu,
        bf16_tflops=sheet.bf16 / 1e12,
        float32_tflops=sheet.float32 / 1e12 if float32_tflops is None else float32_tflops,
        weight_bytes=1.0 if weights is Weights.FP8 else 2.0,
        disk_rate=disk_rate,
        dense_share=dense_share,
    )
    found = plan(shape, chosen, assumed)
    out.print(f"{TITLE}: {shape.name}, {chosen.summary()}", highlight=False)
    out.print(", ".join(f"{name} {value:g}" for name, value in vars(assumed).items()))
    table = Table(box=SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for heading, lines in found.sections.items():
        table.add_row(heading, style="bold")
        for line in lines:
            table.add_row(line.formula.meaning, line.shown, line.formula.text)
    out.print(table)
    for sentence in (*found.verdicts(assumed), LEFT_OUT):
        out.print(sentence, highlight=False)


@app.command("convert")
def convert_command(
    model: Annotated[Path, typer.Option(help="The folder of a dense MLA checkpoint.")],
    output: OutputOption,
    topk: Annotated[int, typer.Option(help="How many keys a query will select.")] = 2048,
    heads: Annotated[int, typer.Option(help="How many heads an indexer has.")] = 32,
    to: Annotated[
        str | None,
        typer.Option(help="Make this model type instead: deepseek_v32 or glm_moe_dsa."),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Stage 0: add untrained indexers to a dense MLA checkpoint."""
    from sglang_indexcache.heal.convert import convert

    convert(model, output, index_topk=topk, index_n_heads=heads, to=to, seed=seed)
    typer.echo(f"wrote {output}; train its indexers with a warm-up stage")


@app.command("evaluate")
def evaluate_command(
    model: ModelOption,
    pattern: PatternOption = "full",
    context: ContextOption = "512",
    rows: RowsOption = 32,
    topk: Annotated[
        int | None,
        typer.Option(help="Select this many keys, to starve it; index_topk if not given."),
    ] = None,
    dense: Annotated[bool, typer.Option(help="Attend to everything instead.")] = False,
) -> None:
    """Held-out text loss and retrieval accuracy, as one JSON object."""
    from sglang_indexcache.heal.scores import evaluate_checkpoint
    from sglang_indexcache.support.lengths import parse_length

    found = evaluate_checkpoint(model, pattern, parse_length(context), rows, topk, dense)
    typer.echo(json.dumps(found, indent=2))


@app.command("data")
def data_command(
    model: ModelOption,
    output: OutputOption,
    context: ContextOption = "512",
    rows: RowsOption = 32,
    seed: SeedOption = 0,
) -> None:
    """Held-out documents of the training tasks as JSONL, for `indexcache search run --data`."""
    from sglang_indexcache.heal.evaluate import write_documents
    from sglang_indexcache.support.lengths import parse_length

    path, counts = write_documents(model, output, parse_length(context), rows, seed)
    typer.echo(f"wrote {path}: " + ", ".join(f"{n} {task}" for task, n in counts.items()))
