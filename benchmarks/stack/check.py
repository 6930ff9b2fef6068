"""Time the layer stack with every set of kernels on this machine's card, into one JSON.

    benchmarks/device_check.sh --stack [--dry] [--out FILE] [--seconds 450] [--model 30b]
        [--kv bf16] [--layers 4]

The paper's shape and contexts, prefill and decode (one request, and a full KV cache), all F against
1/2 and 1/4, with the engine's kernels (where their packages are installed) and ours. Each set runs
in a process of its own with a share of the time; the JSON is written after every set, with whatever
was measured. ``--dry`` goes through the same steps on a CPU with the reference and tiny sizes; its
times mean nothing.
"""

import argparse
import sys

from benchmarks.children import ROOT, Clock, run
from benchmarks.kernels.device_check import build, facts, options_of
from benchmarks.stack.tables import check_grids
from benchmarks.stack.worker import CACHE_TOKENS, LENGTHS, TINY_CACHE_TOKENS, TINY_LENGTHS
from sglang_indexcache.bench.layer_stack import LayerStackResult, StackCheck
from sglang_indexcache.bench.results import save
from sglang_indexcache.support.lengths import format_length

RESULT = ROOT / "benchmarks" / "results" / "layer_stack" / "gpu.json"
KERNELS = ("cuda", "engine", "triton")
"""What a card runs, the most wanted first."""
DRY_KERNELS = ("reference", "engine")


def measure(
    kernels: str, options: list[str], seconds: float
) -> tuple[LayerStackResult | None, str]:
    """One set of kernels in a process of its own.

    Returns:
        What it had measured when it ended, and why it ended early; empty if it did not.
    """
    command = [sys.executable, "-m", "benchmarks.stack.worker", "--kernels", kernels, *options]
    done = run(command, seconds)
    results = [line["result"] for line in done.lines if "result" in line]
    said = [line["problem"] for line in done.lines if "problem" in line]
    problem = ""
    if done.problem is not None:
        problem = said[-1] if said else f"{done.problem}: {done.output[-600:]}"
    elif not results:
        problem = "it measured nothing"
    return (LayerStackResult.model_validate(results[-1]) if results else None), problem


def not_measured(result: LayerStackResult, lengths: tuple[int, ...], cache: int) -> list[str]:
    """What is missing of a set's rows, in words."""
    wanted = [("prefill", length, 1) for length in lengths]
    wanted += [("decode", n, count) for n in lengths for count in sorted({1, cache // n})]
    found = {(row.phase, row.length, row.requests) for row in result.rows}
    return [
        f"{result.kernels}: {phase} {format_length(length)} x {count}"
        for phase, length, count in wanted
        if (phase, length, count) not in found
    ]


def main() -> int:
    """Run every set; 0 if one of ours was measured to the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="30b")
    parser.add_argument("--kv", default="bf16", help="bf16 or fp8")
    parser.add_argument("--layers", type=int, default=4, help="to run, of the model's")
    options = options_of(parser, RESULT)
    if options is None:
        return 2
    clock = Clock(options.seconds)
    machine = facts()
    problems: dict[str, str] = {}
    if not options.dry:
        built = build(clock)
        problems = {f"build {f}": str(b["problem"]) for f, b in built.items() if b.get("problem")}
    flags = ["--model", options.model, "--kv", options.kv, "--layers", str(options.layers)]
    lengths, cache = (TINY_LENGTHS, TINY_CACHE_TOKENS) if options.dry else (LENGTHS, CACHE_TOKENS)
    results: list[LayerStackResult] = []
    missing: list[str] = []
    names = DRY_KERNELS if options.dry else KERNELS
    for number, name in enumerate(names):
        share = clock.left() / (len(names) - number)
        result, problem = measure(name, flags + ["--tiny"] * options.dry, share)
        if problem:
            problems[name] = problem
        if result is not None:
            results.append(result)
            missing += not_measured(result, lengths, cache)
        check = StackCheck(
            dry=options.dry,
            machine=machine,
            results=tuple(results),
            problems=problems,
            not_measured=tuple(missing),
        )
        save(check, options.out)
    for grid in check_grids(check):
        print(grid.to_markdown())
    for name, problem in problems.items():
        print(f"{name}: {problem}")
    print(*(f"not measured: {what}" for what in missing), sep="\n")
    print(f"wrote {options.out}")
    whole = {result.kernels for result in results} - {line.partition(":")[0] for line in missing}
    return 0 if whole & {"cuda", "triton", "reference"} else 1


if __name__ == "__main__":
    sys.exit(main())
