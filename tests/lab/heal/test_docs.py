"""The code in docs/heal.md runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from sglang_indexcache import AttentionInputs, IndexInputs, Layout, Pattern, distillation_loss
from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.lab.heal.forward_state import Sharing, Stage
from sglang_indexcache.lab.heal.model import install, is_indexer

PAGE = Path(__file__).parents[3] / "docs" / "heal.md"


B, N, H, W = 1, 2, 3, 4


def blocks() -> list[str]:
    """Return the page's Python code."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_a_plain_loop_trains_the_indexer() -> None:
    torch.manual_seed(0)
    scope = run(blocks()[0], {})
    for name in ("wq", "wk", "w"):
        assert scope[name].weight.grad.abs().sum() > 0
    assert scope["losses"][-1] < 0.9 * scope["losses"][0]


def test_cu_seqlens_make_the_layout_of_their_documents() -> None:
    """One packed row has the loss of its documents, each alone."""
    torch.manual_seed(0)
    lengths = [5, 1, 9]
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    layout = run(blocks()[1], {"torch": torch, "Layout": Layout, "cu_seqlens": cu_seqlens})[
        "layout"
    ]
    total = sum(lengths)
    shapes = ((B, total, H, W), (B, total, W), (B, total, H))
    index = IndexInputs(*(torch.randn(s, dtype=torch.float64) for s in shapes))
    queries, keys = (torch.randn(B, N, total, W, dtype=torch.float64) for _ in range(2))
    packed = distillation_loss(index, [AttentionInputs(queries, keys, 0.5)], layout)
    alone = torch.zeros((), dtype=torch.float64)
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        part = slice(start, start + length)
        of_part = IndexInputs(*(x[:, part] for x in vars(index).values()))
        target = AttentionInputs(queries[:, :, part], keys[:, :, part], 0.5)
        documents = torch.zeros(B, length, dtype=torch.int64)
        alone += distillation_loss(of_part, [target], Layout(documents))
    torch.testing.assert_close(packed, alone)


def test_a_real_models_indexers_get_gradients_and_nothing_else_does() -> None:
    """Under transformers' own ``no_grad`` nothing would."""
    pattern = Pattern("FSSS" * 3)
    model = AutoModelForCausalLM.from_pretrained(shipped_checkpoint(), dtype=torch.float32)
    names = {"Sharing": Sharing, "Stage": Stage, "Layout": Layout, "install": install}
    names |= {"is_indexer": is_indexer, "model": model, "pattern": pattern}
    compute_loss = run(blocks()[2], names)["compute_loss"]
    ids = torch.randint(0, 500, (2, 150))
    documents = torch.zeros_like(ids)
    documents[0, 100:] = -1
    compute_loss(ids, documents).backward()
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {n.split(".")[2] for n in with_gradient} == {"0", "4", "8"}
    assert all(map(is_indexer, with_gradient))
