"""Run what only a card can show in the minutes that one is there.

    python -m benchmarks.card.phases OUT [--phase served exact speed tools] [--seconds 560]

A step is a process with a limit of its own, so a kernel that faults or hangs costs that step. The
steps that time nothing run side by side; those that do have the card to themselves. OUT holds
``report.json``, written after every step and every test, ``log.txt``, ``speed.json`` and
``servers.txt``, the ends of the servers' logs. Called again with the same OUT it runs what has not
passed; a step that lacks the card, or SGLang, is skipped and says so, as is one that the committed
record passed with these very kernels. The summary comes last, what failed in
front, and fits 10,000 characters.

==========  ========================================================================================
served      SGLang's own kernels compiled, then servers whose greedy tokens are to be stock
            SGLang's: eager, graphs, live, our kernels
exact       our kernels on the conformance grid up to a million tokens, as they were carried; in
            graphs; under memcheck; the backend in SGLang's graphs
speed       ours beside SGLang's, each checked on the timed inputs before it is timed
tools       ncu's counters of four kernels; synccheck and racecheck
waited      what no call has answered yet: live mode's batches beside a control, the start, and the
            speed of what the committed record has not timed; only when it is named
==========  ========================================================================================
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.caches import kept
from benchmarks.card.pack import KERNELS, ROOT
from benchmarks.kernels.machine import Need, facts, lacking, packed_file, preflight
from benchmarks.kernels.workloads import workloads
from benchmarks.records import RESULTS
from sglang_indexcache.library.writing import write_json

RECORD = "kernels/h100.json"
"""The committed record of phases, below the results."""
PHASES, WAITED = ("served", "exact", "speed", "tools"), "waited"
GROUPS = ("topk", "indexer_prefill", "indexer_decode", "sparse_mla", "clusters")
"""Groups of the grid of cases (``tests/kernels/grid``); a fault in one ends no other."""
CLUSTERS = tuple(f"8-heads-bf16-k{slots}-rows1" for slots in (64, 128, 256, 1024))
"""Cases of a group, one for clusters of 1, 2, 4 and 16 blocks each."""
CHECKS, ATTENTION = ("grid", "memcheck", "synccheck", "racecheck"), "sparse_mla"
"""First words of steps that hold one library of kernels to its cases, and the one whose cases
groups and steps with other names than a library's have."""
SUMMARY_CHARACTERS = 10_000
LOG_CHARACTERS = 40_000
"""The log keeps the last so many of each step."""
SKIPPED, ENDED, NO_TOOL = 77, 124, 127
"""Codes of steps that lack something, were ended at their limit, or lack their command."""
CUT_OFF = "the call ended in it; what it had found is its evidence"
PYTHON = sys.executable
CUDA = Path("/usr/local/cuda")
NCU = {
    "select_kernel": "select_prefill-rows8192-context122880-heads32",
    "mqa_logits": "select_prefill-rows8192-context122880-heads32",
    "attend_kernel": "mla_prefill-rows4096-context122880-heads8",
    "topk_kernel": "select_decode-rows8-context204800-heads32",
}
"""Kernels whose counters are read, and the workload in which each runs."""
_BY_GROUPS, _E4M3 = "quantization.per_token_group_quant _jit_module", "torch.float8_e4m3fn"
_FLAT = 'True, False, False, pdl, False, "legacy"'
ENGINE_KERNELS = {
    "activation": "activation.activation activation_module bf16",
    "concat of queries": "attention.concat_mla _jit_concat_mla_absorb_q_module",
    "indexer's queries": (
        "attention.dsa.indexer_q _jit_main_q_indexer_rope_first_quant_module bf16"
    ),
    "FP8, scales by rows": f"{_BY_GROUPS} bf16, {_E4M3}, 128, False, True, {_FLAT}",
    "FP8, scales by columns": f"{_BY_GROUPS} bf16, {_E4M3}, 128, False, False, {_FLAT}",
    "indexer's keys": "attention.dsa.indexer_k _jit_k_indexer_norm_rope_store_module bf16, 64",
    "a gemm": "gemm.dsv3_fused_a_gemm dsv3_fused_a_gemm_module 512, 960, pdl",
    "rope": "attention.rope _jit_fused_rope_module False, 64, bf16, bf16",
    "rope, neox": "attention.rope _jit_fused_rope_module True, 64, bf16, bf16",
    "store of keys": (
        "kvcache.dsa_fused_store_index_cache _jit_dsa_fused_store_module bf16, torch.int64, 64"
    ),
    "store of latents": "kvcache.set_mla_kv_buffer set_mla_kv_buffer_module 528, 128, pdl",
    "topk": "attention.dsv4.topk _jit_topk_v2_module",
}
"""Kernels that SGLang compiles for its first prompt: module, function and its arguments."""
COUNTERS = (
    "gpu__time_duration.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active",
    "lts__t_sectors_op_read.sum",
    "dram__bytes_read.sum",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
)


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: unique; its first word says the kind.
        seconds: after which it is ended.
        command: with ``{json}`` for a file that it writes, whose content goes into the report, and
            ``{out}`` for the folder of the report.
        read: makes of its output what the report says of it; by default its last error, or line.
        environment: on top of ours.
        needs: what it is skipped without.
    """

    name: str
    seconds: float
    command: tuple[str, ...]
    read: Callable[[str], Any] = field(default=lambda words: last(words))
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[Need, ...] = ("card",)


def last(words: str) -> list[str]:
    """Return the last line that names an error, else the last."""
    lines = [line[:400] for line in words.splitlines() if line.strip()]
    return [line for line in lines if re.search(r"\b\w*(Error|Exception)\b.*:", line)][
        -1:
    ] or lines[-1:]


def cases(words: str) -> dict[str, Any]:
    """Return how many cases of the grid passed, and what was wrong with the others."""
    counts = re.findall(r"(\d+) passed, (\d+) failed", words)
    passed, failed = (sum(int(pair[place]) for pair in counts) for place in (0, 1))
    lines = words.splitlines()
    wrong = [line.strip()[:300] for line in lines if line.startswith(("  ", "error:"))]
    return {"passed": passed, "failed": failed, "wrong": wrong[:12]}


def errors(words: str) -> dict[str, Any]:
    """Return what compute-sanitizer said at its end, beside :func:`cases`."""
    lines = [line for line in words.splitlines() if line.startswith("=========")]
    return {**cases(words), "said": lines[:12] + lines[-2:]}


def outcomes(words: str) -> list[str]:
    """Return pytest's count of outcomes, and what failed."""
    lines = words.splitlines()
    failed = [line[:400] for line in lines if re.match(r"(FAILED|ERROR|E  )", line)]
    return (
        failed[:8]
        + [line for line in lines if re.search(r"\d+ (passed|failed|skipped)", line)][-1:]
    )


