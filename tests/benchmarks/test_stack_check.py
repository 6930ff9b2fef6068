"""The layer stack as a device check: its dry run end to end, and what it does when things break."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.children import Finished
from benchmarks.stack import check
from benchmarks.stack import tables as stack_tables
from benchmarks.stack.worker import TINY_CACHE_TOKENS, TINY_LENGTHS
from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.layer_stack import STAGES, LayerStackResult, Row, StackCheck
from sglang_indexcache.bench.results import load
from sglang_indexcache.bench.shapes import PRESETS
from tests.dry_run import dry_run

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_dry_run(tmp_path: Path) -> None:
    """One command, every step, one JSON; a set that cannot run is a reason in it."""
    out, printed = dry_run(tmp_path, "--stack")
    found = load(StackCheck, out)
    assert found.dry
    assert {"name", "torch", "commit"} <= set(found.machine)
    [result] = found.results
    assert result.kernels == "reference"
    assert [(row.phase, row.length, row.requests) for row in result.rows] == [
        ("prefill", 70, 1), ("decode", 70, 1), ("decode", 70, 2),
        ("prefill", 40, 1), ("decode", 40, 1), ("decode", 40, 4),
    ]  # fmt: skip
    assert found.not_measured == ()
    assert "the engine's kernels need" in found.problems["engine"]
    assert "IndexCache 1/4, reference" in printed


def test_no_gpu_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["check"])
    assert check.main() == 2
    assert "use --dry" in capsys.readouterr().err


def row(phase: str, length: int, requests: int, full: float, shared: float) -> Row:
    stages = dict(zip(STAGES, (full - shared, 0.0, shared, 0.0, 0.0), strict=True))
    return Row.model_validate(
        {
            "phase": phase, "length": length, "requests": requests, "full_layer": stages,
            "shared_layer": {**stages, STAGES[0]: 0.0}, "full_total": full, "shared_total": shared,
            "neighbour_overlap": None,
        }
    )  # fmt: skip


def stack(kernels: str, *rows: Row) -> LayerStackResult:
    return LayerStackResult(
        environment=environment(), device="NVIDIA H100", kernels=kernels,
        shape=PRESETS["30b"], layers=4, dtype="bfloat16", kv="bfloat16", chunk=8192, repeats=3,
        cuda_graph=True, rows=rows,
    )  # fmt: skip


def line(result: LayerStackResult) -> dict[str, Any]:
    return {"result": json.loads(result.model_dump_json())}


def test_a_set_that_dies_leaves_what_it_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stack("cuda", row("prefill", 10_000, 1, 2.0, 1.0))
    second = stack("cuda", *first.rows, row("decode", 10_000, 1, 2.0, 1.0))
    died = Finished([line(first), line(second)], "exit code -11", "Segmentation fault")
    monkeypatch.setattr(check, "run", lambda *_: died)
    result, problem = check.measure("cuda", [], 10)
    assert result == second
    assert "Segmentation fault" in problem
    assert check.not_measured(second, (10_000,), 30_000) == ["cuda: decode 10K x 3"]


def test_a_set_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Finished([{"problem": "needs deep_gemm"}], "exit code 1", "noise")
    monkeypatch.setattr(check, "run", lambda *_: refused)
    assert check.measure("engine", [], 10) == (None, "needs deep_gemm")
    silent = Finished([], None, "")
    monkeypatch.setattr(check, "run", lambda *_: silent)
    assert check.measure("engine", [], 10) == (None, "it measured nothing")


def test_the_file_is_there_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Written after every set, so a parent that is killed leaves the sets before."""
    out = tmp_path / "deep" / "stack.json"
    seen: list[int] = []

    def measured(kernels: str, options: list[str], _seconds: float) -> tuple[Any, str]:
        assert "--tiny" in options
        seen.append(len(load(StackCheck, out).results) if out.exists() else -1)
        if kernels == "engine":
            raise KeyboardInterrupt
        return stack("reference", row("prefill", 70, 1, 2.0, 1.0)), "stopped after 10 s"

    monkeypatch.setattr(check, "measure", measured)
    monkeypatch.setattr(sys, "argv", ["check", "--dry", "--out", str(out)])
    with pytest.raises(KeyboardInterrupt):
        check.main()
    assert seen == [-1, 1]
    left = load(StackCheck, out)
    assert left.problems == {"reference": "stopped after 10 s"}
    assert len(left.not_measured) == 2 * len(TINY_LENGTHS) + 1
    assert TINY_CACHE_TOKENS // min(TINY_LENGTHS) == 4


def test_ours_are_compared_with_the_engines_all_full() -> None:
    """47 layers of 2 s and 1 s; ours half of that. 1/4 keeps 12 of 47."""
    engine = stack(
        "engine: all",
        row("prefill", 200_000, 1, 2.0, 1.0),
        row("decode", 200_000, 1, 2.0, 1.0),
        row("decode", 200_000, 4, 4.0, 2.0),
    )
    cuda = stack("cuda", row("prefill", 200_000, 1, 1.0, 0.5), row("decode", 200_000, 1, 1.0, 0.5))
    text = stack_tables.comparison_grid([cuda, engine]).to_markdown()
    assert "| all F, engine: all | 94 (1.00x) |" in text
    assert "| IndexCache 1/4, engine: all | 59 (1.59x) |" in text
    assert "| all F, cuda | 47 (2.00x) |" in text
    assert "| IndexCache 1/4, cuda | 29.5 (3.19x) |" in text
    assert "| IndexCache 1/4, paper's servers (H100) | 1.82x |" in text
    assert "speed-up over all F with engine: all" in text
    # Full KV cache: four requests of the engine's; ours was not run with as many.
    assert "| IndexCache 1/4, engine: all | 0.0339 (1.59x) |" in text
    assert text.count("| IndexCache 1/4, cuda | not measured |") == 1
