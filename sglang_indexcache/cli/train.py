"""``indexcache train``: thin, and free of torch until a command runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sglang_indexcache.cli.common import group

app = group("Train a DSA model for index sharing (paper: training-aware IndexCache).")


@app.command("run")
def run(
    recipe: Annotated[str, typer.Argument(help="A YAML file, or a shipped recipe's name.")],
    folder: Annotated[Path, typer.Argument(help="Of the run: states, log, checkpoint.")],
    pattern: Annotated[
        str | None, typer.Option(help="Replace the recipe's pattern: F/S, full or uniform:1/r.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Replace the recipe's seed.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Start from this DSA checkpoint instead.")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Stop after so many of the recipe's stages.")
    ] = None,
) -> None:
    """Train by a recipe, or go on where an interrupted run stopped.

    Several processes: accelerate launch --num_processes N -m sglang_indexcache.cli train run ...
    """
    from sglang_indexcache.training.recipe import load_recipe
    from sglang_indexcache.training.trainer import Trainer

    overrides: dict[str, Any] = {}
    if pattern is not None:
        overrides["pattern"] = pattern
    if seed is not None:
        overrides["seed"] = seed
    if checkpoint is not None:
        overrides["model"] = {"checkpoint": checkpoint}
    loaded = load_recipe(recipe, overrides)
    Trainer(loaded if stages is None else loaded.first(stages), folder).run()


@app.command("convert")
def convert_command(
    source: Annotated[Path, typer.Argument(help="A dense MLA checkpoint.")],
    target: Annotated[Path, typer.Argument(help="The DSA checkpoint to write.")],
    topk: Annotated[int, typer.Option(help="Keys that a query will select.")] = 2048,
    heads: Annotated[int, typer.Option(help="Heads of an indexer.")] = 32,
    to: Annotated[str | None, typer.Option(help="deepseek_v32 or glm_moe_dsa.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the new indexers.")] = 0,
) -> None:
    """Stage 0: add untrained indexers to a dense MLA checkpoint."""
    from sglang_indexcache.training.convert import convert

    convert(source, target, index_topk=topk, index_n_heads=heads, to=to, seed=seed)
    typer.echo(f"wrote {target}; train its indexers with a warm-up stage")


@app.command("evaluate")
def evaluate_command(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of this trainer.")],
    pattern: Annotated[
        str | None, typer.Option(help="Serve with this pattern; the checkpoint's own if left out.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of each document.")] = 512,
    rows: Annotated[int, typer.Option(help="Documents of each task.")] = 32,
    topk: Annotated[int | None, typer.Option(help="Replace index_topk, to starve it.")] = None,
    dense: Annotated[bool, typer.Option(help="Attend to everything instead.")] = False,
) -> None:
    """Held-out text loss and retrieval accuracy, as one JSON object."""
    from sglang_indexcache.training.scores import evaluate_checkpoint

    found = evaluate_checkpoint(checkpoint, pattern, length, rows, topk, dense)
    typer.echo(json.dumps(found, indent=2))


@app.command("data")
def data_command(
    checkpoint: Annotated[Path, typer.Argument(help="Gives the tokenizer.")],
    output: Annotated[Path, typer.Argument(help="A .jsonl file to write.")],
    length: Annotated[int, typer.Option(help="Tokens of each document.")] = 511,
    rows: Annotated[int, typer.Option(help="Documents of each task.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the documents.")] = 0,
) -> None:
    """Held-out documents of the training tasks as JSONL, for `indexcache search run --data`."""
    from sglang_indexcache.training.data.documents import write_documents

    counts = write_documents(checkpoint, output, length, rows, seed)
    typer.echo(f"wrote {output}: " + ", ".join(f"{n} {task}" for task, n in counts.items()))
