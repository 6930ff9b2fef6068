"""Time every workload, ours against the anchors: lines of JSON as they are known.

    python -m benchmarks.kernels.speed --seconds 120 [--tiny] [--skip CONTENDER ...] [--from N]

Each contender is announced before it first runs. If the process then dies, its parent knows who
killed it, and goes on without it (``--skip``) where it stopped (``--from``).
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import engine_kernels as anchors
from benchmarks.kernels.timing import interleaved, summary
from benchmarks.kernels.workloads import (
    Workload,
    attention_tensors,
    indexer_tensors,
    logits_tensors,
    tiny_workloads,
    workloads,
)
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OpName

SECONDS_EACH = 1.5
LISTS_KEPT = "cuda, lists kept"
"""Ours in an S layer, which finds what its F layer derived from the same list."""
OPS: dict[str, OpName] = {
    "select_prefill": "select",
    "select_decode": "select",
    "topk": "topk",
    "mla_prefill": "sparse_mla",
    "mla_decode": "sparse_mla",
}
"""The op of ours that a family times."""
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
    op = OPS[work.family]

    def maker(implementation: dispatch.Implementation, **more: Any) -> Maker:
        def make() -> Callable[[], Any]:
            function = implementation.check(op, machine).load(op)
            return lambda: function(*arguments, **more)

        return make

    if work.family == "mla_prefill":
        others[LISTS_KEPT] = maker(dispatch.named("cuda"), kept={})
    # The reference loops over rows; on a GPU timing it would only take the others' time.
    on_gpu = machine.capability is not None
    ours = (one for one in dispatch.IMPLEMENTATIONS if not (on_gpu and one.is_reference))
    return {one.name: maker(one) for one in ours} | others


def measure(
    work: Workload, machine: dispatch.Machine, device: torch.device, skip: set[str]
) -> dict[str, Any]:
    """Times of every contender that runs, and why the others do not."""
    ready: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}
    for name, make in contenders(work, machine, device).items():
        if name in skip:
            missing[name] = "stopped the process earlier"
            continue
        say({"begin": name, "workload": str(work)})
        try:
            call = make()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            if "illegal" in str(error) or "unspecified launch failure" in str(error):
                raise SystemExit(3) from error  # the context is gone
            continue
        ready[name] = call
    times = interleaved(ready, device, SECONDS_EACH)
    return {
        "workload": str(work),
        "family": work.family,
        "times": {name: summary(each) for name, each in times.items()},
        "missing": missing,
    }


def say(line: dict[str, Any]) -> None:
    """One line for the parent."""
    print(json.dumps(line), flush=True)


def main() -> None:
    """Time until the list or the time ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tiny", action="store_true", help="shapes for a run without a GPU")
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--from", dest="first", type=int, default=0)
    options = parser.parse_args()
    started = time.perf_counter()
    machine = dispatch.Machine.here()
    device = machine.device
    torch.manual_seed(0)
    todo = list(tiny_workloads() if options.tiny else workloads())
    for number, work in enumerate(todo):
        if number < options.first:
            continue
        if time.perf_counter() - started > options.seconds:
            say({"out_of_time": [str(rest) for rest in todo[number:]]})
            return
        try:
            result = measure(work, machine, device, set(options.skip))
        except torch.OutOfMemoryError as error:
            result = {"workload": str(work), "problem": str(error).splitlines()[0]}
        say({"number": number, "result": result})
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
