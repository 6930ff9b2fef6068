"""The bound that the card sets on a workload.

Peaks are NVIDIA's data sheets' (dense, SXM). A card that is not listed gets no roofline.
"""

from benchmarks.kernels.workloads import Workload
from sglang_indexcache.bench.gpus import GPUS, Gpu

MODELS = ("H100", "H200")


def card_named(name: str) -> Gpu | None:
    """The card whose model is part of the driver's ``name``; PCIe and NVL versions are others."""
    if "PCIe" in name or "NVL" in name:
        return None
    return next((GPUS[model.lower()] for model in MODELS if model in name), None)


def bound_seconds(work: Workload, card: Gpu) -> tuple[float, str]:
    """The least time for ``work``, and what sets it."""
    peak = card.bf16 if work.family.startswith("mla") else card.fp8
    compute, memory = work.flops / peak, work.memory_bytes / card.bandwidth
    return (compute, "matrix unit") if compute > memory else (memory, "memory")
