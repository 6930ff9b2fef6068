"""Build, check, sanitise and time the kernels on this machine's card: the steps of such a check.

``benchmarks.card`` runs them. Everything that can fault or hang runs in a process of its own with a
time limit, and every step returns what it found.
"""

import argparse
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.children import Clock, Finished, module, run
from benchmarks.engine_kernels import TOPKS
from benchmarks.kernels.speed import OPS
from benchmarks.kernels.workloads import tiny_workloads, workloads
from sglang_indexcache import __version__
from sglang_indexcache.bench.roofline import gpu_of_driver
from sglang_indexcache.kernels.contract import OPS as ALL_OPS
from sglang_indexcache.kernels.dispatch import IMPLEMENTATIONS
from sglang_indexcache.kernels.grid.runner import GROUPS
from sglang_indexcache.study.provenance import commit, package_version, said

BUILD_SECONDS, CHECK_SECONDS, SANITIZER_SECONDS = 150, 120, 100
MAX_RESTARTS = 6
GRID = "sglang_indexcache.kernels.grid.runner"
SANITIZER_TOOLS = ("memcheck", "racecheck", "synccheck")
ENGINE_ANCHORS = (
    *(f"deep_gemm + {name}" for name in TOPKS),
    "sgl_kernel.fast_topk_v2",
    "sglang v2",
    "flash_mla",
)
"""What the engine can run; torch.topk and FlashInfer on given logits are not it."""
ENGINE_DEFAULTS = {
    "select_prefill": "deep_gemm + sglang v2",
    "select_decode": "deep_gemm + sglang v2",
    "topk": "sglang v2",
    "mla_prefill": "flash_mla",
    "mla_decode": "flash_mla",
}
"""What it runs unless told otherwise: who has not raced it is not faster than the engine."""
PACKAGES = {
    "triton": ("triton",),
    "tvm_ffi": ("apache-tvm-ffi",),
    "deep_gemm": ("deep_gemm", "sgl-deep-gemm"),
    "flash_mla": ("flash_mla", "sgl-flash-mla"),
    "flashinfer": ("flashinfer-python",),
    "sgl_kernel": ("sglang-kernel",),
    "sglang": ("sglang",),
}
"""Who installs what is timed."""


def facts() -> dict[str, Any]:
    """Card, driver, versions, commit."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit() or "unknown",
        "version": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "name": "CPU",
        "capability": None,
    }
    for name, packages in PACKAGES.items():
        found[name] = package_version(*packages)
    found["nvcc"] = next(reversed(said(["nvcc", "--version"])), None)
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit"]
        answer = said([*query, "--format=csv,noheader"])
        found["driver, max SM clock, power limit"] = next(iter(answer), None)
        properties = torch.cuda.get_device_properties(0)
        found["name"] = properties.name
        found["capability"] = [properties.major, properties.minor]
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
    return found


def build(clock: Clock) -> dict[str, Any]:
    """Compile every library, side by side."""
    from sglang_indexcache.kernels.build import FOLDERS

    seconds = clock.left(BUILD_SECONDS)

    def one(folder: str) -> dict[str, Any]:
        started = time.perf_counter()
        done = run(module("sglang_indexcache.kernels.build", folder), seconds)
        problem = f"{done.problem}: {done.output.strip()}" if done.problem else None
        return {"seconds": time.perf_counter() - started, "problem": problem}

    with ThreadPoolExecutor() as pool:
        return dict(zip(FOLDERS, pool.map(one, FOLDERS), strict=True))


def warm(clock: Clock, tiny: bool) -> dict[str, Any]:
    """Let the anchors that compile at their first use do so, while ours are built."""
    seconds = clock.left(BUILD_SECONDS)
    options = ["--tiny"] if tiny else []
    with ThreadPoolExecutor() as pool:
        children = pool.map(
            lambda name: run(module("benchmarks.kernels.warm", name, *options), seconds), TOPKS
        )
        results = dict(zip(TOPKS, children, strict=True))
    return {
        name: done.lines[-1] if done.lines else {"problem": done.problem, "output": done.output}
        for name, done in results.items()
    }


def check(clock: Clock, implementations: list[str], large: bool) -> dict[str, Any]:
    """The shared grid, a few processes at a time."""
    jobs = [(name, group) for name in implementations for group in GROUPS]
    step = clock.step(CHECK_SECONDS if large else clock.seconds)

    def one(job: tuple[str, str]) -> Finished:
        options = ["--implementation", job[0], "--group", job[1]]
        options += ["--sizes", "large" if large else "small"]
        return run(module(GRID, *options), step.left())

    with ThreadPoolExecutor(4 if large else 1) as pool:
        finished = list(pool.map(one, jobs))
    found: dict[str, Any] = {}
    for (name, group), done in zip(jobs, finished, strict=True):
        ran = [line for line in done.lines if not line["skipped"]]
        found.setdefault(name, {})[group] = {
            "passed": sum(not line["complaints"] for line in ran),
            "failed": {line["case"]: line["complaints"] for line in ran if line["complaints"]},
            "skipped": {line["case"]: line["skipped"] for line in done.lines if line["skipped"]},
            "seconds": sum(line["seconds"] for line in done.lines),
            "problem": done.problem,
            **({"output": done.output} if done.problem else {}),
        }
    return found


def verdicts(checked: dict[str, Any]) -> dict[str, dict[str, bool]]:
    """Whether every case of every group with the op passed, and in each of them some did."""

    def holds(found: dict[str, Any]) -> bool:
        return bool(found["passed"]) and not found["failed"] and not found["problem"]

    return {
        name: {
            op: all(holds(groups[group]) for group in GROUPS if op in GROUPS[group].ops)
            for op in ALL_OPS
        }
        for name, groups in checked.items()
    }


def sanitize(clock: Clock) -> dict[str, Any]:
    """compute-sanitizer on the small and wide cases; only our kernels are instrumented."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        return {"problem": "compute-sanitizer is not installed"}
    step = clock.step(SANITIZER_SECONDS)
    jobs = [(name, group) for name in SANITIZER_TOOLS for group in GROUPS]

    def one(job: tuple[str, str]) -> Finished:
        command = [tool, "--tool", job[0], "--kernel-name", "kns=indexcache", "--error-exitcode=9"]
        options = ["--implementation", "cuda", "--group", job[1], "--sizes", "wide"]
        return run([*command, *module(GRID, *options)], step.left())

    with ThreadPoolExecutor(6) as pool:
        finished = list(pool.map(one, jobs))
    return {
        f"{name} {group}": {
            "cases": sum(not line["skipped"] for line in done.lines),
            "problem": done.problem,
            **({"output": done.output} if done.problem else {}),
        }
        for (name, group), done in zip(jobs, finished, strict=True)
    }


