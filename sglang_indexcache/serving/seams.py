"""Every SGLang internal that this package touches, in one table, and the check that it is there.

SGLang offers official extension points (entry points, hook registry, resolution hooks, backend
registry, out-of-tree forwards and platforms); the table lists those we use and the internals
behind them. The check parses SGLang's source and imports nothing, so it can run in the launcher
before the model is touched, and in the tests against whatever version is installed.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_indexcache.errors import UnsupportedEngineError

SUPPORTED_VERSION = "0.5.23"


@dataclass(frozen=True)
class Seam:
    """One name in SGLang that we hook, subclass, call or set.

    Attributes:
        module: dotted module.
        name: ``function``, ``Class`` or ``Class.method``, or a module-level name.
        parameters: parameters that we pass or rely on, in any order.
        why: what we use it for.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


_SERVER_ARGS = "sglang.srt.server_args"
_DSA = "sglang.srt.layers.attention.dsa_backend"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_METADATA = "sglang.srt.layers.attention.dsa.dsa_indexer_metadata"
_POOL = "sglang.srt.mem_cache.memory_pool"
_KEYS = "sglang.srt.mem_cache.index_key_cache"
_STATE = "sglang.srt.managers.scheduler_components.internal_state"
_SCHEDULER = "sglang.srt.managers.scheduler"
_MESSAGES = "sglang.srt.managers.io_struct"
_HOOKS = "sglang.srt.plugins.hook_registry"
_PD = "sglang.srt.disaggregation.common.conn"
_DEEPSEEK = "sglang.srt.models.deepseek_v2"
_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"

LAUNCH_SEAMS = (
    Seam(_HOOKS, "HookRegistry.register", "wrap a function", ("target", "hook", "hook_type")),
    Seam(_HOOKS, "HookRegistry.apply_hooks", "wrap once a worker knows its plan"),
    Seam(_HOOKS, "HookRegistry._patched", "wrap only once"),
    Seam(_SERVER_ARGS, "ServerArgs.add_cli_args", "add the flags", ("parser",)),
    Seam(_SERVER_ARGS, "ServerArgs.from_cli_args", "keep the flags' values", ("cls", "args")),
    Seam(_SERVER_ARGS, "ServerArgs.__reduce__", "our bookkeeping travels to child processes"),
    Seam("sglang.srt.entrypoints.engine", "Engine.server_args_class", "accept Engine keywords"),
    Seam("sglang.srt.arg_groups.choices", "add_attention_backend_choices", "the backend's name"),
    Seam(
        "sglang.srt.arg_groups.resolution_hooks",
        "register_resolution_hook",
        "resolve the pattern at SGLang's own pipeline steps",
        ("name",),
    ),
    Seam(
        "sglang.srt.arg_groups.overrides",
        "declare_resolution",
        "declare the backend and the config overrides",
        ("server_args", "source"),
    ),
    Seam(
        "sglang.srt.arg_groups.model_path_hook",
        "handle_model_source_paths",
        "the pipeline step after which the model's config can be read",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.arg_groups.model_hook",
        "handle_model_specific_adjustments",
        "the pipeline step that asks CUDA questions on any platform",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.arg_groups.model_hook",
        "_validate_dsa_tbo_index_sharing",
        "lift the ban on two-batch overlap: our buffer supplies the indices",
        ("server_args", "hf_config"),
    ),
    Seam(
        "sglang.srt.utils.hf_transformers.config",
        "get_config",
        "read the checkpoint's config without overrides",
        ("model", "trust_remote_code", "revision", "model_override_args", "model_config_parser"),
    ),
    Seam(
        "sglang.srt.configs.model_config",
        "dsa_layer_skips_topk",
        "obeys indexer_types first",
        ("config", "layer_id"),
    ),
    Seam(
        "sglang.srt.arg_groups.serving_hook",
        "handle_other_validations",
        "a pipeline step after SGLang's kernels and KV dtype are decided",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.arg_groups.model_override_base",
        "model_config_of",
        "the model's shape, which decides whether our kernels can run",
        ("server_args",),
    ),
    Seam("sglang.srt.distributed.utils", "get_pp_indices", "stage boundaries"),
    Seam(
        "sglang.srt.arg_groups.overrides",
        "attention_backends_of",
        "whether a launch path left our name unresolved",
        ("cfg",),
    ),
)
"""What resolving the command line needs."""