def timed(words: str) -> list[str]:
    """Return the lines of workloads that were timed, or the end of what was said without any."""
    lines = words.splitlines()
    return [line for line in lines if re.match(r"(select|topk|mla)_?\w*-rows", line)] or lines[-12:]


def counters(words: str) -> list[str]:
    """Return ncu's lines of counters."""
    return [" ".join(line.split()) for line in words.splitlines() if "__" in line][:40]


def grid(group: str, sizes: str) -> tuple[str, ...]:
    """Return the command that runs our kernels on a group of the grid."""
    command = (PYTHON, "-m", "tests.kernels.grid", "--implementation", "cuda")
    return (*command, "--group", group, "--sizes", sizes)


def tests(*arguments: str) -> tuple[str, ...]:
    """Return the command that runs GPU tests, with their evidence in the step's file."""
    command = (PYTHON, "-m", "pytest", "-p", "tests.gpu.report", "-m", "gpu")
    return (*command, "--gpu-report", "{json}", "--basetemp", "{logs}", *arguments)


SPEED = (PYTHON, "-m", "benchmarks.kernels.speed", "--out", "{out}/speed.json")
START = Step("start", 150, tests("tests/gpu/test_start.py"), outcomes, needs=("card", "sglang"))


def sanitizer_step(tool: str, group: str, case: str = "") -> Step:
    """Return the step that runs a group or a case under compute-sanitizer, ours instrumented."""
    run = ("compute-sanitizer", "--tool", tool, "--kernel-name", "kns=indexcache")
    sizes = "wide" if tool == "memcheck" else "small"
    checked = (*grid(group, sizes), *(("--case", case) if case else ()))
    name = f"{tool} {case or group}"
    return Step(name, 200, (*run, "--error-exitcode=9", *checked), errors)


