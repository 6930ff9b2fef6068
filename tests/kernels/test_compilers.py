"""Compilers: read by their full version; only those that were checked are behind a default."""

from pathlib import Path

import pytest

from sglang_indexcache.kernels import build as building
from sglang_indexcache.kernels import compilers, cuda

PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Cuda compilation tools, release 12.8, V12.8.93
Build cuda_12.8.r12.8/compiler.35583870_0
"""


def test_the_full_version_is_read() -> None:
    assert compilers.version_said(PTXAS) == (12, 8, 93)
    assert compilers.version_said("release 13.0") is None, "a release says too little"


@pytest.mark.parametrize("version", compilers.KNOWN_BAD)
def test_a_known_one_is_named_with_its_source(version: compilers.Version) -> None:
    said = compilers.doubt(version) or ""
    assert compilers.dotted(version) in said
    assert "#" in said, "where it was seen"
    assert version not in compilers.GOOD


def test_an_unknown_one_is_not_trusted_and_good_ones_are_named() -> None:
    said = compilers.doubt((13, 0, 89)) or ""
    assert "nvcc 13.0.89 is not among those that were checked" in said
    for version in compilers.GOOD:
        assert compilers.dotted(version) in said
        assert compilers.doubt(version) is None


@pytest.mark.parametrize(
    ("version", "doubted"), [((13, 0, 88), True), ((13, 0, 89), True), ((13, 1, 80), False)]
)
def test_a_library_is_judged_by_the_compiler_that_made_it(
    version: compilers.Version, doubted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / f"topk-0-cuda{compilers.dotted(version)}" / "topk.so"
    library = building.BuiltKernels(made, made.with_name("build.log"), fresh=False)
    monkeypatch.setattr(cuda, "cached", lambda folder: library)
    assert library.compiler == version
    assert (cuda.doubt() is not None) == doubted
