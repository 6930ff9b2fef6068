"""The dispatch table: what runs where, why, and that no default is without evidence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.kernels import speed
from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OPS, OpName
from sglang_indexcache.kernels.dispatch import Limits
from sglang_indexcache.kernels.grid import cases, runner

ROOT = Path(__file__).parent.parent.parent
CPU = dispatch.Machine("CPU", None)
AMPERE = dispatch.Machine("NVIDIA A100", (8, 0))
HOPPER = dispatch.Machine("NVIDIA H100", (9, 0))
VOLTA = dispatch.Machine("NVIDIA V100", (7, 0))
BLACKWELL = dispatch.Machine("NVIDIA B200", (10, 0))


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be imported and compiled here is another test's business."""
    there = tuple(
        replace(one, missing=lambda: None, distrust=lambda: None)
        for one in dispatch.IMPLEMENTATIONS
    )
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", there)


def names(op: OpName, machine: dispatch.Machine) -> list[str]:
    return [one.name for one in dispatch.running(op, machine)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, ["reference"]),
        (dispatch.Machine("CPU", None, interpreted=True), ["triton", "reference"]),
        (VOLTA, ["reference"]),
        (AMPERE, ["triton", "reference"]),
        (HOPPER, ["cuda", "triton", "reference"]),
        (BLACKWELL, ["triton", "reference"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_table(op: OpName, machine: dispatch.Machine, expected: list[str]) -> None:
    assert names(op, machine) == expected


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (Limits((10, 0), exactly=True), "is for 10.0, this is 9.0"),
        (Limits((8, 0), exactly=True), "is for 8.0, this is 9.0"),
        (Limits((10, 0)), "needs compute capability 10.0, this is 9.0"),
    ],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, limits: Limits, says: str) -> None:
    cuda, *others = dispatch.IMPLEMENTATIONS
    cuda = replace(cuda, limits=limits)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (cuda, *others))
    assert cuda.obstacle("topk", HOPPER) == says
    assert cuda.obstacle("topk", CPU) == "needs an NVIDIA GPU"
    assert names("topk", HOPPER) == ["triton", "reference"]
    with pytest.raises(KernelError, match=r"cuda cannot run on NVIDIA H100: .*; these can: triton"):
        cuda.check("topk", HOPPER)


def test_a_missing_compiler_is_the_reason() -> None:
    cuda = replace(dispatch.named("cuda"), missing=lambda: "there is no nvcc")
    assert cuda.obstacle("topk", HOPPER) == "there is no nvcc"


def test_what_is_not_written_cannot_run() -> None:
    planned = dispatch.Implementation("rocm", Limits(), lambda: None)
    assert planned.obstacle("topk", HOPPER) == "not written"
    with pytest.raises(KernelError, match="topk: rocm cannot be loaded"):
        planned.load("topk")


def test_what_was_measured_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dispatch.MEASURED, ("topk", (9, 0)), ("triton", "kernels/h100.json"))
    assert names("topk", HOPPER) == ["triton", "cuda", "reference"]
    assert names("select", HOPPER) == ["cuda", "triton", "reference"]
    monkeypatch.setitem(dispatch.MEASURED, ("topk", (8, 0)), ("cuda", "kernels/a100.json"))
    assert names("topk", AMPERE) == ["triton", "reference"]


def test_every_default_has_its_evidence() -> None:
    """A default names a committed result, of that card, in which the op was right and faster."""
    for (op, capability), (implementation, path) in dispatch.MEASURED.items():
        result = json.loads((ROOT / "benchmarks" / "results" / path).read_text())
        assert tuple(result["machine"]["capability"]) == capability
        assert result["correct"][implementation][op] is True
        families = [family for family, timed in speed.OPS.items() if timed == op]
        assert families
        assert all(result["faster"][implementation][family] is True for family in families)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_load(op: OpName, name: str) -> None:
    function = dispatch.named(name).load(op)
    assert function.__module__.endswith(name)
    assert function.__name__ == op


