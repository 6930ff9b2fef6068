"""Stand-ins for kernels on the stage, each against a slow form of its own in float64."""

from __future__ import annotations

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from tests.rehearsal.stage import transfer
from tests.rehearsal.stage.kernels import (
    attention,
    dense,
    exchange,
    experts,
    indexer,
    quantized,
    rotary,
    speculative,
)
from tests.rehearsal.stage.registry import REFERENCES
from tests.rehearsal.stage.rounding import round_like_torch

PAGE, WIDTH = indexer.PAGE, indexer.WIDTH


def close(computed: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-2) -> None:
    """Equal but for one rounding to bfloat16, of values of a few units."""
    torch.testing.assert_close(computed.double(), expected.double(), rtol=tolerance, atol=tolerance)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def test_norms() -> None:
    x, residual, weight = bf16(3, 8), bf16(3, 8), bf16(8)
    total = x.double() + residual.double()
    expected = (
        torch.stack([row / math.sqrt(sum(v * v for v in row.tolist()) / 8) for row in total])
        * weight.double()
    )
    close(
        dense.rmsnorm(x, weight, 0.0),
        torch.nn.functional.rms_norm(x.double(), (8,), weight.double(), 0.0),
    )
    out = torch.empty_like(x)
    dense.rmsnorm_into(out, x, weight, 0.0, None)
    close(out, torch.nn.functional.rms_norm(x.double(), (8,), weight.double(), 0.0))
    dense.fused_add_rmsnorm(x, residual, weight, 0.0)
    close(x, expected)
    close(residual, total)
    scale, shift = torch.rand(8), torch.randn(8)
    expected = torch.nn.functional.layer_norm(x.double(), (8,), scale.double(), shift.double())
    close(dense.layernorm(x, scale, shift, 1e-5), expected)


@pytest.mark.parametrize("neox", [True, False])
def test_rotation_is_a_product_of_complex_numbers(neox: bool) -> None:
    x, angles = torch.randn(5, 2, 10), torch.rand(7, 4)
    positions = torch.tensor([6, 0, 3, 3, 1])
    computed = rotary.rotate(x, torch.cat((angles.cos(), angles.sin()), -1), positions, neox=neox)
    pairs = (x[..., :4], x[..., 4:8]) if neox else (x[..., 0:8:2], x[..., 1:8:2])
    rotated = torch.complex(*pairs) * torch.polar(torch.ones(5, 1, 4), angles[positions][:, None])
    expected = torch.stack((rotated.real, rotated.imag), -2 if neox else -1).flatten(-2)
    torch.testing.assert_close(computed[..., :8].float(), expected)
    torch.testing.assert_close(computed[..., 8:].float(), x[..., 8:])


def test_the_hadamard_transform_is_its_matrix() -> None:
    x, out = bf16(3, 16), torch.empty(3, 16, dtype=torch.bfloat16)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    dense.hadamard(x, out, 0.25)
    close(out, x.double() @ matrix * 0.25)


def test_an_index_key_is_stored_and_read_again() -> None:
    pages = torch.zeros(3, PAGE * (WIDTH + 4), dtype=torch.uint8)
    key, slots = torch.randn(4, WIDTH), torch.tensor([64, 3, 191, 70])
    indexer.store(pages, slots, key)
    for row, slot in zip(key, slots.tolist(), strict=True):
        page, place = divmod(slot, PAGE)
        values_read = pages[page, place * WIDTH : (place + 1) * WIDTH].view(quantized.E4M3).double()
        at = PAGE * WIDTH + 4 * place
        scale = pages[page, at : at + 4].view(torch.float32).double()
        # e4m3 has three bits behind the leading one.
        assert ((values_read * scale - row.double()).abs() <= row.abs() / 16 + scale / 512).all()


