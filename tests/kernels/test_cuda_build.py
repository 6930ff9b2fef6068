"""Every CUDA kernel compiles for sm_90a into what the design says; needs nvcc, no GPU.

These are checks of the compiler's output. They say nothing about a run, which ``tests/gpu`` makes.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import build as building
from sglang_indexcache.kernels import checks
from sglang_indexcache.kernels.build import FOLDERS, BuiltKernels, build
from sglang_indexcache.kernels.contract import INDEXER_HEADS
from sglang_indexcache.kernels.indexer.cuda import select_rows
from tests.cli import output_of

pytestmark = pytest.mark.csrc

LOGITS = [(heads, rows) for heads in (32, 64) for rows in (1, 2, 4)] + [(8, 4), (16, 4)]
SELECT = [(heads, select_rows(heads)) for heads in INDEXER_HEADS]
INDEXER = {f"logits_kernel<{heads}, {rows}>": heads * rows for heads, rows in LOGITS} | {
    f"select_kernel<{heads}, {rows}>": heads * rows // 2 for heads, rows in SELECT
}
"""Every kernel, and the columns that one of its warpgroups multiplies."""
KERNELS = {
    "topk": {"topk_kernel"},
    "indexer": set(INDEXER),
    "sparse_mla": {"attend_kernel<0>", "attend_kernel<1>", "pack_kernel"},
}
SPILL_BUDGET = 0
"""Bytes, every kernel: all of them keep their accumulators in registers."""


def available() -> bool:
    try:
        building.nvcc_version()
    except KernelError:
        return False
    return True


_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_NAME = re.compile(r"(?<=\d)([a-z_]+_kernel)(?:I((?:L[ib]\d+E)+)E)?")


@dataclass(frozen=True)
class Usage:
    """Resources of a thread that one kernel takes.

    Attributes:
        kernel: name and template arguments, for example ``select_kernel<32, 8>``.
        registers: at entry; roles that call for more (setmaxnreg) have more.
        stack: bytes of local memory a thread.
        spills: bytes of spill stores and loads.
    """

    kernel: str
    registers: int
    stack: int
    spills: int


def readable(symbol: str) -> str:
    """Return ``select_kernel<32, 8>`` from its mangled name."""
    match = _NAME.search(symbol)
    if match is None:
        return symbol
    arguments = re.findall(r"L[ib](\d+)E", match[2] or "")
    return f"{match[1]}<{', '.join(arguments)}>" if arguments else match[1]


def usage(log: str) -> list[Usage]:
    """Return every kernel that a build log (``ptxas -v``) tells of."""
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        symbol = re.match(r"'(\w+)'", part)
        stack, registers = _STACK.search(part), _REGISTERS.search(part)
        if symbol is None or stack is None or registers is None:
            raise KernelError(f"ptxas says nothing known of a kernel: {part[:200]!r}")
        spills = int(stack[2]) + int(stack[3])
        kernels.append(Usage(readable(symbol[1]), int(registers[1]), int(stack[1]), spills))
    return kernels


def complaints(log: str) -> list[str]:
    """Warnings, and ptxas's notes on lost performance (serialised wgmma, ignored setmaxnreg)."""
    return [line for line in log.splitlines() if "warning" in line or re.search(r"\(C\d+\)", line)]


needs_nvcc = pytest.mark.skipif(not available(), reason="no usable nvcc")


@pytest.fixture(scope="module")
def libraries() -> dict[str, BuiltKernels]:
    return {folder: build(folder) for folder in FOLDERS}


# -- what the compiler made ----------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_instantiation_compiles_without_spills(
    folder: str, libraries: dict[str, BuiltKernels]
) -> None:
    log = libraries[folder].log.read_text()
    kernels = usage(log)
    assert {kernel.kernel for kernel in kernels} == KERNELS[folder]
    assert complaints(log) == []
    for kernel in kernels:
        assert kernel.spills <= SPILL_BUDGET, kernel
        assert kernel.stack == 0, f"an array is indexed at run time: {kernel}"


@needs_nvcc
def test_small_tiles_leave_room_for_two_blocks(libraries: dict[str, BuiltKernels]) -> None:
    """Decode is bound by memory: 2 blocks of 384 threads share 65536 registers."""
    for kernel in usage(libraries["indexer"].log.read_text()):
        if kernel.kernel.startswith("logits") and INDEXER[kernel.kernel] <= 64:
            assert 2 * 384 * kernel.registers <= 65536, kernel