@pytest.mark.parametrize(
    ("op", "libraries"),
    [("select", ["indexer", "topk"]), ("topk", ["topk"]), ("sparse_mla", ["sparse_mla"])],
)
def test_loading_compiles(
    monkeypatch: pytest.MonkeyPatch, op: OpName, libraries: list[str]
) -> None:
    """The first call may be the capture of a graph."""
    from sglang_indexcache.kernels.indexer import cuda as indexer
    from sglang_indexcache.kernels.sparse_mla import cuda as sparse_mla
    from sglang_indexcache.kernels.topk import cuda as topk

    built: list[str] = []
    for module in (indexer, topk, sparse_mla):
        monkeypatch.setattr(module, "library", built.append)
    dispatch.named("cuda").load(op)
    assert built == libraries


def test_list_names_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine, says in (
        (HOPPER, ["NVIDIA H100, compute capability 9.0", "can run"]),
        (AMPERE, ["is for 9.0, this is 8.0"]),
        (CPU, ["needs an NVIDIA GPU"]),
    ):
        monkeypatch.setattr(dispatch.Machine, "here", lambda machine=machine: machine)
        result = CliRunner().invoke(app, ["kernels", "list"], env={"COLUMNS": "160"})
        assert result.exit_code == 0, result.output
        for word in (*OPS, *dispatch.NAMES, "the engine's own kernels", *says):
            assert word in result.output


def test_check_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch.Machine, "here", lambda: AMPERE)
    monkeypatch.setattr(dispatch.Machine, "device", torch.device("cpu"))
    arguments = ["kernels", "check", "--implementation", "reference", "--sizes", "small"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    parts = (cases.PREFILL, cases.DECODE, cases.ATTENTION, cases.TOPK)
    assert f"reference, indexer_prefill: {len(cases.PREFILL)} passed, 0 failed" in result.output
    assert f"reference, indexer_decode: {len(cases.DECODE)} passed, 0 failed" in result.output
    assert f"all {sum(map(len, parts))} cases passed" in result.output


def test_check_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_indexcache.kernels.topk import reference

    right = reference.topk

    def descending(*arguments: object, **options: object) -> torch.Tensor:
        found = right(*arguments, **options)  # type: ignore[arg-type]
        return found.copy_(found.flip(1))

    monkeypatch.setattr(dispatch.Machine, "here", lambda: CPU)
    crash = replace(dispatch.named("reference"), name="wrong")
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (crash,))
    monkeypatch.setattr(dispatch, "NAMES", ("wrong",))
    monkeypatch.setattr(dispatch.Implementation, "obstacle", lambda *_: None)
    monkeypatch.setattr(dispatch.Implementation, "load", lambda *_: descending)
    result = CliRunner().invoke(app, ["kernels", "check"])
    assert result.exit_code == 1
    assert "64-of-700: topk: rows" in result.output
    assert "cases failed" in result.output


def test_check_command_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was checked: that is no success."""
    monkeypatch.setattr(dispatch.Machine, "here", lambda: CPU)
    result = CliRunner().invoke(app, ["kernels", "check", "--implementation", "cuda"])
    assert result.exit_code == 1
    assert "cuda, topk: not run: needs an NVIDIA GPU" in result.output
    result = CliRunner().invoke(app, ["kernels", "check", "--implementation", "fast"])
    assert "may be cuda, triton, reference, got 'fast'" in result.output


def test_runner_reports_each_case() -> None:
    one = runner.Runner(
        dispatch.named("reference"), CPU, torch.device("cpu"), sizes="small", seed=3
    )
    outcomes = list(one.run("topk"))
    assert [outcome.case for outcome in outcomes] == [str(case) for case in cases.TOPK]
    assert not any(outcome.complaints or outcome.skipped for outcome in outcomes)


def test_runner_skips_what_cannot_run() -> None:
    one = runner.Runner(dispatch.named("cuda"), AMPERE, torch.device("cpu"), sizes="small", seed=3)
    for group in runner.GROUPS:
        for outcome in one.run(group):
            assert outcome.skipped == "is for 9.0, this is 8.0"


def test_runner_survives_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch.Implementation, "load", lambda *_: crash)
    one = runner.Runner(
        dispatch.named("triton"), AMPERE, torch.device("cpu"), sizes="small", seed=3
    )
    for group in runner.GROUPS:
        for outcome in one.run(group):
            assert "illegal memory access" in outcome.complaints[0]
