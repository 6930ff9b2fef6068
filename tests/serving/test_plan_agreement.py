"""Checks of a worker before it loads weights, between real processes, on real launch paths."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.lab.client.launch import free_port
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving import plan_agreement
from sglang_indexcache.serving.plan import BACKEND_NAME
from tests.kills import PROCESSES
from tests.serving.plans import plan
from tests.serving.test_plugin import BASE

PLAN = plan("FSFS")
OTHER = replace(PLAN, pattern=Pattern("FFFS"))
ABSENT = "a rank on a node without the plugin"


def rank_main(rank: int, plans: Sequence[Any], meeting: str, answers: Any) -> None:
    """Be one rank: meet the others as SGLang does, compare, tell the test what came of it."""
    plan_agreement.PATIENCE = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=len(plans))
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    try:
        if plans[rank] != ABSENT:
            plan_agreement.agree(plans[rank], rank, len(plans), store)
        answers[rank] = ""
    except SettingsError as error:
        answers[rank] = str(error)
    store.set(f"done/{rank}", "")
    if rank == 0:  # it holds the store until all are through; nobody asks it behind that
        store.wait([f"done/{rank}" for rank in range(len(plans))], timedelta(seconds=60))


def meet(plans: Sequence[Any]) -> dict[int, str]:
    """Return each rank's error, or "" where it had none."""
    with PROCESSES.Manager() as manager:
        answers = manager.dict()
        meeting = f"tcp://127.0.0.1:{free_port()}"
        workers = [
            PROCESSES.Process(target=rank_main, args=(rank, plans, meeting, answers))
            for rank in range(len(plans))
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
            assert worker.exitcode == 0
        return dict(answers)


def test_ranks_with_the_same_plan_agree_wherever_it_was_said() -> None:
    elsewhere = replace(PLAN, source="SGLANG_INDEXCACHE_PATTERN FSFS")
    assert meet([PLAN, elsewhere]) == {0: "", 1: ""}


def test_ranks_that_disagree_see_both_plans() -> None:
    for error in meet([PLAN, OTHER]).values():
        assert "rank 0 on " in error
        assert "has static mode, pattern FSFS" in error
        assert "rank 1 on " in error
        assert "has static mode, pattern FFFS" in error
        assert "same SGLANG_INDEXCACHE_* variables" in error


def test_a_rank_without_indexcache_is_noticed_and_does_not_wait() -> None:
    answers = meet([None, PLAN])
    assert answers[0] == ""
    assert "has no IndexCache" in answers[1]


def test_a_rank_without_the_plugin_is_an_error_and_no_hang() -> None:
    answers = meet([PLAN, ABSENT])
    assert "rank 1 did not say which pattern" in answers[0]


def test_modes_kernels_and_pattern_files_must_agree_too() -> None:
    for change in (
        {"mode": "live"},
        {"kernels": "cuda"},
        {"index_k_dtype": "float32"},
        {"library": "1"},
    ):
        assert replace(PLAN, **change).terms != PLAN.terms  # type: ignore[arg-type]


UNRESOLVED = """
import os, socket, sys, torch
torch.cuda.get_device_capability = lambda *_: (9, 0)  # the resolution without us asks for it
from sglang.srt.server_args import ServerArgs

def resolved(backend):
    server_args = ServerArgs(model_path=sys.argv[1], attention_backend=backend, port=1)
    server_args.resolve_once()  # as in a launch path that loads the plugins too late
    return server_args

by_name, by_variable = resolved("indexcache"), resolved(None)
import sglang.srt.managers.scheduler
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
load_plugins()
from sglang.srt.distributed import bootstrap
from sglang_indexcache.serving.plan_agreement import _asked_for
print("nothing asks:", repr(_asked_for(by_variable)))
os.environ["SGLANG_INDEXCACHE_PATTERN"] = "FSSFSFSS"
print("by variable:", _asked_for(by_variable))
publish(by_name, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
bootstrap.init_parallel_runtime(server_args=by_name, device="cpu", dist_port=port)
"""


def test_a_launch_path_that_resolved_without_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    config = {**BASE, "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.delenv("SGLANG_INDEXCACHE_PATTERN", raising=False)
    command = [sys.executable, "-c", UNRESOLVED, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "nothing asks: ''" in process.stdout, process.stderr
    assert "by variable: SGLANG_INDEXCACHE_PATTERN" in process.stdout
    assert "SettingsError: the attention backend indexcache was not acted on" in process.stderr
    assert "load_plugins() before you make ServerArgs" in process.stderr


def test_the_backend_under_our_own_name_is_always_an_error() -> None:
    """Resolution leaves "dsa": whoever comes by our name was never resolved with us."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins

    load_plugins()
    with pytest.raises(SettingsError, match="resolved before SGLang loaded its plugins"):
        ATTENTION_BACKENDS[BACKEND_NAME](SimpleNamespace(is_draft_worker=False))
