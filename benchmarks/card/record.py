"""Make the committed record of what a card showed, and the tables of its page.

    python -m benchmarks.card.record FOLDER [FOLDER ...] [--publish]

Each FOLDER is what calls of :mod:`benchmarks.card.phases` and :mod:`benchmarks.card.table_1` left:
``report.json``, and ``speed.json`` if kernels were timed. They are added to the committed records,
this one and that of servers (:mod:`benchmarks.card.served`); what was run again counts by its last
run. With ``--publish`` the record is written there and the pages are filled.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks import engine_kernels
from benchmarks.card import served
from benchmarks.card.phases import RECORD, SKIPPED, is_shown
from benchmarks.kernels.speed import LISTS_KEPT
from benchmarks.kernels.workloads import OVERLAP, Family, Workload, workloads
from benchmarks.records import NOT_MEASURED, RESULTS, markdown, read_arguments
from sglang_indexcache.lab.runs.provenance import output_lines
from sglang_indexcache.library.writing import write_json

OURS = "cuda"
LATE_FACTOR, LATE = 1.2, "\\*"
LAYERS, FULL_LAYERS, ROWS, CONTEXT = 78, 20, 8192, 122_880
"""The composed sum is of GLM-5, which keeps a quarter of its indexers."""
NOT_OF_THE_MACHINE = ("date", "commit", "version", "kernels")
WORKLOADS = {str(work): work for work in workloads()}
SHOWN_HEADS = (8, 32)
"""Heads that README shows: GLM-5's indexer, and its attention on a GPU of eight and of two."""
NAMES: dict[Family, str] = {
    "select_prefill": "selection in prefill",
    "select_decode": "selection in decode",
    "mla_prefill": "attention in prefill",
    "mla_decode": "attention in decode",
}
Kind: TypeAlias = tuple[Family, int, bool]
"""An operation in a phase, its heads, and whether the cache is FP8."""
COUNTER_NAMES = {
    "gpu__time_duration.sum": "time",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "tensor cores, %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue slots, %",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active": "ALU, %",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_active": "shared, %",
    "dram__bytes_read.sum": "read from DRAM",
}
"""Counters that the page shows, and what it calls them."""
COUNTED = {
    "select_kernel": "ours: logits and selection, 32 heads",
    "mqa_logits": "DeepGEMM: logits alone, 32 heads",
    "attend_kernel": "ours: attention, 8 heads",
    "topk_kernel": "ours: top-k of a decode step of 8 requests",
}


