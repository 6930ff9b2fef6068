"""Check one implementation of one group of ops on the grid: a line of JSON a case.

    python -m sglang_indexcache.kernels.grid --implementation cuda --group topk [--sizes large]

A process of its own, because a kernel that faults takes the process's GPU context with it. It needs
torch only; a person has ``indexcache kernels check``.
"""

import argparse
import dataclasses
import json

from sglang_indexcache.kernels.dispatch import NAMES, Machine, named
from sglang_indexcache.kernels.grid.runner import GROUPS, SIZES, Runner


def main() -> None:
    """Check, and print as each case ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--implementation", choices=NAMES, required=True)
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machine = Machine.here()
    implementation = named(options.implementation)
    runner = Runner(implementation, machine, machine.device, options.sizes, options.seed)
    for outcome in runner.run(options.group):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
