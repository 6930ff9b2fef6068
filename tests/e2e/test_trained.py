"""A checkpoint that the trainer wrote, served unchanged."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml
from rich.console import Console

from tests.e2e.conftest import Serve, decided_prompt, logprobs
from tests.fixtures.training import RECIPES, Recipe, Trainer
from tests.oracle import Oracle

RECIPE = RECIPES / "tiny-dsa.yaml"


def test_trained_checkpoint_is_served(tmp_path: Path, serve: Serve) -> None:
    """The committed recipe's model after a step of warm-up and one of sparse training."""
    fields = yaml.safe_load(RECIPE.read_text())
    last = [stage for stage in fields["stages"] if stage["kind"] != "dense"]
    fields["stages"] = [{**stage, "steps": 1, "rows": 1} for stage in last]
    fields |= {"pattern": "uniform:1/2", "eval_rows": 1, "dtype": "float32"}
    recipe = Recipe.model_validate(fields)
    trainer = Trainer(recipe, tmp_path, Console(quiet=True))
    checkpoint = trainer.run()
    oracle = Oracle(checkpoint, torch.float32)
    ids = decided_prompt(oracle, 4 * trainer.model.sharing.topk, trainer.pattern)
    with serve(checkpoint, "--dtype", "float32") as client:
        assert client.states()[0].pattern == str(trainer.pattern)
        expected = oracle.answer(ids, trainer.pattern).logprobs
        torch.testing.assert_close(logprobs(client, ids), expected, rtol=0, atol=1e-3)
