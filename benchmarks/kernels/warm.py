"""Run the anchors with one top-k once, on small workloads: a line of JSON.

    python -m benchmarks.kernels.warm "sglang v2" [--tiny]

DeepGEMM, FlashInfer and SGLang compile at their first use and keep the result. The device check
lets them beside our own build, so that no compiler runs on the timing's account.
"""

import argparse
import json
import time

import torch

from benchmarks.engine_kernels import TOPKS
from benchmarks.kernels.speed import contenders
from benchmarks.kernels.workloads import Workload, tiny_workloads
from sglang_indexcache.kernels import dispatch

WORKLOADS = (
    Workload("topk", 8, 4096, 0),
    *(
        Workload(family, rows, 4096, heads)
        for heads in (32, 64)
        for family, rows in (("select_prefill", 256), ("select_decode", 2))
    ),
)


def warm(name: str, tiny: bool) -> dict[str, str]:
    """Run every anchor that ends in top-k ``name``; what failed, and why."""
    machine = dispatch.Machine.here()
    device = machine.device
    missing: dict[str, str] = {}
    for work in tiny_workloads() if tiny else WORKLOADS:
        for anchor, make in contenders(work, machine, device).items():
            if anchor != name and not anchor.endswith(f"+ {name}"):
                continue
            try:
                make()()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            except Exception as error:
                missing[anchor] = f"{work}: {type(error).__name__}: {error}"[:300]
    return missing


def main() -> None:
    """Warm the top-k that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topk", choices=TOPKS)
    parser.add_argument("--tiny", action="store_true", help="shapes for a run without a GPU")
    options = parser.parse_args()
    started = time.perf_counter()
    missing = warm(options.topk, options.tiny)
    seconds = time.perf_counter() - started
    print(json.dumps({"topk": options.topk, "seconds": seconds, "missing": missing}))


if __name__ == "__main__":
    main()
