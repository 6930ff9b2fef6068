"""The kernels' own device code on an emulated GPU (emulator/): barriers, phases, data.

A fibre a thread, in random order; TMA lands late, WGMMA is made when it is waited for. Inputs are
small integers, so every product and sum is exact and results are compared bit for bit, ties
included. What each kernel computes is held to the grid's cases in ``test_cuda_wrappers.py``, on the
same GPU; here are orders of execution, faults, and rows that the grid has not.

This is not a GPU: proxy fences and memory ordering are not modelled (csrc/README.md).
"""

import ctypes
import faulthandler
import os
import signal
from collections.abc import Sequence
from ctypes import Structure, byref, c_bool, c_char_p, c_int, c_int64, c_uint64
from ctypes import c_void_p as address
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels import build
from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.indexer import reference
from tests.kernels.cuda_host import EMULATOR, compiled, pointer
from tests.kernels.grid.cases import IndexerCase, indexer_inputs
from tests.kernels.test_cuda_select import KINDS, make_row, oracle

pytestmark = pytest.mark.csrc


def emulator_command(source: Path, target: Path) -> list[str]:
    """Return the command that compiles ``source`` for the emulated GPU."""
    try:
        toolkit = build.find_nvcc().resolve().parent.parent
    except KernelError:
        pytest.skip("the emulator needs the CUDA toolkit's headers")
    includes = [build.DEFAULT_HOME / "include", toolkit / "include"]
    root = build.source_folder()
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off"]
    paths = [EMULATOR, root, *(path for path in includes if path.is_dir())]
    return ["g++", *flags, *(f"-I{path}" for path in paths), str(source), "-o", str(target)]


@cache
def emulator() -> ctypes.CDLL:
    library = compiled(lambda target: emulator_command(EMULATOR / "kernels.cpp", target))
    for name in ("logits", "select", "topk", "pack", "attend"):
        getattr(library, f"emulate_{name}").restype = c_char_p
    return library


def run(name: str, *arguments: object) -> None:
    problem = getattr(emulator(), f"emulate_{name}")(*arguments).decode()
    assert problem == ""


# -- the indexer -------------------------------------------------------------------------------


class IndexerCall(Structure):
    _fields_ = (
        ("queries", address),
        ("pages", address),
        ("page_count", c_int),
        ("weights", address),
        ("visible", address),
        ("rows", c_int),
        ("query_starts", address),
        ("requests", c_int),
        ("rows_per_request", c_int),
        ("table", address),
        ("table_stride", c_int64),
        ("seed", c_uint64),
    )


def at(tensor: torch.Tensor | None) -> address | None:
    """Return where a tensor's data begins; None for none."""
    return None if tensor is None else address(tensor.data_ptr())


def call_of(batch: IndexerBatch, seed: int) -> IndexerCall:
    """Return the arguments of a launch whose threads run in the order of ``seed``."""
    assert all(part.is_contiguous() for part in (batch.q, batch.weights, batch.visible))
    table = batch.block_table
    pool = at(batch.pages), len(batch.pages)
    rows = at(batch.weights), at(batch.visible), len(batch.visible), at(batch.query_starts)
    requests = len(table), batch.rows_per_request, at(table), table.stride(0)
    return IndexerCall(at(batch.q), *pool, *rows, *requests, seed)


def drawn(
    random: np.random.Generator,
    heads: int,
    lens: Sequence[tuple[int, int]],
    *,
    padding: int = 0,
    decode: bool = False,
) -> IndexerBatch:
    """Draw requests of so many query rows and tokens, of small integers."""
    case = IndexerCase("drawn", heads, tuple(lens), fill="integers", padding=padding, decode=decode)
    generator = torch.Generator().manual_seed(int(random.integers(1 << 31)))
    return indexer_inputs(case, generator, torch.device("cpu"))


def new_counter() -> NDArray:
    """Return a counter of tiles that blocks have taken, as each launch expects and leaves it."""
    return np.zeros(1, dtype=np.uint32)


def select(
    batch: IndexerBatch,
    k: int,
    seed: int,
    *,
    blocks: int = 1,
    slow: int = -1,
    as_slots: bool = False,
    counter: NDArray | None = None,
) -> torch.Tensor:
    """Run the fused kernel in tiles of 8 rows; raise AssertionError with what went wrong.

    Args:
        slow: a block that gets to run only while the others wait or have ended; -1: none.
    """
    out = torch.full((len(batch.q), k), 7777777, dtype=torch.int32)
    sizes = batch.q.shape[1], 8, k, blocks, slow
    counter = new_counter() if counter is None else counter
    results = c_bool(as_slots), pointer(counter), at(out)
    run("select", byref(call_of(batch, seed)), *sizes, *results)
    return out


