"""MiniMax-M3's backend under a pattern: SGLang's own, with stand-ins for its kernels alone.

A stand-in of the indexer answers with the layer that asked, so that what attention is given says
whose blocks they are. The oracle is the pattern, read here letter by letter.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention import minimax_sparse_backend as stock
from sglang.srt.layers.attention.minimax_sparse_ops import minimax_sparse as ops
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_indexcache.errors import SettingsError, StaleIndexError
from sglang_indexcache.serving import active, plugin
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cuda import blocks
from sglang_indexcache.serving.cuda.blocks import BlockSharingBackend, create_blocks_backend
from sglang_indexcache.serving.plan import Plan
from tests.serving.plans import plan

LAYERS = (1, 2, 4, 5, 6)
"""Layers with sparse attention, of seven; the others are dense."""
PATTERN = "FSSFS"
BLOCK, BLOCKS, WIDTH = 8, 4, 8
PREFILL, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
both_phases = pytest.mark.parametrize("phase", [PREFILL, DECODE], ids=["prefill", "decode"])


def sources(pattern: str) -> list[int]:
    """Return by sparse layer the layer whose blocks it reads."""
    layers: list[int] = []
    for layer, letter in zip(LAYERS, pattern, strict=True):
        layers.append(layer if letter == "F" else layers[-1])
    return layers


def m3(pattern: str = PATTERN, heads: int = 1) -> Plan:
    shape = {"index_n_heads": heads, "index_head_dim": WIDTH, "index_topk": BLOCK * BLOCKS}
    return plan(
        pattern,
        architecture="MiniMaxM3SparseForCausalLM",
        layer_ids=LAYERS,
        shape=tuple(shape.items()),
    )


def runner(**config: Any) -> Any:
    """Return what SGLang's backend reads of a ModelRunner, with a real pool of 64 slots."""
    sparse = {
        "sparse_attention_freq": [int(layer in LAYERS) for layer in range(7)],
        "sparse_disable_index_value": [int(layer in LAYERS) for layer in range(7)],
        "sparse_index_dim": WIDTH,
        "sparse_num_index_heads": 1,
        "sparse_block_size": BLOCK,
        "sparse_topk_blocks": BLOCKS,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
    }
    dense = [layer for layer in range(7) if layer not in LAYERS]
    pool = MiniMaxSparseKVPool(
        size=64, page_size=BLOCK, dtype=torch.bfloat16, head_num=1, head_dim=WIDTH,
        idx_head_dim=WIDTH, dense_layer_ids=dense, sparse_layer_ids=list(LAYERS), device="cpu",
        disable_value_sparse_layer_ids=list(LAYERS), start_layer=0, end_layer=7,
    )  # fmt: skip
    hf_config = SimpleNamespace(sparse_attention_config=sparse | config, text_config=None)
    return SimpleNamespace(
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        model_config=SimpleNamespace(hf_config=hf_config, context_len=64, quantization=None),
        layer_info=SimpleNamespace(start_layer=0, end_layer=7),
        server_args=None,
        is_draft_worker=False,
    )


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer what the constructor asks of a server; no pool stores keys with a GPU's kernel."""
    single_rank, none = (
        SimpleNamespace(attn_tp_size=1),
        SimpleNamespace(speculative_num_draft_tokens=None, speculative_algorithm=None),
    )
    for module in (stock, blocks):
        monkeypatch.setattr(module, "get_parallel", lambda: single_rank)
    monkeypatch.setattr(stock, "get_spec", lambda: none)
    monkeypatch.setattr(stock, "resolving_view", lambda args: args)
    monkeypatch.setattr(stock, "m3_fp8_attn_gemm_enabled", lambda args: False)
    monkeypatch.setattr(cuda_graph_config, "check_cuda_graph_backend", lambda *_: True)
    monkeypatch.setattr(MiniMaxSparseKVPool, "set_fused_kv_index_buffer", lambda *_: None)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return which layers ran their indexer (``ran``), and whose blocks were read (``read``)."""
    calls = SimpleNamespace(ran=[], read=[])

    def select(**call: Any) -> tuple[Any, ...]:
        layer = int(call["q"].flatten()[0])
        calls.ran.append(layer)
        shape = (call["q"].shape[1], call["q"].shape[0], call["topk"])
        return None, torch.full(shape, layer, dtype=torch.int32)

    def attend(**call: Any) -> torch.Tensor:
        [source] = set(call["topk_idx"].flatten().tolist())  # of one layer alone
        calls.read.append(source)
        assert call["topk_idx"].shape[:2] == (1, call["q"].shape[0])
        return call["q"]

    def unite(blocks: torch.Tensor, dim: int) -> torch.Tensor:
        return blocks.transpose(1, 2).flatten(2)  # heads that share keys: their blocks together

    monkeypatch.setattr(ops, "flash_prefill_with_topk_index", select)
    monkeypatch.setattr(ops, "flash_decode_with_topk_idx", lambda **call: (*select(**call), None))
    monkeypatch.setattr(ops, "topk_index_reduce", unite)
    for name in ("flash_prefill_with_gqa_share_sparse", "flash_decode_with_gqa_share_sparse"):
        monkeypatch.setattr(ops, name, attend)
    return calls


def make(pattern: str = PATTERN, heads: int = 1) -> BlockSharingBackend:
    return BlockSharingBackend(
        runner(sparse_num_index_heads=heads), ActivePattern(m3(pattern, heads))
    )


def batch(phase: ForwardMode, rows: int = 5) -> Any:
    """Return a batch of one prompt of ``rows`` tokens, or of ``rows`` requests that decode."""
    forward_batch = MagicMock(forward_mode=phase, actual_forward_mode=phase, rids=None)
    forward_batch.minimax_m3_precached_sparse_layers = None
    lengths = [rows] if phase == PREFILL else [9] * rows
    forward_batch.seq_lens = forward_batch.seq_lens_cpu = torch.tensor(lengths)
    forward_batch.batch_size, forward_batch.num_padding, forward_batch.spec_info = (
        len(lengths),
        0,
        None,
    )
    forward_batch.extend_seq_lens_cpu = lengths if phase == PREFILL else None
    forward_batch.extend_seq_lens = torch.tensor(lengths)
    forward_batch.extend_prefix_lens = torch.zeros(1, dtype=torch.int64)
    return forward_batch


def run(backend: Any, forward_batch: Any, layers: tuple[int, ...] = LAYERS, rows: int = 5) -> None:
    """Run ``layers`` of a forward that has begun, each with ``rows`` rows."""
    name = "forward_extend" if forward_batch.forward_mode == PREFILL else "forward_decode"
    for layer in layers:
        q = torch.zeros(rows, 2, WIDTH)
        idx_q = torch.full((rows, backend._idx_group_size, WIDTH), float(layer))
        getattr(backend, name)(
            q, q, q, MagicMock(layer_id=layer), forward_batch, idx_q=idx_q, idx_k=None, idx_v=None
        )


# -- whose blocks a layer reads ----------------------------------------------------------------


@both_phases
@pytest.mark.parametrize("pattern", [PATTERN, "FFFFF", "FSSSS", "FSFFS"])
@pytest.mark.parametrize("heads", [1, 2], ids=["one head", "two heads a group"])
def test_an_s_layer_reads_its_f_layers_blocks_and_runs_no_indexer(
    kernels: SimpleNamespace, phase: ForwardMode, pattern: str, heads: int
) -> None:
    backend = make(pattern, heads)
    full = [layer for layer, letter in zip(LAYERS, pattern, strict=True) if letter == "F"]
    for _ in range(2):  # forwards
        kernels.ran.clear()
        kernels.read.clear()
        forward_batch = batch(phase)
        backend.init_forward_metadata(forward_batch)
        run(backend, forward_batch)
        assert kernels.ran == full
        assert kernels.read == sources(pattern)


@both_phases
def test_a_captured_forward_begins_once_and_runs_its_layers_three_times(
    kernels: SimpleNamespace, phase: ForwardMode
) -> None:
    backend, forward_batch = make(), batch(phase)
    backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
    addresses = set()
    for _ in range(3):
        run(backend, forward_batch)
        addresses |= {buffer.data_ptr() for buffer in backend._decode_topk_buf.values()}
    assert kernels.read == sources(PATTERN) * 3
    assert len(addresses) == (phase == DECODE)
    assert sum(backend.active.counters.indexer_selections) == 0  # nobody was served


def test_rows_that_pad_a_prefill_are_no_part_of_it(kernels: SimpleNamespace) -> None:
    backend, forward_batch = make(), batch(PREFILL)
    backend.init_forward_metadata(forward_batch)
    run(backend, forward_batch, rows=8)
    assert kernels.read == sources(PATTERN)


def drop_an_f(backend: Any) -> None:
    backend._topk_is_source[5] = False


def shift_a_group(backend: Any) -> None:
    backend._topk_group_of_layer[6] -= 3


def share_nothing(backend: Any) -> None:
    backend.index_cache_enabled = False


@both_phases
@pytest.mark.parametrize("mutate", [drop_an_f, shift_a_group, share_nothing])
def test_a_mutant_is_noticed(
    kernels: SimpleNamespace, phase: ForwardMode, mutate: Callable[[Any], None]
) -> None:
    backend, forward_batch = make(), batch(phase)
    mutate(backend)
    backend.init_forward_metadata(forward_batch)
    try:
        run(backend, forward_batch)
    except StaleIndexError:
        return
    assert kernels.read != sources(PATTERN)


# -- what must never be read -------------------------------------------------------------------


@both_phases
def test_a_read_before_any_f_layer_of_this_forward_raises(
    kernels: SimpleNamespace, phase: ForwardMode
) -> None:
    """Stock SGLang would select anew in prefill, and in decode read the last forward's blocks."""
    backend = make("FSSSS")
    for _ in range(2):
        forward_batch = batch(phase)
        backend.init_forward_metadata(forward_batch)
        with pytest.raises(StaleIndexError, match="layer 2 shares the blocks of layer 1"):
            run(backend, forward_batch, layers=(2,))
        run(backend, forward_batch)


