"""The code in docs/heal.md runs as printed.

Torchtitan is not a dependency. Where it is not installed, a stand-in takes its place: what 0.3.0
publishes of ``torchtitan.components.loss`` and no more.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from sglang_indexcache.heal.losses import multi_layer_loss

PAGE = Path(__file__).parent.parent.parent / "docs" / "heal.md"


def blocks() -> list[str]:
    """The page's Python code."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, str(PAGE), "exec"), names)
    return names


class StandIn:
    """``CrossEntropyLoss`` of torchtitan 0.3.0: summed, and divided by all ranks' tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        global_vocab_size: int | None = None

        def build(self) -> Any:
            return self._owner(self)

    def __init_subclass__(cls) -> None:
        cls.Config._owner = cls

    def __init__(self, config: Any) -> None:
        self.global_vocab_size = config.global_vocab_size

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = cross_entropy(pred.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss if global_valid_tokens is None else loss / global_valid_tokens, {}


@pytest.fixture
def _torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("torchtitan") is None:
        for name in ("torchtitan", "torchtitan.components", "torchtitan.components.loss"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["torchtitan.components.loss"].CrossEntropyLoss = StandIn  # type: ignore[attr-defined]


def test_a_plain_loop_trains_the_indexer() -> None:
    torch.manual_seed(0)
    found = run(blocks()[0], {})
    for name in ("wq", "wk", "w"):
        assert found[name].weight.grad.abs().sum() > 0
    assert found["losses"][-1] < 0.9 * found["losses"][0]


@pytest.mark.usefixtures("_torchtitan")
def test_torchtitan_adds_the_two_losses() -> None:
    assert len(blocks()) == 2
    torch.manual_seed(0)
    found = run(blocks()[0], {})
    found["__name__"] = __name__  # dataclasses look their module up
    found = run(blocks()[1], found)
    pred = torch.randn(2, 128, 50, requires_grad=True)
    labels = torch.randint(0, 50, (2, 128))
    labels[:, ::3] = -100
    valid = (labels != -100).sum()
    found["wq"].zero_grad()
    index = found["IndexInputs"](
        found["wq"](found["hidden"]).view(2, 128, 4, 16),
        found["wk"](found["hidden"]).detach(),
        found["w"](found["hidden"]).detach(),
    )
    shared = (found["layout"], found["selected"])
    for layer, attention in enumerate(found["attentions"]):
        found["distil"](layer, index, attention, *shared, served=2)
    total, metrics = found["DistilledLoss"].Config().build()(pred, labels, valid)
    text = cross_entropy(pred.flatten(0, 1), labels.flatten())
    distilled = multi_layer_loss(index, found["attentions"], *shared) / valid
    torch.testing.assert_close(total, text + distilled)
    torch.testing.assert_close(metrics["distillation"], distilled.detach())
    (wanted,) = torch.autograd.grad(distilled, found["wq"].weight, retain_graph=True)
    (logits,) = torch.autograd.grad(text, pred, retain_graph=True)
    total.backward()
    torch.testing.assert_close(found["wq"].weight.grad, wanted)
    torch.testing.assert_close(pred.grad, logits)