@pytest.mark.parametrize(
    ("blocks", "slow"), [(1, -1), (3, 0), (3, 2), (7, -1)], ids=["one", "first", "last", "many"]
)
def test_tiles_go_to_whoever_asks(blocks: int, slow: int, random: np.random.Generator) -> None:
    """Four tiles, the last of one row: for one block; for three, one of which is so slow that it
    finds none left; for seven. Each launch goes on with the counter as the one before left it."""
    batch = drawn(random, 8, [(9, 700), (0, 30), (13, 70), (3, 200)])
    expected, counter, tiles = reference.select(batch, 40, as_slots=True), new_counter(), 4
    for seed in range(3):
        out = select(batch, 40, seed, blocks=blocks, slow=slow, as_slots=True, counter=counter)
        assert torch.equal(out, expected)
        assert counter[0] == 0, "no question too many, none too few"
        fetches = [emulator().emulated_fetches(block) for block in range(blocks)]
        assert sum(fetches) == tiles + blocks, (
            "every tile is fetched once, and all learn of the end"
        )
        assert min(fetches) == 1 if blocks == 7 else slow < 0 or fetches[slow] == 1


def test_select_through_many_checks(random: np.random.Generator) -> None:
    """Long enough for the floors to rise several times."""
    batch = drawn(random, 32, [(4, 9500), (3, 2500)])
    assert torch.equal(select(batch, 32, 1), reference.select(batch, 32))


def test_select_where_every_logit_is_equal(random: np.random.Generator) -> None:
    """The lists fill up with ties and must be cut to exactly k."""
    batch = drawn(random, 8, [(2, 12_000)])
    batch.weights.zero_()
    assert torch.equal(select(batch, 40, 1), reference.select(batch, 40))


MBARRIERS = ("full", "empty", "scored", "queries_full", "queries_empty", "tile_full", "tile_empty")
MUTANTS = [
    *((fault, name) for fault in ("wait", "arrive") for name in MBARRIERS),
    ("pass", "order"),
    ("sync", "segment"),
    ("sync", "gate"),
]
"""Everything by which the roles of the fused kernel wait for each other. Without alternating it
would still be right, and slower."""


@pytest.mark.parametrize(("fault", "barrier"), MUTANTS)
def test_a_role_that_does_not_wait_is_found(fault: str, barrier: str) -> None:
    """A deadlock, a misused barrier or a wrong selection, in one of a dozen orders of execution."""
    random = np.random.default_rng(7)
    long = drawn(random, 8, [(9, 40), (3, 900), (8, 2100)])
    ties = drawn(random, 8, [(2, 16_500)])  # a list that must be cut, by all gate warps together
    ties.weights.zero_()
    batch, k = (ties, 40) if barrier == "gate" else (long, 50)
    expected = reference.select(batch, k)

    def goes_wrong(seed: int) -> bool:
        try:
            return not torch.equal(select(batch, k, seed), expected)
        except AssertionError:
            return True

    assert not goes_wrong(1)
    emulator().emulate_fault(fault.encode(), barrier.encode())
    try:
        assert any(goes_wrong(seed) for seed in range(1, 13))
    finally:
        emulator().emulate_fault(b"", b"")


# -- selection, packing ------------------------------------------------------------------------


