"""Check one implementation of one group of ops on the shared grid: a line of JSON a case.

    python -m benchmarks.kernels.check --implementation cuda --group topk [--sizes large]

A process of its own, because a kernel that faults takes the process's GPU context with it.
"""

import argparse
import dataclasses
import json

import torch

from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.grid.runner import GROUPS, SIZES, Runner


def main() -> None:
    """Check, and print as each case ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=dispatch.ORDER, required=True)
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machine = dispatch.Machine.here()
    device = torch.device("cpu" if machine.capability is None else "cuda")
    runner = Runner(options.implementation, machine, device, options.sizes, options.seed)
    for outcome in runner.run(options.group):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
