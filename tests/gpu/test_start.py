"""Start on the card's machine: what was carried loads, and SGLang resolves our command line."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_indexcache.lab.runs.provenance import package_version
from sglang_indexcache.pattern import Pattern

MODULES = {
    "triton": "triton",
    "tvm_ffi": "apache-tvm-ffi",
    "transformers": "transformers",
    "sglang": "sglang",
    "sglang.srt.entrypoints.http_server": "fastapi",
    "sglang.srt.managers.scheduler": "pyzmq",
    "sgl_kernel": "sglang-kernel",
    "deep_gemm": "sgl-deep-gemm",
    "flash_mla": "sgl-flash-mla",
    "sglang_indexcache.serving.cuda.backend": "sglang-indexcache",
}
"""Modules, and the distribution whose version says something about them."""


def test_the_card_multiplies() -> None:
    a = torch.arange(64.0, device="cuda").view(8, 8)
    assert torch.equal((a @ a).cpu(), a.cpu() @ a.cpu())


@pytest.mark.sglang
@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str, evidence: dict[str, Any]) -> None:
    started = time.perf_counter()
    import_module(name)
    evidence |= {
        "version": package_version(MODULES[name]),
        "seconds": round(time.perf_counter() - started, 2),
    }


@pytest.mark.sglang
def test_sglang_resolves_indexcache_to_dsa_with_the_pattern(
    model: Path, evidence: dict[str, Any]
) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    pattern = Pattern.uniform(12, 4)
    load_plugins()
    arguments = prepare_server_args(
        [
            *("--model-path", str(model)),
            *("--attention-backend", "indexcache", "--indexcache-pattern", str(pattern)),
        ]
    )
    arguments.resolve_once()
    cfg = resolving_view(arguments)
    assert cfg.attention_backend == "dsa"
    types = json.loads(cfg.json_model_override_args).get("indexer_types")
    assert types == pattern.to_indexer_types()
    names = ("kv_cache_dtype", "dsa_prefill_backend", "dsa_decode_backend", "page_size")
    evidence |= {name: str(getattr(cfg, name, None)) for name in names}