def engine_kernel_step(name: str) -> Step:
    """Return the step that compiles one of :data:`ENGINE_KERNELS`."""
    module, function, *arguments = ENGINE_KERNELS[name].split(" ", 2)
    code = "import torch\nfrom sglang.kernels.jit.utils import is_arch_support_pdl\n"
    code += f"from sglang.kernels.ops.{module} import {function}\n"
    code += f"bf16, pdl = torch.bfloat16, is_arch_support_pdl()\n{function}({''.join(arguments)})"
    return Step(f"compile SGLang's {name}", 200, (PYTHON, "-c", code), needs=("card", "sglang"))


def engine_kernels() -> list[Step]:
    """Return the steps that compile what SGLang compiles at its first prompt."""
    return [engine_kernel_step(name) for name in ENGINE_KERNELS]


def server_step(name: str, selector: str) -> Step:
    """Return the step of one test of servers."""
    command = tests("tests/gpu/test_served.py", "-k", selector)
    return Step(f"served {name}", 340, command, outcomes, needs=("card", "sglang"))


def exact() -> list[Step]:
    """Return the steps of the phase "exact"."""
    replays = ("tests/gpu/test_kernels.py", "-k", "replays or key_store or candidates")
    return [
        *(Step(f"grid {group}", 240, grid(group, "large"), cases) for group in GROUPS),
        Step("graphs", 150, tests(*replays), outcomes),
        START,
        *(sanitizer_step("memcheck", group) for group in GROUPS),
    ]


def tools() -> list[Step]:
    """Return the steps of the phase "tools"."""
    ncu = ("ncu", "--clock-control", "none", "--launch-count", "1")
    speed = (PYTHON, "-m", "benchmarks.kernels.speed", "--compile-only", "--out", "{json}")
    among = ("--among", "cuda", "deep_gemm + torch.topk")
    counted = (*ncu, "--metrics", ",".join(COUNTERS))
    return [
        *(
            Step(
                f"ncu {name}", 90, (*counted, "-k", f"regex:{name}", *speed, work, *among), counters
            )
            for name, work in NCU.items()
        ),
        *(sanitizer_step("synccheck", group) for group in GROUPS),
        sanitizer_step("racecheck", "topk"),
        # Each alone: if a cluster of one block is reported, clusters are not the cause.
        *(sanitizer_step("racecheck", "clusters", case) for case in CLUSTERS),
    ]


def waited() -> list[list[Step]]:
    """Return the steps of the phase "waited"."""
    return [
        engine_kernels(),
        [START, server_step("live", "several_patterns")],
        [Step("speed of what was not timed", 120, (*SPEED, *untimed()), timed)],
    ]


def untimed() -> list[str]:
    """Return the names of the workloads that the committed record lacks."""
    timed = {row["workload"] for row in committed()["speed"]}
    return [name for name in map(str, workloads()) if name not in timed]


def committed() -> dict[str, Any]:
    """Return the committed record of kernels on a card."""
    return dict(json.loads((RESULTS / RECORD).read_text()))


def passed_before(name: str, machine: Mapping[str, Any]) -> str | None:
    """Say when such a card passed a step with these very kernels; None if it did not.

    Only what checks one library of kernels is known so: its sources alone decide.
    """
    kind, _, group = name.partition(" ")
    record, kernels = committed(), machine.get("kernels")
    if kind not in CHECKS or not kernels or record["machine"]["name"] != machine["name"]:
        return None
    stems = {stem.split("-")[0]: stem for stem in kernels}
    library = next((name for name in stems if group.startswith(name)), ATTENTION)
    stem = stems[library]
    for run in record["runs"]:
        step = run["steps"].get(name)
        if step and is_shown(step) and stem in run["kernels"]:
            return f"passed on {run['date'][:10]} with the same kernels"
    return None


