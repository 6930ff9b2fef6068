"""The factory behind the backend's name: which class serves this machine and this runner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.serving import live
from sglang_indexcache.serving.active import activate
from sglang_indexcache.serving.cpu import platform as platform_cpu
from sglang_indexcache.serving.settings import BACKEND_NAME, Plan


def create_backend(runner: Any, original: Callable[[Any], Any]) -> Any:
    """Create the attention backend of one model runner.

    Args:
        runner: SGLang's ModelRunner.
        original: SGLang's own factory for "dsa". It serves draft models, whose single layer has
            an indexer and a sharing of its own, and servers that did not ask for IndexCache.
    """
    plan = Plan.from_hf_config(runner.model_config.hf_config)
    if plan is None or runner.is_draft_worker:
        if platform_cpu.is_active():
            raise SettingsError(
                f"only --attention-backend {BACKEND_NAME} serves DSA models on a CPU"
            )
        return original(runner)
    active = activate(plan)
    live.install()
    if platform_cpu.is_active():
        from sglang_indexcache.serving.cpu.backend import CpuIndexCacheBackend

        return CpuIndexCacheBackend(runner, active)
    from sglang_indexcache.serving.cuda.backend import create_cuda_backend

    return create_cuda_backend(runner, active)
