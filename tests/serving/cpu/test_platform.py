"""The platform answers whatever SGLang may ask it, or its flags are refused by name."""

from __future__ import annotations

import ast
import inspect
import os
import textwrap
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.serving.cpu import platform
from tests.serving.plans import plan

pytest.importorskip("sglang")

REFUSED = {"get_default_speculative_draft_attention_backend": "--speculative-algorithm"}
"""Methods that the platform lacks, and the flag without which SGLang does not ask."""


def raising(method: Any) -> bool:
    """Whether a method's own code raises NotImplementedError."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    errors = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc]
    return any("NotImplementedError" in ast.unparse(exc) for exc in errors)


def test_every_method_is_there_or_refused() -> None:
    reference = platform._platform_class()
    methods = dict(inspect.getmembers(reference, inspect.isroutine))
    missing = {
        name for name, method in methods.items()
        if "sglang" in (getattr(method, "__module__", None) or "") and raising(method)
    }  # fmt: skip
    assert missing == REFUSED.keys()


ARGUMENTS = {
    "device": "cpu",
    "kv_cache_dtype": "auto",
    "speculative_algorithm": None,
    "enable_two_batch_overlap": False,
    "enable_hierarchical_cache": False,
    "enable_memory_saver": False,
    "quantization": None,
    "enable_lora": None,
    "lora_paths": None,
    "enable_prefill_cp": False,
    "dcp_size": 1,
    "enable_hisparse": False,
    "enable_kv_cache_sharding": False,
}


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("speculative_algorithm", "EAGLE", "--speculative-algorithm"),
        ("enable_two_batch_overlap", True, "--enable-two-batch-overlap"),
        ("enable_hierarchical_cache", True, "--enable-hierarchical-cache"),
        ("enable_memory_saver", True, "--enable-memory-saver"),
        ("quantization", "fp8", "--quantization fp8"),
        ("enable_lora", True, "--enable-lora"),
        ("lora_paths", ["name=folder"], "--enable-lora"),
        ("enable_prefill_cp", True, "--enable-prefill-cp"),
        ("dcp_size", 2, "--dcp-size 2"),
        ("enable_hisparse", True, "--enable-hisparse"),
        ("enable_kv_cache_sharding", True, "--enable-kv-cache-sharding"),
        ("kv_cache_dtype", "fp8_e4m3", "--kv-cache-dtype"),
        ("device", "cuda", "--device"),
    ],
)
def test_what_needs_a_gpu_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, field: str, value: Any, flag: str
) -> None:
    monkeypatch.setattr(platform, "is_active", lambda: True)
    monkeypatch.setattr(
        "sglang.srt.arg_groups.overrides.resolving_view",
        lambda arguments: SimpleNamespace(**arguments),
    )
    platform.check_plan(ARGUMENTS, plan())
    with pytest.raises(SettingsError, match=f"^{flag}"):
        platform.check_plan(ARGUMENTS | {field: value}, plan())


def test_an_activity_of_ours_is_recorded_once() -> None:
    """SGLang starts a profiler for "CPU" and one for the platform's, if a request names both."""
    built = platform._platform_class()()
    assert built.get_torch_profiler_activity_str() not in platform.PROFILED
    assert str(built.get_torch_profiler_activity()).endswith("CPU")


@pytest.mark.parametrize(
    ("activities", "is_recorded"),
    [
        (None, True),
        ([], True),
        (["CPU"], True),
        (["CPU", "GPU"], True),
        (["GPU"], False),
        (["CPU", "MEM"], False),
        (["CUDA_PROFILER"], False),
    ],
)
def test_only_what_a_cpu_has_is_recorded(activities: list[str] | None, is_recorded: bool) -> None:
    """SGLang would end at its start of any other profiler."""
    request = SimpleNamespace(activities=activities)
    result = platform._profile(lambda _, activities: activities, None, request)
    if is_recorded:
        assert result is request
    else:
        assert not result.success
        assert ", ".join(sorted(activities or [])) in result.message


def test_memory_is_released_without_a_driver() -> None:
    """Unlike CUDA's module, which a CUDA build of torch names when no device is given."""
    before = torch.get_device_module
    released = platform._release_memory(lambda: torch.get_device_module().synchronize() or "done")
    assert released == "done"
    assert torch.get_device_module is before


@pytest.mark.parametrize(
    ("flags", "cores", "threads", "binding"),
    [
        ({}, 2, None, None),
        ({"tp_size": 2}, 2, "1", "0|1"),
        ({"tp_size": 2}, 8, "4", "0,1,2,3|4,5,6,7"),
        ({"tp_size": 4}, 2, "1", "0|1|0|1"),
        ({"tp_size": 4, "dp_size": 2, "attn_dp_size": 2}, 8, "2", "0,1|2,3|4,5|6,7"),
        ({"pp_size": 2, "dp_size": 2}, 4, "1", "0|1|2|3"),
    ],
)
def test_ranks_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    flags: dict[str, int],
    cores: int,
    threads: str | None,
    binding: str | None,
) -> None:
    """Each rank has as many threads as cores; what a user has set stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "attn_dp_size": 1} | flags
    names = ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND")
    for environment in ({}, dict.fromkeys(names, "7")):
        monkeypatch.setattr(os, "environ", dict(environment))
        platform._bind_cores(SimpleNamespace(**sizes))
        values = [os.environ.get(name) for name in names]
        assert values == (["7", "7"] if environment else [threads, binding])
