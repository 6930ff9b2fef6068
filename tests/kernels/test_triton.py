"""What only the Triton twins have: bounded scratch, splits, two ways to multiply e4m3.

Runs on a GPU, or under the interpreter (see ``test_triton_interpreted.py``).
"""

import os

import pytest
import torch

from sglang_indexcache.kernels.contract import VALUE_DIM, IndexerBatch
from sglang_indexcache.kernels.grid import cases, suite
from sglang_indexcache.kernels.indexer import reference
from sglang_indexcache.kernels.indexer import triton as indexer
from sglang_indexcache.kernels.indexer.quantization import write_pages
from sglang_indexcache.kernels.sparse_mla import triton as sparse_mla

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="needs a GPU or TRITON_INTERPRET=1",
    ),
]


@pytest.mark.parametrize("scratch_bytes", [1, 2000, 1 << 20])
def test_bounded_scratch_changes_nothing(
    generator: torch.Generator, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row, a few rows and all rows at a time; what is allocated respects the bound."""
    case = cases.IndexerCase("ragged", 32, ((2, 140), (0, 3), (3, 70), (1, 1)), padding=1)
    batch = cases.indexer_inputs(case, generator, DEVICE)
    expected = indexer.select(batch, case.topk)
    allocated = []
    original = torch.empty

    def watched(*size: int, **options: object) -> torch.Tensor:
        made = original(*size, **options)  # type: ignore[call-overload]
        allocated.append(made.nbytes if made.dtype == torch.float32 else 0)
        return made

    monkeypatch.setattr(indexer.torch, "empty", watched)
    got = indexer.select(batch, case.topk, scratch_bytes=scratch_bytes)
    one_row = 4 * batch.block_table.shape[1] * 64
    assert max(allocated) <= max(scratch_bytes, one_row)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("scratch_bytes", [1, 3000])
def test_bounded_scratch_in_decode(generator: torch.Generator, scratch_bytes: int) -> None:
    case = cases.IndexerCase("ragged", 64, ((2, 140), (2, 3), (2, 70)), decode=True)
    batch = cases.indexer_inputs(case, generator, DEVICE)
    expected = indexer.select(batch, case.topk, as_slots=True)
    got = indexer.select(batch, case.topk, as_slots=True, scratch_bytes=scratch_bytes)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("number", [1, 3, 4])
def test_split_lists(generator: torch.Generator, splits: int, number: int) -> None:
    inputs = cases.attention_inputs(cases.ATTENTION[number], generator, DEVICE)

    def split(*arguments: object, **options: object) -> object:
        return sparse_mla.sparse_mla(*arguments, splits=splits, **options)  # type: ignore[arg-type]

    assert suite.check_sparse_mla(split, inputs) == []


def test_splitting_fills_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Card", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    gpu = torch.device("cuda")
    assert sparse_mla._splits(8192, 2048, gpu) == 1
    assert sparse_mla._splits(1, 2048, gpu) == sparse_mla.MAX_SPLITS
    assert sparse_mla._splits(64, 2048, gpu) == 4
    assert sparse_mla._splits(1, 64, gpu) == 1


@pytest.mark.skipif(not INTERPRETED, reason="a card has one of the two")
@pytest.mark.parametrize("fill", ["random", "integers"])
def test_both_matrix_units_agree(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, fill: cases.Fill
) -> None:
    """E4m3 as stored, and widened to float16: the products are the same, and so is their sum."""
    case = cases.IndexerCase("two", 16, ((3, 150),), fill=fill)
    batch = cases.indexer_inputs(case, generator, DEVICE)
    results = []
    for stored in (False, True):
        monkeypatch.setattr(indexer, "multiplies_e4m3", lambda _, answer=stored: answer)
        results.append(indexer.logits(batch, 150)[-1])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-3)


def test_every_e4m3_value_is_widened_exactly() -> None:
    """One key per byte against a query that picks one of its entries."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = every[~every.float().isnan()]
    keys = torch.zeros(len(finite), 128, dtype=torch.float8_e4m3fn)
    keys.view(torch.uint8)[:, 77] = finite.view(torch.uint8)
    pages = torch.zeros(4, 8448, dtype=torch.uint8)
    write_pages(pages, torch.arange(len(finite)), keys, torch.ones(len(finite)))
    q = torch.zeros(1, 8, 128, dtype=torch.float8_e4m3fn)
    q.view(torch.uint8)[0, 0, 77] = torch.tensor(1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    q.view(torch.uint8)[0, 1, 77] = torch.tensor(-1.0).to(torch.float8_e4m3fn).view(torch.uint8)
    weights = torch.tensor([[1.0, -1.0, 0, 0, 0, 0, 0, 0]])  # relu(x) - relu(-x) = x
    table = torch.arange(4, dtype=torch.int32)[None]
    starts = torch.tensor([0, 1], dtype=torch.int32)
    visible = torch.tensor([len(finite)], dtype=torch.int32)
    tensors = (q, weights, pages, table, visible, starts)
    batch = IndexerBatch(*(tensor.to(DEVICE) for tensor in tensors))
    logits = indexer.logits(batch, len(finite))
    assert torch.equal(logits[0].cpu(), finite.float() + 0.0)
    assert torch.equal(logits.cpu(), reference.logits(IndexerBatch(*tensors), len(finite)))


def test_values_are_512_wide(generator: torch.Generator) -> None:
    inputs = cases.attention_inputs(cases.ATTENTION[0], generator, DEVICE)
    out, lse = sparse_mla.sparse_mla(inputs.q, inputs.cache, inputs.slots, inputs.scale)
    assert out.shape == (1, 1, VALUE_DIM)
    assert lse.shape == (1, 1)