WORKER_SEAMS = (
    Seam(
        "sglang.srt.layers.attention.attention_registry",
        "register_attention_backend",
        "register the backend",
        ("name",),
    ),
    Seam(
        "sglang.srt.layers.attention.attention_registry",
        "create_dsa_backend",
        "SGLang's own DSA backend, for draft models and plain --attention-backend dsa",
        ("runner",),
    ),
    Seam(
        _DEEPSEEK,
        "DeepseekV2AttentionMLA.forward_prepare",
        "carries indices between layers",
        ("prev_topk_indices",),
    ),
    Seam(
        _MLA,
        "DeepseekMLAForwardMixin.should_run_indexer",
        "skips the indexer on S layers",
        ("prev_topk_indices",),
    ),
    Seam(
        _MLA,
        "DeepseekMLAForwardMixin.forward_absorb_core",
        "hands indices to the backend",
        ("topk_indices",),
    ),
    Seam(
        _STATE,
        "SchedulerInternalStateController.get_internal_state",
        "report over /server_info",
        ("recv_req",),
    ),
    Seam(
        _STATE,
        "SchedulerInternalStateController.set_internal_state",
        "accept a new pattern over /set_internal_state",
        ("recv_req",),
    ),
    Seam(_MESSAGES, "SetInternalStateReqOutput.updated", "the answer to a switch"),
    Seam(_MESSAGES, "PauseGenerationReqInput.mode", "retract running requests before a switch"),
    Seam(_MESSAGES, "ContinueGenerationReqInput.torch_empty_cache", "resume after a switch"),
    Seam(
        _SCHEDULER,
        "Scheduler.pause_generation",
        "retract running requests before a switch",
        ("recv_req",),
    ),
    Seam(_SCHEDULER, "Scheduler.continue_generation", "resume after a switch", ("recv_req",)),
    Seam(_SCHEDULER, "Scheduler.flush_cache", "drop KV that the old pattern made"),
    Seam(_SCHEDULER, "Scheduler.is_fully_idle", "whether a switch needs a retraction"),
    Seam(
        "sglang.srt.model_executor.forward_context",
        "get_attn_backend",
        "the backend of the forward in progress, a sub-batch's own under overlap",
    ),
    Seam("sglang.srt.runtime_context", "get_model", "the resolved config in a worker"),
    Seam(
        "sglang.srt.distributed.bootstrap",
        "init_parallel_runtime",
        "the ranks have met and no weight is read: compare their plans",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.__init__",
        "keep cached KV apart by pattern",
        ("extra_key",),
    ),
    Seam(
        "sglang.srt.mem_cache.utils",
        "get_storage_hash_str",
        "stored pages are found by extra_key too",
        ("key",),
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.attach_hicache_storage_wrapped",
        "no storage in live mode",
        ("recv_req",),
    ),
    Seam(
        _PD,
        "CommonKVManager.__init__",
        "tell a disaggregated peer the pattern with the KV dtype",
        ("args",),
    ),
    Seam(
        _PD,
        "CommonKVManager.try_ensure_parallel_info",
        "turn away a prefill node with another pattern",
        ("bootstrap_addr",),
    ),
)
"""What every worker needs."""

