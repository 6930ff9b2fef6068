"""Refusals of what a plan does not combine with; ``test_plugin.py`` has real command lines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
from sglang.srt import platforms
from sglang.srt.model_executor.cuda_graph_config import default_cuda_graph_config
from sglang.srt.platforms.device_mixin import PlatformEnum

from sglang_indexcache.errors import PatternError, SettingsError
from sglang_indexcache.models import BY_ARCHITECTURE
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.operating.features import describe_row_split
from sglang_indexcache.serving.refusals import check, stage_starts
from tests.serving.plans import plan

LIVE = {"mode": "live"}
SPLIT = {"split_rows": "on"}
TP_8 = {"tp_size": 8}
RETURN = {"enable_return_indexer_topk": True}


def flags(**changes: Any) -> SimpleNamespace:
    """Return what a plain command line resolves to, and what was ``given``."""
    plain = {
        "attention_backend": "indexcache",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "use_ray": False,
        "enable_pdmux": False,
        "enable_two_batch_overlap": False,
        "enable_return_indexer_topk": False,
        "pp_size": 1,
        "tp_size": 1,
        "attn_dp_size": 1,
        "disaggregation_mode": "null",
        "speculative_algorithm": None,
        "enable_prefill_cp": False,
        "cp_strategy": None,
        "dcp_size": 1,
        "enable_hisparse": False,
        "enable_kv_cache_sharding": False,
        "enable_torch_compile": False,
        "kv_cache_dtype": "auto",
        "cuda_graph_config": None,
        "cuda_graph_backend_decode": None,
        "cuda_graph_backend_prefill": None,
        "disable_cuda_graph": False,
        "disable_decode_cuda_graph": False,
        "enable_flexkv": False,
        "radix_cache_backend": None,
        "hicache_storage_backend": None,
        "enable_lmcache": False,
        "enable_unified_cache_external_linker": False,
    }
    return SimpleNamespace(**plain | changes)


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return an NVIDIA GPU, which a test may make another device."""
    device = type("Platform", (platforms.CudaSRTPlatform,), {})()
    monkeypatch.setattr(platforms, "current_platform", device)
    return device


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({}, {}),
        (LIVE, {}),
        ({}, {"hicache_storage_backend": "mooncake"}),
        (LIVE, {"hicache_storage_backend": "file"}),
        (LIVE, {"enable_lmcache": True}),
        ({}, {"enable_lmcache": True}),
        ({"own": Pattern("FSFS")}, {"enable_flexkv": True}),
        ({"kernels": "cuda"}, {}),
        (SPLIT, TP_8),
        (SPLIT | LIVE, {"tp_size": 8, "attn_dp_size": 4}),
        (SPLIT, TP_8 | {"cuda_graph_backend_prefill": "breakable", "pp_size": 2}),
        ({}, {"pp_size": 4}),
        ({}, {"dcp_size": 2, "enable_hisparse": True}),
        (LIVE, {"kv_cache_dtype": "fp8_e4m3"}),
        ({}, RETURN | {"tp_size": 4, "attn_dp_size": 4}),
        (LIVE, {"cuda_graph_config": {"decode": {"max_bs": 8, "backend": "disabled"}}}),
        (LIVE, {"cuda_graph_config": default_cuda_graph_config()}),  # SGLang's own
    ],
    ids=str,
)
def test_what_goes_together(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    check(flags(**changes), plan(**fields), 4)


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (SPLIT, {}, "--indexcache-split-rows on does not work with one rank a replica"),
        (SPLIT, {"tp_size": 8, "attn_dp_size": 8}, "with one rank a replica"),
        (SPLIT, TP_8 | {"enable_prefill_cp": True}, "has dealt out the rows already"),
        (SPLIT, TP_8 | {"dcp_size": 2}, "--dcp-size 2, which deals out the keys"),
        (SPLIT, TP_8 | {"enable_two_batch_overlap": True}, "between whose halves nobody has run"),
        (SPLIT, TP_8 | {"enable_hisparse": True}, "--enable-hisparse, which moves what"),
        (SPLIT, TP_8 | {"enable_kv_cache_sharding": True}, "where ranks read keys together"),
        (SPLIT, TP_8 | {"cuda_graph_backend_prefill": "full"}, "would replay the rows of their"),
        ({}, {"use_ray": True}, "does not work with --use-ray"),
        ({}, {"enable_pdmux": True}, "--enable-pdmux does not work with models of"),
        ({}, {"enable_prefill_cp": True, "cp_strategy": "zigzag"}, "Use --cp-strategy interleave"),
        ({}, RETURN | {"enable_two_batch_overlap": True}, "with --enable-two-batch-overlap, where"),
        ({}, RETURN | {"pp_size": 2}, "with --pp-size, where each stage records its own"),
        ({}, RETURN | {"disaggregation_mode": "decode"}, "with --disaggregation-mode, where"),
        ({}, RETURN | {"tp_size": 2}, "with attention that is split over GPUs"),
        ({}, RETURN | {"tp_size": 4, "attn_dp_size": 2}, "--tp-size above --attn-dp-size"),
        (
            LIVE,
            {"enable_flexkv": True},
            "--indexcache-mode live does not work with --enable-flexkv",
        ),
        ({}, {"enable_flexkv": True}, "FlexKV finds KV by its tokens alone"),
        ({}, {"radix_cache_backend": "flexkv"}, "does not work with --radix-cache-backend flexkv"),
        (LIVE, {"pp_size": 2, "enable_prefill_cp": True}, "--enable-prefill-cp"),
        (LIVE, {"dcp_size": 2}, "live mode does not work with --dcp-size"),
        (LIVE, {"enable_hisparse": True}, "live mode does not work with --enable-hisparse"),
        (LIVE, {"enable_kv_cache_sharding": True}, "with --enable-kv-cache-sharding"),
        (LIVE, {"enable_torch_compile": True}, "--enable-torch-compile is not served"),
        ({}, {"enable_torch_compile": True}, "Drop the flag; CUDA graphs work without it"),
        ({}, {"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is not served"),
        (LIVE, {"kv_cache_dtype": "fp4_mx_block16"}, "fp4_mx_block16 is not served"),
        (LIVE, {"cuda_graph_config": {"decode": {"backend": "full"}}}, r"decode graphs \(full\)"),
        (LIVE, {"cuda_graph_backend_decode": "full"}, "Drop --cuda-graph-backend-decode"),
        (
            LIVE,
            {"cuda_graph_backend_prefill": "breakable"},
            "Drop --cuda-graph-backend-prefill, and the prefill backend",
        ),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check(flags(**changes), plan(**fields), 4)


@pytest.mark.parametrize(
    ("device", "fields", "message"),
    [
        (PlatformEnum.ROCM, LIVE, "live mode does not work on AMD GPUs"),
        (PlatformEnum.ROCM, {"kernels": "cuda"}, "cuda does not work on AMD GPUs"),
        (PlatformEnum.NPU, {}, r"does not serve on this platform \(npu\)"),
        (PlatformEnum.XPU, {}, "SGLang has another attention backend for it"),
        (PlatformEnum.CPU, {}, "does not serve on this platform"),
    ],
    ids=str,
)
def test_platforms_that_are_not_served(
    platform: Any, device: PlatformEnum, fields: dict[str, Any], message: str
) -> None:
    type(platform)._enum, type(platform).device_name = device, device.name.lower()
    with pytest.raises(SettingsError, match=message):
        check(flags(), plan(**fields), 4)


def test_amd_serves_a_static_pattern_with_the_engines_kernels(platform: Any) -> None:
    type(platform)._enum = PlatformEnum.ROCM
    check(flags(), plan(), 4)


HYBRID = {"architecture": "Glm5NextForConditionalGeneration", "layer_ids": (3, 7, 11)}
TWO = {"pp_size": 2}
OVERLAP = TWO | {"enable_two_batch_overlap": True}


@pytest.mark.parametrize(
    ("fine", "bad", "start", "fields", "changes"),
    [
        ("FSFS", "FFSS", 2, LIVE, TWO),
        # SGLang drops the halves' indices, and would hand on an earlier layer's without a word.
        ("FSFS", "FFSS", 2, {}, OVERLAP),
        ("FFS", "FSF", 1, HYBRID, TWO),  # hands no indices on; its second stage begins at layer 7
    ],
    ids=["live", "overlap", "hybrid"],
)
def test_a_stage_that_is_handed_no_indices_starts_on_a_full_layer(
    fine: str, bad: str, start: int, fields: dict[str, Any], changes: dict[str, Any]
) -> None:
    layers = 14 if fields is HYBRID else 4
    check(flags(**changes), plan(fine, **fields), layers)
    with pytest.raises(PatternError, match=f"stages start at layer {start}, where"):
        check(flags(**changes), plan(bad, **fields), layers)
    check(flags(), plan(bad, **fields), layers)


def test_in_static_mode_sglang_hands_the_indices_on() -> None:
    check(flags(**TWO), plan("FFSS"), 4)


def test_no_model_of_ours_has_prefill_in_pieces() -> None:
    files = (Path(sglang.__file__).parent / "srt" / "models").glob("*.py")
    pieces = {
        name: "forward_split_prefill" in text
        for text in map(Path.read_text, files)
        for name in BY_ARCHITECTURE
        if f"class {name}(" in text
    }
    assert {"GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"} <= pieces.keys()
    assert not any(pieces.values())


def test_stage_starts_in_pattern_positions() -> None:
    assert stage_starts(range(6), 6, 2) == [3]
    assert stage_starts((3, 7, 11), 16, 4) == [1, 2]  # the last stage begins behind layer 11
    assert stage_starts((3, 7, 11), 14, 14) == [0, 1, 2]
    assert stage_starts(range(6), 6, 1) == []


@pytest.mark.parametrize(
    ("fields", "changes", "text"),
    [
        ({}, {}, ""),
        (SPLIT, TP_8, "each of 8 ranks scores its share of a prefill's rows"),
        ({"split_rows": "off"}, TP_8, ""),
        ({}, TP_8 | {"attn_dp_size": 2}, "none: each of 4 ranks runs every indexer for all rows"),
        ({}, TP_8 | {"dcp_size": 2}, "none, beside --dcp-size 2, which deals out the keys"),
    ],
    ids=str,
)
def test_the_row_split_is_advised(
    fields: dict[str, Any], changes: dict[str, Any], text: str
) -> None:
    description = describe_row_split(flags(**changes), plan(**fields))
    assert description.startswith(text)
    assert bool(description) == bool(text)
