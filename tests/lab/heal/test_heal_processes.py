"""``heal`` in processes of its own, killed at any moment."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sglang_indexcache.lab.heal.heal import HealOptions, heal
from tests.kills import PROCESSES
from tests.lab.heal.checkpoints import checkpoint
from tests.lab.heal.test_heal import options

KILLS = int(os.environ.get("HEAL_KILLS", "3"))


def work(settings: HealOptions) -> None:
    torch.set_num_threads(1)
    heal(settings, Console(quiet=True))


def start(settings: HealOptions) -> Any:
    process = PROCESSES.Process(target=work, args=(settings,))
    process.start()
    return process


def finished(process: Any) -> None:
    process.join()
    assert process.exitcode == 0


def test_killed_at_random_moments_it_ends_the_same(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    sizes = {"dense_steps": 10, "sparse_steps": 10, "evaluate_every": 5}
    began = time.monotonic()
    finished(start(options(tmp_path, **sizes)))
    took = time.monotonic() - began
    settings = options(tmp_path, output=tmp_path / "killed", **sizes)
    for _ in range(KILLS):
        process = start(settings)
        process.join(timeout=random.uniform(0.0, took))
        process.kill()
        process.join()
    finished(start(settings))
    for name in ("indexers.safetensors", "adapter.yaml"):
        content = (tmp_path / "killed" / name).read_bytes()
        assert content == (tmp_path / "adapter" / name).read_bytes()
