"""Implementations that run, why the others do not, and the grid's command line."""

from dataclasses import replace

import pytest
import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OPS, OpName
from tests.kernels.grid import __main__ as grid
from tests.kernels.grid import cases, suite

CPU = dispatch.Machine("CPU", None)
AMPERE = dispatch.Machine("NVIDIA A100", (8, 0))
HOPPER = dispatch.Machine("NVIDIA H100", (9, 0))
VOLTA = dispatch.Machine("NVIDIA V100", (7, 0))
BLACKWELL = dispatch.Machine("NVIDIA B200", (10, 0))


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make everything installed: what can be compiled here is another test's business."""
    implementations = tuple(
        replace(implementation, missing=lambda: None) for implementation in dispatch.IMPLEMENTATIONS
    )
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", implementations)


def names(machine: dispatch.Machine) -> list[str]:
    return [implementation.name for implementation in dispatch.running(machine)]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        (CPU, ["reference"]),
        (VOLTA, ["reference"]),
        (AMPERE, ["reference"]),
        (HOPPER, ["cuda", "reference"]),
        (BLACKWELL, ["reference"]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_table(machine: dispatch.Machine, expected: list[str]) -> None:
    assert names(machine) == expected


def test_what_cannot_be_imported_is_an_error() -> None:
    with pytest.raises(KernelError, match="topk: rocm cannot be loaded"):
        dispatch.Implementation("rocm").load("topk")


@pytest.mark.parametrize("op", OPS)
def test_load(op: OpName) -> None:
    function = dispatch.named("reference").load(op)
    assert function.__module__.endswith("reference")
    assert function.__name__ == op


@pytest.mark.parametrize(
    ("op", "libraries"),
    [
        ("select", ["indexer", "topk"]),
        ("topk", ["indexer", "topk"]),
        ("sparse_mla", ["sparse_mla"]),
    ],
)
def test_loading_compiles(
    monkeypatch: pytest.MonkeyPatch, op: OpName, libraries: list[str]
) -> None:
    """The first call may be the capture of a graph."""
    from sglang_indexcache.kernels.indexer import cuda as indexer
    from sglang_indexcache.kernels.sparse_mla import cuda as sparse_mla

    loaded_names: list[str] = []
    for module in (indexer, sparse_mla):
        monkeypatch.setattr(module, "library", loaded_names.append)
    dispatch.named("cuda").load(op)
    assert loaded_names == libraries


def test_the_grid_s_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch.Machine, "here", lambda: AMPERE)
    monkeypatch.setattr(dispatch.Machine, "device", torch.device("cpu"))
    grid.main(["--implementation", "reference", "--sizes", "small"])
    output = capsys.readouterr().out
    parts = (cases.PREFILL, cases.DECODE, cases.ATTENTION, cases.CLUSTERS, cases.TOPK)
    assert f"reference, indexer_prefill: {len(cases.PREFILL)} passed, 0 failed" in output
    assert f"reference, indexer_decode: {len(cases.DECODE)} passed, 0 failed" in output
    assert f"all {sum(map(len, parts))} cases passed" in output
    grid.main(["--implementation", "reference", "--group", "topk", "--sizes", "small"])
    assert f"all {len(cases.TOPK)} cases passed" in capsys.readouterr().out


def test_the_grid_s_command_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_indexcache.kernels.indexer import reference

    right = reference.topk

    def descending(*arguments: object, **options: object) -> torch.Tensor:
        rows = right(*arguments, **options)  # type: ignore[arg-type]
        return rows.copy_(rows.flip(1))

    monkeypatch.setattr(dispatch.Machine, "here", lambda: CPU)
    monkeypatch.setattr(dispatch.Implementation, "load", lambda *_: descending)
    with pytest.raises(KernelError, match="cases failed"):
        grid.main([])
    assert "64-of-700: topk: rows" in capsys.readouterr().out


def test_the_grid_s_command_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was checked: that is no success."""
    monkeypatch.setattr(dispatch.Machine, "here", lambda: CPU)
    with pytest.raises(KernelError, match="nothing was checked"):
        grid.main(["--implementation", "cuda"])
    assert "cuda: not run: needs an NVIDIA GPU" in capsys.readouterr().out


def test_a_crash_is_a_complaint_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(dispatch.Implementation, "load", lambda *_: crash)
    for name, group in suite.GROUPS.items():
        outcomes = list(suite.run(dispatch.named("cuda"), name, "small", CPU))
        assert [outcome.case for outcome in outcomes] == [str(case) for case in group.cases[0]]
        assert all("illegal memory access" in outcome.complaints[0] for outcome in outcomes)
