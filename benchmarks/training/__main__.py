"""Train by a recipe, or go on where an interrupted run stopped.

python -m benchmarks.training tiny-dsa --output runs/tiny
python -m benchmarks.training RECIPE.yaml --output runs/half --pattern uniform:1/2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.training.recipe import load_recipe
from benchmarks.training.trainer import Trainer


def main(argv: list[str] | None = None) -> None:
    """Run a recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", help="a YAML file, or the name of one in recipes/")
    parser.add_argument("--output", type=Path, required=True, help="the folder of the run")
    parser.add_argument("--pattern", help="in place of the recipe's")
    parser.add_argument("--stages", type=int, help="stop after so many of the recipe's stages")
    arguments = parser.parse_args(argv)
    recipe = load_recipe(
        arguments.recipe, {} if arguments.pattern is None else {"pattern": arguments.pattern}
    )
    stages = recipe.stages[: arguments.stages]
    Trainer(recipe.model_copy(update={"stages": stages}), arguments.output).run()


if __name__ == "__main__":
    main()
