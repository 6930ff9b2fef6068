"""KV of another pattern: kept apart in caches, turned away at the handshake of two nodes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.disaggregation.common import conn
from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_indexcache.serving import active, foreign_kv, hooks
from tests.serving.plans import plan

MANAGER = conn.CommonKVManager


@pytest.fixture(autouse=True)
def own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave SGLang as it was."""
    monkeypatch.setattr(HookRegistry, "_patched", set(HookRegistry._patched))
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(hooks, "_ours", set())
    monkeypatch.setattr(active, "_active", None)
    for owner, name in (
        (Req, "__init__"),
        (scheduler.Scheduler, "attach_hicache_storage_wrapped"),
        (MANAGER, "__init__"),
        (MANAGER, "try_ensure_parallel_info"),
    ):
        monkeypatch.setattr(owner, name, owner.__dict__[name])


def serve(
    monkeypatch: pytest.MonkeyPatch, text: str, mode: str = "static", disaggregated: bool = False
) -> None:
    """Make this process a worker with pattern ``text`` of a model that ships every indexer."""
    bag = SimpleNamespace(disaggregation_mode="decode" if disaggregated else "null")
    monkeypatch.setattr("sglang.srt.runtime_context.get_disagg", lambda: bag)
    made = plan(text, mode=mode)
    active.activate(made)
    foreign_kv.install(made)


def stored_under(extra_key: str | None = None, lora_id: str | None = None) -> Any:
    """The keys under which a request's pages go to HiCache's storage."""
    tokens = array("q", range(8))
    request = Req("1", "", tokens, SamplingParams(), extra_key=extra_key, lora_id=lora_id)
    return get_storage_hash_str(RadixKey(request.origin_input_ids, request.extra_key), page_size=4)


@pytest.mark.parametrize("extra_key", [None, "a user's"])
def test_patterns_do_not_find_each_others_pages(
    monkeypatch: pytest.MonkeyPatch, extra_key: str | None
) -> None:
    found = [stored_under(extra_key)]  # stock SGLang
    for text in ("FSFS", "FFFS"):
        serve(monkeypatch, text)
        found.append(stored_under(extra_key))
        assert stored_under(extra_key) == found[-1]
    for page in range(2):
        assert len({pages[page] for pages in found}) == 3


def test_users_keys_and_adapters_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "FSFS")
    keys = [stored_under(), stored_under("a"), stored_under("b"), stored_under("a", "adapter")]
    assert len({pages[0] for pages in keys}) == 4


def test_the_checkpoints_own_sharing_shares_with_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = stored_under()
    serve(monkeypatch, "FFFF")
    assert stored_under() == stock


def test_a_request_that_comes_back_keeps_its_key() -> None:
    once = foreign_kv.within("indexcache-1", "mine")
    assert foreign_kv.within("indexcache-1", once) == once
    alone = foreign_kv.within("indexcache-1", None)
    assert foreign_kv.within("indexcache-1", alone) == alone
    assert foreign_kv.within("indexcache-2", once) != once


def test_no_storage_can_be_attached_in_live_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "FSFS", mode="live")
    attach = scheduler.Scheduler.attach_hicache_storage_wrapped
    answer = attach(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert not answer.success
    assert "static mode" in answer.message


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
    said = {
        "attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64,
        "kv_cache_dtype": kv_cache_dtype, "follow_bootstrap_room": False,
    }  # fmt: skip
    answer = SimpleNamespace(status_code=200, json=lambda: said)
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


def test_stock_sharing_shakes_hands_with_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, "FFFF", disaggregated=True)
    manager = decode_node()
    assert handshake(monkeypatch, manager, "bfloat16")
    manager.prefill_info_table.clear()
    with pytest.raises(RuntimeError, match="KV cache dtype mismatch"):  # SGLang's own, as ever
        handshake(monkeypatch, manager, "fp8_e4m3")
