"""Compilers known to miscompile: read by their full version, and never behind a default."""

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_indexcache.kernels import build as building
from sglang_indexcache.kernels import compilers, cuda, dispatch

PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Cuda compilation tools, release 12.8, V12.8.93
Build cuda_12.8.r12.8/compiler.35583870_0
"""


def test_the_full_version_is_read() -> None:
    assert compilers.version_said(PTXAS) == (12, 8, 93)
    assert compilers.version_said("release 13.0") is None, "a release says too little"


@pytest.mark.parametrize("version", compilers.KNOWN_BAD)
def test_a_known_one_is_named_with_its_source(version: compilers.Version) -> None:
    said = compilers.doubt("nvcc", version) or ""
    assert compilers.dotted(version) in said
    assert "#" in said, "where it was seen"
    assert compilers.doubt("nvcc", (*version[:2], version[2] + 1)) is None


@pytest.mark.parametrize(("version", "doubted"), [((13, 0, 88), True), ((13, 1, 80), False)])
def test_a_library_is_judged_by_the_compiler_that_made_it(
    version: compilers.Version, doubted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / f"topk-0-cuda{compilers.dotted(version)}" / "topk.so"
    library = building.BuiltKernels(made, made.with_name("build.log"), fresh=False)
    monkeypatch.setattr(cuda, "cached", lambda folder: library)
    assert library.compiler == version
    assert (cuda.doubt() is not None) == doubted


def test_a_compiler_matters_on_a_hopper_only() -> None:
    one = replace(dispatch.named("cuda"), distrust=lambda: "it miscompiles")
    assert one.doubt(dispatch.Machine("NVIDIA H100", (9, 0))) == "it miscompiles"
    assert one.doubt(dispatch.Machine("NVIDIA A100", (8, 0))) is None


def test_the_ptxas_of_triton_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(f"#!/bin/sh\necho '{PTXAS}'\n")
    ptxas.chmod(0o755)
    tool = type("Tool", (), {"path": str(ptxas)})()
    monkeypatch.setattr(knobs, "nvidia", type("Knobs", (), {"ptxas": tool})())
    dispatch._distrust_triton.cache_clear()
    assert "Triton's ptxas 12.8.93" in (dispatch._distrust_triton() or "")
    dispatch._distrust_triton.cache_clear()