def topk_rows(
    logits: NDArray,
    visible: NDArray,
    k: int,
    seed: int,
    *,
    cluster: int = 1,
    starts: NDArray | None = None,
    per_request: int = 1,
    table: NDArray | None = None,
) -> NDArray:
    """Run the top-k kernel over rows of float32; raise AssertionError with what went wrong."""
    assert logits.strides[1] == 4
    out = np.full((len(logits), k), 7777777, dtype=np.int32)
    rows = (
        address(logits.ctypes.data),
        c_int64(logits.strides[0] // 4),
        pointer(visible),
        len(logits),
    )
    requests = (
        None if starts is None else pointer(starts),
        0 if starts is None else len(starts) - 1,
        per_request,
        None if table is None else pointer(table),
        c_int64(0 if table is None else table.shape[1]),
    )
    run("topk", *rows, k, *requests, cluster, c_uint64(seed), pointer(out))
    return out


def topk_row(row: NDArray, k: int, seed: int, cluster: int = 1) -> NDArray:
    return topk_rows(row[None], np.int32([len(row)]), k, seed, cluster=cluster)[0]


@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_topk(kind: str, cluster: int, random: np.random.Generator) -> None:
    """Rows of any length that begin anywhere; shares that are empty, one chunk, or several."""
    for least, most in ((1, 40), (40, 3000), (3000, 40_000)):
        n, k = int(random.integers(least, most)), int(random.integers(1, min(most, 2049)))
        misplaced = int(random.integers(4))
        row = make_row(kind, n + misplaced, random)[misplaced:]
        np.testing.assert_array_equal(topk_row(row, k, n, cluster), oracle(row, k))


@pytest.mark.parametrize("kind", ["normal", "equal", "ascending", "one bin"])
@pytest.mark.parametrize("n", [2047, 2048, 2049, 131_073, 300_001])
def test_topk_of_long_rows(kind: str, n: int, random: np.random.Generator) -> None:
    """Lists that overflow are cut, over and over where a row ascends."""
    row = make_row(kind, n, random)
    np.testing.assert_array_equal(topk_row(row, 2048, n, cluster=2), oracle(row, 2048))


def test_topk_where_one_share_has_it_all(random: np.random.Generator) -> None:
    """The best lie next to each other, at the beginning, the end, or where two shares meet."""
    for first in (0, 4096 - 1000, 16_384 - 2000):
        row = random.standard_normal(16_384).astype(np.float32)
        row[first : first + 2000] += 20
        np.testing.assert_array_equal(topk_row(row, 1999, first, cluster=4), oracle(row, 1999))


def test_topk_lists_few_of_a_random_row(random: np.random.Generator) -> None:
    """The bound is worth its name: not much over k is listed of a row that the blocks hold."""
    row = random.standard_normal(7 * 256 * 8).astype(np.float32)
    topk_row(row, 256, 1, cluster=8)
    assert 256 <= emulator().emulated_listed() < 4 * 256, "of 14336; 400 on average"


def test_topk_of_nan_ends_in_bounds(random: np.random.Generator) -> None:
    row = make_row("normal", 20_000, random)
    row[::7] = np.nan
    numbers = np.where(np.isnan(row), -np.inf, row)
    np.testing.assert_array_equal(topk_row(row, 2048, 3, cluster=4), oracle(numbers, 2048))
    row[100:] = np.nan
    few = topk_row(row, 2048, 3, cluster=4)
    assert ((few >= -1) & (few < len(row))).all()
    assert (np.unique(few[few >= 0]) == few[few >= 0]).all()


RUNS = 25
"""Of a mutant and a row, each in an order of its own, before it counts as not found."""


def test_topk_needs_each_of_its_barriers() -> None:
    """Mutants: the kernel without one of its barriers.

    Two blocks with a share of one chunk each, and a block whose list overflows and whose selection
    is in two windows. Each mutant is caught in one of some runs, always the same ones: by what it
    selects, by how much it lists, by a misuse of memory, or by threads that wait for ever.
    """
    random = np.random.default_rng(5)
    low = -np.exp(10 * make_row("normal", 2500, random))  # the bound is found in two steps
    ascending = [make_row("ascending", n, random) for n in (9000, 4000)]
    cases = [(low, 60, 2), (ascending[0], 1600, 1), (ascending[1], 1700, 1)]
    emulator().emulate_without_barrier(-1)
    expected = [listed_rightly(row, k, 0, cluster) for row, k, cluster in cases]
    assert None not in expected
    barriers = range(emulator().emulated_barriers())
    assert len(barriers) > 20

    def passes_without(barrier: int) -> bool:
        """Run a fork without ``barrier``, which may well crash; return whether it passes."""
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # a crash here is a mutant caught
            signal.alarm(20)  # a mutant may count for ever
            emulator().emulate_without_barrier(barrier)
            equal = all(
                listed_rightly(row, k, seed, cluster) == few
                for (row, k, cluster), few in zip(cases, expected, strict=True)
                for seed in range(RUNS)
            )
            os._exit(0 if equal else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    # The first and the last barrier of DeviceBlock.keep are for its other user.
    assert len([barrier for barrier in barriers if passes_without(barrier)]) <= 2


def listed_rightly(row: NDArray, k: int, seed: int, cluster: int) -> int | None:
    """Return the number of entries listed if the selection is right, else None."""
    try:
        right = bool((topk_row(row, k, seed, cluster) == oracle(row, k)).all())
    except AssertionError:
        return None
    return emulator().emulated_listed() if right else None