def paged(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return ``(pages, table, keys)``: keys as stored, in pages that do not lie in order."""
    pages_each = max(-(-n // PAGE) for n in lengths)
    pages = torch.zeros(len(lengths) * pages_each, PAGE * (WIDTH + 4), dtype=torch.uint8)
    table = torch.randperm(len(pages)).view(len(lengths), pages_each).int()
    keys = []
    for row, length in zip(table, lengths, strict=True):
        key = torch.randn(length, WIDTH)
        at = torch.arange(length)
        indexer.store(pages, row[at // PAGE].long() * PAGE + at % PAGE, key)
        values, scales = quantized.quantize(key, indexer.LEAST)
        keys.append(values.double() * scales.double()[:, None])
    return pages, table, keys


def test_paged_logits_are_a_loop_over_heads_and_poison_what_is_behind_the_end() -> None:
    lengths = [70, 5]
    pages, table, keys = paged(lengths)
    q = torch.randn(2, 1, 3, WIDTH).to(quantized.E4M3)
    weights = torch.randn(2, 3)
    computed = indexer.fp8_paged_mqa_logits(
        q, pages.view(len(pages), PAGE, 1, WIDTH + 4), weights,
        torch.tensor(lengths, dtype=torch.int32)[:, None], table, None, 128,
    )  # fmt: skip
    for b, length in enumerate(lengths):
        expected = sum(
            weights[b, h].double() * (keys[b] @ q[b, 0, h].double()).relu() for h in range(3)
        )
        torch.testing.assert_close(computed[b, :length].double(), expected, rtol=1e-5, atol=1e-4)
        assert computed[b, length:].isnan().all()


def test_contiguous_logits_are_undefined_outside_a_request() -> None:
    q = torch.randn(2, 3, WIDTH).to(quantized.E4M3)
    values, scales = quantized.quantize(torch.randn(6, WIDTH), indexer.LEAST)
    start, end = (torch.tensor(v, dtype=torch.int32) for v in ([0, 2], [2, 6]))
    computed = indexer.fp8_mqa_logits(q, (values, scales), torch.rand(2, 3), start, end)
    assert computed.isnan().tolist() == [[False] * 2 + [True] * 4, [True] * 2 + [False] * 4]


def test_lists_hold_the_largest_logits_as_slots_and_then_nothing() -> None:
    logits = torch.randn(2, 200)
    logits[0, 3:] = float("nan")
    lengths = torch.tensor([3, 150])
    table = torch.randperm(8).view(2, 4)
    out = torch.empty(2, 16, dtype=torch.int32)
    indexer.topk_paged(logits, lengths, table, out, PAGE, None)
    assert sorted(out[0].tolist()) == sorted(
        [*(int(table[0, 0]) * PAGE + i for i in range(3)), *[-1] * 13]
    )
    best = logits[1, :150].sort(descending=True).indices[:16]
    assert set(out[1].tolist()) == {
        int(table[1, i // PAGE]) * PAGE + i % PAGE for i in best.tolist()
    }


def test_an_undefined_logit_may_not_be_read() -> None:
    logits = torch.full((1, 32), float("nan"))
    with pytest.raises(AssertionError, match="undefined"):
        indexer.fast_topk(logits, torch.tensor([32]), 16)


def attended(q: torch.Tensor, rows: torch.Tensor, scale: float, d_v: int) -> torch.Tensor:
    """Compute one head's attention, number by number."""
    weights = [math.exp(float(q.double() @ row.double()) * scale) for row in rows]
    return sum(
        (w * row[:d_v].double() for w, row in zip(weights, rows, strict=True)),
        torch.zeros(d_v, dtype=torch.float64),
    ) / max(sum(weights), 1e-30)


def test_sparse_attention_skips_holes_and_padded_heads() -> None:
    q, kv = torch.zeros(2, 64, 576, dtype=torch.bfloat16), bf16(90, 1, 576)
    q[:, :3] = bf16(2, 3, 576)
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, [0, 5, 100]] = torch.tensor([7, 89, 3], dtype=torch.int32)
    out, *_ = attention.flash_mla_sparse_fwd(q, kv, indices, 0.02)
    for head in range(3):
        close(out[0, head], attended(q[0, head], kv[[7, 89, 3], 0], 0.02, 512))
    assert not out[1].any()
    assert not out[:, 3:].any()