@both_phases
def test_a_batch_does_not_read_the_blocks_of_another(
    kernels: SimpleNamespace, phase: ForwardMode
) -> None:
    """A batch that begins while another runs, as halves that overlap would."""
    backend, first, two = make("FSSSS"), batch(phase), batch(phase)
    backend.init_forward_metadata(first)
    run(backend, first, layers=(1,))
    backend.init_forward_metadata(two)
    with pytest.raises(StaleIndexError, match="has selected none in this forward"):
        run(backend, two if phase == DECODE else first, layers=(2,))


def test_decode_of_other_rows_than_the_forward_began_with_raises(kernels: SimpleNamespace) -> None:
    """Stock SGLang would share nothing there, without a word."""
    backend, forward_batch = make(), batch(DECODE)
    backend.init_forward_metadata(forward_batch)
    with pytest.raises(StaleIndexError, match="7 rows are decoded in a forward that began with"):
        run(backend, forward_batch, rows=7)


def test_layers_that_sglang_builds_otherwise_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"SGLang built layers \(1, 2, 4, 5\)"):
        BlockSharingBackend(
            runner(sparse_attention_freq=[0, 1, 1, 0, 1, 1, 0]), ActivePattern(m3())
        )


# -- what is counted ---------------------------------------------------------------------------


