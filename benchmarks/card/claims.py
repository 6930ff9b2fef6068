"""Say what a card's record shows, measured kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks import engine_kernels
from benchmarks.card import record as records
from benchmarks.card.phases import is_shown
from benchmarks.kernels.workloads import Family
from benchmarks.records import markdown
from sglang_indexcache.lab.latency.tables import NOT_MEASURED

OURS = records.OURS
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


def ratios(record: Mapping[str, Any]) -> dict[Kind, list[float | None]]:
    """Return the time of SGLang's fastest over ours, for each length and number of rows.

    Each run that timed ours beside any rival gives a ratio, and the least counts. It is None where
    ours or SGLang's default was never timed: beating only the other rivals is no win.
    """
    by_workload: dict[str, list[float]] = {}
    with_default: set[str] = set()
    for row in records.speed_of(record):
        work, times = records.WORKLOADS[row["workload"]], row["times"]
        rival = records.fastest(row, work)
        if OURS in times and rival is not None:
            ours, theirs = (records.microseconds(row, name)[0] for name in (OURS, rival))
            by_workload.setdefault(row["workload"], []).append(theirs / ours)
            with_default |= {str(work)} if engine_kernels.engine_default(work) in times else set()
    kinds: dict[Kind, list[float | None]] = {}
    for name, work in records.WORKLOADS.items():
        if work.family in NAMES:
            ratio = min(by_workload[name]) if name in with_default else None
            kinds.setdefault((work.family, work.heads, work.fp8), []).append(ratio)
    return kinds


def may_be_default(record: Mapping[str, Any]) -> set[tuple[Family, int]]:
    """Return the operations and heads in which ours won everywhere, over either cache."""
    wins: dict[tuple[Family, int], bool] = {}
    for (family, heads, _), every in ratios(record).items():
        wins_all = all(ratio is not None and ratio > 1 for ratio in every)
        wins[family, heads] = wins.get((family, heads), True) and wins_all
    return {kind for kind, everywhere in wins.items() if everywhere}


def _span(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return f"{least}x" if least == most else f"{least} to {most}x"


def measured_table(record: Mapping[str, Any]) -> str:
    """Return in how many shapes of each kind ours won, and whether it may become a default."""
    defaults, rows = may_be_default(record), []
    for (family, heads, is_fp8), every in ratios(record).items():
        measured = [ratio for ratio in every if ratio is not None]
        rows.append(
            (
                NAMES[family],
                heads,
                ("FP8" if is_fp8 else "bfloat16") if family.startswith("mla") else "",
                f"{sum(ratio > 1 for ratio in measured)} of {len(measured)}" if measured else "",
                _span(measured) if measured else NOT_MEASURED,
                "yes" if (family, heads) in defaults else "no",
            )
        )
    header = ("", "heads", "cache", "ours faster", "over SGLang's fastest", "may be a default")
    return markdown(header, rows)


def line(record: Mapping[str, Any]) -> str:
    """Return what README says of the card: right or not, how fast, and what was not measured."""
    steps = records.last_steps(record)
    grids = [step["said"] for name, step in steps.items() if name.startswith("grid ")]
    right, wrong = (sum(grid[key] for grid in grids) for key in ("passed", "failed"))
    cases = f"{right} of {right + wrong} cases right" if grids else f"cases **{NOT_MEASURED}**"
    spans = [
        f"{NAMES[family]}, {heads} heads{', FP8' * is_fp8}, {_span(measured)}"
        for (family, heads, is_fp8), every in ratios(record).items()
        if heads in SHOWN_HEADS and (measured := [ratio for ratio in every if ratio is not None])
    ]
    speed = "; ".join(spans) or f"**{NOT_MEASURED}**"
    servers = [
        f"{name.removeprefix('served ')} {test['prompts compared']} of {_prompts(test)} prompts"
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


def _prompts(test: Mapping[str, Any]) -> int:
    """Return how many prompts a test asked: those that stock answers twice alike, and the rest."""
    return int(test["prompts compared"] + test["left out"])
