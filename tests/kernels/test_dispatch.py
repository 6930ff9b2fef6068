"""The dispatch table: what runs where, why, and that no default is without evidence."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OPS, Limits, OpName
from sglang_indexcache.kernels.grid import cases, runner
from sglang_indexcache.kernels.report import print_table

ROOT = Path(__file__).parent.parent.parent
CPU = dispatch.Machine("CPU", None)
AMPERE = dispatch.Machine("NVIDIA A100", (8, 0))
HOPPER = dispatch.Machine("NVIDIA H100", (9, 0))
VOLTA = dispatch.Machine("NVIDIA V100", (7, 0))
ANY = dispatch.Shape()


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be imported and compiled here is another test's business."""
    monkeypatch.setattr(dispatch, "_missing_cuda", lambda: None)
    monkeypatch.setattr(dispatch, "_missing_triton", lambda: None)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("machine", "default", "opt_in"),
    [
        (CPU, "cpu", "reference"),
        (VOLTA, "engine", "reference"),
        (AMPERE, "engine", "triton"),
        (HOPPER, "engine", "cuda"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_table(op: OpName, machine: dispatch.Machine, default: str, opt_in: str) -> None:
    decision = dispatch.decide(op, machine)
    assert (decision.default, decision.opt_in) == (default, opt_in)
    assert decision.why


@pytest.mark.parametrize(
    ("limits", "shape", "says"),
    [
        (Limits(heads=frozenset({32, 64})), dispatch.Shape(heads=8), "knows 32, 64 heads, not 8"),
        (Limits(topk=1024), dispatch.Shape(topk=2048), "k up to 1024, not 2048"),
        (Limits(next_n=frozenset({1, 2})), dispatch.Shape(next_n=3), "next_n 1, 2, not 3"),
        (
            Limits(caches=frozenset({torch.bfloat16})),
            dispatch.Shape(cache=torch.uint8),
            "cannot read a cache of uint8",
        ),
        (Limits(architectures=frozenset({(10, 0)})), ANY, "is for 10.0, this is 9.0"),
        (Limits(oldest=(10, 0)), ANY, "needs compute capability 10.0, this is 9.0"),
    ],
)
def test_limits(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, shape: dispatch.Shape, says: str
) -> None:
    monkeypatch.setattr(dispatch, "_cuda_limits", lambda: {"topk": limits})
    verdict = dispatch.judge("topk", "cuda", HOPPER, shape)
    assert not verdict.runs
    assert says in verdict.why
    assert dispatch.decide("topk", HOPPER, shape).opt_in == "triton"
    with pytest.raises(KernelError, match=r"cuda cannot run on NVIDIA H100: .*; these can: triton"):
        dispatch.require("topk", "cuda", HOPPER, shape)


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_missing_cuda", lambda: "there is no nvcc")
    assert dispatch.judge("topk", "cuda", HOPPER, ANY).why == "there is no nvcc"


def test_evidence_makes_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = dispatch.Evidence("cuda", "kernels/h100.json")
    monkeypatch.setitem(dispatch.DEFAULTS, ("topk", (9, 0)), evidence)
    decision = dispatch.decide("topk", HOPPER)
    assert decision.default == "cuda"
    assert "h100.json" in decision.why
    assert dispatch.decide("topk", AMPERE).default == "engine"
    monkeypatch.setattr(dispatch, "_missing_cuda", lambda: "there is no nvcc")
    assert dispatch.decide("topk", HOPPER).default == "engine"


def test_every_default_has_its_evidence() -> None:
    """A default names a committed result, of that card, in which the op was right and faster."""
    for (op, capability), evidence in dispatch.DEFAULTS.items():
        result = json.loads((ROOT / "benchmarks" / "results" / evidence.result).read_text())
        assert tuple(result["machine"]["capability"]) == capability
        assert result["correct"][evidence.implementation][op] is True
        assert result["faster"][evidence.implementation][op] is True


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_load(op: OpName, name: dispatch.Implementation) -> None:
    function = dispatch.load(op, name)
    assert function.__module__.endswith(name)


def test_load_says_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.HOMES, "topk", ("nowhere", "topk"))
    with pytest.raises(KernelError, match="topk: the triton implementation cannot be loaded"):
        dispatch.load("topk", "triton")


def test_report_names_everything() -> None:
    console = Console(width=160)
    with console.capture() as captured:
        print_table(HOPPER, console)
    text = captured.get()
    for word in (*OPS, "NVIDIA H100", "9.0", "engine", "cuda", "no committed measurement"):
        assert word in text
    with console.capture() as captured:
        print_table(CPU, console)
    assert "triton: needs an NVIDIA GPU" in captured.get()


def test_command() -> None:
    result = CliRunner().invoke(app, ["kernels", "list"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "sparse_mla_decode" in result.output


def test_runner_reports_each_case() -> None:
    machine = dataclasses.replace(CPU)
    one = runner.Runner("reference", machine, torch.device("cpu"), sizes="small", seed=3)
    outcomes = list(one.run("topk"))
    assert [outcome.case for outcome in outcomes] == [str(case) for case in cases.TOPK]
    assert not any(outcome.complaints or outcome.skipped for outcome in outcomes)


def test_runner_skips_what_cannot_run() -> None:
    one = runner.Runner("cuda", AMPERE, torch.device("cpu"), sizes="small", seed=3)
    for group in runner.GROUPS:
        for outcome in one.run(group):
            assert outcome.skipped == "is for 9.0, this is 8.0"


def test_runner_survives_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch, "load", lambda *_: crash)
    one = runner.Runner("triton", AMPERE, torch.device("cpu"), sizes="small", seed=3)
    for group in runner.GROUPS:
        for outcome in one.run(group):
            assert "illegal memory access" in outcome.complaints[0]