@pytest.mark.parametrize(("heads", "width"), [(16, 128), (64, 100)])
def test_sparse_attention_refuses_what_the_kernel_does(heads: int, width: int) -> None:
    indices = torch.zeros(1, 1, width, dtype=torch.int32)
    with pytest.raises(AssertionError, match="kernel takes"):
        attention.flash_mla_sparse_fwd(bf16(1, heads, 576), bf16(4, 1, 576), indices, 1.0)


def test_decode_attention_reads_the_listed_slots() -> None:
    q, qv, pool = bf16(2, 3, 64), bf16(2, 3, 512), bf16(40, 1, 1, 576)
    table = torch.full((2, 8), -1, dtype=torch.int32)
    table[0, :3] = torch.tensor([9, 2, 33])
    table[1, :1] = 4
    out = attention.flash_attn_with_kvcache(
        q=q, k_cache=pool[..., 512:], v_cache=pool[..., :512], qv=qv, page_table=table,
        cache_seqlens=torch.tensor([3, 1], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 2], dtype=torch.int32),
        softmax_scale=0.05, causal=False,
    )  # fmt: skip
    full = torch.cat((qv, q), -1)
    for head in range(3):
        close(out[0, head], attended(full[0, head], pool[[9, 2, 33], 0, 0], 0.05, 512))
        close(out[1, head], pool[4, 0, 0, :512])


def test_prefill_without_absorption_is_causal_and_keeps_sequences_apart() -> None:
    q, k, v = bf16(3, 2, 8), bf16(7, 2, 8), bf16(7, 2, 4)
    bounds = [torch.tensor(b, dtype=torch.int32) for b in ([0, 1, 3], [0, 3, 7])]
    out = attention.flash_attn_varlen_func(q, k, v, *bounds, softmax_scale=0.3, causal=True)
    visible = [slice(0, 3), slice(3, 6), slice(3, 7)]
    for row, keys in enumerate(visible):
        for head in range(2):
            weights = (k[keys, head].double() @ q[row, head].double() * 0.3).softmax(0)
            close(out[row, head], weights @ v[keys, head].double())