def test_counters_say_what_each_layer_did(kernels: SimpleNamespace) -> None:
    model_runner = runner()
    active_pattern = ActivePattern(m3())
    active_pattern.traffic.look_at(active_pattern.plan, model_runner)
    backend = BlockSharingBackend(model_runner, active_pattern)
    for phase in (PREFILL, DECODE, DECODE):
        forward_batch = batch(phase)
        backend.init_forward_metadata(forward_batch)
        run(backend, forward_batch)
    backend.init_forward_metadata_out_graph(batch(DECODE))  # a replay, which runs no Python
    counters = active_pattern.counters
    assert counters.indexer_selections == [3, 0, 0, 3, 0]
    assert counters.index_reuses == [0, 3, 3, 0, 3]
    assert counters.forwards == 4
    assert dict(counters.graph_replays) == {"decode": 1}
    traffic = active_pattern.traffic
    assert dict(traffic.tokens) == {("prefill", PATTERN): 5, ("decode", PATTERN): 15}
    assert traffic.index_k_bytes == 5 * WIDTH * 2  # bfloat16, of every layer
    assert (traffic.topk, traffic.flops) == (32, 2 * WIDTH)


# -- who gets this backend ---------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what SGLang's own function was called with; nothing is hooked in this process."""
    calls: list[Any] = []
    for module, name in (
        (plugin.live, "install"),
        (plugin.requests, "install"),
        (plugin.agreement, "install_handshake"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(active, "_active", None)
    return calls


@pytest.mark.parametrize(("plan", "is_draft"), [(None, False), (plan("FSFS"), False), (m3(), True)])
def test_other_models_and_drafts_get_sglangs_own(
    installed: list[Any], plan: Plan | None, is_draft: bool
) -> None:
    """The path of a DSA model: the same call, and nothing of this plugin's begins."""
    model_runner = runner()
    model_runner.is_draft_worker = is_draft
    if plan is not None:
        model_runner.model_config.hf_config.indexcache = plan.hf_overrides()["indexcache"]

    def stock(*arguments: Any) -> str:
        installed.append(arguments)
        return "stock"

    assert plugin._share_blocks(stock, model_runner, "dense") == "stock"
    assert installed == [(model_runner, "dense")]
    assert active.current() is None


def test_a_server_of_minimax_m3_gets_it_around_its_dense_backend(installed: list[Any]) -> None:
    model_runner, dense = runner(), MagicMock()
    model_runner.model_config.hf_config.indexcache = m3().hf_overrides()["indexcache"]
    hybrid = plugin._share_blocks(attention_registry.attn_backend_wrapper, model_runner, dense)
    assert type(hybrid) is stock.MiniMaxHybridAttnBackend
    assert hybrid.dense is dense
    assert type(hybrid.sparse) is BlockSharingBackend
    assert hybrid.sparse.active is active.current()
    assert tuple(hybrid.sparse_layer_ids) == LAYERS


def test_a_backend_that_shares_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs import model_config

    monkeypatch.setattr(model_config, "uses_minimax_m3_nvfp4_native_stack", lambda _: True)
    with pytest.raises(SettingsError, match="does not work with NVFP4 weights on Blackwell"):
        create_blocks_backend(runner(), MagicMock(), ActivePattern(m3()))


def test_the_models_config_gets_the_plan_and_no_other_models_keys() -> None:
    users, config = {"text_config": {"a": 1}}, SimpleNamespace(text_config=SimpleNamespace())
    overrides = m3().config_overrides(users, config)
    assert overrides["indexer_types"] is None
    assert overrides["text_config"] == {"a": 1}
    assert Plan.from_json(overrides["indexcache"]) == m3()
