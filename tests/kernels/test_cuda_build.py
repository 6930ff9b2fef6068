"""Every CUDA kernel compiles for sm_90a into what the design says; needs nvcc, no GPU.

These are checks of the compiler's output. They say nothing about a run: none has been made.
"""

import os
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.kernels import yardstick
from sglang_indexcache.cli import app
from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import build as building
from sglang_indexcache.kernels import cuda
from sglang_indexcache.kernels.build import FOLDERS, BuiltKernels, build
from sglang_indexcache.kernels.contract import INDEXER_HEADS
from sglang_indexcache.kernels.indexer.cuda import select_rows
from tests.kernels import disassembly as report

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
Code = list[tuple[int, str]]
SPILL_BUDGET = 0
"""Bytes, every kernel: all of them keep their accumulators in registers."""


def available() -> bool:
    try:
        building.nvcc_version()
    except KernelError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not available(), reason="no usable nvcc")


@pytest.fixture(scope="module")
def libraries() -> dict[str, BuiltKernels]:
    return {folder: build(folder) for folder in FOLDERS}


@pytest.fixture(scope="module")
def code(libraries: dict[str, BuiltKernels]) -> dict[str, Code]:
    kernels: dict[str, Code] = {}
    for library in libraries.values():
        kernels |= report.disassemble(library.path)
    return kernels


@pytest.fixture(scope="module")
def sass(code: dict[str, Code]) -> dict[str, Counter[str]]:
    return {kernel: report.instructions(lines) for kernel, lines in code.items()}


def count(counter: Counter[str], start: str) -> int:
    return sum(number for name, number in counter.items() if name.startswith(start))


# -- what the compiler made ----------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_instantiation_compiles_without_spills(
    folder: str, libraries: dict[str, BuiltKernels]
) -> None:
    log = libraries[folder].log.read_text()
    kernels = report.usage(log)
    assert {kernel.kernel for kernel in kernels} == KERNELS[folder]
    assert report.complaints(log) == []
    for kernel in kernels:
        assert kernel.spills <= SPILL_BUDGET, kernel
        assert kernel.stack == 0, f"an array is indexed at run time: {kernel}"


@needs_nvcc
def test_small_tiles_leave_room_for_two_blocks(libraries: dict[str, BuiltKernels]) -> None:
    """Decode is bound by memory: 2 blocks of 384 threads share 65536 registers."""
    for kernel in report.usage(libraries["indexer"].log.read_text()):
        if kernel.kernel.startswith("logits") and INDEXER[kernel.kernel] <= 64:
            assert 2 * 384 * kernel.registers <= 65536, kernel


@needs_nvcc
@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_in_local_memory(folder: str, sass: dict[str, Counter[str]]) -> None:
    for kernel in KERNELS[folder]:
        assert sum(sass[kernel].values()) > 100, "the disassembly was not understood"
        assert count(sass[kernel], "LDL") == 0
        assert count(sass[kernel], "STL") == 0


@needs_nvcc
@pytest.mark.parametrize(("kernel", "columns"), INDEXER.items())
def test_indexer_uses_fp8_wgmma_and_tma(
    kernel: str, columns: int, sass: dict[str, Counter[str]]
) -> None:
    code = sass[kernel]
    shape = f"QGMMA.64x{columns}x32.F32.E4M3.E4M3"
    assert count(code, shape) == count(code, "QGMMA") == 4, "four K steps of 32"
    assert count(code, "HMMA") == count(code, "HGMMA") == 0
    assert count(code, "UTMALDG.2D") >= 1, "queries"
    assert count(code, "UTMALDG.3D") >= 1, "keys from their pages"
    assert count(code, "UBLKCP") >= 1, "scales"
    asks = kernel.startswith("select")
    assert count(code, "ATOMG.E.INC") == count(code, "ATOMG") == asks, "for a tile"
    # 96 or 192 registers of accumulators and weights; a thread has 96 of 640, 168 of 384.
    wide = columns == (128 if kernel.startswith("select") else 256)
    assert (count(code, "USETMAXREG") == 2) == wide, "registers move to the math warpgroups"


@needs_nvcc
def test_topk_begins_while_the_logits_are_made(code: dict[str, Code]) -> None:
    """It waits for them whatever the row is, before it reads them or writes anything; and every
    logits kernel lets it begin."""
    lines = [line for _, line in code["topk_kernel"]]
    wait = next(i for i, line in enumerate(lines) if line.startswith("ACQBULK"))
    assert not any(
        re.search(r"\b(LDG\.E\.128|LD\.|STG|STS|BAR|EXIT)", line) for line in lines[:wait]
    )
    for heads, rows in LOGITS:
        kernel = f"logits_kernel<{heads}, {rows}>"
        assert any("PREEXIT" in line for _, line in code[kernel]), kernel