@needs_nvcc
def test_arguments_reach_the_libraries(libraries: dict[str, BuiltKernels]) -> None:
    """Every export takes what the Python side gives it, and then wants it on a GPU."""
    ints, floats, data = torch.int32, torch.float32, torch.uint8
    rows, table = torch.zeros(4, dtype=ints), torch.zeros(2, 8, dtype=ints)
    starts, logits = torch.zeros(3, dtype=ints), torch.zeros(4, 64, dtype=floats)
    selection = torch.zeros(4, 16, dtype=ints)
    q, pages = torch.zeros(4, 32, 128, dtype=data), torch.zeros(3, 8448, dtype=data)
    weights = torch.zeros(4, 32, dtype=floats)
    lists = torch.zeros(1, 8, 16384, dtype=torch.int64)
    topk, indexer, mla = (building.library(folder) for folder in FOLDERS)
    queries = torch.zeros(4, 20, 576, dtype=torch.bfloat16)
    cache, slots = torch.zeros(9, 656, dtype=data), torch.zeros(4, 16, dtype=ints)
    packed = torch.zeros(2, 32, dtype=ints), torch.zeros(2, 32, dtype=data), rows[:2]
    sinks, out = torch.zeros(20), torch.zeros(4, 20, 512, dtype=torch.bfloat16)
    lse = torch.zeros(4, 20)
    batch = q, weights, pages, table, starts, rows
    calls = [
        lambda: topk.topk(logits, rows, selection),
        lambda: topk.topk_of_requests(logits, rows, starts, 1, table, selection),
        lambda: topk.topk_of_requests(logits, rows, None, 2, None, selection),
        lambda: indexer.indexer_logits(q, weights, pages, table, starts, 1, rows, logits),
        lambda: indexer.indexer_logits(q, weights, pages, table, None, 2, rows, logits),
        lambda: indexer.indexer_select(*batch, True, lists, rows[:1], selection),
        lambda: mla.sparse_mla_pack(slots, 2, *packed),
        lambda: mla.sparse_mla_clusters(cache, 8),
        lambda: mla.sparse_mla_attend(queries, cache, *packed, 2, 0.1, sinks, 1, out, lse),
        lambda: mla.sparse_mla_attend(queries, cache, slots, None, None, 1, 0.1, None, 8, out, lse),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="must be on a GPU"):
            call()


