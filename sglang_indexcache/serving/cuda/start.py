"""Make the CUDA backend of one model runner, or say why indices cannot reach a layer there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import get_dsa_index_topk
from sglang.srt.layers.attention.dsa_backend import TopkTransformMethod
from sglang.srt.runtime_context import get_exec

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.kernels.dispatch import Machine
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cuda import kernels as kernels_cuda
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
from sglang_indexcache.serving.cuda.choice import choose
from sglang_indexcache.serving.cuda.indexer import indexer_forward
from sglang_indexcache.serving.cuda.kernels import EngineKernels
from sglang_indexcache.serving.cuda.row_split import SplitForwards
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.options import MODE

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def create_cuda_backend(runner: ModelRunner, active: ActivePattern) -> IndexCacheBackend:
    """Create a backend of one runner.

    Raises:
        SettingsError: a combination in which indices cannot reach a shared layer.
    """
    backend = IndexCacheBackend(runner, active)
    if active.plan.split_rows == "on":
        topk = get_dsa_index_topk(runner.model_config.hf_config)
        backend.split_forwards = SplitForwards.install(active, topk)
    backend.kernels = _load_kernels(runner, active)
    if get_exec().overlap.enable_two_batch_overlap:
        _check_overlap(backend)
    if active.plan.mode == "live":
        target = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.forward_cuda"
        around(target, indexer_forward)
    return backend


def _load_kernels(runner: ModelRunner, active: ActivePattern) -> EngineKernels:
    """Load what ``--indexcache-kernels`` asks for, on the GPU of this worker."""
    if active.plan.kernels == "engine":
        return EngineKernels()
    cfg = resolving_view(runner.server_args)
    routes = choose(active.plan.kernels, cfg, runner.model_config, Machine.here())
    kernels = EngineKernels.load(routes)
    if kernels.selects:
        kernels_cuda.install()
    return kernels


def _check_overlap(backend: IndexCacheBackend) -> None:
    """Refuse an overlap whose sub-batches get indices that mean something only in the whole batch.

    Such are offsets into a flattened batch (RAGGED). In live mode a request may name any pattern,
    so the first of these layers may be S.
    """
    first = backend.first_overlapped_layer
    plan = backend.active.plan
    positions = [i for i, layer in enumerate(plan.layer_ids) if layer >= first]
    if not positions or (plan.pattern.is_full(positions[0]) and plan.mode == "static"):
        return
    if positions[0] == 0 or not _may_flatten(backend):  # the first layer is F in every pattern
        return
    fix = "Make that layer F" if plan.mode == "static" else f"Use {MODE.flag} static"
    raise SettingsError(
        f"under --enable-two-batch-overlap layer {first} is the first to run on sub-batches, and "
        f"with this prefill kernel indices cannot be cut in two. {fix}, or choose "
        "--dsa-prefill-backend flashmla_kv."
    )


def _may_flatten(backend: IndexCacheBackend) -> bool:
    """Return whether some prefill's indices are offsets into a flattened batch.

    SGLang decides it for each batch (``set_dsa_prefill_impl``) under ``flashmla_auto`` over FP8 on
    Blackwell; elsewhere it is decided by now.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    if backend.enable_auto_select_prefill_impl and backend.dsa_kv_cache_store_fp8:
        return bool(backend._is_blackwell())
    method = backend.get_topk_transform_method(ForwardMode.EXTEND)
    return bool(method == TopkTransformMethod.RAGGED)