@needs_nvcc
def test_topk_keeps_a_chunk_of_the_row_in_flight(sass: dict[str, Counter[str]]) -> None:
    counts = sass["topk_kernel"]
    assert count(counts, "LDG.E.128") >= 2 * 7, "seven vectors a thread, now and for the next chunk"
    assert count(counts, "UCGABAR_WAIT") == 3, "bound, digits, end"


@needs_nvcc
@pytest.mark.parametrize("kernel", ["attend_kernel<0>", "attend_kernel<1>"])
def test_sparse_mla_uses_wgmma(kernel: str, sass: dict[str, Counter[str]]) -> None:
    code = sass[kernel]
    assert count(code, "HGMMA.64x64x16.F32.BF16") == 36, "576 / 16 steps of scores"
    assert count(code, "HGMMA.64x256x16.F32.BF16") == 4, "64 / 16 steps of output"
    assert count(code, "HGMMA") == 40
    assert count(code, "HMMA") == 0
    assert count(code, "USETMAXREG") == 2
    assert count(code, "UCGABAR") >= 4, "two barriers of the cluster"
    fp8 = kernel == "attend_kernel<1>"
    unpacked = sum(number for name, number in code.items() if "E4M3.UNPACK" in name)
    assert (unpacked > 0) == fp8
    loads = 6 * 4 if fp8 else 72
    assert count(code, "LDGSTS") >= loads, "all of a stage's rows are under way at once"
    assert count(code, "MUFU.EX2") >= 32, "of 32 scores each, without a case for subnormal results"


def registers(line: str) -> set[int]:
    """Numbers of the general registers that an instruction names; of wide ones the rest, too."""
    wide = 4 if ".128" in line else 2 if ".64" in line or ".WIDE" in line else 1
    return {int(r) + i for r in re.findall(r"\bR(\d+)\b", line) for i in range(wide)}


