"""FSDP2 on two gloo processes: sharded layers give the gradients of the whole model.

``accelerate`` offers FSDP2 on accelerators only, so the model is sharded with torch's own call,
which is what accelerate's configuration makes it call.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.training.model import DistilledModel
from sglang_indexcache.training.sharing import Stage
from tests.training.models import make, one_document, tokens

PROCESSES = 2


def work(rank: int, port: int, folder: str) -> None:
    """Run this process's rows through the sharded model and save the gathered gradients."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=PROCESSES)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    given = torch.load(Path(folder) / "given.pt")
    inner = make("glm-5")
    inner.load_state_dict(given["state"])
    model = DistilledModel(inner, Pattern("FSFS"), block=7)
    for layer in inner.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = model(**one_document(given["ids"][rank : rank + 1]), stage=Stage.SPARSE)
    ((losses.lm + losses.index.sum()) * PROCESSES).backward()
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore
    if rank == 0:
        torch.save(gradients, Path(folder) / "gradients.pt")
    dist.destroy_process_group()


def test_sharded_gradients_equal_those_of_the_whole_model(tmp_path: Path) -> None:
    inner, ids = make("glm-5"), tokens(PROCESSES, 23)
    torch.save({"state": inner.state_dict(), "ids": ids}, tmp_path / "given.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (port, str(tmp_path)), nprocs=PROCESSES)
    model = DistilledModel(inner, Pattern("FSFS"), block=7)
    losses = model(**one_document(ids), stage=Stage.SPARSE)
    (losses.lm + losses.index.sum()).backward()
    sharded = torch.load(tmp_path / "gradients.pt")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(sharded[name], parameter.grad, rtol=1e-6, atol=1e-6)