def stages(phase: str) -> list[list[Step]]:
    """Return a phase's steps; those of a stage may run side by side, and wait for earlier ones."""
    if phase == "exact":
        return [exact()]
    if phase == "speed":
        # Again for what is left, should a kernel end the process.
        return [[Step(f"speed {number}", 560, SPEED, timed)] for number in (1, 2, 3)]
    if phase == "tools":
        return [[step] for step in tools()]
    if phase == WAITED:
        return waited()
    return [
        engine_kernels(),
        [
            server_step("eager", "eager_tokens"),
            server_step("our kernels", "with_our_kernels"),
            server_step("graphs", "tokens_in_graphs"),
            server_step("live", "several_patterns"),
        ],
    ]


def is_shown(outcome: Mapping[str, Any]) -> bool:
    """Return whether a step passed, and nothing in it was skipped."""
    return bool(outcome["code"] == 0 and "skipped" not in json.dumps(outcome["said"]))


class Report:
    """Keep what came of each step in OUT, and write it after each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.log = folder / "report.json", folder / "log.txt"
        self.machine = facts()
        fresh = {"machine": self.machine, "preflight": preflight(self.machine), "steps": {}}
        self.content: dict[str, Any] = (
            json.loads(self.path.read_text()) if self.path.exists() else fresh
        )
        self._lock = threading.Lock()

    def has_passed(self, name: str) -> bool:
        """Return whether a step need not run again."""
        return name in self.content["steps"] and is_shown(self.content["steps"][name])

    def add(self, name: str, outcome: dict[str, Any], words: str = "") -> None:
        """Write what came of a step, and say it; a step that is skipped keeps what it once had."""
        before = self.content["steps"].get(name, {})
        if outcome["code"] == SKIPPED and "evidence" in before:
            outcome = {**before, "then": outcome["said"]}
        with self._lock:
            self.content["steps"][name] = outcome
            write_json(self.path, self.content)
            with self.log.open("a") as log:
                log.write(f"\n=== {name}: {outcome['code']}\n{words[-LOG_CHARACTERS:]}\n")
        if outcome["code"] != SKIPPED:
            print(f"{name}: {outcome['code']} after {outcome['seconds']} s", flush=True)

    def note(self, name: str, evidence: Any) -> None:
        """Write what a step has found so far as a step that was cut off, as the call may be."""
        outcome = {"code": ENDED, "seconds": 0, "said": [CUT_OFF]}
        with self._lock:
            if evidence and self.content["steps"].get(name, {}).get("evidence") != evidence:
                copied = json.loads(json.dumps(evidence))
                self.content["steps"][name] = {**outcome, "evidence": copied}
                write_json(self.path, self.content)

    def keep_logs(self, name: str, folder: Path) -> None:
        """Append the ends of the servers' logs below a folder to ``servers.txt``."""
        for log in sorted(folder.rglob("*.log")):
            words = log.read_text(errors="replace")[-LOG_CHARACTERS:]
            with self._lock, self.path.with_name("servers.txt").open("a") as ends:
                ends.write(f"\n=== {name}: {log.relative_to(folder)}\n{words}\n")

    def exit_code(self) -> int:
        """Return 1 if any step failed; a step skipped for lack of something, or time, did not."""
        codes = {outcome["code"] for outcome in self.content["steps"].values()}
        return int(bool(codes - {0, SKIPPED}))

    def summary(self) -> str:
        """Return the report for a person: what failed, what was found, what was not run and why."""
        machine, steps = self.content["machine"], self.content["steps"]
        lines = [", ".join(f"{key} {machine[key]}" for key in ("name", "torch", "commit"))]
        lines.append(self.content["preflight"])
        ran = {name: outcome for name, outcome in steps.items() if outcome["code"] != SKIPPED}
        failures_first = sorted(ran.items(), key=lambda pair: pair[1]["code"] == 0)
        lines += [_line(name, outcome) for name, outcome in failures_first]
        skipped = {name: outcome["said"] for name, outcome in steps.items() if name not in ran}
        for why in dict.fromkeys(skipped.values()):
            names = [name for name, reason in skipped.items() if reason == why]
            lines.append(f"skipped, {why}: {len(names)} steps ({', '.join(names)[:500]})")
        return "\n".join(lines)[:SUMMARY_CHARACTERS]