def accumulators(line: str) -> set[int]:
    """Return those that a WGMMA writes: N / 2 from the first on."""
    match = re.search(r"GMMA\.64x(\d+)x\d+\S*\s+R(\d+)", line)
    return set(range(int(match[2]), int(match[2]) + int(match[1]) // 2)) if match else set()


def flow(code: Code) -> list[list[int]]:
    """Return for each instruction the indices of those that may run right after it."""
    at = {address: index for index, (address, _) in enumerate(code)}
    successors: list[list[int]] = []
    for index, (_, line) in enumerate(code):
        jump = re.search(r"\b(?:BRA|CALL|BSSY)\S*\s.*?(0x[0-9a-f]+)$", line)
        goes = [] if jump is None else [at[int(jump[1], 16)]]
        ends = re.match(r"BRA 0x|EXIT|RET", line) or index + 1 == len(code)
        successors.append(goes if ends else [*goes, index + 1])
    return successors


def reachable(code: Code, start: int) -> set[int]:
    """Indices of the instructions that can run after the one at index ``start``."""
    following = flow(code)
    visited: set[int] = set()
    todo = list(following[start])
    while todo:
        index = todo.pop()
        if index not in visited:
            visited.add(index)
            todo += following[index]
    return visited


@needs_nvcc
@pytest.mark.parametrize("kernel", [*INDEXER, "attend_kernel<0>", "attend_kernel<1>"])
def test_accumulators_rest_while_wgmma_is_in_flight(kernel: str, code: dict[str, Code]) -> None:
    """No other instruction names them between a fence and the wait, and all lanes go together."""
    lines = [line for _, line in code[kernel]]
    fences = [index for index, line in enumerate(lines) if "WARPGROUP.ARRIVE" in line]
    assert len(fences) == (2 if kernel.startswith("attend") else 1)
    for fence in fences:
        wait = next(i for i in range(fence, len(lines)) if "WARPGROUP.DEPBAR" in lines[i])
        inside = lines[fence:wait]
        busy = set().union(*map(accumulators, inside))
        assert len(busy) >= 16
        other_lines = [line for line in inside if "GMMA" not in line]
        assert not [line for line in other_lines if registers(line) & busy]
        assert lanes_are_together(code[kernel], fence)


def before(code: Code, fence: int) -> set[int]:
    """Indices of what may run between a warp's last synchronisation and ``fence``, on any path."""
    comes_from = defaultdict(set)
    for index, following in enumerate(flow(code)):
        for place in following:
            comes_from[place].add(index)
    sources: set[int] = set()
    todo = list(comes_from[fence])
    while todo:
        line = todo.pop()
        if line not in sources and not re.search(r"WARPSYNC\.ALL|BAR\.SYNC", code[line][1]):
            sources.add(line)
            todo += comes_from[line]
    return sources


def lanes_are_together(code: Code, fence: int) -> bool:
    """Whether nothing parts a warp's lanes between their last synchronisation and ``fence``.

    ptxas opens a region by BSSY before a branch that may part them and closes it by BSYNC. A branch
    outside such a region is one that it has proved to go the same way in all lanes, and then it
    makes nothing even of an explicit bar.warp.sync.
    """
    region = sorted(before(code, fence))
    lines = {index: code[index][1] for index in region}
    if 0 in region or any(re.search(r"BREAK|BRA\.DIV|COLLECTIVE", x) for x in lines.values()):
        return False
    branches = [index for index, line in lines.items() if "BRA" in line]
    opened = [re.search(r"BSSY (B\d+)", lines[i]) for i in region if any(b > i for b in branches)]
    closed = [re.search(r"BSYNC (B\d+)", line) for line in lines.values()]
    return {match[1] for match in opened if match} <= {match[1] for match in closed if match}


def test_a_warp_that_was_not_synchronised_is_noticed() -> None:
    """A loop whose lanes may part, with and without what brings them together again."""

    def loop(*body: str) -> Code:
        lines = ["BAR.SYNC 0x0", "NOP", *body, "WARPGROUP.ARRIVE", "@P1 BRA 0x10", "EXIT"]
        return [(16 * i, line) for i, line in enumerate(lines)]

    parts = ("BSSY B0, 0x50", "@P0 BRA 0x50", "NOP")
    assert lanes_are_together(loop(), 2)
    assert lanes_are_together(loop(*parts, "BSYNC B0"), 6)
    assert not lanes_are_together(loop(*parts, "NOP"), 6)
    assert lanes_are_together(loop(*parts, "NOP", "WARPSYNC.ALL"), 7)
    assert not lanes_are_together(loop("BRA.DIV UR5, 0x30"), 3)
    assert not lanes_are_together([(0, "NOP"), (16, "WARPGROUP.ARRIVE"), (32, "EXIT")], 1)


@needs_nvcc
@pytest.mark.parametrize(
    ("kernel", "limits"),
    [
        ("select_kernel<32, 8>", (0x40, 0x68)),
        ("select_kernel<64, 4>", (0x40, 0x68)),
        ("attend_kernel<0>", (0x58, 0xD0)),
        ("attend_kernel<1>", (0x58, 0xD0)),
    ],
)
def test_roles_stay_within_their_registers(
    kernel: str, limits: tuple[int, int], code: dict[str, Code]
) -> None:
    """The fewer are the limit where attention's roles meet again, to combine."""
    assert most_registers(code[kernel]) == dict.fromkeys(limits, True)


def most_registers(code: Code) -> dict[int, bool]:
    """Return for every setmaxnreg whether all that can run after it uses no register beyond."""
    fits = {}
    for index, (_, line) in enumerate(code):
        limit = re.search(r"USETMAXREG.* (0x[0-9a-f]+)$", line)
        if limit:
            used = [
                max(registers(code[i][1]) | accumulators(code[i][1]), default=0)
                for i in reachable(code, index)
            ]
            assert len(used) > 500, "the walk ended early"
            fits[int(limit[1], 16)] = max(used) < int(limit[1], 16)
    return fits


LOOPS = {
    "page": {"QGMMA": 4},
    "gate": {"LDS.128": 2, "ATOMS.POPC": 1},
    "step": {"HGMMA": 40},
    "gather": {"LDGSTS": 72},
    "conversion": {"F2FP": 100, "LDGSTS": 16},
}
"""What a hot loop must hold: so it is found, wherever it lies."""


def print_in(code: Code, part: str) -> str:
    """Return the fingerprint of a loop; for "upkeep" of all but the page loop and the gate's."""
    if part != "upkeep":
        return report.fingerprint(report.innermost(code, LOOPS[part]))
    hot = {line for loop in ("page", "gate") for line in report.innermost(code, LOOPS[loop])}
    return report.fingerprint([line for line in code if line not in hot], values=True)


@needs_nvcc
@pytest.mark.parametrize(("kernel", "loop"), yardstick.COUNTED)
def test_the_yardstick_counts_the_loops_of_today(
    kernel: str, loop: str, libraries: dict[str, BuiltKernels], code: dict[str, Code]
) -> None:
    if libraries["indexer"].compiler != yardstick.COUNTED_OF:
        pytest.skip("another nvcc makes other loops")
    assert print_in(code[kernel], loop) == yardstick.COUNTED[kernel, loop], (
        "this code is not that whose clocks benchmarks/kernels/yardstick.py holds: count "
        "them again as is said there, and run it with --publish"
    )


def test_a_changed_loop_has_another_fingerprint() -> None:
    """Registers and addresses may differ; an instruction, or two in another order, may not."""

    def loop(*body: str, start: int = 16) -> Code:
        lines = ["NOP", *body, f"@P0 BRA {hex(start)}", "EXIT"]
        return [(16 * at, line) for at, line in enumerate(lines)]

    def print_of(code: Code) -> str:
        return report.fingerprint(report.innermost(code, {"QGMMA": 1}))

    fingerprint = print_of(loop("FADD R0, R1, R2", "QGMMA.64x8 R4", "FMUL R3, R3, R3"))
    assert fingerprint.startswith("4, ")
    assert print_of(loop("FADD R7, R8, R2", "@!P1 QGMMA.64x8 R9", "FMUL R1, R1, R3")) == fingerprint
    assert print_of(loop("FMUL R3, R3, R3", "QGMMA.64x8 R4", "FADD R0, R1, R2")) != fingerprint
    assert (
        print_of(loop("FADD R0, R1, R2", "QGMMA.64x8 R4", "NOP", "FMUL R3, R3, R3")) != fingerprint
    )
    outer = [*loop("QGMMA.64x8 R4")[:-1], (48, "NOP"), (64, "@P1 BRA 0x0"), (80, "EXIT")]
    assert report.innermost(outer, {"QGMMA": 1}) == outer[1:3]
    with pytest.raises(KernelError, match="no loop holds"):
        report.innermost(outer, {"HGMMA": 1})


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
    topk, indexer, mla = (cuda.library(folder) for folder in FOLDERS)
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
    mla = cuda.library("sparse_mla")
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
    result = CliRunner().invoke(app, ["kernels", "build"])
    assert result.exit_code == 0, result.output
    for folder in FOLDERS:
        assert f"{folder}: in the cache" in result.output


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
    assert "nvcc" in (cuda.unavailable() or "")


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
    cuda.library.cache_clear()
    yield
    cuda.library.cache_clear()


def test_what_was_packed_is_found_on_a_machine_without_nvcc(
    empty_library: Path, elsewhere: Path, fresh_libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {folder: keep(folder, "13.1.80", empty_library) for folder in FOLDERS}
    libraries = [
        BuiltKernels(path, path.parent / "build.log", fresh=True) for path in paths.values()
    ]
    building.pack(elsewhere / "kernels.tar.gz", libraries)
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
    assert cuda.library("topk")


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
    assert cuda.library("topk")
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
    assert cuda.unavailable() is None
    assert build("topk").path == older["topk"]
    newer = {folder: keep(folder, "13.0", empty_library) for folder in FOLDERS}
    assert [build(folder).path for folder in FOLDERS] == list(newer.values())
    newer["indexer"].unlink()
    older["indexer"].unlink()
    assert "install the CUDA toolkit" in (cuda.unavailable() or "")


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
        cuda.library("topk")
    assert "cannot be loaded" in (cuda.unavailable() or "")


@needs_nvcc
def test_the_own_nvcc_s_build_is_preferred(small: Path, empty_library: Path) -> None:
    keep("topk", "99.0", empty_library)
    library = build("topk")
    assert library.fresh
    assert building.cached("topk") == BuiltKernels(library.path, library.log, fresh=False)


def test_what_cannot_be_read_16_bytes_at_a_time_is_refused() -> None:
    with pytest.raises(KernelError, match="q must begin at a multiple of 16 bytes"):
        cuda.require_aligned("op", q=torch.zeros(64, dtype=torch.uint8)[1:])


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(building.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
    assert building.cache_folder() == Path("/some/cache/sglang-indexcache/kernels")
    monkeypatch.setenv(building.CACHE_VARIABLE, "/elsewhere")
    assert building.cache_folder() == Path("/elsewhere")
    assert os.environ[building.CACHE_VARIABLE] == "/elsewhere"


def test_names_are_readable() -> None:
    names = {
        "_ZN10indexcache7indexer13select_kernelILi32ELi8EEEv14CU": "select_kernel<32, 8>",
        "_ZN10indexcache10sparse_mla13attend_kernelILb1EEEvNS0_6ParamsE": "attend_kernel<1>",
        "_ZN10indexcache4topk11topk_kernelENS0_6ParamsE": "topk_kernel",
    }
    for symbol, name in names.items():
        assert report.readable(symbol) == name


# -- the compiler's version ---------------------------------------------------------------------

PTXAS = """ptxas: NVIDIA (R) Ptx optimizing assembler
Cuda compilation tools, release 12.8, V12.8.93
Build cuda_12.8.r12.8/compiler.35583870_0
"""


def test_the_full_version_is_read() -> None:
    assert building.read_version(PTXAS) == (12, 8, 93)
    assert building.read_version("release 13.0") is None, "a release says too little"
