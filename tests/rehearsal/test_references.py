"""Stand-ins for kernels on the stage are as strict as the kernels, and their memory as undefined.

What they compute is held against transformers by each rehearsed server.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.rehearsal.stage import transfer
from tests.rehearsal.stage.kernels import attention, experts, indexer, quantized
from tests.rehearsal.stage.rounding import round_like_torch

PAGE, WIDTH = indexer.PAGE, indexer.WIDTH


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_contiguous_logits_are_undefined_outside_a_request() -> None:
    q = torch.randn(2, 3, WIDTH).to(quantized.E4M3)
    values, scales = quantized.quantize(torch.randn(6, WIDTH), indexer.LEAST)
    start, end = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2], [2, 6]))
    computed = indexer.fp8_mqa_logits(q, (values, scales), torch.rand(2, 3), start, end)
    assert computed.isnan().tolist() == [[False] * 2 + [True] * 4, [True] * 2 + [False] * 4]


def test_paged_logits_are_undefined_behind_the_end() -> None:
    lengths = torch.tensor([[70], [5]], dtype=torch.int32)
    pages = torch.zeros(4, PAGE, 1, WIDTH + 4, dtype=torch.uint8)
    q, table = torch.zeros(2, 1, 3, WIDTH).to(quantized.E4M3), torch.arange(4).view(2, 2).int()
    weights = torch.rand(2, 3)
    computed = indexer.fp8_paged_mqa_logits(q, pages, weights, lengths, table, None, 128)
    assert computed.isnan().sum(1).tolist() == [128 - 70, 128 - 5]
    assert not computed[0, :70].isnan().any()


def test_an_undefined_logit_may_not_be_read() -> None:
    logits = torch.full((1, 32), float("nan"))
    with pytest.raises(AssertionError, match="undefined"):
        indexer.fast_topk(logits, torch.tensor([32]), 16)


@pytest.mark.parametrize(("heads", "width"), [(16, 128), (64, 100)])
def test_sparse_attention_refuses_what_the_kernel_does(heads: int, width: int) -> None:
    indices = torch.zeros(1, 1, width, dtype=torch.int32)
    with pytest.raises(AssertionError, match="kernel takes"):
        attention.flash_mla_sparse_fwd(bf16(1, heads, 576), bf16(4, 1, 576), indices, 1.0)


def test_decode_attention_refuses_few_heads() -> None:
    lengths = torch.tensor([3], dtype=torch.int32)
    with pytest.raises(AssertionError, match="kernel takes"):
        attention.get_mla_metadata(cache_seqlens=lengths, num_heads_q=8, topk=128)


def test_pages_are_copied_whole() -> None:
    card, host, at = torch.zeros(12, 2), torch.zeros(12, 2), torch.tensor([4, 5, 6, 7])
    with pytest.raises(AssertionError, match="in pieces"):
        attention.transfer_kv_direct([card], [host], torch.tensor([0, 1, 3, 2]), at, 4)


def test_a_tile_of_rows_has_one_expert_and_rows_of_none_are_undefined() -> None:
    a, b, d = bf16(256, 8), bf16(3, 4, 8), torch.empty(256, 4, dtype=torch.bfloat16)
    of = torch.tensor([2] * 100 + [-1] * 28 + [0] * 128, dtype=torch.int32)
    experts.grouped_bf16_gemm(a, b, d, of)
    assert torch.equal(d.isnan().all(1), of < 0)
    of[1] = 1
    with pytest.raises(AssertionError, match="two experts"):
        experts.grouped_bf16_gemm(a, b, d, of)


_RECEIVER = """
import torch
from tests.rehearsal.stage.transfer import TransferEngine
TransferEngine().initialize()
received = torch.zeros(4)
print(received.data_ptr(), flush=True)
input()
print(received.tolist())
"""


def test_one_process_writes_registered_memory_into_anothers() -> None:
    command = [sys.executable, "-c", _RECEIVER]
    source, engine = torch.arange(4.0), transfer.TransferEngine()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        where = int(receiver.stdout.readline())
        blocks = [source.data_ptr() + 4], [where + 8], [8]
        with pytest.raises(AssertionError, match="not registered"):
            engine.batch_transfer_sync_write(f"here:{receiver.pid}", *blocks)
        engine.batch_register_memory([source.data_ptr()], [16])
        assert engine.batch_transfer_sync_write(f"here:{receiver.pid}", *blocks) == 0
        assert receiver.communicate("\n")[0].strip() == "[0.0, 0.0, 1.0, 2.0]"


def test_triton_kernels_round_up_to_the_next_power_of_two() -> None:
    from triton import language as tl
    from triton.runtime import interpreter

    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 30
    convert = round_like_torch(interpreter._convert_float)
    for target, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.bfloat16, torch.bfloat16)):
        bits = torch.from_numpy(convert(values.numpy(), tl.float32, target, None).astype("int32"))
        width = 8 * dtype.itemsize
        expected = values.to(dtype).view(torch.uint8 if width == 8 else torch.int16).int()
        assert torch.equal(bits, expected & (2**width - 1))
