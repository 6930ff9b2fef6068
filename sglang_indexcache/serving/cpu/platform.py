"""Entry point ``sglang.srt.platforms``: serve on a machine without any accelerator.

Slow by nature and exact by design: the reference that the GPU path is compared with, and the
way to try everything before there is a GPU. Never active where SGLang could use an accelerator.
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
from sglang_indexcache.serving.config_check import INDEX_HEAD_DIM
from sglang_indexcache.serving.cpu.fp8 import read_plain
from sglang_indexcache.serving.hooks import after, around
from sglang_indexcache.serving.options import INDEX_K_DTYPE, KERNELS
from sglang_indexcache.serving.plan import Plan

if TYPE_CHECKING:
    from sglang.srt.platforms.interface import KVPoolKind

logger = logging.getLogger(__name__)

PLATFORM_NAME = "indexcache_cpu"
"""The entry point's name; also the key of the indexer's forward."""

MAX_TOTAL_TOKENS = 65536
"""KV pool when --max-total-tokens is not given; SGLang's own rule would take most of the RAM."""
MAX_RUNNING_REQUESTS = 64
CHUNKED_PREFILL_SIZE = 2048

PROFILED = {"CPU", "GPU"}
"""Activities that SGLang records if none is named; torch leaves the second out on this machine."""

IDLE_NAP = 0.005
"""Seconds that an idle scheduler which must stay awake rests between two looks."""


def activate() -> str | None:
    """Return the platform class to use, or None where this machine has an accelerator."""
    if torch.accelerator.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None
    return "sglang_indexcache.serving.cpu.platform:CpuReferencePlatform"


def is_active() -> bool:
    """Return whether SGLang runs on this platform."""
    from sglang.srt.platforms import current_platform

    return current_platform.get_dispatch_key_name() == PLATFORM_NAME


def __getattr__(name: str) -> Any:
    # The class needs SGLang's, and SGLang imports this module before those exist.
    if name == "CpuReferencePlatform":
        return _platform_class()
    raise AttributeError(name)


def _platform_class() -> type:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
        """No Triton, no graphs, no compilation: plain torch."""

        _enum = PlatformEnum.OOT
        capabilities = PlatformCapabilities()

        def get_dispatch_key_name(self) -> str:
            return PLATFORM_NAME

        def get_default_attention_backend(self) -> str:
            return "dsa"

        def get_device(self, device_id: int = 0) -> str:
            return "cpu"  # SGLang's default for --device is this, and it wants a string

        def get_compile_backend(self, mode: str | None = None) -> str:
            return "eager"

        def get_torch_profiler_activity_str(self) -> str:
            # Nobody asks for an activity of this name: "CPU" would be recorded twice.
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
            from sglang.kernels.fused_op import BaseFusedOp
            from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

            from sglang_indexcache.serving.cpu.indexer import indexer_forward

            BaseFusedOp.register_oot_forward(Indexer, indexer_forward, PLATFORM_NAME)
            indexer = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
            after(f"{indexer}.__init__", _keep_gate_precision)
            after("sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle", _nap)
            loader = "sglang.srt.model_loader.loader.DefaultModelLoader"
            around(f"{loader}._get_weights_iterator", read_plain)
            runner = "sglang.srt.model_executor.model_runner"
            around(f"{runner}.create_indexer_capturer", _keep_selections)
            parts = "sglang.srt.managers.scheduler_components"
            around(f"{parts}.profiler_manager.SchedulerProfilerManager._profile", _profile)
            updater = "weight_updater.SchedulerWeightUpdaterManager"
            around(f"{parts}.{updater}.release_memory_occupation", _release_memory)

    return CpuReferencePlatform


def _apply_defaults(server_args: Any) -> None:
    server_args.device = "cpu"
    server_args.sampling_backend = "pytorch"
    if server_args.attn_dp_size == 1:
        # An idle scheduler spins on a core that others need. Under dp_attention it must not
        # sleep until a request comes (its peers cannot run a batch without it), but may nap.
        server_args.sleep_on_idle = True
    for name, value in (
        ("max_total_tokens", MAX_TOTAL_TOKENS),
        ("max_running_requests", MAX_RUNNING_REQUESTS),
        ("chunked_prefill_size", CHUNKED_PREFILL_SIZE),
    ):
        if getattr(server_args, name) is None:
            setattr(server_args, name, value)
    _bind_cores(server_args)
    # Without a GPU there is no core dump to wait a minute for after a crash.
    os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")


