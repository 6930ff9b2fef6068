"""Ours beside the engine's kernels on one workload, and what may be concluded from many.

``tests/gpu/test_speed.py`` runs it on a card. The engine's kernel and ours take turns within the
same seconds (``timing.py``); the card's clocks are logged before and after.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks import engine_kernels as anchors
from benchmarks.kernels.machine import clocks
from benchmarks.kernels.timing import interleaved, summary
from benchmarks.kernels.workloads import (
    Family,
    Workload,
    attention_tensors,
    gpu_of_driver,
    indexer_tensors,
    logits_tensors,
    workloads,
)
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OpName

SECONDS_EACH = 1.5
LISTS_KEPT = "cuda, lists kept"
"""Ours in an S layer, which finds what its F layer derived from the same list."""
OPS: dict[Family, tuple[OpName, dispatch.Phase | None]] = {
    "select_prefill": ("select", "prefill"),
    "select_decode": ("select", "decode"),
    "topk": ("topk", None),
    "mla_prefill": ("sparse_mla", "prefill"),
    "mla_decode": ("sparse_mla", "decode"),
}
"""The op of ours that a family times, and where a server would run it."""
Maker = Callable[[], Callable[[], Any]]


def contenders(work: Workload, machine: dispatch.Machine, device: torch.device) -> dict[str, Maker]:
    """Makers of the calls that do ``work``, by name; ours are named by implementation."""
    others: dict[str, Maker]
    arguments: tuple[Any, ...]
    if work.family.startswith("select"):
        tensors = indexer_tensors(work, device)
        others = dict(anchors.select_anchors(work, tensors))
        arguments = tensors, work.topk
    elif work.family == "topk":
        logits, visible = logits_tensors(work, device)
        others = dict(anchors.topk_anchors(work, logits, visible))
        arguments = logits, visible, work.topk
    else:
        attention = attention_tensors(work, device)
        others = dict(anchors.mla_anchors(work, attention))
        arguments = attention.q, attention.cache, attention.slots, attention.scale
    op, _ = OPS[work.family]

    def maker(implementation: dispatch.Implementation, **more: Any) -> Maker:
        def make() -> Callable[[], Any]:
            function = implementation.check(machine).load(op)
            return lambda: function(*arguments, **more)

        return make

    if work.family == "mla_prefill":
        others[LISTS_KEPT] = maker(dispatch.named("cuda"), kept={})
    ours = {one.name: maker(one) for one in dispatch.IMPLEMENTATIONS}
    if machine.capability is not None:
        # It loops over rows; on a GPU timing it would only take the others' time.
        del ours["reference"]
    return ours | others


def measure(work: Workload, machine: dispatch.Machine) -> dict[str, Any]:
    """Times of every contender that runs, why the others do not, and the least that is possible.

    Returns:
        ``times``: name -> median, least and most microseconds, and, where the card's data sheet is
        known, the share of its bound; ``missing``: name -> reason; ``clocks``: before and after.
    """
    device = machine.device
    ready: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}
    for name, make in contenders(work, machine, device).items():
        try:
            call = make()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # the context is gone
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            continue
        ready[name] = call
    before = clocks()
    times = {name: summary(each) for name, each in interleaved(ready, device, SECONDS_EACH).items()}
    card = gpu_of_driver(machine.name)
    if card is not None:
        seconds, by = work.bound(card)
        for one in times.values():
            one["of_bound"] = seconds * 1e6 / one["median_us"]
        missing["bound"] = f"{seconds * 1e6:.1f} us by {by}"
    return {"times": times, "missing": missing, "clocks": [before, clocks()]}


def beats(work: Workload, times: dict[str, dict[str, float]], ours: str) -> bool | None:
    """Whether ours took less time than all that the engine can run; None without its default.

    Args:
        times: of :func:`measure`.
    """
    default, rivals = anchors.engine_default(work), anchors.engine_anchors(work)
    if not {ours, default} <= set(times):
        return None
    return times[ours]["median_us"] < min(times[a]["median_us"] for a in rivals if a in times)


def conclude(timed: Mapping[str, dict[str, Any]], card: str) -> list[dict[str, Any]]:
    """Return the operations, phases and shapes in which our CUDA kernels may become a default.

    There they won wherever they were to be timed: at every length and number of rows, and over
    either cache.

    Args:
        timed: what :func:`measure` found, by the workload's name; one that is missing is not won.
        card: as its driver calls it.
    """
    won: dict[tuple[Family, int, int], bool] = {}
    for work in workloads():
        shape, found = (work.family, work.heads, work.topk), timed.get(str(work))
        is_faster = found is not None and beats(work, found["times"], "cuda") is True
        won[shape] = won.get(shape, True) and is_faster
    return [
        {
            "op": OPS[family][0],
            "phase": OPS[family][1],
            "card": card,
            "heads": heads,
            "topk": topk,
            "implementation": "cuda",
        }
        for (family, heads, topk), everywhere in won.items()
        if everywhere and OPS[family][1] is not None
    ]
