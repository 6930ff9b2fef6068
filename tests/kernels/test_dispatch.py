"""The dispatch table: what runs where, why, and that no default is without evidence."""

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OPS, OpName
from sglang_indexcache.kernels.dispatch import KernelMeasurement
from sglang_indexcache.kernels.grid import cases, suite

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


def names(machine: dispatch.Machine) -> list[str]:
    return [one.name for one in dispatch.running(machine)]


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
def test_table(machine: dispatch.Machine, expected: list[str]) -> None:
    assert names(machine) == expected


def test_what_cannot_be_imported_is_an_error() -> None:
    with pytest.raises(KernelError, match="topk: rocm cannot be loaded"):
        dispatch.Implementation("rocm").load("topk")


ROW = KernelMeasurement("select", "prefill", HOPPER.name, 32, 2048, "cuda", "gpu/h100.json")


def shown(row: KernelMeasurement, report: dict[str, Any]) -> bool:
    """Whether a report of the GPU tests says all that the row claims."""
    claims = {f.name: getattr(row, f.name) for f in fields(row) if f.name != "record"}
    right = report["correct"].get(row.implementation, {}).get(row.op)
    return right is True and claims in report["faster"] and report["machine"]["name"] == row.card


def test_every_default_has_its_evidence() -> None:
    """A row names a committed report, of that card, in which ours was right and faster."""
    for row in dispatch.MEASURED:
        assert shown(row, json.loads((ROOT / "benchmarks" / "results" / row.record).read_text()))
        assert row.implementation == "cuda", "others are to be asked for by name"


@pytest.mark.parametrize(
    "wrong",
    [
        {"heads": 64},
        {"card": "NVIDIA H20"},
        {"topk": 1024},
        {"phase": "decode"},
        {"op": "sparse_mla"},
    ],
)
def test_evidence_for_another_case_is_none(wrong: dict[str, Any]) -> None:
    claims = {name: value for name, value in asdict(ROW).items() if name != "record"}
    report = {
        "correct": {"cuda": {"select": True}},
        "faster": [claims],
        "machine": {"name": HOPPER.name},
    }
    assert shown(ROW, report)
    assert not shown(replace(ROW, **wrong), report)
    assert not shown(ROW, report | {"correct": {"cuda": {"select": False}}})
    assert not shown(ROW, report | {"machine": {"name": "NVIDIA H200"}})


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
        for word in (*dispatch.NAMES, "the engine's own kernels", *says):
            assert word in result.output


@pytest.mark.parametrize(
    ("doubt", "says"),
    [("it miscompiles", "auto would not take what is built here: it miscompiles"), (None, "")],
)
def test_build_says_first_whom_not_to_trust(
    doubt: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_indexcache.kernels import build as building

    cuda = replace(dispatch.named("cuda"), distrust=lambda: doubt)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", (cuda,))

    def compile_nothing(folder: str, **_: object) -> None:
        raise KernelError("compiling begins")

    monkeypatch.setattr(building, "build", compile_nothing)
    result = CliRunner().invoke(app, ["kernels", "build"], env={"COLUMNS": "400"})
    before, begins, _ = result.output.partition("compiling begins")
    assert begins
    assert says in before
    assert ("auto would not" in before) == bool(doubt)


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
    assert "cuda: not run: needs an NVIDIA GPU" in result.output
    assert "nothing was checked" in result.output
    result = CliRunner().invoke(app, ["kernels", "check", "--implementation", "fast"])
    assert "may be cuda, triton, reference, got 'fast'" in result.output


def test_a_crash_is_a_complaint_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch.Implementation, "load", lambda *_: crash)
    for name, group in suite.GROUPS.items():
        outcomes = list(suite.run(dispatch.named("triton"), name, "small", CPU))
        assert [one.case for one in outcomes] == [str(case) for case in group.cases[0]]
        assert all("illegal memory access" in one.complaints[0] for one in outcomes)
