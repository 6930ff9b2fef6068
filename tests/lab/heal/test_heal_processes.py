"""``heal`` in processes of its own: killed at any moment, and two that share the work."""

from __future__ import annotations

import os
import random
import socket
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from sglang_indexcache.lab.heal.heal import HealOptions, heal
from tests.kills import PROCESSES
from tests.lab.heal.checkpoints import checkpoint
from tests.lab.heal.test_heal import options, same_first_step

KILLS = int(os.environ.get("HEAL_KILLS", "3"))


def work(settings: HealOptions, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    heal(settings, Console(quiet=True))


def start(settings: HealOptions, **environment: str) -> Any:
    process = PROCESSES.Process(target=work, args=(settings, environment))
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


def test_two_processes_take_the_steps_of_one(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    finished(start(options(tmp_path)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = options(tmp_path, output=tmp_path / "two")
    processes = [
        start(
            shared,
            ACCELERATE_USE_CPU="true",
            WORLD_SIZE="2",
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    for process in processes:
        finished(process)
    same_first_step(tmp_path / "adapter", tmp_path / "two", rel=1e-4)
    single = load_file(tmp_path / "adapter" / "indexers.safetensors")
    assert load_file(tmp_path / "two" / "indexers.safetensors").keys() == single.keys()
