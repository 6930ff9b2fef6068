"""Entry point ``sglang.srt.platforms``: serve on a machine without any accelerator.

The platform is slow and exact: it is the reference that the GPU path is compared with, and allows a
trial before there is a GPU. It is never active where SGLang could use an accelerator.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from sglang_indexcache.errors import Findings, SettingsError
from sglang_indexcache.kernels.contract import INDEX_DIM
from sglang_indexcache.serving.cpu.fp8 import read_plain
from sglang_indexcache.serving.hooks import after, around
from sglang_indexcache.serving.options import INDEX_K_DTYPE, KERNELS
from sglang_indexcache.serving.plan import Plan

if TYPE_CHECKING:
    from sglang.srt.platforms.interface import KVPoolKind

logger = logging.getLogger(__name__)

PLATFORM_NAME = "indexcache_cpu"
"""Name of the entry point, and dispatch key of the indexer's forward."""

MAX_TOTAL_TOKENS = 65536
"""KV pool in tokens without --max-total-tokens; SGLang's own rule would take most of the RAM."""
MAX_RUNNING_REQUESTS = 64
CHUNKED_PREFILL_SIZE = 2048

PROFILED = {"CPU", "GPU"}
"""Activities that SGLang records by default; without a GPU torch ignores the second."""

IDLE_NAP = 0.005
"""Seconds that an idle scheduler under dp_attention rests between two polls."""


def activate() -> str | None:
    """Return the path of the platform class, or None if this machine has an accelerator."""
    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "sglang_indexcache.serving.cpu.platform:CpuReferencePlatform"


def is_active() -> bool:
    """Return whether SGLang runs on this platform."""
    from sglang.srt.platforms import current_platform

    return current_platform.get_dispatch_key_name() == PLATFORM_NAME


def __getattr__(name: str) -> Any:
    # The class derives from SGLang's classes, and SGLang imports this module before they exist.
    if name == "CpuReferencePlatform":
        return _platform_class()
    raise AttributeError(name)


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
        """Platform of plain torch, without Triton, graphs or compilation."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_dispatch_key_name(self) -> str:
            return PLATFORM_NAME

        def get_default_attention_backend(self) -> str:
            return "dsa"

        def get_device(self, device_id: int = 0) -> str:
            return "cpu"  # becomes SGLang's default for --device, which must be a string

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def get_torch_profiler_activity_str(self) -> str:
            # A name that nobody requests: with "CPU", SGLang would record the CPU twice.
            return PLATFORM_NAME

        def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
            return torch.profiler.ProfilerActivity.CPU

        def apply_server_args_defaults(self, server_args: Any) -> None:
            _apply_defaults(server_args)

        def get_kv_pool_cls(self, *, kind: KVPoolKind) -> type | None:
            if kind != "dsa":
                return None
            from sglang_indexcache.serving.cpu.indexer import CpuDSATokenToKVPool

            return CpuDSATokenToKVPool

        def init_backend(self) -> None:
            _adapt_worker()

    return CpuReferencePlatform


def _adapt_worker() -> None:
    """Give a worker our indexer, and replace what SGLang does there for accelerators alone."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    from sglang_indexcache.serving.cpu.indexer import indexer_forward

    BaseFusedOp.register_oot_forward(Indexer, indexer_forward, PLATFORM_NAME)
    after("sglang.srt.layers.attention.dsa.dsa_indexer.Indexer.__init__", _keep_gate_precision)
    after("sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle", _nap)
    loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
    around(f"{loader}._get_weights_iterator", read_plain)
    around("sglang.srt.model_executor.model_runner.create_indexer_capturer", _keep_selections)
    parts = "sglang.srt.managers.scheduler_components"
    around(f"{parts}.profiler_manager.SchedulerProfilerManager._profile", _profile)
    updater = "weight_updater.SchedulerWeightUpdaterManager"
    around(f"{parts}.{updater}.release_memory_occupation", _release_memory)


