"""KV of another pattern is turned away at the handshake of two nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.common import conn

from sglang_indexcache.serving import plan_agreement, process
from tests.serving.plans import plan

MANAGER = conn.CommonKVManager


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch, own_hooks: None) -> None:
    """Leave SGLang as it was."""
    for name in ("__init__", "try_ensure_parallel_info"):
        monkeypatch.setattr(MANAGER, name, MANAGER.__dict__[name])


def serve(
    monkeypatch: pytest.MonkeyPatch, text: str, *, disaggregated: bool = False, **fields: Any
) -> None:
    """Make this process a worker with pattern ``text`` of a model that ships every indexer."""
    bag = SimpleNamespace(disaggregation_mode="decode" if disaggregated else "null")
    monkeypatch.setattr("sglang.srt.runtime_context.get_disagg", lambda: bag)
    served_plan = plan(text, **fields)
    process.activate(served_plan)
    plan_agreement.install_handshake()


def decode_node() -> Any:
    """SGLang's manager of a decode node, up to what the handshake compares."""
    args = SimpleNamespace(kv_cache_dtype_str="bfloat16", page_size=64)
    manager: Any = MANAGER.__new__(MANAGER)
    with pytest.raises(AttributeError):  # of a real server's arguments it needs more
        manager.__init__(args, "decode", None)
    manager.prefill_info_table = {}
    manager.dsv41_spec_layout = None
    manager.is_mla_backend, manager.attn_tp_size, manager.dcp_size = True, 1, 1
    manager._resolve_rank_mapping = lambda info: None
    return manager


def handshake(
    monkeypatch: pytest.MonkeyPatch, manager: Any, kv_cache_dtype: str = "bfloat16"
) -> bool:
    """Ask a prefill node that told its bootstrap server ``kv_cache_dtype``."""
    answered = {
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64,
        "kv_cache_dtype": kv_cache_dtype, "follow_bootstrap_room": False,
    }  # fmt: skip
    answer = SimpleNamespace(status_code=200, json=lambda: answered)
    monkeypatch.setattr(conn.requests, "get", lambda *_, **__: answer)
    return bool(manager.try_ensure_parallel_info("prefill:8998"))


SAME = "bfloat16 with IndexCache pattern FSFS"


def test_nodes_with_the_same_pattern_shake_hands(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "FSFS", disaggregated=True)
    manager = decode_node()
    assert manager.kv_cache_dtype_str == SAME  # what a prefill node with it tells
    assert handshake(monkeypatch, manager, SAME)


@pytest.mark.parametrize(
    "prefill",
    ["bfloat16", "bfloat16 with IndexCache pattern FFFS", "bfloat16 with IndexCache in live mode"],
)
def test_a_prefill_node_with_another_pattern_is_turned_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, prefill: str
) -> None:
    serve(monkeypatch, "FSFS", disaggregated=True)
    manager = decode_node()
    assert not handshake(monkeypatch, manager, prefill)
    assert not manager.prefill_info_table
    assert "nothing is taken from the prefill node prefill:8998" in caplog.text
    assert f"kv_cache_dtype={prefill}, but" in caplog.text
    assert f"kv_cache_dtype={SAME}" in caplog.text
    assert "and the same pattern" in caplog.text


def test_live_nodes_have_the_same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each resolves the names of requests by itself."""
    serve(monkeypatch, "FFFF", disaggregated=True, mode="live", library="one")
    assert plan_agreement._tag() == " with IndexCache in live mode, library one"
    manager = decode_node()
    assert handshake(monkeypatch, manager, f"bfloat16{plan_agreement._tag()}")
    manager.prefill_info_table.clear()
    assert not handshake(monkeypatch, manager, "bfloat16 with IndexCache in live mode, library two")


def test_stock_sharing_shakes_hands_with_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "FFFF", disaggregated=True)
    manager = decode_node()
    assert handshake(monkeypatch, manager, "bfloat16")
    manager.prefill_info_table.clear()
    with pytest.raises(RuntimeError, match="KV cache dtype mismatch"):  # SGLang's own, as ever
        handshake(monkeypatch, manager, "fp8_e4m3")
