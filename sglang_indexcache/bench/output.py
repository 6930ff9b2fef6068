"""The files of a result: JSON with every sample, the tables, and figures as PNG."""

from __future__ import annotations

from pathlib import Path

from sglang_indexcache.bench import figures, replay_tables, tables
from sglang_indexcache.bench.replay import ReplayResult
from sglang_indexcache.bench.results import LatencyResult, save
from sglang_indexcache.support.files import write_whole


def write_latency(result: LatencyResult, folder: Path) -> list[Path]:
    """Write ``latency.json``, ``.md`` and figures; returns the files."""
    written = [folder / "latency.json", folder / "latency.md", folder / "latency-speedup.png"]
    save(result, written[0])
    write_whole(written[1], tables.report(result))
    figures.draw_speedups(result, written[2])
    if "prefill" in result.metrics:
        written.append(folder / "latency-scaling.png")
        unit = "prefill time, relative to DSA at the shortest"
        figures.draw_scaling(figures.prefill_curves(result), unit, written[-1])
    shares = figures.share_curves(result)
    if shares:
        written.append(folder / "latency-share.png")
        figures.draw_shares(shares, written[-1])
    return written


def write_replay(result: ReplayResult, folder: Path) -> list[Path]:
    """Write ``replay.json``, ``.md`` and ``.png``; returns the files."""
    written = [folder / f"replay{suffix}" for suffix in (".json", ".md", ".png")]
    save(result, written[0])
    write_whole(written[1], replay_tables.report(result))
    figures.draw_replay(result, written[2])
    return written