CUDA_SEAMS = (
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.__init__",
        "the backend that ours extends",
        ("model_runner",),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.init_forward_metadata",
        "a forward begins (eager)",
        ("forward_batch",),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.init_forward_metadata_out_graph",
        "a forward begins (CUDA graph)",
        ("forward_batch", "in_capture"),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.forward_extend",
        "attention in prefill",
        ("layer", "forward_batch", "topk_indices"),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.forward_decode",
        "attention in decode",
        ("layer", "forward_batch", "topk_indices"),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.get_topk_transform_method",
        "whether indices are pool slots or offsets into a flattened batch",
        ("forward_mode",),
    ),
    Seam(
        _INDEXER,
        "Indexer.forward_cuda",
        "the branch of live mode",
        ("x", "q_lora", "positions", "forward_batch", "layer_id", "return_indices"),
    ),
    Seam(
        _INDEXER,
        "Indexer._forward_cuda_k_only",
        "live mode: store the key, select nothing",
        ("x", "positions", "forward_batch", "layer_id", "act_quant", "metadata", "return_indices"),
    ),
    Seam(
        "sglang.kernels.ops.quantization.act_quant_triton",
        "act_quant",
        "the quantiser that the key-only path takes",
    ),
    Seam(
        "sglang.srt.layers.attention.tbo_backend",
        "TboAttnBackend.__init__",
        "a backend for whole batches and one per sub-batch",
        ("primary", "children"),
    ),
    Seam(
        "sglang.srt.model_executor.model_runner_components.layer_setup",
        "ModelLayerInfo.start_layer",
        "whose indices come from an earlier pipeline stage",
    ),
    Seam(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend",
        "FullCudaGraphBackend.capture_one",
        "a captured forward begins once and runs its layers three times",
        ("forward_fn",),
    ),
    Seam(
        "sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend",
        "BreakableCudaGraphBackend.capture_one",
        "the same in prefill",
        ("forward_fn",),
    ),
    Seam(
        "sglang.srt.layers.radix_attention",
        "RadixAttention._eager_attention",
        "a prefill graph's replay runs attention with the batch of now",
        ("output",),
    ),
    Seam(
        "sglang.srt.state_capturer.indexer_topk",
        "maybe_capture_indexer_topk",
        "return_indexer_topk shows what each layer used",
        ("layer_id", "topk_indices"),
    ),
    Seam(
        _INDEXER,
        "Indexer._get_topk_ragged",
        "prefill: from quantised queries to indices, where our selection takes over",
        (
            "enable_dual_stream",
            "forward_batch",
            "layer_id",
            "q_fp8",
            "weights",
            "metadata",
            "topk_result",
        ),
    ),
    Seam(
        _INDEXER,
        "Indexer._get_topk_paged",
        "the same in decode and MTP",
        ("forward_batch", "layer_id", "q_fp8", "weights", "metadata"),
    ),
    Seam(
        _INDEXER,
        "Indexer._get_index_k_read_buffer",
        "a layer's index-K pages",
        ("pool", "layer_id"),
    ),
    *(
        Seam(_METADATA, f"DSAIndexerMetadata.{name}", "the geometry of a forward")
        for name in (
            "attn_metadata",
            "topk_transform_method",
            "force_unfused_topk",
            "get_seqlens_int32",
            "get_page_table_64",
            "get_seqlens_expanded",
            "get_indexer_kvcache_range",
            "get_dsa_extend_len_cpu",
        )
    ),
    *(
        Seam(_DSA, f"DSAMetadata.{name}", "the geometry of a forward")
        for name in (
            "page_size",
            "cu_seqlens_q",
            "real_page_table",
            "dsa_seqlens_expanded",
            "topk_indices_offset",
            "indexer_k_start_end",
            "indexer_logical_page_table",
        )
    ),
    Seam(
        "sglang.srt.layers.attention.dsa.dsa_topk_backend",
        "TopkTransformMethod.RAGGED",
        "what indices of a prefill point at",
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend._forward_flashmla_sparse",
        "sparse attention, where ours takes over",
        ("q_all", "kv_cache", "page_table_1", "sm_scale", "attn_sink"),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend._forward_flashmla_kv",
        "sparse attention, where ours takes over",
        ("q_all", "kv_cache", "page_table_1", "sm_scale"),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend._forward_fa3",
        "sparse attention, where ours takes over",
        ("q_nope", "q_rope", "kv_cache", "page_table", "sm_scale", "logit_cap"),
    ),
    Seam(
        "sglang.kernels.ops.attention.utils",
        "concat_mla_absorb_q_general",
        "join the two parts of a query",
        ("q_nope", "q_rope"),
    ),
)
"""What the CUDA backend needs."""