def _line(name: str, outcome: Mapping[str, Any]) -> str:
    words = json.dumps(outcome["said"])[: 6000 if name.startswith("speed") else 400]
    then = f", then skipped: {outcome['then']}" if "then" in outcome else ""
    is_right = outcome["code"] == 0
    return f"{'ok ' if is_right else 'BAD'} {outcome['seconds']:>5} s {name}: {words}{then}"


def run(step: Step, report: Report, scratch: Path, ends: float) -> None:
    """Run one step to its end or its limit, its whole process group; what it wrote is reported."""
    limit = min(step.seconds, ends - time.monotonic())
    if limit < 5 or report.has_passed(step.name):
        return
    if why := lacking(*step.needs) or passed_before(step.name, report.content["machine"]):
        report.add(step.name, {"code": SKIPPED, "seconds": 0, "said": why})
        return
    logs = scratch / re.sub(r"\W+", "-", step.name)
    file = logs.with_suffix(".json")
    places = {"{json}": str(file), "{logs}": str(logs), "{out}": str(report.path.parent.resolve())}
    command = list(step.command)
    for word, place in places.items():
        command = [part.replace(word, place) for part in command]
    if shutil.which(command[0]) is None:
        outcome = {"code": NO_TOOL, "seconds": 0, "said": f"no {command[0]} here"}
        report.add(step.name, outcome)
        return
    began = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    code, output = _execute(
        command, environment, began + limit, lambda: report.note(step.name, _content(file))
    )
    outcome = {
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        "said": step.read(output),
    }
    if file.exists():
        outcome["evidence"] = _content(file)
    report.keep_logs(step.name, logs)
    report.add(step.name, outcome, output)


def _content(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def run_stage(
    steps: Sequence[Step], report: Report, scratch: Path, ends: float, workers: int = 10
) -> None:
    """Run steps side by side, each with its share of the cores.

    Else each step's torch takes every core, and ten of them stand in each other's way: six models
    took 150 s to write on 16 cores.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    shared = [replace(step, environment={**share, **step.environment}) for step in steps]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda step: run(step, report, scratch, ends), shared))


def _execute(
    command: list[str], environment: Mapping[str, str], ends: float, note: Callable[[], None]
) -> tuple[int, str]:
    """Run a command until ``ends`` at most; return its code (or ENDED) and what it printed.

    ``note`` is called every few seconds while it runs.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as words:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        code = None
        while code is None:
            try:
                code = process.wait(min(5, max(ends - time.monotonic(), 0)))
            except subprocess.TimeoutExpired:
                note()
                if time.monotonic() >= ends:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    code = ENDED
        words.seek(0)
        return code, words.read()


def prepare() -> None:
    """Put CUDA's tools on the path, and the kernels that were carried where they are looked for.

    Every process looks for packages where this one does, whatever folder it runs in.
    """
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if CUDA.exists():
        os.environ.setdefault("CUDA_HOME", str(CUDA))
        os.environ["PATH"] += f":{CUDA / 'bin'}"
    carried = packed_file(KERNELS)
    folder = Path(os.environ.setdefault("INDEXCACHE_KERNEL_CACHE", "/tmp/indexcache-kernels"))
    if carried is not None:
        kept(folder, partial(shutil.unpack_archive, carried, filter="data"))


def main() -> int:
    """Run the phases. Return 1 if any step failed; a skipped step is not a failure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--phase", nargs="+", choices=(*PHASES, WAITED), default=PHASES)
    parser.add_argument("--seconds", type=float, default=560.0, help="for all of them")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    prepare()
    report = Report(options.out)
    with tempfile.TemporaryDirectory() as scratch:
        for stage in (stage for phase in options.phase for stage in stages(phase)):
            run_stage(stage, report, Path(scratch), ends)
    print(report.summary())
    return report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
