"""Wrong arguments get one error that names the argument, what it is and what it must be."""

from typing import Any

import pytest
import torch

from sglang_indexcache.errors import KernelError
from sglang_indexcache.kernels.checks import (
    check_indexer,
    check_logits,
    check_sparse_mla,
    check_topk,
    output,
)
from sglang_indexcache.kernels.contract import IndexerBatch

FP8 = torch.float8_e4m3fn


def indexer(decode: bool = False, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 32, 128, dtype=FP8),
        "weights": torch.zeros(4, 32),
        "pages": torch.zeros(3, 8448, dtype=torch.uint8),
        "block_table": torch.zeros(2, 5, dtype=torch.int32),
        "visible": torch.zeros(4, dtype=torch.int32),
        "query_starts": None if decode else torch.zeros(3, dtype=torch.int32),
    }
    check_indexer("op", IndexerBatch(**(arguments | changes)))


def attention(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 20, 576, dtype=torch.bfloat16),
        "cache": torch.zeros(9, 656, dtype=torch.uint8),
        "slots": torch.zeros(4, 7, dtype=torch.int32),
        "sinks": torch.zeros(20),
    }
    check_sparse_mla(**(arguments | changes))


def test_right_arguments_pass() -> None:
    indexer()
    indexer(decode=True)
    indexer(block_table=torch.zeros(2, 9, dtype=torch.int32)[:, :5])  # a wider table's columns
    attention()
    attention(cache=torch.zeros(9, 576, dtype=torch.bfloat16), sinks=None)
    check_logits(torch.zeros(3, 9)[:, :5], torch.zeros(3, dtype=torch.int32), 4)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(4, 32, 128)}, r"q must be \[T, H, 128\] float8_e4m3fn on cpu, not"),
        ({"q": torch.zeros(4, 32, 64, dtype=FP8)}, r"not \[4, 32, 64\] float8_e4m3fn"),
        ({"weights": torch.zeros(4, 64)}, r"weights must be .*T = 4, H = 32"),
        ({"weights": torch.zeros(32, 4).T}, "weights must be contiguous"),
        ({"pages": torch.zeros(3, 64, 132, dtype=torch.uint8)}, r"pages must be \[P, 8448\]"),
        ({"visible": torch.zeros(4, dtype=torch.int64)}, "visible must be .* int32"),
        (
            {"block_table": torch.zeros(2, 1, dtype=torch.int32).expand(2, 65_537)},
            "block_table must be contiguous",
        ),
        (
            {"block_table": torch.zeros(2, 65_537, dtype=torch.int32)},
            r"block_table has 65537 columns; 65536 \(4194304 tokens\) are the most",
        ),
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, r"query_starts must be \[3\]"),
        (
            {"q": torch.zeros(4, 12, 128, dtype=FP8), "weights": torch.zeros(4, 12)},
            "12 heads; there are",
        ),
        ({"pages": torch.zeros(3 * 8448 + 1, dtype=torch.uint8)[1:].view(3, 8448)}, "16 bytes"),
    ],
)
def test_indexer(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(KernelError, match=says):
        indexer(**changes)


@pytest.mark.parametrize("rows", [3, 18])
def test_decode_rows(rows: int) -> None:
    """There are more than eight of each request; or one request has more than another."""
    with pytest.raises(
        KernelError, match=f"{rows} rows of 2 requests; .* each has as many, 1 to 8"
    ):
        indexer(
            decode=True,
            q=torch.zeros(rows, 32, 128, dtype=FP8),
            weights=torch.zeros(rows, 32),
            visible=torch.zeros(rows, dtype=torch.int32),
        )


@pytest.mark.parametrize("topk", [0, 2049])
def test_topk(topk: int) -> None:
    with pytest.raises(KernelError, match=f"k is {topk}; it can be 1 to 2048"):
        check_topk(topk)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"q": torch.zeros(4, 20, 512, dtype=torch.bfloat16)}, r"q must be \[T, Hq, 576\]"),
        ({"q": torch.zeros(4, 129, 576, dtype=torch.bfloat16), "sinks": None}, "129 heads"),
        ({"cache": torch.zeros(9, 576)}, r"cache must be \[N, 576\] bfloat16"),
        ({"cache": torch.zeros(9, 576, dtype=torch.uint8)}, r"cache must be \[N, 656\] uint8"),
        ({"slots": torch.zeros(5, 7, dtype=torch.int32)}, "slots must be .*T = 4"),
        ({"slots": torch.zeros(4, 0, dtype=torch.int32)}, "at least one slot"),
        ({"sinks": torch.zeros(8)}, r"sinks must be \[Hq\].*Hq = 20"),
    ],
)
def test_sparse_mla(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(KernelError, match=says):
        attention(**changes)


def test_outputs_that_kernels_cannot_write() -> None:
    wide = torch.zeros(4, 32)
    rows: dict[str, Any] = {
        "shape": (4, 16),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    assert output("op", None, **rows).shape == (4, 16)
    assert output("op", wide[:, :16], **rows, strided_rows=True).stride() == (32, 1)
    for wrong, says in (
        (wide, r"\[4, 16\] float32 on cpu, not \[4, 32\]"),
        (wide[:, :16].int().contiguous(), r"\[4, 16\] float32 on cpu, not \[4, 16\] int32"),
        (wide[:, :16], "contiguous"),
        (wide[:, ::2], "contiguous"),
    ):
        with pytest.raises(KernelError, match=f"op: out must be {says}"):
            output("op", wrong, **rows)
    with pytest.raises(KernelError, match="op: out must be contiguous"):
        output("op", wide[:, ::2], **rows, strided_rows=True)