@needs_nvcc
def test_launches_that_the_kernels_cannot_do_are_refused(
    libraries: dict[str, BuiltKernels],
) -> None:
    mla = building.library("sparse_mla")
    slots = torch.zeros(4, 4096, dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot pack 5 rows of 4096 slots"):
        mla.sparse_mla_pack(slots, 5, slots, slots, slots)
    q, cache = torch.zeros(4, 33, 576, dtype=torch.bfloat16), torch.zeros(1, 656)
    with pytest.raises(ValueError, match="a cluster of 17"):
        mla.sparse_mla_attend(q, cache, slots, None, None, 1, 1.0, None, 17, q, q)
    with pytest.raises(ValueError, match="2 rows of 33 heads in one tile"):
        mla.sparse_mla_attend(q, cache, slots, None, None, 2, 1.0, None, 1, q, q)


@needs_nvcc
def test_build_kernels_command(libraries: dict[str, BuiltKernels]) -> None:
    output = output_of("kernels", "build")
    for folder in FOLDERS:
        assert f"{folder}: in the cache" in output


# -- the cache -----------------------------------------------------------------------------------

TRIVIAL = "__global__ void some_kernel(int* out) { *out = 1; }\n"


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a csrc/ of one trivial file, and a cache of its own."""
    source = tmp_path / "csrc" / "topk" / "small.cu"
    source.parent.mkdir(parents=True)
    source.write_text(TRIVIAL)
    monkeypatch.setattr(building, "source_folder", lambda: tmp_path / "csrc")
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path / "cache"))
    return source


@needs_nvcc
def test_a_library_is_built_once_for_what_it_depends_on(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build("topk")
    assert first.fresh
    assert build("topk") == BuiltKernels(first.path, first.log, fresh=False)
    small.write_text(TRIVIAL + "// changed\n")
    changed = build("topk")
    assert changed.fresh
    assert changed.path != first.path
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-lineinfo"))
    assert build("topk").path not in (first.path, changed.path)


@needs_nvcc
def test_a_failed_compilation_shows_the_compilers_words(small: Path) -> None:
    small.write_text("__global__ void broken() { no_such_function(); }\n")
    with pytest.raises(KernelError, match='identifier "no_such_function" is undefined'):
        build("topk")
    assert not list(building.cache_folder().rglob("*.so"))
    small.write_text(TRIVIAL)
    assert build("topk").fresh, "nothing of the failure is kept"


@needs_nvcc
def test_a_library_appears_whole_and_for_every_user(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes look for it without the lock, other users share a container's cache."""
    compile_all = building._compile

    def interrupted(folder: str, scratch: Path) -> None:
        compile_all(folder, scratch)
        assert (scratch / f"{folder}.so").is_file()
        assert building.cached(folder) is None
        raise KeyboardInterrupt

    monkeypatch.setattr(building, "_compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build("topk")
    assert building.cached("topk") is None
    monkeypatch.setattr(building, "_compile", compile_all)
    mask = os.umask(0o022)
    try:
        library = build("topk")
    finally:
        os.umask(mask)
    for path in (library.path.parent, library.path):
        assert path.stat().st_mode & 0o055 == 0o055, path
    assert not list(building.cache_folder().glob("tmp*"))


# -- errors before anything slow starts ----------------------------------------------------------


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this a machine without CUDA; the folder stands for CUDA_HOME."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(building, "DEFAULT_HOME", tmp_path)
    functions = building.find_nvcc, building.nvcc_version
    for function in functions:
        function.cache_clear()
    yield tmp_path
    for function in functions:
        function.cache_clear()


def test_without_nvcc(elsewhere: Path) -> None:
    with pytest.raises(KernelError, match=r"install the CUDA toolkit 12\.5 or later"):
        build("topk")
    assert "nvcc" in (building.unavailable() or "")


@pytest.mark.parametrize(
    ("does", "error"),
    [
        ("echo 'Cuda compilation tools, release 11.8, V11.8.89'", "is CUDA 11.8; the kernels need"),
        ("echo 'something else'", "names no release"),
        ("exit 3", "does not run"),
    ],
)
def test_with_an_nvcc_that_cannot_serve(elsewhere: Path, does: str, error: str) -> None:
    nvcc = elsewhere / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\n{does}\n")
    nvcc.chmod(0o755)
    with pytest.raises(KernelError, match=error):
        build("topk")


@needs_nvcc
def test_a_cache_that_cannot_be_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(building.CACHE_VARIABLE, str(small / "below a file"))
    with pytest.raises(KernelError, match="set INDEXCACHE_KERNEL_CACHE to a folder"):
        build("topk")


def keep(folder: str, release: str, source: Path) -> Path:
    """Put a library into the cache as another machine's nvcc would have."""
    target = building.cache_folder() / f"{building.stem_of(folder)}{release}" / f"{folder}.so"
    target.parent.mkdir(parents=True)
    target.write_bytes(source.read_bytes())
    return target


@pytest.fixture(scope="module")
def empty_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a shared library that loads anywhere."""
    source = tmp_path_factory.mktemp("empty") / "empty.cpp"
    source.write_text('extern "C" int nothing() { return 0; }\n')
    target = source.with_suffix(".so")
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", target], check=True)
    return target


@pytest.fixture
def fresh_libraries() -> None:
    building.library.cache_clear()
    yield
    building.library.cache_clear()


def test_what_was_packed_is_found_on_a_machine_without_nvcc(
    empty_library: Path, elsewhere: Path, fresh_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {folder: keep(folder, "13.1.80", empty_library) for folder in FOLDERS}
    output_of("kernels", "build", "--archive", elsewhere / "kernels.tar.gz")
    node = elsewhere / "node"
    monkeypatch.setenv(building.CACHE_VARIABLE, str(node))
    assert building.cached("topk") is None
    shutil.unpack_archive(elsewhere / "kernels.tar.gz", node)
    for folder, path in paths.items():
        library = building.cached(folder)
        assert library is not None
        assert library.path.is_relative_to(node)
        assert library.path.read_bytes() == path.read_bytes()
        assert library.compiler == (13, 1, 80)
    assert building.library("topk")


@pytest.mark.parametrize("release", ["13.0.88", "13.1.80"])
def test_a_compiler_that_miscompiled_is_named(
    release: str,
    empty_library: Path,
    elsewhere: Path,
    fresh_libraries: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The command that builds names it, and so does the log of who loads the library."""
    for folder in FOLDERS:
        keep(folder, release, empty_library)
    result = CliRunner().invoke(app, ["kernels", "build"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    assert building.library("topk")
    for words in (result.output, caplog.text):
        assert (f"nvcc {release} has miscompiled" in words) == (release == "13.0.88")
        assert words.count("#1262") == (release == "13.0.88"), "where it was seen, once"


@pytest.mark.parametrize(
    ("version", "releases", "expected"),
    [
        ((13, 0, 88), ["13.0.88", "13.1.80"], "13.1.80"),  # unpacked beside a bad compiler's
        ((13, 5, 37), ["13.1.80"], "13.1.80"),
        ((13, 1, 80), ["13.1.80", "13.5.37"], "13.1.80"),
        ((12, 9, 86), ["13.1.80"], None),  # wants another CUDA than torch has there
        ((13, 5, 37), ["13.0.88"], None),
        ((13, 0, 88), ["13.0.88"], "13.0.88"),  # there is no other compiler, and it is named
        (None, ["13.1.80", "13.5.37"], "13.5.37"),
        (None, ["13.1.80", "13.0.88"], "13.1.80"),
    ],
)
def test_what_came_from_elsewhere_is_used_and_what_may_be_wrong_comes_last(
    version: tuple[int, ...] | None,
    releases: list[str],
    expected: str | None,
    empty_library: Path,
    elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An archive would otherwise be of no use on a machine that happens to have an nvcc."""
    if version is not None:
        monkeypatch.setattr(building, "nvcc_version", lambda: version)
    paths = {release: keep("topk", release, empty_library) for release in releases}
    library = building.cached("topk")
    assert (library and library.path) == (expected and paths[expected])


def test_what_was_built_ahead_needs_no_nvcc(
    empty_library: Path, elsewhere: Path, fresh_libraries: None
) -> None:
    """The container that serves has the libraries and no compiler."""
    older = {folder: keep(folder, "12.9", empty_library) for folder in FOLDERS}
    assert building.unavailable() is None
    assert build("topk").path == older["topk"]
    newer = {folder: keep(folder, "13.0", empty_library) for folder in FOLDERS}
    assert [build(folder).path for folder in FOLDERS] == list(newer.values())
    newer["indexer"].unlink()
    older["indexer"].unlink()
    assert "install the CUDA toolkit" in (building.unavailable() or "")


def test_libraries_of_other_sources_do_not_count(
    empty_library: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("topk", "13.0", empty_library)
    monkeypatch.setattr(building, "FLAGS", (*building.FLAGS, "-lineinfo"))
    with pytest.raises(KernelError, match="need nvcc"):
        build("topk")


def test_a_library_that_cannot_be_loaded_says_why(
    tmp_path: Path, elsewhere: Path, fresh_libraries: None
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("another CUDA's\n")
    for folder in FOLDERS:
        keep(folder, "13.0", broken)
    with pytest.raises(KernelError, match=r"topk.so cannot be loaded: .*major version torch has"):
        building.library("topk")
    assert "cannot be loaded" in (building.unavailable() or "")


@needs_nvcc
def test_the_own_nvcc_s_build_is_preferred(small: Path, empty_library: Path) -> None:
    keep("topk", "99.0", empty_library)
    library = build("topk")
    assert library.fresh
    assert building.cached("topk") == BuiltKernels(library.path, library.log, fresh=False)


def test_what_cannot_be_read_16_bytes_at_a_time_is_refused() -> None:
    with pytest.raises(KernelError, match="q must begin at a multiple of 16 bytes"):
        checks.require_aligned("op", q=torch.zeros(64, dtype=torch.uint8)[1:])


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(building.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert building.cache_folder() == Path("/some/cache/sglang-indexcache/kernels")
    monkeypatch.setenv(building.CACHE_VARIABLE, "/elsewhere")
    assert building.cache_folder() == Path("/elsewhere")
    assert os.environ[building.CACHE_VARIABLE] == "/elsewhere"


# -- the compiler's version ---------------------------------------------------------------------

PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Cuda compilation tools, release 12.8, V12.8.93
Build cuda_12.8.r12.8/compiler.35583870_0
"""


def test_the_full_version_is_read() -> None:
    assert building.read_version(PTXAS) == (12, 8, 93)
    assert building.read_version("release 13.0") is None, "a release says too little"