def fp8_row(latent: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """A latent ``[576]`` as FlashMLA's 656 bytes, group by group, and what they stand for."""
    values, scales, stands_for = b"", b"", []
    for group in latent[:512].float().split(128):
        scale = group.abs().max() / 448
        quantised = (group / scale).to(torch.float8_e4m3fn)
        values += quantised.view(torch.uint8).numpy().tobytes()
        scales += scale.numpy().tobytes()
        stands_for.append(quantised.double() * scale.double())
    rotary = latent[512:].view(torch.uint8).numpy().tobytes()
    return values + scales + rotary, torch.cat((*stands_for, latent[512:].double()))


def test_decode_attention_reads_fp8_rows() -> None:
    rows, latents = zip(*(fp8_row(latent) for latent in bf16(128, 576)), strict=True)
    cache = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(2, 64, 1, 656)
    q = torch.zeros(2, 1, 64, 576, dtype=torch.bfloat16)
    q[:, :, :3] = bf16(2, 1, 3, 576)
    indices = torch.full((2, 1, 128), -1, dtype=torch.int32)
    indices[0, 0, [0, 5, 100]] = torch.tensor([7, 127, 64], dtype=torch.int32)
    schedule, splits = attention.get_mla_metadata(
        cache_seqlens=torch.tensor([3, 0], dtype=torch.int32), num_heads_q=64, topk=128
    )
    out, _ = attention.flash_mla_with_kvcache(
        q, cache.view(torch.float8_e4m3fn), 512, num_splits=splits, softmax_scale=0.02,
        indices=indices, is_fp8_kvcache=True, tile_scheduler_metadata=schedule,
    )  # fmt: skip
    latents_of_list = torch.stack([latents[slot] for slot in (7, 127, 64)])
    for head in range(3):
        close(out[0, 0, head], attended(q[0, 0, head], latents_of_list, 0.02, 512))
    assert not out[1].any()
    with pytest.raises(AssertionError, match="kernel takes"):
        attention.get_mla_metadata(
            cache_seqlens=torch.tensor([3], dtype=torch.int32), num_heads_q=8, topk=128
        )


def test_an_fp8_product_is_a_loop_over_blocks() -> None:
    x, n = bf16(3, 256), 192
    weight = torch.randn(n, 256).to(torch.float8_e4m3fn)
    by_block = torch.rand(2, 2) + 0.5
    values, scales = torch.empty(3, 256).to(torch.float8_e4m3fn), torch.empty(2, 3).mT
    quantized.per_token_group_quant(x, values, scales)
    out = torch.empty(3, n, dtype=torch.bfloat16)
    quantized.fp8_gemm_nt((values, scales), (weight, by_block), out)
    for row in range(3):
        expected = torch.zeros(n, dtype=torch.float64)
        for group in range(2):
            inside = slice(128 * group, 128 * (group + 1))
            scale = x[row, inside].float().abs().max() / 448
            quantised = (x[row, inside].float() / scale).to(torch.float8_e4m3fn).double()
            for column in range(n):
                part = quantised @ weight[column, inside].double() * scale.double()
                expected[column] += part * by_block[column // 128, group].double()
        close(out[row], expected)


def test_fp8_experts_are_bfloat16_ones_of_what_is_held() -> None:
    x, ids = bf16(4, 128), torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]])
    w1, w2 = (torch.randn(2, *s).to(torch.float8_e4m3fn) for s in ((256, 128), (128, 128)))
    s1, s2 = torch.tensor([[[0.1], [0.2]], [[0.3], [0.1]]]), torch.full((2, 1, 1), 0.1)
    weights = torch.rand(4, 2)
    computed = experts.fused_experts_impl(
        x, w1, w2, weights, ids, use_fp8_w8a8=True, w1_scale=s1, w2_scale=s2, block_shape=[128, 128]
    )
    plain = experts.fused_experts_impl(
        x,
        (w1.double() * s1.repeat_interleave(128, 1)).bfloat16(),
        (w2.double() * s2).bfloat16(),
        weights,
        ids,
    )
    # The inputs of both products lose all but 4 bits.
    assert float((computed - plain).double().norm() / plain.double().norm()) < 0.06


def test_experts_are_a_loop_over_tokens() -> None:
    x, w1, w2 = bf16(4, 8), bf16(3, 12, 8), bf16(3, 8, 6)
    ids, weights = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0]]), torch.rand(4, 2)
    computed = experts.fused_experts_impl(x, w1, w2, weights, ids, routed_scaling_factor=2.0)
    for token in range(4):
        expected = torch.zeros(8, dtype=torch.float64)
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w1[expert].double() @ x[token].double()).chunk(2)
            activation = torch.nn.functional.silu(gate) * up
            expected += 2.0 * weight.double() * (w2[expert].double() @ activation)
        close(computed[token], expected, 5e-2)