def time_all(clock: Clock, tiny: bool) -> dict[str, Any]:
    """All workloads; a contender that ends the process is left out from there on."""
    results: list[dict[str, Any]] = []
    fatal: dict[str, str] = {}
    unmeasured: list[str] = []
    first, restarts = 0, 0
    while True:
        seconds = clock.left()
        options = ["--seconds", str(max(1.0, seconds - 15)), "--from", str(first)]
        options += ["--tiny"] if tiny else []
        options += ["--skip", *fatal] if fatal else []
        done = run(module("benchmarks.kernels.speed", *options), seconds)
        results += [line["result"] for line in done.lines if "result" in line]
        numbers = [line["number"] for line in done.lines if "number" in line]
        first = max(numbers, default=first - 1) + 1
        unmeasured = next((x["out_of_time"] for x in done.lines if "out_of_time" in x), [])
        restarts += 1
        begun = [line["begin"] for line in done.lines if "begin" in line]
        if done.problem is None:
            break
        if "stopped after" in done.problem or not begun or restarts > MAX_RESTARTS:
            fatal["(timing)"] = f"{done.problem}: {done.output[-600:]}"
            unmeasured = [str(work) for work in tiny_workloads() if tiny] or [
                str(work) for work in list(workloads())[first:]
            ]
            break
        fatal[begun[-1]] = f"{done.problem}: {done.output[-600:]}"
    return {"results": results, "ended_the_process": fatal, "not_measured": unmeasured}


def add_rooflines(timed: dict[str, Any], name: str, tiny: bool) -> None:
    """Achieved against the card's bound, in every result."""
    card = gpu_of_driver(name)
    known = {str(work): work for work in (tiny_workloads() if tiny else workloads())}
    for result in timed["results"]:
        work = known[result["workload"]]
        result["flops"], result["memory_bytes"] = work.flops, work.memory_bytes
        if card is None:
            result["bound"] = None
            continue
        fp8 = not work.family.startswith("mla")
        seconds, by = card.bound(work.flops, work.memory_bytes, fp8=fp8)
        result["bound"] = {"us": seconds * 1e6, "by": by}
        for times in result.get("times", {}).values():
            times["of_bound"] = seconds * 1e6 / times["median_us"]
            times["tflops"] = work.flops / times["median_us"] / 1e6


def faster(timed: dict[str, Any]) -> dict[str, dict[str, bool | None]]:
    """Whether ours beat every engine anchor wherever the engine's default ran; None if nowhere."""
    found: dict[str, dict[str, bool | None]] = {}
    for name in (one.name for one in IMPLEMENTATIONS if not one.is_reference):
        found[name] = {}
        for family in OPS:
            wins: list[bool] = []
            for result in timed["results"]:
                times = result.get("times", {})
                rivals = [times[a]["median_us"] for a in ENGINE_ANCHORS if a in times]
                raced = {name, ENGINE_DEFAULTS[family]} <= set(times)
                if result.get("family") == family and raced:
                    wins.append(times[name]["median_us"] < min(rivals))
            found[name][family] = all(wins) if wins else None
    return found


def options_of(
    parser: argparse.ArgumentParser, result: Path, seconds: float = 450.0
) -> argparse.Namespace | None:
    """The command line of a check, with ``out`` filled in; None, and said, if there is no GPU.

    Args:
        parser: with the check's own options.
        result: where a run on a card is kept; a dry run's goes to a temporary folder.
        seconds: for everything, unless the command line says otherwise.
    """
    parser.add_argument("--dry", action="store_true", help="without a GPU, tiny sizes")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=seconds, help="for everything")
    options = parser.parse_args()
    dry_result = Path(tempfile.gettempdir()) / f"{result.parent.name}_dry.json"
    options.out = options.out or (dry_result if options.dry else result)
    if not options.dry and not torch.cuda.is_available():
        print("error: torch sees no GPU; on a CPU use --dry", file=sys.stderr)
        return None
    return options
