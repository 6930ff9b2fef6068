"""Make the attention backend of one model runner, on a CPU or on a GPU.

The plan holds every decision by now. What can be refused only here needs a loaded model or a
finished backend to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import get_dsa_index_topk
from sglang.srt.runtime_context import get_exec

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.serving import internal_state, plan_agreement, requests
from sglang_indexcache.serving.adapters import loading
from sglang_indexcache.serving.cpu import platform as platform_cpu
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.options import MODE
from sglang_indexcache.serving.plan import BACKEND_NAME, Plan
from sglang_indexcache.serving.process import ServingProcess, activate

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_indexcache.serving.cuda.backend import IndexCacheBackend


def create_backend(runner: ModelRunner, original: Callable[[ModelRunner], Any]) -> Any:
    """Create the attention backend of one model runner.

    ``original``, SGLang's own factory for "dsa", serves two cases: draft models, whose single layer
    has its own indexer, and servers that did not ask for IndexCache.

    Raises:
        SettingsError: an adapter or indices cannot reach the layers that need them.
    """
    plan = Plan.from_hf_config(runner.model_config.hf_config)
    on_cpu = platform_cpu.is_active()
    if plan is None or runner.is_draft_worker:
        if on_cpu:
            raise SettingsError(
                f"only --attention-backend {BACKEND_NAME} serves DSA models on a CPU"
            )
        return original(runner)
    loading.check_in_effect(runner, plan)
    process = activate(plan)
    process.traffic.look_at(plan, runner)
    internal_state.install()
    requests.install(plan)
    plan_agreement.install_handshake()
    if on_cpu:
        from sglang_indexcache.serving.cpu.backend import CpuIndexCacheBackend

        return CpuIndexCacheBackend(runner, process)
    return create_cuda_backend(runner, process)


def create_cuda_backend(runner: ModelRunner, process: ServingProcess) -> IndexCacheBackend:
    """Create the backend of one runner on a GPU, with the plan's kernels, row split and mode.

    Raises:
        SettingsError: indices cannot reach a shared layer under this combination of settings.
    """
    from sglang_indexcache.serving.cuda import kernels
    from sglang_indexcache.serving.cuda.backend import IndexCacheBackend, live_indexer_forward
    from sglang_indexcache.serving.cuda.row_split import SplitForwards

    backend, plan = IndexCacheBackend(runner, process), process.plan
    if plan.split_rows == "on":
        topk = get_dsa_index_topk(runner.model_config.hf_config)
        backend.split_forwards = SplitForwards.install(process, topk)
    backend.kernels = kernels.EngineKernels.load(plan.routes, process.counters.kernel_choices)
    if backend.kernels.selects:
        kernels.install()
    if get_exec().overlap.enable_two_batch_overlap:
        _check_overlap(backend)
    if plan.mode == "live":
        target = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda"
        around(target, live_indexer_forward)
    return backend


def _check_overlap(backend: IndexCacheBackend) -> None:
    """Refuse an overlap whose sub-batches would get indices that are valid only in the whole batch.

    Offsets into a flattened batch (RAGGED) are such indices. In live mode a request may name any
    pattern, so the first overlapped layer may be S.
    """
    first = backend.first_overlapped_layer
    plan = backend.process.plan
    positions = [i for i, layer in enumerate(plan.layer_ids) if layer >= first]
    if not positions or (plan.pattern.is_full(positions[0]) and plan.mode == "static"):
        return
    if positions[0] == 0 or not _may_flatten(backend):  # layer 0 is F in every pattern
        return
    fix = "Make that layer F" if plan.mode == "static" else f"Use {MODE.flag} static"
    raise SettingsError(
        f"under --enable-two-batch-overlap layer {first} is the first to run on sub-batches, and "
        f"with this prefill kernel indices cannot be cut in two. {fix}, or choose "
        "--dsa-prefill-backend flashmla_kv."
    )


def _may_flatten(backend: IndexCacheBackend) -> bool:
    """Return whether a prefill's indices can be offsets into a flattened batch.

    Under ``flashmla_auto`` with an FP8 cache on Blackwell, SGLang decides for each batch
    (``set_dsa_prefill_impl``); otherwise the decision is already made.
    """
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if backend.enable_auto_select_prefill_impl and backend.dsa_kv_cache_store_fp8:
        return bool(backend._is_blackwell())
    method = backend.get_topk_transform_method(ForwardMode.EXTEND)
    return bool(method == TopkTransformMethod.RAGGED)