def _keep_gate_precision(_result: None, indexer: Any, *_args: Any, **_kwargs: Any) -> None:
    """Keep the head gates' weights as they are; SGLang's bfloat16 would round float32 ones."""
    gates = indexer.weights_proj.weight
    gates.data = gates.data.to(torch.get_default_dtype())


def _keep_selections(
    _original: Any, *, model_config: Any, num_tokens: int, max_running_requests: int, device: str
) -> Any:
    """Serve --enable-return-indexer-topk, which SGLang knows on accelerators only."""
    from sglang.srt.configs.model_config import get_num_indexer_layers
    from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
    from sglang.srt.runtime_context import get_exec
    from sglang.srt.state_capturer.indexer_topk import IndexerTopkCapturer

    if not get_exec().features.enable_return_indexer_topk:
        return None
    # SGLang would pin the memory for copies from a device.
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
    """Refuse activities of a device that is not here: starting to record them ends SGLang."""
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
    """Make SGLang wait for the CPU, where a CUDA build of torch would name CUDA as the device."""
    with _pretended(torch, "get_device_module", lambda *_: torch.cpu):
        return original(*args, **kwargs)


def _nap(_result: None, scheduler: Any) -> None:
    """Sleep for a moment: under dp_attention ranks are idle together, so all of them do."""
    if scheduler.idle_sleeper is None:
        time.sleep(IDLE_NAP)


def _bind_cores(server_args: Any) -> None:
    """Distribute this machine's cores over the ranks; SGLang asks for it with more than one rank.

    Otherwise torch starts a thread for every core in each rank, and all wait for all.
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
    """Refuse what only a GPU can do, and say that this is the CPU reference.

    Raises:
        SettingsError: a flag that needs a GPU.
    """
    if not is_active():
        return
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(server_args)
    width = dict(plan.shape).get("index_head_dim", INDEX_HEAD_DIM)
    reasons = {
        f"--device {cfg.device} was given, but no accelerator is visible here. Drop the flag to "
        "serve on the CPU, or check the driver.": cfg.device not in (None, "cpu"),
        f"--kv-cache-dtype {cfg.kv_cache_dtype} needs a GPU; the CPU platform stores latents in "
        "the model's dtype. Drop the flag (index keys: --indexcache-index-k-dtype).": (
            cfg.kv_cache_dtype not in ("auto", "bfloat16", "bf16")
        ),
        f"{INDEX_K_DTYPE.flag} fp8_e4m3 stores index keys in a GPU's pages, which hold "
        f"{INDEX_HEAD_DIM} entries a key, and this model's keys have {width}. Drop the flag, or "
        "take bfloat16 or float32.": plan.index_k_dtype == "fp8_e4m3" and width != INDEX_HEAD_DIM,
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
        "--enable-lora": cfg.enable_lora or cfg.lora_paths,  # its buffers are pinned by a driver
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
    """Route around the places where SGLang takes "not a known CPU" for "CUDA"."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_model_specific_adjustments")(_adjust_without_cuda)
    around(
        "sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _generic_rope, at_start=True
    )
    _take_cpu_branches()
    _rest_in_controller()


def _rest_in_controller() -> None:
    """Let the process that hands requests to data-parallel ranks sleep between its polls."""
    module: Any = sys.modules.get("sglang.srt.managers.data_parallel_controller")
    if module is None:
        return
    receive = module.sock_recv

    def wait_and_receive(socket: Any, flags: int = 0) -> Any:
        socket.poll(IDLE_NAP * 1000)  # milliseconds; returns at once when a message is there
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
    kwargs["device"] = None  # "cpu" would take a branch that knows only DeepSeek-YaRN
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
    """Replace a function of torch's while a function of SGLang's runs."""
    real = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, real)
