"""Choice of operations that become ours: by flag, card, model and SGLang's own configuration."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.errors import IndexCacheError, SettingsError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.dispatch import Machine
from sglang_indexcache.serving import options
from sglang_indexcache.serving.cuda.choice import (
    REPLACED_ATTENTION,
    ROUTED,
    check_engine,
    choose,
)

CPU = Machine("CPU", None)
RECORDED = Machine("NVIDIA H100 80GB HBM3", (9, 0))
VOLTA = Machine("NVIDIA V100", (7, 0))
AMPERE = Machine("NVIDIA A100", (8, 0))
HOPPER = Machine("NVIDIA H100", (9, 0))
BLACKWELL = Machine("NVIDIA B200", (10, 0))


@pytest.fixture(autouse=True)
def everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    present = tuple(
        replace(implementation, missing=lambda: None) for implementation in dispatch.IMPLEMENTATIONS
    )
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", present)


def server(**fields: Any) -> Any:
    """Return what SGLang decides for a bfloat16 cache on Hopper."""
    return SimpleNamespace(
        **{
            "device": "cuda",
            "dsa_topk_backend": "sgl-kernel",
            "kv_cache_dtype": "bfloat16",
            "dsa_prefill_backend": "flashmla_sparse",
            "dsa_decode_backend": "fa3",
            "enable_hisparse": False,
            "enable_prefill_cp": False,
            "enable_kv_cache_sharding": False,
            "dcp_size": 1,
            "tp_size": 1,
            "attn_dp_size": 1,
            "attn_cp_size": 1,
            "speculative_num_draft_tokens": None,
            **fields,
        }
    )


FP8 = {
    "kv_cache_dtype": "fp8_e4m3",
    "dsa_prefill_backend": "flashmla_kv",
    "dsa_decode_backend": "flashmla_kv",
}
"""What SGLang decides for an FP8 cache on Hopper."""


def glm5(**fields: Any) -> Any:
    config = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048}
    shape = {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": torch.bfloat16,
        "context_len": 202752,
        "num_attention_heads": 20,
    }
    config |= {name: value for name, value in fields.items() if name.startswith("index_")}
    shape |= {name: value for name, value in fields.items() if name in shape}
    return SimpleNamespace(hf_config=SimpleNamespace(**config), **shape)


Names = dict[tuple[str, str], str | None]


def names(value: str, cfg: Any, model: Any, machine: Machine) -> Names:
    routes = choose(value, cfg, model, machine)
    assert all(route.why for route in routes)
    return {(route.op, route.phase): route.implementation for route in routes}


def all_from(name: str | None) -> Names:
    return dict.fromkeys(ROUTED, name)


@pytest.mark.parametrize("machine", [CPU, VOLTA, HOPPER], ids=lambda m: m.name)
def test_engine_is_the_engine_everywhere(machine: Machine) -> None:
    assert names("engine", server(), glm5(), machine) == all_from(None)


@pytest.mark.parametrize("name", ["cuda", "reference"])
def test_a_name_is_for_everything(name: str) -> None:
    assert names(name, server(), glm5(), HOPPER) == all_from(name)


@pytest.mark.parametrize(
    ("operations", "ours"),
    [
        ("sparse_mla", ROUTED[2:]),
        ("prefill", ROUTED[::2]),
        ("select-prefill, sparse_mla", (ROUTED[0], *ROUTED[2:])),
        ("sparse_mla-decode", ROUTED[3:]),
    ],
)
def test_operations_are_chosen_each_by_itself(operations: str, ours: Any) -> None:
    expected = all_from(None) | dict.fromkeys(ours, "cuda")
    assert names(f"cuda:{operations}", server(), glm5(), HOPPER) == expected


def test_what_is_not_asked_for_is_no_obstacle() -> None:
    """Twelve indexer heads stop our selection only."""
    assert names("cuda:sparse_mla", server(), glm5(index_n_heads=12), HOPPER)
    cfg = server(dsa_decode_backend="tilelang")
    assert names("cuda:prefill", cfg, glm5(), HOPPER)
    with pytest.raises(SettingsError, match="Name the operations that shall be ours"):
        choose("cuda", cfg, glm5(), HOPPER)


@pytest.mark.parametrize("value", ["triton", "cuda:", "cuda:topk", "cuda:select,", "engine:select"])
def test_an_operation_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(
        SettingsError, match="is not auto, or one of cuda, reference, alone or with op"
    ):
        options.collect({"indexcache_kernels": value})


@pytest.mark.parametrize(
    "value", ["engine", "cuda", "reference", "cuda:prefill", "auto", "auto:70"]
)
def test_what_may_be_asked_for(value: str) -> None:
    assert options.collect({"indexcache_kernels": value})


@pytest.mark.parametrize("value", ["auto:", "auto:101", "auto:-1", "auto:prefill"])
def test_an_overlap_that_is_none_is_an_error(value: str) -> None:
    with pytest.raises(SettingsError, match=r"in percent: write auto:70, or auto where"):
        options.collect({"indexcache_kernels": value})


def auto(cfg: Any, model: Any, value: str = "auto", machine: Machine = RECORDED) -> dict[str, str]:
    """Return what ``auto`` says of each operation: what it may take, or why it takes nothing."""
    return {f"{route.op}-{route.phase}": route.why for route in choose(value, cfg, model, machine)}


GLM5_FP8 = server(**{**FP8, "tp_size": 8})
GLM5_64 = glm5(num_attention_heads=64)


def test_auto_is_what_the_record_of_the_card_allows() -> None:
    taken = auto(GLM5_FP8, GLM5_64)
    assert (
        "8,192 rows, 61,440 tokens: cuda (5,027 us, SGLang's default 5,898)"
        in taken["select-prefill"]
    )
    assert "8,192 rows, 10,240 tokens: sglang v2" in taken["select-prefill"]
    assert "64 rows: cuda" in taken["sparse_mla-decode"]
    assert taken["select-decode"].startswith("nothing was faster: record of NVIDIA H100 80GB")
    assert taken["sparse_mla-prefill"].startswith("no shape was timed: ")
    loaded = names("auto", GLM5_FP8, GLM5_64, RECORDED)
    assert loaded == all_from(None) | dict.fromkeys([ROUTED[0], ROUTED[3]], "cuda")


def test_auto_takes_attention_in_prefill_only_where_lists_are_said_to_overlap() -> None:
    cfg = server(tp_size=8)
    assert auto(cfg, GLM5_64)["sparse_mla-prefill"].endswith("8 heads, lists that share 0 %")
    assert "4,096 rows: cuda" in auto(cfg, GLM5_64, "auto:70")["sparse_mla-prefill"]
    assert auto(cfg, GLM5_64)["sparse_mla-decode"] == "fa3 over a bfloat16 cache was not timed"


@pytest.mark.parametrize(
    ("operation", "cfg", "model", "why"),
    [
        ("select-prefill", {"dsa_topk_backend": "torch"}, {}, "--dsa-topk-backend torch was not"),
        ("select-prefill", {"enable_prefill_cp": True}, {}, "--enable-prefill-cp gives every GPU"),
        ("select-prefill", {}, {"index_topk": 1024}, "lists of 1024 were not timed"),
        (
            "select-prefill",
            {**FP8, "dsa_prefill_backend": "flashmla_sparse"},
            {},
            "SGLang runs its faster top-k there by default",
        ),
        ("sparse_mla-decode", {"dsa_decode_backend": "tilelang"}, {}, "not for tilelang"),
    ],
)
def test_auto_leaves_to_sglang_what_was_not_timed_or_cannot_run(
    operation: str, cfg: dict[str, Any], model: dict[str, Any], why: str
) -> None:
    assert why in auto(server(**cfg), glm5(**model))[operation]


def test_auto_on_a_card_without_a_record_is_sglangs() -> None:
    for machine in (HOPPER, BLACKWELL, CPU):
        taken = auto(GLM5_FP8, GLM5_64, machine=machine)
        assert set(taken.values()) == {f"no record of {machine.name}"}


def test_auto_goes_without_ours_where_they_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = tuple(replace(i, missing=lambda: "needs nvcc") for i in dispatch.IMPLEMENTATIONS)
    monkeypatch.setattr(dispatch, "IMPLEMENTATIONS", lacking)
    routes = choose("auto", GLM5_FP8, GLM5_64, RECORDED)
    assert [route.implementation for route in routes] == [None] * 4
    assert "; without cuda, which needs nvcc: " in str(routes[0])
    assert "61,440 tokens: sglang v2" in str(routes[0])


@pytest.mark.parametrize(
    ("name", "machine", "says"),
    [
        ("cuda", AMPERE, "is for 9.0, this is 8.0; these can: reference"),
        ("cuda", BLACKWELL, "is for 9.0, this is 10.0; these can: reference"),
        ("cuda", VOLTA, "is for 9.0, this is 7.0; these can: reference"),
        ("cuda", CPU, "needs an NVIDIA GPU; these can: reference"),
    ],
)
def test_a_name_that_cannot_run_is_an_error(name: str, machine: Machine, says: str) -> None:
    with pytest.raises(
        SettingsError, match=f"kernels {name}: {name} cannot run on {machine.name}: {says}"
    ):
        names(name, server(), glm5(), machine)


BAD_INDEXERS = [
    ({"index_n_heads": 24}, {}, "has 24 heads, ours 8, 16, 32, 64"),
    ({"index_topk": 4096}, {}, "selects 4096, ours up to 2048"),
    ({"index_head_dim": 64}, {}, "64 wide, ours 128"),
    ({"index_kpool": 4}, {}, "pools its index keys"),
    ({"index_init_tokens": 1}, {}, "always selects some first or last tokens"),
    ({"index_local_tokens": 16}, {}, "always selects some first or last tokens"),
    ({"context_len": (1 << 20) + 1}, {}, "--context-length"),
    ({}, {"enable_prefill_cp": True}, "--enable-prefill-cp"),
    ({}, {"dcp_size": 2}, "--dcp-size"),
    ({}, {"enable_kv_cache_sharding": True}, "--enable-kv-cache-sharding"),
]


@pytest.mark.parametrize(("fields", "flags", "says"), BAD_INDEXERS)
def test_what_our_indexer_cannot_do(fields: Any, flags: Any, says: str) -> None:
    model, cfg = glm5(**fields), server(**flags)
    why = f"--indexcache-kernels cuda: select in prefill: .*{says}"
    with pytest.raises(SettingsError, match=why):
        choose("cuda", cfg, model, HOPPER)


@pytest.mark.parametrize(
    ("fields", "flags", "says"),
    [
        ({"kv_lora_rank": 256}, {}, "256 \\+ 64 wide, ours 512 \\+ 64"),
        ({"qk_rope_head_dim": 0}, {}, "512 \\+ 0 wide"),
        ({"dtype": torch.float16}, {}, "torch.float16, ours in bfloat16"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, "cannot read a fp8_e5m2 cache"),
        ({}, {"kv_cache_dtype": "fp4_e2m1"}, "cannot read a fp4_e2m1 cache"),
        ({}, {"enable_hisparse": True}, "--enable-hisparse"),
        ({}, {"dsa_prefill_backend": "trtllm"}, "stands in for .*, not for trtllm"),
        # With trtllm on either side SGLang stores 576 bytes a row for both.
        ({}, FP8 | {"dsa_decode_backend": "trtllm"}, "with trtllm .* without scales"),
        ({}, {"dcp_size": 2}, "--dcp-size"),
    ],
)
def test_what_our_attention_cannot_read(fields: Any, flags: Any, says: str) -> None:
    model, cfg = glm5(**fields), server(**flags)
    with pytest.raises(SettingsError, match=f"(sparse_mla|select) in prefill: .*{says}"):
        choose("cuda", cfg, model, HOPPER)


@pytest.mark.parametrize("backend", REPLACED_ATTENTION)
def test_each_attention_kernel_that_can_be_replaced(backend: str) -> None:
    cfg = server(dsa_prefill_backend=backend, dsa_decode_backend=backend)
    assert names("cuda", cfg, glm5(), HOPPER) == all_from("cuda")


@pytest.mark.parametrize(
    ("value", "fields", "shape", "message"),
    [
        ("engine", {}, {}, None),
        ("engine", {}, {"index_topk": 512}, "takes 2048 only: .* more than 512 tokens"),
        ("engine", FP8, {"index_topk": 512}, "Add --dsa-topk-backend torch"),
        ("engine", {"dsa_topk_backend": "torch"}, {"index_topk": 512}, None),
        ("engine", {"kv_cache_dtype": "fp8_e4m3"}, {"index_topk": 512}, None),  # gathers first
        ("engine", {"kv_cache_dtype": "fp8_e4m3"}, {"index_topk": 4096}, "index_topk is 4096"),
        (
            "engine",
            {"dsa_prefill_backend": "flashmla_sparse_q8"},
            {"index_topk": 512, "num_attention_heads": 64},
            None,
        ),
        ("engine", {}, {"index_topk": 512, "index_kpool": 4}, None),
        ("cuda", {}, {"index_topk": 512}, None),  # ours take any
        ("engine", {"device": "cpu"}, {"index_topk": 64, "dtype": torch.float16}, None),
        ("engine", {}, {"dtype": torch.float16}, "Add --dtype bfloat16"),
        ("engine", {"dsa_prefill_backend": "flashmla_sparse_q8"}, {}, "20 attention heads"),
        ("engine", {"dsa_prefill_backend": "flashmla_sparse_q8", "tp_size": 5}, {}, None),  # 4
        (
            "engine",
            {"dsa_prefill_backend": "flashmla_sparse_q8", "tp_size": 8, "attn_dp_size": 8},
            {"num_attention_heads": 96},
            "96 attention heads, which SGLang cannot pad",
        ),
        ("engine", {"dsa_prefill_backend": "flashmla_sparse"}, {}, None),  # our backend pads
        ("engine", {"dsa_decode_backend": "trtllm"}, {}, "dsa-decode-backend trtllm needs a Black"),
        ("engine", {"dsa_prefill_backend": "trtllm"}, {}, "this is NVIDIA H100"),
    ],
    ids=str,
)
def test_a_model_that_sglangs_kernels_do_not_fit(
    value: str, fields: dict[str, Any], shape: dict[str, Any], message: str | None
) -> None:
    cfg, model = server(**fields), glm5(**shape)
    routes = choose(value, cfg, model, HOPPER)
    if message is None:
        check_engine(routes, cfg, model, HOPPER)
    else:
        with pytest.raises(SettingsError, match=message):
            check_engine(routes, cfg, model, HOPPER)


def test_a_blackwell_gpu_has_trtllm() -> None:
    cfg = server(dsa_decode_backend="trtllm", dsa_prefill_backend="trtllm")
    check_engine(choose("engine", cfg, glm5(), BLACKWELL), cfg, glm5(), BLACKWELL)


def test_every_kernel_that_does_not_fit_is_told_at_once() -> None:
    cfg = server(dsa_decode_backend="trtllm", dsa_prefill_backend="flashmla_sparse_q8")
    model = glm5(dtype=torch.float16)
    with pytest.raises(IndexCacheError) as caught:
        check_engine(choose("engine", cfg, model, HOPPER), cfg, model, HOPPER)
    for reason in ("--dtype bfloat16", "20 attention heads", "trtllm needs"):
        assert reason in str(caught.value)
