"""No run of the tests draws anything fresh."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from tests.seeds import FIXED, SEED, seed_all

FRESH_WITHOUT_ARGUMENTS = {"default_rng", "RandomState", "Random", "SeedSequence", "seed"}
ALWAYS_FRESH = {"urandom", "SystemRandom", "token_bytes", "token_hex", "randbits"}


def fresh(source: str) -> list[int]:
    """Lines on which a generator is made, or seeded, from the clock or the system."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    lines = []
    for call in calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        name = call.func.id if isinstance(call.func, ast.Name) else name
        bare = not call.args and not call.keywords
        # torch.Generator() starts from a constant, until it is told to seed itself.
        if name in ALWAYS_FRESH or (bare and name in FRESH_WITHOUT_ARGUMENTS):
            lines.append(call.lineno)
    return lines


@pytest.mark.parametrize("line", ["np.random.default_rng()", "Random()", "os.urandom(4)"])
def test_a_fresh_draw_is_found(line: str) -> None:
    assert fresh(f"import os\nx = {line}\n") == [2]


def test_no_test_makes_a_generator_of_its_own_accord() -> None:
    places = {
        f"{path.name}:{line}"
        for path in Path(__file__).parent.rglob("*.py")
        for line in fresh(path.read_text())
    }
    assert not places


def test_every_test_starts_from_the_seed() -> None:
    ours = random.random(), np.random.random(), torch.rand(()).item()
    seed_all(SEED)
    assert ours == (random.random(), np.random.random(), torch.rand(()).item())
    assert ours[0] == random.Random(SEED).random()


def test_hypothesis_draws_the_same_in_every_run() -> None:
    assert hypothesis.settings().derandomize == (SEED == FIXED)