CPU_SEAMS = (
    Seam(
        "sglang.srt.platforms.interface",
        "SRTPlatform.apply_server_args_defaults",
        "defaults of the CPU platform",
        ("server_args",),
    ),
    Seam("sglang.srt.platforms.interface", "SRTPlatform.get_kv_pool_cls", "our KV pool", ("kind",)),
    Seam("sglang.srt.platforms.interface", "SRTPlatform.init_backend", "set up each worker"),
    Seam("sglang.srt.platforms.cpu", "CpuDeviceMixin", "device questions on a CPU"),
    Seam(
        "sglang.kernels.fused_op",
        "BaseFusedOp.register_oot_forward",
        "the indexer's forward",
        ("op_cls", "fn", "platform_key"),
    ),
    Seam(
        _INDEXER,
        "Indexer.__init__",
        "names of the indexer's parts",
        ("index_n_heads", "index_head_dim", "rope_head_dim", "index_topk", "is_neox_style"),
    ),
    Seam(_INDEXER, "Indexer.__init__", "keep the head gates in the model's dtype"),
    Seam(_INDEXER, "Indexer._maybe_rotate", "where a GPU applies the Hadamard rotation", ("x",)),
    Seam(_POOL, "DSATokenToKVPool._create_index_key_cache", "our index-K cache"),
    Seam(
        _POOL,
        "MLATokenToKVPool._scatter_mla_rows",
        "a Triton writer that we replace",
        ("dst_buffer", "loc", "cache_k_nope", "cache_k_rope"),
    ),
    Seam(
        _POOL,
        "MLATokenToKVPool.set_mla_kv_buffer",
        "store latent rows",
        ("layer", "loc_info", "cache_k_nope", "cache_k_rope"),
    ),
    Seam(_KEYS, "IndexKeyCache._buffer_shape", "layout of our index-K cache", ("num_pages",)),
    Seam(_KEYS, "IndexKeyCache.move", "relocate tokens", ("tgt_loc", "src_loc")),
    Seam(
        "sglang.srt.layers.rotary_embedding.factory",
        "get_rope_wrapper",
        "its CPU branch knows only DeepSeek-YaRN; the generic one works",
        ("device",),
    ),
    Seam(
        "sglang.srt.distributed.parallel_state",
        "_is_cpu",
        "take the plain collectives instead of ops registered for another device",
    ),
    Seam("sglang.srt.model_executor.forward_batch_info", "_is_cpu", "no pinned memory"),
    Seam("sglang.srt.layers.dp_attention", "memcpy_func", "no Triton copy under dp_attention"),
    Seam("sglang.srt.layers.dp_attention", "memcpy_cpu", "the copy to use instead"),
    Seam(
        "sglang.srt.managers.data_parallel_controller",
        "sock_recv",
        "let the idle controller of dp_attention rest",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.maybe_sleep_on_idle",
        "let an idle scheduler rest under dp_attention too",
    ),
    Seam("sglang.srt.utils.numa_utils", "init_threads_binding", "reads the core binding we set"),
)
"""What the CPU platform needs."""

SEAMS = (*LAUNCH_SEAMS, *WORKER_SEAMS, *CUDA_SEAMS, *CPU_SEAMS)


def check(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Raise unless the installed SGLang is the supported version and every seam is in place.

    Raises:
        UnsupportedEngineError: naming the version, or what has moved.
    """
    version = importlib.metadata.version("sglang")
    if version != SUPPORTED_VERSION:
        raise UnsupportedEngineError(
            f"sglang-indexcache extends SGLang {SUPPORTED_VERSION}, and {version} is installed. "
            f"Install the supported one: pip install 'sglang=={SUPPORTED_VERSION}'."
        )
    moved = [problem for seam in seams if (problem := problem_with(seam))]
    if moved:
        raise UnsupportedEngineError(
            f"this SGLang {version} is not the one that sglang-indexcache knows: "
            f"{'; '.join(moved)}. Reinstall it: pip install --force-reinstall 'sglang=={version}'."
        )


def problem_with(seam: Seam) -> str | None:
    """What is wrong with ``seam`` in the installed SGLang, or None."""
    path = _module_file(seam.module)
    if path is None:
        return f"module {seam.module} is gone"
    node = _find(_parse(path), seam.name.split("."))
    if node is None:
        return f"{seam.path} is gone"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        missing = [p for p in seam.parameters if p not in _parameter_names(node)]
        if missing:
            return f"{seam.path} no longer takes {', '.join(missing)}"
    return None


def sglang_folder() -> Path:
    """Where the installed SGLang's source lies."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise UnsupportedEngineError(
            f"SGLang is not installed. Install it: pip install 'sglang=={SUPPORTED_VERSION}'."
        )
    return Path(spec.origin).parent


def _module_file(module: str) -> Path | None:
    stem = sglang_folder().parent.joinpath(*module.split("."))
    for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


@functools.cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition or assignment of dotted ``names`` below ``tree``."""
    for node in _definitions(tree):
        if _defines(node, names[0]):
            return node if len(names) == 1 else _find(node, names[1:])
    return None


def _definitions(tree: ast.AST) -> Iterator[ast.AST]:
    """Statements of a module or class body, also those inside ``if`` and ``try``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from _definitions(node)
        else:
            yield node


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.ImportFrom):  # replaced where it is used, not where it is from
        return any((alias.asname or alias.name) == name for alias in node.names)
    return False


def _parameter_names(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in every}
