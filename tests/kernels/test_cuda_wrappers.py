"""The Python side of the CUDA kernels, with the emulated GPU in place of the libraries.

Which launch is chosen, what is sliced, flattened and handed over, and what comes back, against the
references. The "GPU" has two multiprocessors, and a workspace that forces several launches. Each
launch runs its threads in another order, so that calls which repeat must give the same bits in any.
"""

import itertools
from ctypes import byref, c_bool, c_float, c_int64, c_uint64

import numpy as np
import pytest
import torch

from sglang_indexcache.kernels.contract import IndexerBatch
from sglang_indexcache.kernels.indexer import cuda as indexer
from sglang_indexcache.kernels.indexer import reference
from sglang_indexcache.kernels.sparse_mla import cuda as sparse_mla
from sglang_indexcache.kernels.sparse_mla import reference as mla_reference
from tests.kernels.grid import cases, suite
from tests.kernels.test_cuda_emulated import IndexerCall, at, call_of, drawn, run

pytestmark = pytest.mark.csrc

SMS = 2
ORDERS = itertools.count(1)
"""Seeds of the orders in which threads run."""


def launch(q, weights, pages, table, starts, per_request, visible) -> IndexerCall:
    """Return the call of what a library's export was given."""
    batch = IndexerBatch(q, weights, pages, table, visible, starts)
    assert starts is not None or batch.rows_per_request == per_request
    return call_of(batch, next(ORDERS))


def run_topk(logits, visible, starts, per_request, table, out) -> None:
    """Run on clusters of two blocks, each of which gets a share of rows of 200 logits already."""
    rows = at(logits), c_int64(logits.stride(0)), at(visible), len(out), out.shape[1]
    count = 0 if starts is None else len(starts) - 1
    stride = 0 if table is None else table.stride(0)
    requests = at(starts), count, per_request, at(table), c_int64(stride)
    run("topk", *rows, *requests, 2, c_uint64(next(ORDERS)), at(out))


