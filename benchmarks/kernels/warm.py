"""Run an anchor that compiles at its first use once, on every kind of workload: a line of JSON.

    python -m benchmarks.kernels.warm "deep_gemm + sglang v2" [--tiny]

What it compiles stays in its own cache. The device check does this beside our own build, so that
no compiler runs on the timing's account.
"""

import argparse
import json
import time

import torch

from benchmarks.kernels.anchors import COMPILED
from benchmarks.kernels.speed import contenders
from benchmarks.kernels.workloads import Workload, tiny_workloads
from sglang_indexcache.kernels import dispatch

WORKLOADS = tuple(
    Workload(family, rows, 4096, heads)
    for heads in (32, 64)
    for family, rows in (("select_prefill", 256), ("select_decode", 2))
)


def main() -> None:
    """Run one anchor; whatever it raises is the problem that is reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("anchor", choices=COMPILED)
    parser.add_argument("--tiny", action="store_true", help="shapes for a run without a GPU")
    options = parser.parse_args()
    machine = dispatch.Machine.here()
    device = torch.device("cpu" if machine.capability is None else "cuda")
    started = time.perf_counter()
    problem = None
    for work in tiny_workloads() if options.tiny else WORKLOADS:
        if not work.family.startswith("select"):
            continue
        try:
            contenders(work, machine, device)[options.anchor]()()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            problem = f"{work}: {type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - started
    print(json.dumps({"anchor": options.anchor, "seconds": seconds, "problem": problem}))


if __name__ == "__main__":
    main()