def make_record(folders: Sequence[Path], before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the record of calls on one kind of machine.

    Args:
        folders: what each call left.
        before: the record to which they are added.

    Raises:
        ValueError: the calls ran on machines that differ in card or software.
    """
    empty: dict[str, Any] = {"machine": {}, "runs": [], "speed": [], "counters": {}}
    content: dict[str, Any] = json.loads(json.dumps(before or empty))
    for folder in folders:
        report = json.loads((folder / "report.json").read_text())
        number, machine = len(content["runs"]), report["machine"]
        content["machine"] = _same_machine(content["machine"], machine)
        steps = {
            name: {key: step[key] for key in ("code", "seconds", "said")} | _tested(step)
            for name, step in report["steps"].items()
            if not name.startswith("speed") and step["code"] != SKIPPED and name not in served.STEPS
        }
        run = {"date": machine["date"], **_sources(machine), "steps": steps}
        content["runs"].append(run)
        for name, step in steps.items():
            if name.startswith("ncu ") and step["code"] == 0:
                values = dict(counter(line) for line in step["said"])
                content["counters"][name.removeprefix("ncu ")] = values
        times = folder / "speed.json"
        for name, timing in (json.loads(times.read_text()) if times.exists() else {}).items():
            marks = {"workload": name, "run": number}
            content["speed"].append({**marks, **_rounded(timing)})
    return content


def _sources(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what names the sources of a call: its commit if this repository has it, digests."""
    is_known = bool(output_lines(["git", "-C", str(RESULTS), "cat-file", "-t", machine["commit"]]))
    commit = {"commit": machine["commit"]} if is_known else {}
    return {**commit, "kernels": machine.get("kernels", [])}


def _tested(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return how each test of a step that serves ended, and what it wrote down."""
    tests = step.get("evidence", {}).get("tests", {})
    outcomes = {
        name.rpartition("::")[2]: {"outcome": test["outcome"], **test.get("evidence", {})}
        for name, test in tests.items()
    }
    return {"tests": outcomes} if outcomes else {}


def _same_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of both; what only one of them had, as a package, is no difference.

    Raises:
        ValueError: they differ.
    """
    new = {key: value for key, value in now.items() if key not in NOT_OF_THE_MACHINE}
    differ = [
        key for key in new if None not in (before.get(key), new[key]) and before[key] != new[key]
    ]
    if differ:
        raise ValueError(
            f"the calls ran on machines that differ in {', '.join(differ)}: make a record of each "
            "kind (--fresh --output FILE)"
        )
    return {**new, **{key: value for key, value in before.items() if value is not None}}


def last_steps(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return every step with what its last run came to."""
    return {name: step for run in record["runs"] for name, step in run["steps"].items()}


def counter(line: str) -> tuple[str, str]:
    """Split ncu's line of a metric into its name and its value with the unit."""
    name, *unit, value = line.split()
    return name, " ".join([value, *unit])


def _rounded(timing: Mapping[str, Any]) -> dict[str, Any]:
    times = {
        name: {key: round(value, 2 if key.endswith("us") else 4) for key, value in values.items()}
        for name, values in timing["times"].items()
    }
    rest = {key: timing.get(key, []) for key in ("missing", "wrong", "clocks")}
    rest["replayed"] = timing.get("replayed", False)
    return {"times": times, **rest}


def exact_table(record: Mapping[str, Any]) -> str:
    """Return what each check that times nothing came to, in its last run."""
    rows = []
    for name, step in last_steps(record).items():
        if name.startswith(("compile", "collect", "ncu")):
            continue
        outcome = "passed" if step["code"] == 0 else f"not passed ({step['code']})"
        if step["code"] == 0 and not is_shown(step):
            outcome = "skipped"
        words = "; ".join(_test_lines(step)) or _summarize(step["said"])
        rows.append((name, outcome, words, f"{step['seconds']:.0f}"))
    return markdown(("step", "outcome", "what it says", "seconds"), rows)


def _test_lines(step: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a step's tests wrote down, for those that wrote something or did not pass."""
    for name, test in step.get("tests", {}).items():
        facts = [f"{key} {value}" for key, value in test.items() if key != "outcome"]
        if facts or test["outcome"] != "passed":
            yield f"{name.removeprefix('test_')}: {', '.join([test['outcome'], *facts])}"


def _summarize(words: Any) -> str:
    if isinstance(words, Mapping):
        errors = [line for line in words.get("said", ()) if "ERROR SUMMARY" in line]
        cases = f"{words['passed']} cases right, {words['failed']} wrong"
        return "; ".join([cases, *(line.strip("= ").lower() for line in errors[-1:])])
    last = str(words[-1]) if words else "nothing: it was ended at its limit"
    return last.strip("= ").partition("/")[0] if last.startswith("/") else last.strip("= ")[:90]


def speed_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what was timed of workloads that are still timed."""
    return [row for row in record["speed"] if row["workload"] in WORKLOADS]


def timed(record: Mapping[str, Any], family: str) -> Iterator[tuple[Workload, Mapping[str, Any]]]:
    """Yield the workloads of a family, and what was timed of each in its last run with a rival."""
    last: dict[str, Mapping[str, Any]] = {}
    for row in speed_of(record):
        work = WORKLOADS[row["workload"]]
        default = engine_kernels.engine_default(work)
        if default in row["times"] or row["workload"] not in last:
            last[row["workload"]] = row
    for name, row in last.items():
        if WORKLOADS[name].family == family:
            yield WORKLOADS[name], row


def microseconds(row: Mapping[str, Any], name: str) -> tuple[float, str]:
    """Return the time of a call, and the mark behind it.

    It is the median, or the least if the median is far above that: the host then launched too
    late, and the card waited.
    """
    median, least = (row["times"][name][key] for key in ("median_us", "min_us"))
    return (least, LATE) if median > LATE_FACTOR * least else (median, "")


def _cell(row: Mapping[str, Any], name: str | None) -> str:
    if name not in row["times"]:
        return NOT_MEASURED
    time, mark = microseconds(row, str(name))
    return f"{time:,.0f}{mark}"


def _ratio(row: Mapping[str, Any], rival: str | None, ours: str = OURS) -> str:
    if rival not in row["times"] or ours not in row["times"]:
        return ""
    return f"{microseconds(row, str(rival))[0] / microseconds(row, ours)[0]:.2f}x"


def fastest(row: Mapping[str, Any], work: Workload) -> str | None:
    """Return the fastest of the timed kernels that SGLang can run, or None."""
    timed = [name for name in engine_kernels.engine_anchors(work) if name in row["times"]]
    return min(timed, key=lambda name: microseconds(row, name)[0], default=None)


def composed_sum(record: Mapping[str, Any]) -> str:
    """Return what the rows add up to: indexers and attention of GLM-5's chunk at tp 8 and 1/4."""
    select = _times_of(record, Workload("select_prefill", ROWS, CONTEXT, 32))
    attend = _times_of(record, Workload("mla_prefill", ROWS // 2, CONTEXT, 8))
    default = engine_kernels.engine_default(Workload("select_prefill", ROWS, CONTEXT, 32))
    if not ({default, OURS} <= {*select} and {"flash_mla", OURS, LISTS_KEPT} <= {*attend}):
        return f"{NOT_MEASURED}\n"
    shared = LAYERS - FULL_LAYERS
    attention = FULL_LAYERS * 2 * attend[OURS] + shared * 2 * attend[LISTS_KEPT]
    theirs = FULL_LAYERS * select[default] + LAYERS * 2 * attend["flash_mla"]
    ours = FULL_LAYERS * select[OURS] + attention
    fastest = f"deep_gemm + {engine_kernels.ENGINE_TOPK}"
    faster = FULL_LAYERS * select[fastest] + LAYERS * 2 * attend["flash_mla"]
    alone = FULL_LAYERS * select[default] + attention
    return (
        f"**Composed** from the rows, for GLM-5 at tp 8 (8 heads a rank, {LAYERS} layers) with "
        f"{FULL_LAYERS} indexers left: indexers and attention of a chunk of {ROWS:,} rows behind "
        f"{CONTEXT // 1024}K tokens take {theirs / 1000:.0f} ms by SGLang's default kernels and "
        f"{ours / 1000:.0f} ms by ours, {theirs / ours:.2f}x; {faster / ours:.2f}x beside SGLang's "
        f"own faster top-k, {theirs / alone:.2f}x with our attention alone. All of it rests on "
        f"lists that share {OVERLAP} %. No model was timed as a whole.\n"
    )


def power_line(record: Mapping[str, Any]) -> str:
    """Return what the card drew, and at which clocks, behind the longest selections."""
    limit = record["machine"]["driver, max SM clock, power limit"]
    clock, watts = (float(part.split()[0]) for part in limit.split(", ")[1:])
    behind = [
        tuple(float(part.split()[0]) for part in row["clocks"][1].split(", "))
        for work, row in timed(record, "select_prefill")
        if work.rows == ROWS and work.context >= 61_440 and row["clocks"]
    ]
    if not behind:
        return f"{NOT_MEASURED}\n"
    drawn, clocks = [power for _, _, power, _ in behind], [speed for speed, *_ in behind]
    return (
        f"**Power is at its limit.** Behind {ROWS:,} rows over 60K tokens and more the card drew "
        f"{min(drawn):.0f} to {max(drawn):.0f} of {watts:.0f} W, at {min(clocks):,.0f} to "
        f"{max(clocks):,.0f} of {clock:,.0f} MHz.\n"
    )


def _times_of(record: Mapping[str, Any], work: Workload) -> dict[str, float]:
    row = dict(timed(record, work.family)).get(work, {"times": {}})
    return {name: microseconds(row, name)[0] for name in row["times"]}


def _table(
    record: Mapping[str, Any],
    families: Sequence[str],
    header: Sequence[str],
    cells: Callable[[Workload, Mapping[str, Any]], Sequence[Any]],
) -> str:
    """Return a row for each timed shape of some families; none where there are no cells."""
    rows = [
        ("prefill" if work.is_prefill else "decode", *columns)
        for family in families
        for work, row in sorted(timed(record, family), key=lambda pair: _shape(pair[0]))
        if (columns := cells(work, row))
    ]
    return markdown(("", *header), rows)


def select_table(record: Mapping[str, Any]) -> str:
    """Return logits and selection, ours beside SGLang's default and the fastest it can run."""

    def cells(work: Workload, row: Mapping[str, Any]) -> Sequence[Any]:
        default, best = engine_kernels.engine_default(work), fastest(row, work)
        shape = (work.heads, f"{work.rows:,}", f"{work.context // 1024}K")
        times = (_cell(row, name) for name in (default, best, OURS))
        return (*shape, *times, _ratio(row, default), _ratio(row, best))

    header = ("heads", "rows", "tokens", "SGLang's default", "its fastest", "ours")
    header += ("over the default", "over the fastest")
    return _table(record, ("select_prefill", "select_decode"), header, cells)


def attention_table(record: Mapping[str, Any]) -> str:
    """Return sparse MLA, ours beside SGLang's default and what else was timed."""

    def cells(work: Workload, row: Mapping[str, Any]) -> Sequence[Any]:
        default = engine_kernels.engine_default(work)
        if default not in row["times"]:
            return ()  # FlashAttention 3 did not travel: nothing to hold ours beside
        shape = ("FP8" if work.fp8 else "bfloat16", work.heads, f"{work.rows:,}")
        gains = (_ratio(row, default), _ratio(row, default, LISTS_KEPT))
        return (*shape, _cell(row, default), _cell(row, OURS), *gains)

    header = ("cache", "heads", "rows", "FlashMLA", "ours", "faster", "lists kept")
    return _table(record, ("mla_prefill", "mla_decode"), header, cells)


def others_table(record: Mapping[str, Any]) -> str:
    """Return prefill attention beside what SGLang offers besides its default."""
    rows = []
    for row in speed_of(record):
        work = WORKLOADS[row["workload"]]
        rivals = [name for name in row["times"] if not name.startswith(OURS)]
        if work.family != "mla_prefill" or rivals in ([], ["flash_mla"]):
            continue
        best = fastest(row, work)
        rows.append(
            (
                work.family.replace("_", " "),
                work.heads,
                f"{work.rows:,}",
                f"{best}: {_cell(row, best)}",
                _cell(row, OURS),
                _ratio(row, best),
            )
        )
    return markdown(
        ("", "heads", "rows", "fastest of SGLang's", "ours", "faster"), sorted(rows, key=str)
    )


def counters_table(record: Mapping[str, Any]) -> str:
    """Return ncu's counters of four kernels."""
    rows = [
        (name, *(record["counters"][kernel].get(metric, "") for metric in COUNTER_NAMES))
        for kernel, name in COUNTED.items()
        if kernel in record["counters"]
    ]
    return markdown(("kernel", *COUNTER_NAMES.values()), rows)


def gains(record: Mapping[str, Any]) -> dict[Kind, list[float]]:
    """Return the time of SGLang's fastest over ours, of each shape in which its default was timed.

    Each run that timed ours beside any rival gives a ratio, and the least counts.
    """
    ratios: dict[str, list[float]] = {}
    with_default: set[str] = set()
    for row in speed_of(record):
        work, times = WORKLOADS[row["workload"]], row["times"]
        rival = fastest(row, work)
        if OURS in times and rival is not None:
            ours, theirs = (microseconds(row, name)[0] for name in (OURS, rival))
            ratios.setdefault(row["workload"], []).append(theirs / ours)
            with_default |= {str(work)} if engine_kernels.engine_default(work) in times else set()
    kinds: dict[Kind, list[float]] = {}
    for name, work in WORKLOADS.items():
        each = kinds.setdefault((work.family, work.heads, work.fp8), [])
        each += [min(ratios[name])] if name in with_default else []
    return kinds


def _span(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{least}x" if least == most else f"{least} to {most}x"


def measured_table(record: Mapping[str, Any]) -> str:
    """Return in how many shapes of each kind ours won."""
    rows = [
        (
            NAMES[family],
            heads,
            ("FP8" if is_fp8 else "bfloat16") if family.startswith("mla") else "",
            f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}" if ratios else "",
            _span(ratios) if ratios else NOT_MEASURED,
        )
        for (family, heads, is_fp8), ratios in gains(record).items()
    ]
    return markdown(("", "heads", "cache", "ours faster", "over SGLang's fastest"), rows)


def line(record: Mapping[str, Any]) -> str:
    """Return what README says of the card: right or not, how fast, and what was not measured."""
    steps = last_steps(record)
    grids = [step["said"] for name, step in steps.items() if name.startswith("grid ")]
    right, wrong = (sum(grid[key] for grid in grids) for key in ("passed", "failed"))
    cases = f"{right} of {right + wrong} cases right" if grids else f"cases **{NOT_MEASURED}**"
    spans = [
        f"{NAMES[family]}, {heads} heads{', FP8' * is_fp8}, {_span(ratios)}"
        for (family, heads, is_fp8), ratios in gains(record).items()
        if heads in SHOWN_HEADS and ratios
    ]
    speed = "; ".join(spans) or f"**{NOT_MEASURED}**"
    servers = [
        f"{name.removeprefix('served ')} {test['prompts compared']} of "
        f"{test['prompts compared'] + test['left out']} prompts"
        for name, step in steps.items()
        for test in step.get("tests", {}).values()
        if is_shown(step) and "prompts compared" in test
    ]
    served = ", ".join(servers) or f"**{NOT_MEASURED}**"
    return (
        f"Our kernels on {record['machine']['name']}: {cases}. "
        f"Speed-up over SGLang's fastest (above 1x ours is faster): {speed}. "
        "A server of ours with SGLang's kernels gave stock SGLang's greedy tokens on every prompt "
        f"on which stock repeats its own: {served}.\n"
    )


def _shape(work: Workload) -> tuple[bool, int, int, int]:
    return work.fp8, work.heads, work.rows, work.context


def main() -> None:
    """Write the records; when they are published fill the pages, too."""
    from benchmarks import readme  # it fills pages from this module
    from benchmarks.card import measured

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--fresh", action="store_true", help="add to nothing")
    options = read_arguments(parser, RECORD)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    reports = {
        folder: json.loads((folder / "report.json").read_text()) for folder in options.folders
    }
    calls = []
    for folder, report in reports.items():
        if report.get("asked", {}).get("rehearse"):
            served.write_rehearsal(report, options.output)
        else:
            calls.append(folder)
    if calls:
        _write(calls, options.output, fresh=options.fresh)
    if options.publish:
        measured.main()
        readme.write()


def _write(calls: Sequence[Path], output: Path, *, fresh: bool) -> None:
    """Write what calls on a card left: the record of kernels, and that of servers.

    Raises:
        SystemExit: the calls ran on machines that differ.
    """
    committed = RESULTS / RECORD
    before = None if fresh or not committed.exists() else json.loads(committed.read_text())
    try:
        content = make_record(calls, before)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    command = "python -m benchmarks.card.phases OUT; python -m benchmarks.card.record OUT"
    write_json(output, content | {"command": command})
    print(f"wrote {output}")
    served.write(calls, output, fresh=fresh)


if __name__ == "__main__":
    main()