class Emulated:
    """The exports of csrc/*/exports.cu and topk.cu; counts the calls of each."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def indexer_logits(self, q, weights, pages, table, starts, per_request, visible, out) -> None:
        self.calls.append("indexer_logits")
        call = launch(q, weights, pages, table, starts, per_request, visible)
        rows = 4 if starts is not None else min(per_request, 4)
        tile = {1: 1, 2: 2}.get(rows, 4) if q.shape[1] >= 32 else 4
        run("logits", byref(call), q.shape[1], tile, rows, 2, at(out), c_int64(out.stride(0)))

    def indexer_select(
        self, q, weights, pages, table, starts, visible, slots, lists, counter, out
    ) -> None:
        self.calls.append("indexer_select")
        assert counter.tolist() == [0]
        assert lists.shape[1:] == (indexer.select_rows(q.shape[1]), indexer.LIST_CAPACITY)
        call = launch(q, weights, pages, table, starts, 1, visible)
        tile, k, blocks = lists.shape[1], out.shape[1], lists.shape[0]
        results = c_bool(slots), at(counter), at(out)
        run("select", byref(call), q.shape[1], tile, k, blocks, -1, *results)

    def topk(self, logits, visible, out) -> None:
        self.calls.append("topk")
        run_topk(logits, visible, None, 1, None, out)

    def topk_of_requests(self, logits, visible, starts, per_request, table, out) -> None:
        self.calls.append("topk_of_requests")
        run_topk(logits, visible, starts, per_request, table, out)

    def sparse_mla_pack(self, slots, per_tile, packed, masks, counts) -> None:
        self.calls.append("sparse_mla_pack")
        for tile in range(len(counts)):
            slots_of_tile = slots[tile * per_tile : (tile + 1) * per_tile]
            assert slots_of_tile.is_contiguous()
            count = counts[tile : tile + 1]
            rows, k = slots_of_tile.shape
            targets = at(packed[tile]), at(masks[tile]), at(count)
            run("pack", at(slots_of_tile), rows, k, c_uint64(next(ORDERS)), *targets)

    def sparse_mla_attend(
        self, q, cache, slots, masks, counts, per_tile, scale, sinks, cluster, out, lse
    ) -> None:
        self.calls.append(f"sparse_mla_attend {per_tile} {cluster}")
        rows, heads = q.shape[:2]
        fp8, width = cache.shape[1] == 656, slots.shape[1]
        results = at(out), at(lse), rows, heads, per_tile, c_float(scale)
        lists = at(slots), at(masks), at(counts), width, cluster, c_uint64(next(ORDERS))
        run("attend", at(q), at(cache), c_bool(fp8), at(sinks), *results, *lists)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Emulated:
    library = Emulated()
    for module in (indexer, sparse_mla):
        monkeypatch.setattr(module, "library", lambda folder: library)
        monkeypatch.setattr(module, "multiprocessors", lambda device: SMS)
    monkeypatch.setattr(
        sparse_mla,
        "clusters_at_once",
        lambda device, fp8, size: sparse_mla.multiprocessors(device) // size,
    )
    return library


@pytest.mark.parametrize("as_slots", [False, True])
@pytest.mark.parametrize(
    ("lens", "launches"),
    [
        ([3, 0, 21, 1], ["indexer_select"]),
        ([3, 0, 2, 1], ["indexer_logits", "topk_of_requests"]),
    ],
)
def test_select_prefill(
    lens: list[int],
    launches: list[str],
    as_slots: bool,
    emulated: Emulated,
    random: np.random.Generator,
) -> None:
    """Fused where every multiprocessor gets a tile, in two launches below that."""
    batch = drawn(random, 32, list(zip(lens, [130, 9, 200, 70], strict=True)), padding=2)
    selection = indexer.select(batch, 40, as_slots=as_slots)
    assert emulated.calls == launches
    assert torch.equal(selection, reference.select(batch, 40, as_slots=as_slots))


@pytest.mark.parametrize("as_slots", [False, True])
@pytest.mark.parametrize("next_n", [1, 2, 3, 6])
def test_select_decode_in_parts(
    next_n: int,
    as_slots: bool,
    emulated: Emulated,
    random: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lens = [(next_n, keys) for keys in (next_n, 65, 190, 64, 128)]
    batch = drawn(random, 32, lens, decode=True)
    width = batch.block_table.shape[1] * 64
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 2 * next_n * width * 4 + 3)
    selection = indexer.select(batch, 30, as_slots=as_slots)
    assert emulated.calls == ["indexer_logits", "topk_of_requests"] * 3
    assert torch.equal(selection, reference.select(batch, 30, as_slots=as_slots))


@pytest.mark.parametrize("as_slots", [False, True])
def test_few_long_rows_do_not_leave_multiprocessors_idle(
    as_slots: bool,
    emulated: Emulated,
    random: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A prefill of fewer tiles than multiprocessors whose logits do not fit at once: still split
    over its keys, in parts that begin and end within requests."""
    batch = drawn(random, 32, [(3, 130), (0, 9), (4, 200)], padding=1)
    width = batch.block_table.shape[1] * 64
    monkeypatch.setattr(indexer, "WORKSPACE_BYTES", 2 * width * 4 + 3)
    selection = indexer.select(batch, 40, as_slots=as_slots)
    assert emulated.calls == ["indexer_logits", "topk_of_requests"] * 4
    assert torch.equal(selection, reference.select(batch, 40, as_slots=as_slots))


@pytest.mark.parametrize("gap", [0, 8])
def test_decode_logits_into_strided_rows(
    gap: int, emulated: Emulated, random: np.random.Generator
) -> None:
    batch = drawn(random, 32, [(2, 100), (2, 64), (2, 2)], decode=True)
    store = torch.full((6, 128 + gap), 1234.5)
    out = store[:, :128]
    assert indexer.logits(batch, 128, out=out) is out
    sees = torch.arange(128) < batch.visible[:, None]
    assert torch.equal(out[sees], reference.logits(batch, 128)[sees])
    assert (store[:, 128:] == 1234.5).all()


def test_nothing_to_do(emulated: Emulated, random: np.random.Generator) -> None:
    batch = drawn(random, 32, [(0, 5)])
    assert indexer.select(batch, 7).shape == (0, 7)
    assert indexer.logits(batch, 64).shape == (0, 64)
    assert indexer.topk(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int32), 7).shape == (0, 7)
    q, cache = torch.zeros(0, 20, 576).bfloat16(), torch.zeros(3, 576).bfloat16()
    out, lse = sparse_mla.sparse_mla(q, cache, torch.zeros(0, 9, dtype=torch.int32), 1.0)
    assert (out.shape, lse.shape) == ((0, 20, 512), (0, 20))
    assert emulated.calls == []