def _apply_defaults(server_args: Any) -> None:
    server_args.device = "cpu"
    server_args.sampling_backend = "pytorch"
    if server_args.attn_dp_size == 1:
        # An idle scheduler spins on a core that other processes need. Under dp_attention it must
        # not sleep until a request comes (its peers cannot run a batch without it), but it may nap.
        server_args.sleep_on_idle = True
    for name, value in (
        ("max_total_tokens", MAX_TOTAL_TOKENS),
        ("max_running_requests", MAX_RUNNING_REQUESTS),
        ("chunked_prefill_size", CHUNKED_PREFILL_SIZE),
    ):
        if getattr(server_args, name) is None:
            setattr(server_args, name, value)
    _bind_cores(server_args)
    # Without a GPU there is no core dump, so do not wait a minute for one after a crash.
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def _keep_gate_precision(_result: None, indexer: Any, *_args: Any, **_kwargs: Any) -> None:
    """Keep the precision of the head gates' weights; SGLang would round float32 to bfloat16."""
    gates = indexer.weights_proj.weight
    gates.data = gates.data.to(torch.get_default_dtype())


def _keep_selections(
    _original: Any, *, model_config: Any, num_tokens: int, max_running_requests: int, device: str
) -> Any:
    """Serve --enable-return-indexer-topk, which SGLang supports only on accelerators."""
    from sglang.srt.configs.model_config import get_num_indexer_layers
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.state_capturer.indexer_topk import IndexerTopkCapturer

    if not get_exec().features.enable_return_indexer_topk:
        return None
    # SGLang would pin the memory for copies from a GPU, which needs a driver.
    ALLOC_MEMORY_FUNCS[device] = lambda shape, dtype, **_: torch.zeros(shape, dtype=dtype)
    config = model_config.hf_text_config
    return IndexerTopkCapturer(
        num_tokens=num_tokens,
        num_indexer_layers=get_num_indexer_layers(config),
        index_topk=config.index_topk,
        max_running_requests=max_running_requests,
        device=device,
    )


