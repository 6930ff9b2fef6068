"""FSDP2 on two gloo processes: sharded layers give the gradients of the whole model.

``accelerate`` offers FSDP2 on accelerators only, so the model is sharded with torch's own call and
its defaults (a layer's weights are freed after its forward), which is what accelerate's
configuration makes it call.
"""

from __future__ import annotations

import itertools
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_indexcache.heal.model import DistilledModel, Losses
from sglang_indexcache.heal.sharing import Stage
from sglang_indexcache.pattern import Pattern
from tests.heal.models import FAMILIES, make, one_document, tokens

PROCESSES = 2
PATTERN = Pattern("FSFS")
CASES = list(itertools.product(FAMILIES, Stage, [False, True]))
"""Family, stage, and whether layers are computed again in the backward pass."""

Case = tuple[str, Stage, bool]
Gradients = dict[str, torch.Tensor | None]


def prepared(case: Case, state: dict[str, torch.Tensor]) -> DistilledModel:
    """The model of a case, with what its stage does not train frozen."""
    family, stage, again = case
    inner = make(family)
    inner.load_state_dict(state)
    model = DistilledModel(inner, PATTERN, block=7).train()
    if again:
        inner.gradient_checkpointing_enable({"use_reentrant": False})
    model.prepare_stage(stage)
    return model


def loss(losses: Losses, stage: Stage) -> torch.Tensor:
    """What the stage trains with."""
    parts = [] if stage is Stage.WARMUP else [losses.lm]
    parts += [] if stage is Stage.DENSE else [losses.index.sum()]
    return torch.stack(parts).sum()


def work(rank: int, port: int, folder: str) -> None:
    """Run this process's rows through the sharded models and save the gathered gradients."""
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("error")  # torch only warns of outputs that would lose their hooks
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    given = torch.load(Path(folder) / "given.pt")
    found: dict[Case, Gradients] = {}
    for case in CASES:
        model = prepared(case, given[case[0]])
        for layer in model.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for _ in range(2):  # a second step finds what the first has left behind
            model.zero_grad()
            losses = model(**one_document(given["ids"][rank : rank + 1]), stage=case[1])
            (loss(losses, case[1]) * PROCESSES).backward()
        found[case] = {
            name: None if p.grad is None else p.grad.full_tensor()  # type: ignore[attr-defined]
            for name, p in model.named_parameters()
        }
    if rank == 0:
        torch.save(found, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights and tokens, and the gradients of the sharded models."""
    folder = tmp_path_factory.mktemp("fsdp")
    weights = {family: make(family).state_dict() for family in FAMILIES}
    torch.save({**weights, "ids": tokens(PROCESSES, 23)}, folder / "given.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(folder)), nprocs=PROCESSES)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1].value}-{case[2]}")
def test_sharded_gradients_equal_those_of_the_whole_model(given: Path, case: Case) -> None:
    start = torch.load(given / "given.pt")
    model = prepared(case, start[case[0]])
    loss(model(**one_document(start["ids"]), stage=case[1]), case[1]).backward()
    with torch.serialization.safe_globals([Stage]):
        sharded: Gradients = torch.load(given / "gradients.pt")[case]
    trained = 0
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (sharded[name] is None), name
        if parameter.grad is not None:
            trained += 1
            assert parameter.grad.dtype == torch.float64
            torch.testing.assert_close(sharded[name], parameter.grad, rtol=1e-10, atol=1e-10)
    assert trained > 0