def test_routing_is_that_of_transformers() -> None:
    logits, bias = torch.randn(5, 8), torch.randn(8) * 0.1
    weights, ids = torch.empty(5, 2), torch.empty(5, 2, dtype=torch.int32)
    experts.fused_topk_deepseek(logits, bias, 4, 2, 2, 2.5, weights, ids)
    scores = logits.sigmoid()
    for row in range(5):
        biased = scores[row] + bias
        by_group = biased.view(4, 2)
        groups = by_group.sum(-1).sort(descending=True).indices[:2].tolist()
        allowed = [e for e in range(8) if e // 2 in groups]
        best = sorted(allowed, key=lambda e: -float(biased[e]))[:2]
        assert ids[row].tolist() == best
        weights_of_best = scores[row, best]
        torch.testing.assert_close(weights[row], weights_of_best / weights_of_best.sum() * 2.5)


def test_pages_are_copied_between_pools() -> None:
    card, host = torch.arange(24.0).view(12, 2), torch.zeros(2, 12, 2)
    at = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    attention.transfer_kv_direct([card, -card], list(host), at, torch.arange(4, 12), 4)
    assert host[0, 4:].tolist() == card[at].tolist()
    assert host[1, 4:].tolist() == (-card[at]).tolist()
    assert not host[:, :4].any()
    with pytest.raises(AssertionError, match="in pieces"):
        attention.transfer_kv_direct([card], [host[0]], torch.tensor([0, 1, 3, 2]), at[:4], 4)


class _Rank:
    """One of two ranks, each a thread."""

    size = 2

    def __init__(self, rank: int, meeting: Barrier, table: list[torch.Tensor]) -> None:
        self.rank, self._meeting, self._table = rank, meeting, table

    def rows(self, mine: torch.Tensor) -> list[torch.Tensor]:
        self._table[self.rank] = mine
        self._meeting.wait(10)
        everybodys = list(self._table)
        self._meeting.wait(10)
        return everybodys


def test_tokens_go_to_the_ranks_of_their_experts_and_come_back_summed() -> None:
    """Four experts on two ranks, of which expert ``e`` multiplies by ``e + 1``."""
    tokens = [bf16(5, 8), bf16(2, 8)]
    experts_of = [
        torch.tensor([[0, 1], [0, 2], [3, 2], [-1, -1], [1, 3]]),
        torch.tensor([[1, 0]] * 2),
    ]
    weights = [torch.rand(len(ids_there), 2) for ids_there in experts_of]
    meeting, table = Barrier(2), [torch.empty(0)] * 2

    def work(rank: int) -> tuple[list[int], list[list[int]], torch.Tensor]:
        group = _Rank(rank, meeting, table)
        *_, goes = exchange.get_dispatch_layout(experts_of[rank], 4, 2)
        x, ids, shares, counts, routes = exchange.dispatch(
            tokens[rank], experts_of[rank], weights[rank], goes, 4, 128, group
        )
        factors = (ids + 1 + 2 * rank) * shares
        output = (x.double() * factors.double().sum(1, keepdim=True)).to(x.dtype)
        return counts, ids.tolist(), exchange.combine(output, routes, group)

    with ThreadPoolExecutor(2) as ranks:
        (counts, ids, first), (other_counts, other_ids, second) = ranks.map(work, range(2))
    assert counts == other_counts == [128, 128]
    assert ids == [[0, 1], [0, -1], [1, -1], [1, 0], [1, 0]]
    assert other_ids == [[-1, 0], [1, 0], [-1, 1]]
    for x, of, shares, got in zip(tokens, experts_of, weights, (first, second), strict=True):
        factors = ((of + 1) * shares).double().sum(1, keepdim=True)
        close(got, x.double() * factors, 3e-2)


def test_a_grouped_product_is_each_rows_own() -> None:
    a, b, d = bf16(256, 8), bf16(3, 4, 8), torch.empty(256, 4, dtype=torch.bfloat16)
    of = torch.tensor([2] * 100 + [-1] * 28 + [0] * 128, dtype=torch.int32)
    experts.grouped_bf16_gemm(a, b, d, of)
    for row, expert in enumerate(of.tolist()):
        if expert < 0:
            assert d[row].isnan().all()
        else:
            close(d[row], b[expert].double() @ a[row].double())
    of[1] = 1
    with pytest.raises(AssertionError, match="two experts"):
        experts.grouped_bf16_gemm(a, b, d, of)


def test_scattered_rows_are_gathered_with_their_weights() -> None:
    """Two experts, of which the first multiplies by 2 and the second by 3; -1 is elsewhere."""
    x, weights = bf16(4, 8), torch.rand(4, 2)
    experts_of = torch.tensor([[0, 1], [-1, 1], [1, 0], [-1, -1]])
    counts, gathered = torch.tensor([128, 128], dtype=torch.int32), torch.empty(256, 8).bfloat16()
    owners, places = torch.empty(256, dtype=torch.int32), torch.empty(4, 2, dtype=torch.int64)
    experts.ep_scatter(
        x, None, experts_of, counts, counts, counts.clone(), gathered, None, owners, places
    )
    assert owners.tolist() == [0] * 128 + [1] * 128
    assert (places >= 0).tolist() == (experts_of >= 0).tolist()
    out = torch.empty_like(x)
    experts.ep_gather(gathered * (owners + 2)[:, None], experts_of, weights, places, out)
    factors = (weights * torch.tensor([0.0, 2.0, 3.0])[experts_of + 1]).sum(1, keepdim=True)
    close(out, x.double() * factors.double())


def test_rows_of_padding_have_no_expert() -> None:
    ids = torch.ones(3, 2, dtype=torch.int32)
    experts.mask_topk(ids, torch.tensor(2, dtype=torch.int32))
    assert ids.tolist() == [[1, 1], [1, 1], [-1, -1]]


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


def test_a_chain_is_accepted_as_far_as_the_target_goes_along() -> None:
    lengths, drafts = torch.tensor([5, 3, 9]), 4
    links = [torch.full((3, drafts), -7) for _ in range(3)]
    mask, positions = torch.zeros(drafts * int((lengths + drafts).sum())), torch.zeros(12)
    nothing = torch.zeros(3, 0)
    speculative.build_tree(
        nothing, nothing, lengths, mask, positions, *links, 1, drafts - 1, drafts, 0
    )
    assert positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6, 9, 10, 11, 12]
    for row, request in enumerate(mask.split((drafts * (lengths + drafts)).tolist())):
        is_visible = request.view(drafts, -1)
        assert not is_visible[:, : lengths[row]].any()
        assert is_visible.sum(1).tolist() == [1, 2, 3, 4]
    # Tokens to verify, and what the target says comes behind each of them.
    candidates = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    target = torch.tensor([[11, 12, 99, 14], [98, 22, 23, 24], [31, 32, 33, 34]])
    accepted, count = torch.full((3, drafts), -1), torch.full((3,), -1)
    predicts = torch.full((12,), -1)
    speculative.verify_greedy(predicts, accepted, count, candidates, *links, target)
    assert accepted.tolist() == [[0, 1, 2, -1], [4, -1, -1, -1], [8, 9, 10, 11]]
    assert count.tolist() == [2, 0, 3]
    assert predicts.tolist() == [11, 12, 99, -1, 98, -1, -1, -1, 31, 32, 33, 34]


def test_a_drafts_input_is_two_norms_side_by_side() -> None:
    embedding, hidden, out = bf16(3, 8), bf16(3, 8), torch.empty(3, 16, dtype=torch.bfloat16)
    weights = bf16(8), bf16(8)
    speculative.fused_eh_norm(embedding, hidden, *weights, out, 0.0)
    for x, weight, half in zip((embedding, hidden), weights, out.chunk(2, -1), strict=True):
        close(half, torch.nn.functional.rms_norm(x.double(), (8,), weight.double(), 0.0))


def test_every_reference_has_a_name_that_says_how_it_is_reached() -> None:
    prefixes = ("jit:", "deep_gemm", "deep_ep.", "sgl_kernel", "sglang.", "flashinfer.")
    assert len(REFERENCES) > 25
    for name in REFERENCES:
        assert name.startswith(prefixes), name


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