def _profile(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Refuse to profile a missing device, because starting to record it would end SGLang."""
    from sglang.srt.managers.io_struct import ProfileReqOutput

    activities = set(request.activities or PROFILED)
    if "CPU" in activities and activities <= PROFILED:
        return original(manager, request)
    return ProfileReqOutput(
        success=False,
        message=f"activities {', '.join(sorted(activities))} were asked for, and the CPU platform "
        "records CPU only. Name CPU, or none.",
    )


def _release_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make SGLang wait for the CPU; a CUDA build of torch would name CUDA as the device."""
    with _pretended(torch, "get_device_module", lambda *_: torch.cpu):
        return original(*args, **kwargs)


def _nap(_result: None, scheduler: Any) -> None:
    """Sleep for a moment: under dp_attention all ranks are idle at once, so all of them sleep."""
    if scheduler.idle_sleeper is None:
        time.sleep(IDLE_NAP)


def _bind_cores(server_args: Any) -> None:
    """Distribute this machine's cores over the ranks, as SGLang needs with several ranks.

    Otherwise torch would start a thread for every core in each rank, and threads would wait for
    each other.
    """
    replicas = server_args.dp_size if server_args.attn_dp_size == 1 else 1
    ranks = server_args.tp_size * server_args.pp_size * replicas
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        share = max(1, len(cores) // ranks)
        groups = [
            [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
        ]
        binding = "|".join(",".join(map(str, group)) for group in groups)
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", binding)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))


def check_plan(server_args: Any, plan: Plan) -> None:
    """Refuse flags that need a GPU, and log that this is the CPU reference.

    Raises:
        SettingsError: a flag needs a GPU.
    """
    if not is_active():
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    width = dict(plan.shape).get("index_head_dim", INDEX_DIM)
    reasons = {
        f"--device {cfg.device} was given, but no accelerator is visible here. Drop the flag to "
        "serve on the CPU, or check the driver.": cfg.device not in (None, "cpu"),
        f"--kv-cache-dtype {cfg.kv_cache_dtype} needs a GPU; the CPU platform stores latents in "
        "the model's dtype. Drop the flag (index keys: --indexcache-index-k-dtype).": (
            cfg.kv_cache_dtype not in ("auto", "bfloat16", "bf16")
        ),
        f"{INDEX_K_DTYPE.flag} fp8_e4m3 stores index keys in a GPU's pages, which hold "
        f"{INDEX_DIM} entries a key, and this model's keys have {width}. Drop the flag, or "
        "take bfloat16 or float32.": plan.index_k_dtype == "fp8_e4m3" and width != INDEX_DIM,
        f"{KERNELS.flag} {plan.kernels} chooses GPU kernels, and the CPU platform has kernels of "
        "its own. Drop the flag.": plan.kernels != "engine",
    }
    for_gpus = {
        f"--speculative-algorithm {cfg.speculative_algorithm}": (
            cfg.speculative_algorithm is not None
        ),
        "--enable-two-batch-overlap": cfg.enable_two_batch_overlap,
        "--enable-hierarchical-cache": cfg.enable_hierarchical_cache,
        "--enable-memory-saver": cfg.enable_memory_saver,
        f"--quantization {cfg.quantization}": cfg.quantization is not None,
        "--enable-lora": cfg.enable_lora or cfg.lora_paths,  # pins its buffers
        "--enable-prefill-cp": cfg.enable_prefill_cp,
        f"--dcp-size {cfg.dcp_size}": cfg.dcp_size > 1,
        "--enable-hisparse": cfg.enable_hisparse,
        "--enable-kv-cache-sharding": cfg.enable_kv_cache_sharding,
    }
    reasons |= {f"{flag} needs a GPU. Drop the flag.": holds for flag, holds in for_gpus.items()}
    findings = Findings()
    findings.each += [SettingsError(reason) for reason, holds in reasons.items() if holds]
    findings.report()
    logger.warning(
        "No accelerator found: serving on the IndexCache CPU reference platform, which is exact "
        "but slow."
    )


def adapt_engine() -> None:
    """Patch the places where SGLang assumes CUDA because it does not know this CPU platform."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_model_specific_adjustments")(_adjust_without_cuda)
    around(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _generic_rope, at_start=True
    )
    _take_cpu_branches()
    _rest_in_controller()


def _rest_in_controller() -> None:
    """Make the process that passes requests to data-parallel ranks sleep between its polls."""
    module: Any = sys.modules.get("sglang.srt.managers.data_parallel_controller")
    if module is None:
        return
    receive = module.sock_recv

    def wait_and_receive(socket: Any, flags: int = 0) -> Any:
        socket.poll(IDLE_NAP * 1000)  # in milliseconds; returns as soon as a message arrives
        return receive(socket, flags=flags)

    module.sock_recv = wait_and_receive


def _take_cpu_branches() -> None:
    import sglang.srt.distributed.parallel_state as parallel_state
    import sglang.srt.layers.dp_attention as dp_attention
    import sglang.srt.model_executor.forward_batch_info as forward_batch_info

    parallel_state._is_cpu = True
    forward_batch_info._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu


def _generic_rope(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs["device"] = None  # "cpu" would select a branch with only DeepSeek-YaRN
    return original(*args, **kwargs)


def _adjust_without_cuda(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Make SGLang's DSA adjustments as for a Hopper GPU, but keep the KV dtype."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    kv_cache_dtype = resolving_view(server_args).kv_cache_dtype
    with _pretended(torch.cuda, "get_device_capability", lambda *_: (9, 0)):
        previous(server_args)
    declare_resolution(server_args, PLATFORM_NAME, kv_cache_dtype=kv_cache_dtype)


@contextmanager
def _pretended(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a torch function while an SGLang function runs."""
    real = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, real)
