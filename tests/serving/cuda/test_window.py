"""Recent windows in the CUDA backend: what reaches SGLang's attention, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, TopkTransformMethod
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.serving.cuda import window
from sglang_indexcache.serving.cuda.choice import Route
from tests.serving.cuda.test_backend import Q, backend, layer, seen  # noqa: F401
from tests.serving.plans import plan

TOPK = 4
SLOTS = torch.arange(2 * 20, dtype=torch.int32).flip(0).view(2, 20)
"""Of 20 tokens of each of two requests."""


def prefill(*lengths: tuple[int, int], padding: int = 0) -> Any:
    """Requests of ``(tokens before, tokens in this chunk)``."""
    positions = [torch.arange(before, before + count) for before, count in lengths]
    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        tbo_parent_token_range=None,
        rids=None,
        batch_size=len(lengths),
        positions=torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)]),
        extend_seq_lens=torch.tensor([count for _, count in lengths]),
        req_pool_indices=torch.arange(len(lengths)).flip(0),
    )


def decode(*positions: int) -> Any:
    return SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        tbo_parent_token_range=None,
        rids=None,
        batch_size=len(positions),
        positions=torch.tensor(positions),
        req_pool_indices=torch.arange(len(positions)).flip(0),
    )


def wanted(pool_row: int, position: int, listed: set[int], size: int) -> set[int]:
    """Slots of a row's list and of its last ``size`` tokens."""
    near = range(max(0, position - size + 1), position + 1)
    return {int(SLOTS[pool_row, one]) for one in listed | set(near)}


@pytest.mark.parametrize("padding", [0, 3])
def test_a_chunked_prefill_reaches_into_the_chunk_before(padding: int) -> None:
    """Rows 6 to 9 of a request, whose windows begin before them, and the first 3 of another."""
    batch = prefill((6, 4), (0, 3), padding=padding)
    rows = [(1, position) for position in range(6, 10)] + [(0, position) for position in range(3)]
    listed = [{0, 5}] * 4 + [{0}] * 3
    lists = torch.full((7 + padding, TOPK), -1, dtype=torch.int32)
    for row, ((pool_row, _), chosen) in enumerate(zip(rows, listed, strict=True)):
        lists[row, : len(chosen)] = SLOTS[pool_row, sorted(chosen)]
    wide, counts = window.widen(lists, 3, 3, batch, SLOTS, None)
    assert wide.shape == (7 + padding, window.MULTIPLE)
    for row, ((pool_row, position), chosen) in enumerate(zip(rows, listed, strict=True)):
        entries = wide[row, : counts[row]].tolist()
        assert len(entries) == len(set(entries))
        assert set(entries) == wanted(pool_row, position, chosen, 3)
        assert (wide[row, counts[row] :] == -1).all()


def test_a_ragged_prefill_names_offsets() -> None:
    batch = prefill((0, 2), (4, 2))
    offsets = torch.tensor([0, 0, 2, 2])
    lists = torch.tensor([[0, -1], [1, -1], [2, -1], [3, -1]], dtype=torch.int32)
    wide, counts = window.widen(lists, 2, 2, batch, SLOTS, offsets)
    found = [set(row[:count].tolist()) for row, count in zip(wide, counts, strict=True)]
    assert found == [{0}, {0, 1}, {2, 2 + 4, 2 + 3}, {3, 2 + 5, 2 + 4}]


