"""The bound that the card sets on a workload.

Peaks are NVIDIA's data sheets' (dense, SXM). A card that is not listed gets no roofline.
"""

from dataclasses import dataclass

from benchmarks.kernels.workloads import Workload


@dataclass(frozen=True)
class Card:
    """Peak rates: FLOP/s of FP8 and bfloat16 matrix products, bytes/s of the memory."""

    fp8: float
    bfloat16: float
    memory: float


CARDS = {
    "H100": Card(fp8=1979e12, bfloat16=989e12, memory=3.35e12),
    "H200": Card(fp8=1979e12, bfloat16=989e12, memory=4.8e12),
}


def card_named(name: str) -> Card | None:
    """The card whose model is part of the driver's ``name``; PCIe and NVL versions are others."""
    if "PCIe" in name or "NVL" in name:
        return None
    return next((card for model, card in CARDS.items() if model in name), None)


def bound_seconds(work: Workload, card: Card) -> tuple[float, str]:
    """The least time for ``work``, and what sets it."""
    peak = card.bfloat16 if work.family.startswith("mla") else card.fp8
    compute, memory = work.flops / peak, work.memory_bytes / card.memory
    return (compute, "matrix unit") if compute > memory else (memory, "memory")
