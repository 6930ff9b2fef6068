"""Make the record of what servers on a card showed, and its tables: the paper's beside ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from benchmarks.card.phases import SKIPPED
from benchmarks.card.slices import SLICES, whole
from benchmarks.card.table_1 import ARMS, GATE, RECORD
from benchmarks.records import NOT_MEASURED, RESULTS, markdown
from sglang_indexcache.library.files import load_entry
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.writing import shipped, write_json

COMMAND = "python -m benchmarks.card.table_1 OUT; python -m benchmarks.card.record OUT"
REHEARSAL_RECORD = "latency/h100/rehearsal.json"
VERSIONS = ("python", "torch", "triton", "sglang", "sgl_kernel", "deep_gemm", "flash_mla")
"""Facts that a rehearsal's line names."""
STEPS = (GATE, *(arm.name for arm in ARMS), *SLICES)
STOCK, QUARTER, AGAIN = "stock, all F", "ours, 1/4", "stock again"
PAPERS = {
    "prefill": ("Prefill, s", "prefill time"),
    "decode": ("Decode of one request, tokens/s", "decode, one request"),
    "full": ("Decode, full KV cache, tokens/s", "decode, full KV cache"),
}
"""Metrics: a heading here, and the name in a pattern's file."""
LAYERS = 47
Value: TypeAlias = float | None


