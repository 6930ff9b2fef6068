"""The kernels' own device code on an emulated GPU (emulator/): barriers, phases, data.

A fibre a thread, in random order; TMA lands late, WGMMA is made when it is waited for. Inputs are
small integers, so every product and sum is exact and results are compared bit for bit, ties
included. Memory that no row may see holds NaN; table entries that nobody may follow lead nowhere.
What each kernel computes is held to the grid's cases in ``test_cuda_wrappers.py``, on the same GPU;
here are orders of execution, faults, and rows that the grid has not.

This is not a GPU: proxy fences and memory ordering are not modelled (csrc/README.md).
"""

import ctypes
import faulthandler
import os
import signal
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
from tests.kernels.cuda_host import EMULATOR, compiled, pointer
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


class Batch:
    """Requests over a paged pool, and the logits that they must have."""

    def __init__(
        self,
        random: np.random.Generator,
        heads: int,
        query_lens: list[int],
        key_lens: list[int],
        padding: int = 0,
        decode: int = 0,
    ) -> None:
        counts = [-(-keys // 64) for keys in key_lens]
        pages = sum(counts) + 2
        order = random.permutation(pages).astype(np.int32)
        self.table = np.full((len(key_lens), max(counts, default=0) + 1), 1 << 24, dtype=np.int32)
        raw = np.full((pages, 8448), 0xFF, dtype=np.uint8)  # NaN, in e4m3 and float32
        self.rows = sum(query_lens) + padding
        self.q = self.integers(random, self.rows, heads, 128)
        self.weights = random.integers(-4, 5, (self.rows, heads)).astype(np.float32) / 8
        self.starts = np.cumsum([0, *query_lens]).astype(np.int32)
        self.visible = np.full(self.rows, 77, dtype=np.int32)  # padding may say anything
        self.logits: list[NDArray] = []
        self.slots: list[NDArray] = []
        first = 0
        for b, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
            mine = order[first : first + counts[b]]
            first += counts[b]
            self.table[b, : counts[b]] = mine
            slots = mine.repeat(64)[:keys] * 64 + np.arange(keys) % 64
            key = self.integers(random, keys, 128)
            scale = 2.0 ** random.integers(-2, 3, keys).astype(np.float32)
            for s, slot in enumerate(slots):
                page, offset = divmod(int(slot), 64)
                raw[page, offset * 128 : offset * 128 + 128] = self.bytes(key[s])
                at = 8192 + offset * 4
                raw[page, at : at + 4] = np.frombuffer(scale[s].tobytes(), dtype=np.uint8)
            for row in range(int(self.starts[b]), int(self.starts[b + 1])):
                visible = keys - queries + 1 + row - int(self.starts[b])
                self.visible[row] = visible
                dots = np.maximum(self.q[row] @ key[:visible].T, 0)
                self.logits.append((self.weights[row] @ dots) * scale[:visible])
                self.slots.append(slots)
        self.pages = raw
        self.q_bytes = self.bytes(self.q)
        self.call = IndexerCall(
            pointer(self.q_bytes),
            pointer(self.pages),
            pages,
            pointer(self.weights),
            pointer(self.visible),
            self.rows,
            None if decode else pointer(self.starts),
            len(key_lens),
            max(decode, 1),
            pointer(self.table),
            self.table.shape[1],
            int(random.integers(1 << 40)),
        )

    @staticmethod
    def integers(random: np.random.Generator, *shape: int) -> NDArray:
        """Mostly zeros, so that logits repeat and many are exactly zero."""
        values = random.integers(-2, 3, shape)
        return (values * (random.random(shape) < 0.2)).astype(np.float32)

    @staticmethod
    def bytes(values: NDArray) -> NDArray:
        e4m3 = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
        return np.ascontiguousarray(e4m3.view(torch.uint8).numpy())

    def selected(self, k: int, *, as_slots: bool) -> NDArray:
        selection = np.full((self.rows, k), -1, dtype=np.int32)
        for row, logits in enumerate(self.logits):
            positions = oracle(logits, k)
            valid = positions >= 0
            slots = self.slots[row]
            selection[row, valid] = slots[positions[valid]] if as_slots else positions[valid]
        return selection


def new_counter() -> NDArray:
    """Return a counter of tiles that blocks have taken, as each launch expects and leaves it."""
    return np.zeros(1, dtype=np.uint32)


def select(
    batch: Batch,
    tile_rows: int,
    k: int,
    blocks: int,
    *,
    slow: int = -1,
    as_slots: bool = False,
    counter: NDArray | None = None,
) -> NDArray:
    """Run the fused kernel over a batch; raise AssertionError with what went wrong.

    Args:
        slow: a block that gets to run only while the others wait or have ended; -1: none.
    """
    out = np.full((batch.rows, k), 7777777, dtype=np.int32)
    sizes = batch.q.shape[1], tile_rows, k, blocks, slow
    counter = new_counter() if counter is None else counter
    run("select", byref(batch.call), *sizes, c_bool(as_slots), pointer(counter), pointer(out))
    return out


@pytest.mark.parametrize(
    ("blocks", "slow"), [(1, -1), (3, 0), (3, 2), (7, -1)], ids=["one", "first", "last", "many"]
)
def test_tiles_go_to_whoever_asks(blocks: int, slow: int, random: np.random.Generator) -> None:
    """Four tiles, the last of one row: for one block; for three, one of which is so slow that it
    finds none left; for seven. Each launch goes on with the counter as the one before left it."""
    batch = Batch(random, 8, [9, 0, 13, 3], [700, 30, 70, 200])
    expected, counter, tiles = batch.selected(40, as_slots=True), new_counter(), 4
    for _ in range(3):
        batch.call.seed = int(random.integers(1 << 40))
        out = select(batch, 8, 40, blocks, slow=slow, as_slots=True, counter=counter)
        np.testing.assert_array_equal(out, expected)
        assert counter[0] == 0, "no question too many, none too few"
        fetches = [emulator().emulated_fetches(block) for block in range(blocks)]
        assert sum(fetches) == tiles + blocks, (
            "every tile is fetched once, and all learn of the end"
        )
        assert min(fetches) == 1 if blocks == 7 else slow < 0 or fetches[slow] == 1


def test_select_through_many_checks(random: np.random.Generator) -> None:
    """Long enough for the floors to rise several times."""
    batch = Batch(random, 32, [4, 3], [9500, 2500])
    out = select(batch, 8, 32, 1)
    np.testing.assert_array_equal(out, batch.selected(32, as_slots=False))


def test_select_where_every_logit_is_equal(random: np.random.Generator) -> None:
    """The lists fill up with ties and must be cut to exactly k."""
    batch = Batch(random, 8, [2], [12_000])
    batch.weights[:] = 0
    batch.logits = [logits * 0 for logits in batch.logits]
    out = select(batch, 8, 40, 1)
    np.testing.assert_array_equal(out, batch.selected(40, as_slots=False))


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
    long = Batch(random, 8, [9, 3, 8], [40, 900, 2100])
    ties = Batch(random, 8, [2], [16_500])  # a list that must be cut, by all gate warps together
    ties.weights[:] = 0
    ties.logits = [logits * 0 for logits in ties.logits]
    batch, k = (ties, 40) if barrier == "gate" else (long, 50)
    expected = batch.selected(k, as_slots=False)

    def goes_wrong(seed: int) -> bool:
        batch.call.seed = seed
        try:
            return not np.array_equal(select(batch, 8, k, 1), expected)
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


# -- sparse MLA --------------------------------------------------------------------------------


def attention(
    q: torch.Tensor, latent: torch.Tensor, slots: NDArray, scale: float, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in float64, a row at a time."""
    rows, heads, _ = q.shape
    out = torch.zeros(rows, heads, 512, dtype=torch.float64)
    lse = torch.full((rows, heads), float("-inf"), dtype=torch.float64)
    for row in range(rows):
        rows_of = latent[slots[row][slots[row] >= 0]].double()
        if len(rows_of) == 0:
            continue
        scores = q[row].double() @ rows_of.T * scale
        lse[row] = scores.logsumexp(-1)
        total = lse[row] if sinks is None else torch.logaddexp(lse[row], sinks.double())
        out[row] = (scores - total[:, None]).exp() @ rows_of[:, :512]
    return out, lse


def fp8_cache(latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 656-byte rows, and the bfloat16 rows that they mean."""
    groups = latent[:, :512].float().unflatten(1, (4, 128))
    scales = groups.abs().amax(-1) / 448
    values = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    exact = (values.float() * scales[..., None]).bfloat16().flatten(1)
    rotary = latent[:, 512:].contiguous()
    parts = [values.flatten(1), scales.contiguous(), rotary]
    rows = torch.cat([part.view(torch.uint8) for part in parts], 1)
    return rows.contiguous(), torch.cat([exact, rotary], 1)