@pytest.mark.parametrize(
    ("rows", "sms", "calls"),
    [
        (1, 8, ["sparse_mla_attend 1 2"]),  # 100 slots are two steps
        (2, 2, ["sparse_mla_attend 1 1"]),
        (14, 2, ["sparse_mla_pack", "sparse_mla_attend 3 1"] * 3),  # workspace: 6, 6, 2 rows
    ],
)
def test_sparse_mla(
    rows: int,
    sms: int,
    calls: list[str],
    emulated: Emulated,
    random: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    k = 100
    monkeypatch.setattr(sparse_mla, "multiprocessors", lambda device: sms)
    monkeypatch.setattr(sparse_mla, "WORKSPACE_BYTES", 2 * (3 * k * 5 + 4) + 1)
    torch.manual_seed(int(random.integers(1 << 31)))
    q, latent = torch.randn(rows, 20, 576).bfloat16(), torch.randn(150, 576).bfloat16()
    slots = torch.stack([torch.randperm(130)[:k] for _ in range(rows)]).int()
    slots[0, 60:] = -1
    sinks = torch.randn(20)
    out, lse = sparse_mla.sparse_mla(q, latent, slots, 0.05, sinks=sinks)
    assert emulated.calls == calls
    want_out, want_lse = mla_reference.sparse_mla(q.double(), latent, slots, 0.05, sinks=sinks)
    torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-4)
    torch.testing.assert_close(out.double(), want_out, rtol=2**-7, atol=2**-8)


def test_layers_that_share_slots_share_their_packed_lists(
    emulated: Emulated, random: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as packed anew; lists that are too long to keep are packed in every call."""
    monkeypatch.setattr(sparse_mla, "multiprocessors", lambda device: 1)
    torch.manual_seed(int(random.integers(1 << 31)))
    q, latent = torch.randn(6, 20, 576).bfloat16(), torch.randn(90, 576).bfloat16()
    slots = torch.stack([torch.randperm(80)[:40] for _ in range(6)]).int()
    packed: dict[object, object] = {}
    first = sparse_mla.sparse_mla(q, latent, slots, 0.05, kept=packed)
    again = sparse_mla.sparse_mla(q, latent, slots, 0.05, kept=packed)
    assert emulated.calls == ["sparse_mla_pack", "sparse_mla_attend 3 1", "sparse_mla_attend 3 1"]
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    sparse_mla.sparse_mla(q, latent, slots, 0.05)
    assert emulated.calls[3:] == ["sparse_mla_pack", "sparse_mla_attend 3 1"]
    monkeypatch.setattr(sparse_mla, "WORKSPACE_BYTES", 3 * 40 * 5 + 4)
    packed = {}
    for _ in range(2):
        sparse_mla.sparse_mla(q, latent, slots, 0.05, kept=packed)
    assert emulated.calls[5:] == ["sparse_mla_pack", "sparse_mla_attend 3 1"] * 4
    assert packed == {}


# -- the suite that every implementation must pass -----------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.parametrize("sms", [1, 100], ids=["fused", "two launches"])
@pytest.mark.parametrize("case", cases.PREFILL, ids=str)
def test_suite_prefill(
    case: cases.IndexerCase,
    sms: int,
    emulated: Emulated,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is always a tile for each multiprocessor if there is one."""
    monkeypatch.setattr(indexer, "multiprocessors", lambda device: sms)
    batch = cases.indexer_inputs(case, generator, CPU)
    assert suite.check_indexer(indexer.logits, indexer.select, case, batch) == []


@pytest.mark.parametrize("case", cases.DECODE, ids=str)
def test_suite_decode(
    case: cases.IndexerCase, emulated: Emulated, generator: torch.Generator
) -> None:
    batch = cases.indexer_inputs(case, generator, CPU)
    assert suite.check_indexer(indexer.logits, indexer.select, case, batch) == []


@pytest.mark.parametrize("sms", [1, 100], ids=["packed", "split"])
@pytest.mark.parametrize("case", cases.ATTENTION, ids=str)
def test_suite_attention(
    case: cases.AttentionCase,
    sms: int,
    emulated: Emulated,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sparse_mla, "multiprocessors", lambda device: sms)
    inputs = cases.attention_inputs(case, generator, CPU)
    assert suite.check_sparse_mla(sparse_mla.sparse_mla, inputs) == []


@pytest.mark.parametrize("case", cases.TOPK, ids=str)
def test_suite_topk(case: cases.TopKCase, emulated: Emulated, generator: torch.Generator) -> None:
    logits, visible = cases.topk_inputs(case, generator, CPU)
    assert suite.check_topk(indexer.topk, logits, visible, case.topk) == []
