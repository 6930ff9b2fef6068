"""Check on this machine that our kernels do what their contract says.

    python -m tests.kernels.grid [--implementation cuda] [--group topk] [--sizes large]

It needs torch only. A kernel that faults takes its process's GPU context with it, and what comes
after it fails too: ``--group`` runs one group of ops alone.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.dispatch import Implementation, Machine
from tests.kernels.grid.suite import GROUPS, SIZES, CaseOutcome, run


def check(
    implementation: Implementation,
    groups: Sequence[str],
    sizes: str,
    machine: Machine,
    seed: int,
    only: str = "",
) -> Iterator[CaseOutcome]:
    """Yield every outcome; print what is wrong and how many cases of a group passed."""
    for group in groups:
        passed = failed = 0
        outcomes = run(implementation, group, sizes, machine, seed, only)  # type: ignore[arg-type]
        for outcome in outcomes:
            passed, failed = passed + (not outcome.complaints), failed + bool(outcome.complaints)
            for complaint in outcome.complaints:
                print(f"  {outcome.case}: {complaint}", flush=True)
            yield outcome
        print(f"{implementation.name}, {group}: {passed} passed, {failed} failed", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the grid.

    Raises:
        KernelError: a case failed, or nothing of what was asked for can run here.
    """
    machine = Machine.here()
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.grid", description=__doc__)
    parser.add_argument("--implementation", choices=dispatch.NAMES, help="default: all")
    parser.add_argument("--group", choices=GROUPS, help="ops to check; default: all")
    parser.add_argument(
        "--sizes",
        choices=SIZES,
        default="small" if machine.capability is None else "large",
        help="cases: wide adds many short rows, large up to a million tokens; default: large on a "
        "GPU, small without one",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default="", help="name of the only case to check")
    options = parser.parse_args(arguments)
    names = (options.implementation,) if options.implementation else dispatch.NAMES
    groups = (options.group,) if options.group else tuple(GROUPS)
    outcomes: list[CaseOutcome] = []
    for name in names:
        implementation = dispatch.named(name)
        if obstacle := implementation.obstacle(machine):
            print(f"{name}: not run: {obstacle}")
        else:
            outcomes += check(
                implementation, groups, options.sizes, machine, options.seed, options.case
            )
    failed = sum(bool(outcome.complaints) for outcome in outcomes)
    if failed:
        raise KernelError(f"{failed} cases failed, {len(outcomes) - failed} passed")
    if not outcomes:
        raise KernelError("nothing was checked: none of what was asked for can run here")
    print(f"all {len(outcomes)} cases passed")


if __name__ == "__main__":
    try:
        main()
    except KernelError as error:
        sys.exit(f"error: {error}")
