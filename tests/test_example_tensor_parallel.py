"""Two processes that split a model's heads compute the loss of one (``examples/``)."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

EXAMPLES = Path(__file__).parent.parent / "examples"
STEPS, MICRO_BATCHES, LENGTH = 3, 2, 24


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(mesh: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses and weights of some steps, in float64; on the mesh if there is one."""
    module = example("tensor_parallel_loss")
    torch.manual_seed(0)
    model = module.Model().double()
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() > 1):
            matrix.mul_(3)  # so that heads attend to different keys
    batches = torch.randint(module.VOCABULARY, (STEPS, MICRO_BATCHES, 2, LENGTH))
    if mesh is not None:
        module.split(model, mesh)
        assert (
            model.layers[1].attention.q_b.weight.to_local().shape[0]
            == model.layers[1].attention.q_b.out_features // 2
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = torch.tensor(
        [module.train_step(model, optimizer, list(step)) for step in batches], dtype=torch.float64
    )
    parameters = {
        n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()
    }
    return losses, {name: tensor.detach().clone() for name, tensor in parameters.items()}


def one_of_two(rank: int, port: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    outcome = trained(init_device_mesh("cpu", (2,)))
    torch.save(outcome, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_with_split_heads_train_as_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(one_of_two, args=(port, str(tmp_path)), nprocs=2)
    losses, weights = trained(None)
    for rank in (0, 1):
        theirs, parts = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(theirs, losses, rtol=1e-11, atol=0)
        assert parts.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(parts[name], tensor, rtol=1e-11, atol=1e-13)
