"""Check 11: the Triton form of the sparse distillation loss, beside PyTorch's (``training``).

Both get the same numbers and selections, of the widths that one layer of a released model has. What
an indexer is scored with are small whole numbers: every dot product is exact, so none lies a
rounding away from the kink of relu, where two right gradients may differ.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.card.claims import MissingError, Report, expect
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.heal import losses
from sglang_indexcache.heal.losses import AttentionInputs, IndexInputs, LossKernel
from sglang_indexcache.heal.packing import Layout


@dataclass(frozen=True)
class Case:
    """One served layer: tokens of a row, selected keys, heads and their width, of the indexer."""

    tokens: int
    selected: int
    heads: int
    width: int
    index_heads: int
    index_width: int
    dtype: torch.dtype = torch.float32


RIGHT = tuple(
    Case(4096, 2048, heads, 256, 32, 128, dtype)
    for heads in (20, 64)
    for dtype in (torch.float32, torch.bfloat16)
)
TIMED = tuple(Case(tokens, 2048, 20, 256, 32, 128, torch.bfloat16) for tokens in (8192, 32768))
TINY = (Case(70, 9, 3, 10, 2, 8), Case(70, 9, 3, 10, 2, 8, torch.bfloat16))
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the largest number of a tensor. Both sum in float32, and round gradients to the inputs'."""
REPEATS = 3

Inputs = tuple[IndexInputs, AttentionInputs, Layout, torch.Tensor]
Form = Callable[[Inputs], torch.Tensor]


def made(case: Case, device: str) -> Inputs:
    """Inputs on ``device``, drawn on the CPU; two documents, padding, rows that select nothing."""
    draw = torch.Generator().manual_seed(0)
    t, h, d = case.tokens, case.index_heads, case.index_width

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=draw).to(device, case.dtype).requires_grad_()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(device, case.dtype)

    weights = (0.2 * normal(1, t, h) / (d * h**0.5)).requires_grad_()
    index = IndexInputs(whole(1, t, h, d), whole(1, t, d), weights)
    heads = (1, case.heads, t, case.width)
    attention = AttentionInputs(normal(*heads), normal(*heads), case.width**-0.5)
    documents = torch.zeros(1, t, dtype=torch.int64)
    documents[0, t // 3 :], documents[0, t - t // 20 :] = 1, -1
    layout = Layout(documents.to(device))
    selected = losses.select_top_k(index, layout, case.selected)
    selected[0, t // 2 : t // 2 + 3] = -1
    return index, attention, layout, selected


def by_torch(inputs: Inputs) -> torch.Tensor:
    """PyTorch's form, as training takes it."""
    index, attention, layout, selected = inputs
    return losses.distillation_loss(index, [attention], layout, selected)


def by_triton(inputs: Inputs) -> torch.Tensor:
    """Triton's form."""
    index, attention, layout, selected = inputs
    return losses.distillation_loss(index, [attention], layout, selected, triton=True)


def stand_in(inputs: Inputs) -> torch.Tensor:
    """For Triton's form on a CPU: PyTorch's, that which it does not take by itself there."""
    with patch.object(losses, "GATHERED_FROM", 0):
        return by_torch(inputs)


def with_gradients(form: Form, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The loss, and the gradients of what the indexer scores with."""
    loss, parts = form(inputs), vars(inputs[0])
    gradients = torch.autograd.grad(loss, [*parts.values()])
    return {"loss": loss.detach(), **dict(zip(parts, gradients, strict=True))}


def difference(case: Case, form: Form, device: str) -> dict[str, float]:
    """Largest difference from PyTorch's form, of value and gradients, of their largest number."""
    inputs = made(case, device)
    ours, theirs = (with_gradients(each, inputs) for each in (form, by_torch))
    found = {}
    for name, tensor in theirs.items():
        expect(ours[name].isfinite().all(), f"{case}: the {name} are not finite")
        largest = tensor.float().abs().max()
        expect(largest > 0, f"{case}: the {name} are all zero, so nothing could be seen")
        found[name] = float((ours[name].float() - tensor.float()).abs().max() / largest)
    return found


def timed(case: Case, forms: dict[str, Form], device: str) -> dict[str, Any]:
    """Milliseconds and peak MiB of value and gradient, in turns (A B A B), and the values."""
    inputs = made(case, device)
    taken: dict[str, list[float]] = {name: [] for name in forms}
    peak, value = dict.fromkeys(forms, 0.0), dict.fromkeys(forms, 0.0)
    for turn in range(REPEATS + 1):  # the first compiles
        for name, form in forms.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            started = time.perf_counter()
            loss = with_gradients(form, inputs)["loss"]
            if device == "cuda":
                torch.cuda.synchronize()
                peak[name] = torch.cuda.max_memory_allocated() / 2**20
            value[name] = float(loss)
            if turn:
                taken[name].append(1e3 * (time.perf_counter() - started))
    middle = {name: statistics.median(times) for name, times in taken.items()}
    return {
        "ms": middle,
        "times torch": middle["torch"] / middle["triton"],
        "peak MiB": peak if device == "cuda" else None,
        "value": value,
    }


def run(report: Report) -> None:
    """Whether it is right, then how long it takes."""
    form = stand_in if report.dry else by_triton
    right, speed = report.claims
    with report.claim(right) as evidence:
        if not report.dry:
            try:
                LossKernel.TRITON.check(torch.device(report.device))
            except TrainingError as error:
                raise MissingError(str(error)) from error
        for case in TINY if report.dry else RIGHT:
            evidence[str(case)] = found = difference(case, form, report.device)
            wrong = [name for name, by in found.items() if by > TOLERANCE[case.dtype]]
            expect(not wrong, f"{case}: {', '.join(wrong)} differ from PyTorch's form: {found}")
    with report.claim(speed) as evidence:
        for case in TINY[:1] if report.dry else TIMED:
            times = timed(case, {"torch": by_torch, "triton": form}, report.device)
            evidence[str(case)] = times
            ours, theirs = times["value"]["triton"], times["value"]["torch"]
            same = abs(ours - theirs) <= TOLERANCE[case.dtype] * abs(theirs)
            expect(same, f"{case}: what was timed gives {ours}, PyTorch's form {theirs}")
