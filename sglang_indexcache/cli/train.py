"""``indexcache train``: thin, and free of torch until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_indexcache.cli.common import (
    ContextOption,
    ModelOption,
    OutputOption,
    PatternOption,
    SeedOption,
    group,
)

app = group("Train a DSA model for index sharing (paper: training-aware IndexCache).")

RowsOption = Annotated[int, typer.Option(help="How many documents there are of each task.")]


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
    from sglang_indexcache.training.recipe import load_recipe
    from sglang_indexcache.training.trainer import Trainer

    given = {
        "pattern": pattern,
        "seed": seed,
        "model": None if model is None else {"checkpoint": model},
    }
    overrides: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    loaded = load_recipe(recipe, overrides)
    Trainer(loaded if stages is None else loaded.first(stages), output).run()


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
    from sglang_indexcache.training.convert import convert

    convert(model, output, index_topk=topk, index_n_heads=heads, to=to, seed=seed)
    typer.echo(f"wrote {output}; train its indexers with a warm-up stage")


@app.command("merge")
def merge_command(
    adapter: Annotated[Path, typer.Argument(help="The folder of an adapter.")],
    model: Annotated[Path, typer.Option(help="The checkpoint that it was trained on.")],
    output: OutputOption,
) -> None:
    """Write a standard checkpoint: the model with the adapter's indexers and pattern.

    Every tensor but the indexers stays as it is, bit for bit. A file without indexers becomes a
    hard link to the model's where the disk allows it, so do not edit it in place.
    """
    from sglang_indexcache.training.merge import merge

    merge(adapter, model, output, typer.echo)
    typer.echo(f"wrote {output}")


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
    from sglang_indexcache.support.lengths import parse_length
    from sglang_indexcache.training.scores import evaluate_checkpoint

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
    from sglang_indexcache.support.lengths import parse_length
    from sglang_indexcache.training.evaluate import write_documents

    path, counts = write_documents(model, output, parse_length(context), rows, seed)
    typer.echo(f"wrote {path}: " + ", ".join(f"{n} {task}" for task, n in counts.items()))