@pytest.mark.parametrize("kernel", ["fa3", "flashmla_sparse"])
def test_shared_layers_attend_to_more_and_say_how_much(
    seen: list[tuple[int, torch.Tensor | None]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
) -> None:
    """An F layer and the lists that SGLang hands on stay as they are."""
    told: list[Any] = []
    method = f"_forward_{kernel}"
    length = {"fa3": "cache_seqlens", "flashmla_sparse": "topk_length"}[kernel]
    monkeypatch.setattr(
        DeepseekSparseAttnBackend, method, lambda self, **call: told.append(call[length].tolist())
    )
    served = backend("FSS+w3")
    served.req_to_token = SLOTS
    served.get_topk_transform_method = lambda mode: TopkTransformMethod.PAGED
    batch = decode(9, 1)
    served.init_forward_metadata(batch)
    lists = torch.full((2, TOPK), -1, dtype=torch.int32)
    lists[0] = SLOTS[1, [0, 3, 8, 9]]
    lists[1, :2] = SLOTS[0, [0, 1]]
    stock = torch.tensor([4, 2, 1], dtype=torch.int32)
    for number in range(3):
        served.forward_decode(Q[:2], 2, 3, layer(number), batch, topk_indices=lists)
        getattr(served, method)(**{length: stock})
    assert seen[0][1] is lists
    assert seen[1][1] is seen[2][1]  # made once for the layers that share a selection
    assert seen[1][1] is not None
    assert set(seen[1][1][0].tolist()) - {-1} == wanted(1, 9, {0, 3, 8, 9}, 3)
    assert set(seen[1][1][1].tolist()) - {-1} == wanted(0, 1, {0, 1}, 3)
    rest = [1] if kernel == "fa3" else []
    assert told == [[4, 2, 1], [5, 2, *rest], [5, 2, *rest]]


def test_without_a_window_attention_is_told_nothing_new(
    seen: list[tuple[int, torch.Tensor | None]],  # noqa: F811
) -> None:
    served = backend("FSS")
    batch = decode(9)
    served.init_forward_metadata(batch)
    lists = torch.tensor([[1, 2]], dtype=torch.int32)
    for number in range(3):
        served.forward_decode(Q[:1], 2, 3, layer(number), batch, topk_indices=lists)
        assert served.windows.entries is None
    assert all(indices is lists for _, indices in seen)


FINE = {
    "dsa_prefill_backend": "flashmla_sparse",
    "dsa_decode_backend": "fa3",
    "kv_cache_dtype": "bfloat16",
    "speculative_algorithm": None,
    "enable_two_batch_overlap": False,
    "enable_prefill_cp": False,
    "dcp_size": 1,
    "enable_kv_cache_sharding": False,
    "enable_hisparse": False,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dsa_decode_backend": "flashmla_kv"}, "--dsa-decode-backend flashmla_kv .take fa3 or"),
        ({"dsa_prefill_backend": "trtllm"}, "--dsa-prefill-backend trtllm"),
        ({"dsa_prefill_backend": "flashmla_auto", "kv_cache_dtype": "fp8_e4m3"}, "flashmla_auto"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
        ({"enable_prefill_cp": True}, "--enable-prefill-cp"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
        ({"enable_hisparse": True}, "--enable-hisparse"),
    ],
)
def test_what_cannot_be_given_wider_lists_is_refused(change: dict[str, Any], message: str) -> None:
    cfg = SimpleNamespace(**FINE | change)
    window.check(cfg, plan("FSSS"), (), 1)
    with pytest.raises(SettingsError, match=message):
        window.check(cfg, plan("FSSS+w8"), (), 1)


def test_what_can_is_not() -> None:
    window.check(SimpleNamespace(**FINE), plan("FSSS+w8"), (), 1)
    for dtype in ("bfloat16", "auto"):
        automatic = FINE | {"dsa_prefill_backend": "flashmla_auto", "kv_cache_dtype": dtype}
        window.check(SimpleNamespace(**automatic), plan("FSSS+w8"), (), 1)
    with pytest.raises(SettingsError, match="pools its index keys"):
        window.check(SimpleNamespace(**FINE), plan("FSSS+w8"), (), 4)


def test_our_sparse_attention_takes_wider_lists() -> None:
    """In the place of a kernel of SGLang's that does not."""
    cfg = SimpleNamespace(**FINE | {"dsa_decode_backend": "flashmla_kv"})
    ours = Route("sparse_mla", "decode", SimpleNamespace(name="cuda"), "asked for")  # type: ignore[arg-type]
    window.check(cfg, plan("FSSS+w8"), (ours,), 1)