def merge(reports: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a record with what the reports add to one; a step that passed stays.

    Raises:
        ValueError: the reports are of cards or software that differ.
    """
    content: dict[str, Any] = json.loads(json.dumps(before or {"steps": {}}))
    for report in reports:
        machine = {key: value for key, value in report["machine"].items() if key != "date"}
        if content.setdefault("machine", machine) != machine:
            raise ValueError(
                "the calls are of machines or commits that differ: begin a --fresh one"
            )
        for name, step in report["steps"].items():
            has_passed = content["steps"].get(name, {}).get("code") == 0
            if name in STEPS and step["code"] != SKIPPED and not has_passed:
                content["steps"][name] = {"date": report["machine"]["date"], **step}
    return content | {"command": COMMAND}


def beside(kernels: Path, record: str) -> Path:
    """Return where a record of servers is written when that of kernels is written to a path."""
    return (
        RESULTS / record
        if kernels.is_relative_to(RESULTS)
        else kernels.with_name(Path(record).name)
    )


def write_rehearsal(report: Mapping[str, Any], kernels: Path) -> None:
    """Write the record of a call without a card: what went through, beside which packages."""
    path = beside(kernels, REHEARSAL_RECORD)
    steps = {name: report["steps"][name] for name in STEPS if name in report["steps"]}
    ran = {
        name: {"code": step["code"], "seconds": step["seconds"]}
        for name, step in steps.items()
        if step["code"] != SKIPPED
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks.card.table_1 OUT --rehearse; the same with --slices"
    write_json(path, {"command": command, "machine": report["machine"], "steps": ran})
    print(f"wrote {path}")


def rehearsed(record: Mapping[str, Any]) -> str:
    """Return what a rehearsal went through, beside which packages."""
    machine, steps = record["machine"], record["steps"]
    passed = [name for name, step in steps.items() if step["code"] == 0]
    minutes = sum(step["seconds"] for step in steps.values()) / 60
    versions = ", ".join(f"{name} {machine[name]}" for name in VERSIONS)
    others = "; ".join(name for name in STEPS if name not in passed) or "none"
    return (
        f"On {machine['date'][:10]}, at commit `{machine['commit']}` and on a CPU with {versions}, "
        f"{len(passed)} of {len(STEPS)} steps went through in {minutes:.0f} minutes "
        f"({'; '.join(passed)}); not: {others}.\n"
    )


def write(folders: Sequence[Path], kernels: Path, *, fresh: bool) -> None:
    """Add what calls left to the record of servers, beside that of kernels; if they left any.

    Raises:
        SystemExit: the calls are of cards or software that differ.
    """
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    reports = [report for report in reports if any(name in STEPS for name in report["steps"])]
    if not reports:
        return
    path = beside(kernels, RECORD)
    before = json.loads(path.read_text()) if path.exists() and not fresh else None
    try:
        content = merge(reports, before)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    print(f"wrote {path}")


def value(record: Mapping[str, Any], arm: str, metric: str, length: int) -> Value:
    """Return the median of an arm's samples; None if it has none."""
    step = record["steps"].get(arm, {})
    if step.get("code") != 0:  # its layers may have done something else than the pattern says
        return None
    samples = step.get("evidence", {}).get("samples", ())
    values = [s[metric] for s in samples if s["length"] == length and metric in s]
    return median(values) if values else None


def lengths(record: Mapping[str, Any]) -> list[int]:
    """Return the prompt lengths of the record."""
    steps = (record["steps"][name] for name in STEPS if name in record["steps"])
    samples = (s for step in steps for s in step.get("evidence", {}).get("samples", ()))
    return sorted({sample["length"] for sample in samples})


def papers(metric: str, retention: str, length: int) -> Value:
    """Return the paper's figure: of every indexer for "", else of a retention it has."""
    if retention == "1/8":
        return None  # its Table 1 has none
    entry = load_entry(
        shipped("patterns") / f"glm-4.7-flash-dsa-{(retention or '1/2').replace('/', 'of')}.yaml"
    )
    for row in entry.latency:
        if (row.metric, row.context) == (PAPERS[metric][1], format_length(length)):
            return row.value if retention else row.all_full
    return None


def table(record: Mapping[str, Any]) -> str:
    """Return Table 1: each cell the paper's figure, then ours, with what both gain."""
    columns = lengths(record)
    rows: list[tuple[str, ...]] = []
    for metric, (heading, _) in PAPERS.items():
        rows.append((heading, *[""] * len(columns)))
        for arm in ARMS:
            if arm.name != AGAIN and (arm.work == "full") == (metric == "full"):
                cells = [_cell(record, arm, metric, length) for length in columns]
                rows.append((arm.name, *cells))
    header = ("paper, then here", *map(format_length, columns))
    return markdown(header, rows) + "\n" + "".join(_notes(record))


def _cell(record: Mapping[str, Any], arm: Any, metric: str, length: int) -> str:
    base = next(base.name for base in ARMS if base.work == arm.work and not base.retention)
    pairs = (
        (papers(metric, arm.retention, length), papers(metric, "", length)),
        (value(record, arm.name, metric, length), value(record, base, metric, length)),
    )
    return ", ".join(_figure(metric, *pair, gain=bool(arm.retention)) for pair in pairs)


def _figure(metric: str, mine: Value, all_full: Value, *, gain: bool) -> str:
    if mine is None:
        return "-"
    if not gain or all_full is None:
        return f"{mine:.3g}"
    return f"{mine:.3g} ({speedup(metric, mine, all_full):.2f}x)"


def speedup(metric: str, mine: float, all_full: float) -> float:
    """Return the gain over every indexer, above 1 where it is faster."""
    return all_full / mine if metric == "prefill" else mine / all_full


def _notes(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what else the servers showed: shares, drift, and what is missing."""
    machine, steps = record["machine"], record["steps"]
    commit = machine.get("commit")
    yield f"{machine['name']}, torch {machine['torch']}, commit {commit}. Random weights; "
    yield "`1/4` and the others are the library's patterns for this model.\n"
    if (realised := amdahl(record)) is not None:
        share, ideal, gained, length = realised
        yield (
            f"Indexers take {share:.0%} of stock's prefill of {format_length(length)} tokens: 1/4 "
            f"could gain {ideal:.2f}x, and gains {gained:.2f}x, {gained / ideal:.0%} of that.\n"
        )
    drifts = [
        f"{format_length(n)} {again / first - 1:+.1%}"
        for n in lengths(record)
        if (again := value(record, AGAIN, "prefill", n)) is not None
        and (first := value(record, STOCK, "prefill", n)) is not None
    ]
    if drifts:
        yield f"Stock asked again at the end, in prefill: {', '.join(drifts)}.\n"
    missing = [name for name in STEPS if steps.get(name, {}).get("code") != 0]
    if missing:
        yield f"{NOT_MEASURED.capitalize()}: {', '.join(missing)}.\n"


def amdahl(record: Mapping[str, Any]) -> tuple[float, float, float, int] | None:
    """Return the indexers' share of a stock prefill, Amdahl's gain of 1/4, ours, and the length.

    None where one of them was not measured.
    """
    evidence = record["steps"].get(STOCK, {}).get("evidence", {})
    watched = evidence.get("seen")
    if watched is None:
        return None
    length = watched["length"]
    first, mine = (value(record, arm, "prefill", length) for arm in (STOCK, QUARTER))
    if first is None or mine is None:
        return None
    share = watched["indexer seconds"] / first
    pattern = record["steps"][QUARTER]["evidence"]["pattern"]
    removed = pattern.count("S") / len(pattern)
    return share, 1 / (1 - share * removed), first / mine, length


def line(record: Mapping[str, Any]) -> str:
    """Return README's sentence: what a quarter of the indexers gains at the longest length."""
    length = max(lengths(record), default=0)
    gains = []
    for metric in ("prefill", "decode"):
        first, mine = (value(record, arm, metric, length) for arm in (STOCK, QUARTER))
        if first is not None and mine is not None:
            gains.append(f"{speedup(metric, mine, first):.2f}x in {metric}")
    if not gains:
        return f"{NOT_MEASURED}\n"
    return (
        f"{' and '.join(gains)} at 1/4 and {format_length(length)} tokens, measured on one "
        f"{record['machine']['name']} with the paper's 30B shape and random weights\n"
    )


def slices_table(record: Mapping[str, Any]) -> str:
    """Return what a layer costs by slices side by side, and the whole models composed of them."""
    rows = []
    for name, (layers, full, ranks) in SLICES.items():
        evidence = record["steps"].get(name, {}).get("evidence", {})
        for length, costs in evidence.get("costs", {}).items():
            first, mine = (
                whole(costs, layers, count, int(length), ranks) for count in (layers, full)
            )
            milliseconds = (f"{1000 * costs[kind]:.1f}" for kind in ("F", "S"))
            composed = f"{first:.2f} to {mine:.2f} s, {first / mine:.2f}x"
            tokens = format_length(int(length))
            rows.append((name, tokens, *milliseconds, f"{costs['residual']:.1%}", composed))
    header = ("", "tokens", "F layer, ms", "S layer, ms", "residual", "composed: all F to 1/4")
    return markdown(header, rows) if rows else f"{NOT_MEASURED}\n"
