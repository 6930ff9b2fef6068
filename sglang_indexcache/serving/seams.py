"""Every SGLang internal that this package touches or whose behaviour it follows, in one table.

SGLang offers official extension points (entry points, hook registry, resolution hooks, backend
registry, out-of-tree forwards and platforms); the table lists those we use and the internals
behind them. ``engine_version.py`` holds an SGLang against it. After a change here::

    python -m sglang_indexcache.serving.engine_version
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_indexcache import __version__

SUPPORTED_VERSION = __version__.partition(".post")[0]


@dataclass(frozen=True)
class Seam:
    """One name in SGLang that we hook, subclass, call or set.

    Attributes:
        module: dotted module.
        name: ``function``, ``Class`` or ``Class.method``, or a module-level name.
        parameters: parameters that we pass or rely on, in any order.
        why: what we use it for.
        by_signature: only its parameters matter to us; what it does inside may change.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...] = ()
    by_signature: bool = False

    @property
    def path(self) -> str:
        """``module.name``."""
        return f"{self.module}.{self.name}"


_SERVER_ARGS = "sglang.srt.server_args"
_RESOLVING = "sglang.srt.arg_groups.model_override_base"
_CONTEXT = "sglang.srt.runtime_context"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_DSA = "sglang.srt.layers.attention.dsa_backend"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_METADATA = "sglang.srt.layers.attention.dsa.dsa_indexer_metadata"
_POOL = "sglang.srt.mem_cache.memory_pool"
_KEYS = "sglang.srt.mem_cache.index_key_cache"
_STATE = "sglang.srt.managers.scheduler_components.internal_state"
_SCHEDULER = "sglang.srt.managers.scheduler"
_MESSAGES = "sglang.srt.managers.io_struct"
_HOOKS = "sglang.srt.plugins.hook_registry"
_LOADER = "sglang.srt.model_loader.loader"
_PD = "sglang.srt.disaggregation.common.conn"
_DEEPSEEK = "sglang.srt.models.deepseek_v2"
_VARIANTS = "sglang.srt.layers.attention.graph_variants"
_PLATFORM = "sglang.srt.platforms.interface"
_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla"

LAUNCH_SEAMS = (
    Seam(_HOOKS, "HookRegistry.register", "wrap a function", ("target", "hook", "hook_type")),
    Seam(_HOOKS, "HookRegistry.apply_hooks", "wrap once a worker knows its plan"),
    Seam(_HOOKS, "HookRegistry._patched", "wrap only once"),
    Seam(_HOOKS, "HookType", "the kinds of wrapping, by name"),
    Seam("sglang.srt.plugins", "load_plugins", "what calls us in every process, and the doctor"),
    Seam(_SERVER_ARGS, "ServerArgs.add_cli_args", "add the flags", ("parser",), by_signature=True),
    Seam(_SERVER_ARGS, "ServerArgs.from_cli_args", "keep the flags' values", ("cls", "args")),
    Seam(_SERVER_ARGS, "ServerArgs.__reduce__", "our bookkeeping travels to child processes"),
    Seam(_SERVER_ARGS, "prepare_server_args", "parse a command line", ("argv",)),
    Seam("sglang.launch_server", "run_server", "serve with these arguments", ("server_args",)),
    *(
        Seam("sglang.cli.serve_backends", name, "sglang serve --model-type indexcache")
        for name in ("SERVE_BACKEND_API_VERSION", "ServeBackend", "ServeRequest")
    ),
    Seam("sglang", "Engine", "search with an engine inside the command"),
    Seam("sglang.srt.entrypoints.engine", "Engine.server_args_class", "accept Engine keywords"),
    Seam("sglang.srt.arg_groups.choices", "add_attention_backend_choices", "the backend's name"),
    Seam(
        "sglang.srt.arg_groups.resolution_hooks",
        "register_resolution_hook",
        "resolve the pattern at SGLang's own pipeline steps",
        ("name",),
    ),
    Seam(
        "sglang.srt.arg_groups.pipeline",
        "run_resolution_pipeline",
        "which steps come before and after those that we wrap",
        ("server_args",),
    ),
    *(
        Seam("sglang.srt.arg_groups.overrides", name, "where these two are imported from")
        for name in ("model_config_of", "resolving_view")
    ),
    Seam(_RESOLVING, "resolving_view", "read what is decided so far", ("server_args",)),
    Seam(_RESOLVING, "ResolvingConfig", "read what is decided so far"),
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
        by_signature=True,
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
    Seam("sglang.srt.configs.model_config", "get_dsa_index_topk", "the model's k", ("config",)),
    Seam(
        "sglang.srt.arg_groups.serving_hook",
        "handle_other_validations",
        "a pipeline step after SGLang's kernels and KV dtype are decided",
        ("server_args",),
        by_signature=True,
    ),
    Seam(
        _RESOLVING,
        "model_config_of",
        "the model's shape, which decides whether our kernels can run",
        ("server_args",),
    ),
    Seam("sglang.srt.distributed.utils", "get_pp_indices", "stage boundaries"),
    *(
        Seam(
            "sglang.srt.arg_groups.model_override_base",
            name,
            "whether a launch path left our name unresolved",
            parameters,
        )
        for name, parameters in (
            ("attention_backends_of", ("cfg",)),
            ("resolved_view", ("server_args",)),
        )
    ),
    Seam(
        "sglang.srt.arg_groups.choices",
        "ATTENTION_BACKEND_CHOICES",
        "whether this plugin was loaded",
    ),
)
"""What resolving the command line needs."""

WORKER_SEAMS = (
    *(
        Seam(
            "sglang.srt.managers.scheduler_components.weight_updater",
            f"SchedulerWeightUpdaterManager.update_weights_from_{way}",
            "refuse what would replace an adapter's indexers",
            ("recv_req",),
            by_signature=True,
        )
        for way in ("disk", "distributed", "tensor", "ipc")
    ),
    *(
        Seam(_MESSAGES, f"Update{name}ReqOutput", "its answer", by_signature=True)
        for name in (
            "WeightFromDisk",
            "WeightsFromDistributed",
            "WeightsFromTensor",
            "WeightsFromIPC",
        )
    ),
    Seam(
        _LOADER,
        "DefaultModelLoader.load_weights_only",
        "bring an adapter's indexers in behind the checkpoint's",
        ("model", "weights"),
    ),
    *(
        Seam(_LOADER, f"DefaultModelLoader.{name}", "replace indexers in live mode", ("model",))
        for name in ("restore_weights_before_loading", "postprocess_weights")
    ),
    Seam(
        "sglang.srt.models.deepseek_common.deepseek_weight_loader",
        "DeepseekV2WeightLoaderMixin.do_load_weights",
        "takes an indexer's weights alone, as a checkpoint has them",
        ("weights",),
    ),
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
    Seam(_DEEPSEEK, "DeepseekV2AttentionMLA.__init__", "which layers get an indexer"),
    Seam(
        _DEEPSEEK,
        "DeepseekV2Model.forward",
        "carries indices between layers, and between pipeline stages",
    ),
    Seam(
        "sglang.srt.layers.attention.index_topk_share",
        "IndexTopKShareState",
        "the indices that SGLang carries",
    ),
    Seam(
        "sglang.srt.models.deepseek_common.attention_backend_handler",
        "handle_attention_dsa",
        "when attention selects tokens, and when it is dense",
        ("attn", "forward_batch"),
    ),
    Seam(_KEYS, "IndexKeyCache._layer_num_pages", "no index keys on S layers", ("layer_idx",)),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_dsa_kv_pool",
        "no index keys on S layers",
    ),
    Seam(
        "sglang.srt.model_executor.pool_configurator",
        "DefaultPoolConfigurator._compute_dsa_indexer_cell_size",
        "the memory that S layers save",
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
    Seam(_MESSAGES, "SetInternalStateReq.server_args", "the request for a switch"),
    Seam(_MESSAGES, "SetInternalStateReqOutput.updated", "the answer to a switch"),
    Seam(_SCHEDULER, "Scheduler.is_fully_idle", "whether a switch could fall between two nodes"),
    Seam(
        "sglang.srt.model_executor.forward_context",
        "get_attn_backend",
        "the backend of the forward in progress, a sub-batch's own under overlap",
    ),
    Seam(
        "sglang.srt.distributed.bootstrap",
        "init_parallel_runtime",
        "the ranks have met and no weight is read: compare their plans",
        ("server_args",),
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.generate_request",
        "every route's requests: answer a name that is no pattern of this server's",
        ("obj", "request"),
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.__init__",
        "a process takes requests from here on",
        by_signature=True,
    ),
    Seam("sglang.srt.entrypoints.http_server", "app", "say in a header what an answer was made of"),
    Seam(
        "sglang.srt.entrypoints.http_server",
        "init_multi_tokenizer",
        "how a tokenizer process comes to its manager",
    ),
    Seam(
        _SERVER_ARGS,
        "ServerArgs.get_tokenizer_worker_class",
        "tokenizer processes load no plugins; this brings the hooks along",
        by_signature=True,
    ),
    Seam(
        "sglang.srt.managers.multi_tokenizer_mixin",
        "TokenizerWorker",
        "tell a tokenizer process from the launcher",
        by_signature=True,
    ),
    Seam(
        "sglang.srt.utils.common",
        "get_device_memory_capacity",
        "how much memory decode graphs are reserved from",
        by_signature=True,
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "FINISH_ABORT",
        "tell an aborted turn of a session",
        by_signature=True,
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.__init__",
        "decide a request's pattern, and keep its cached KV apart by it",
        ("origin_input_ids", "sampling_params", "session", "extra_key"),
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.set_finish_with_abort",
        "end a request whose pattern is none",
        ("error_msg",),
    ),
    Seam("sglang.srt.sampling.sampling_params", "SamplingParams", "what a request says of it"),
    Seam(
        "sglang.srt.session.session_controller",
        "Session.create_req",
        "which earlier turns a session goes on from",
        ("req_factory",),
    ),
    Seam(
        "sglang.srt.session.session_controller", "SessionReqNode.__init__", "a turn that it holds"
    ),
    *(
        Seam("sglang.srt.session.streaming_session", f"StreamingSession.{name}", why)
        for name, why in (
            ("try_cache_finished_req", "an aborted turn takes the session's KV with it"),
            ("find_active_slot", "a refused turn leaves it to the next"),
        )
    ),
    Seam(
        _BATCH,
        "ForwardBatch.init_new",
        "tell a forward the patterns of its requests",
        ("batch",),
    ),
    *(
        Seam(_BATCH, f"ForwardBatch.{name}", "which rows are whose")
        for name in ("rids", "extend_seq_lens_cpu", "positions")
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "SchedulerOutputStreamer.is_request_level_customized_info_key",
        "an answer tells its pattern once, not for each token",
        ("key",),
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "_GenerationStreamAccumulator",
        "an answer tells its pattern",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.update_request_meta_info",
        "an answer tells its pattern",
        ("customized_info",),
    ),
    Seam(
        "sglang.srt.mem_cache.utils",
        "get_storage_hash_str",
        "stored pages are found by extra_key too",
        ("key",),
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
    Seam(_CONTEXT, "get_model", "the resolved config in a worker"),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "create_attention_graph_variants",
        "several decode graphs of a batch size",
    ),
    Seam(_VARIANTS, "create_attention_graph_variants", "what that is", ("hf_config",)),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner._resolve_attention_variant",
        "asks before each replay which of them it is to be",
        ("forward_batch",),
    ),
    Seam(
        "sglang.srt.model_executor.runner_utils.capture_mode",
        "get_capture_attention_variant",
        "which of them is captured",
    ),
    Seam(_VARIANTS, "DSA_DENSE", "the graph in which indexers only store keys"),
    Seam(_VARIANTS, "DSA_SPARSE", "the graph of every batch"),
    Seam(_VARIANTS, "DsaGraphVariants.select", "when SGLang takes the one or the other"),
    Seam(
        _INDEXER,
        "Indexer._should_skip_logits_computation",
        "an indexer asks which graph is captured",
        ("forward_batch",),
    ),
    Seam(_CONTEXT, "get_exec", "whether two batches overlap"),
    Seam(_CONTEXT, "get_parallel", "the pipeline's stages"),
    Seam(_CONTEXT, "get_disagg", "whether prefill and decode are apart"),
    *(
        Seam(_BATCH, f"ForwardMode.{name}", "which phase a forward is of")
        for name in (
            "EXTEND",
            "is_decode",
            "is_decode_or_idle",
            "is_draft_extend_v2",
            "is_idle",
            "is_target_verify",
        )
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
        _DSA,
        "DeepseekSparseAttnBackend.set_dsa_prefill_impl",
        "when a prefill is dense (use_mha) and takes no indices",
        ("forward_batch",),
    ),
    Seam(
        _DSA,
        "DeepseekSparseAttnBackend.get_indexer_metadata",
        "the geometry of a forward",
        ("layer_id", "forward_batch"),
    ),
    Seam(_DSA, "TopkTransformMethod", "where it is imported from"),
    Seam(_BATCH, "ForwardBatch.tbo_parent_token_range", "a sub-batch's rows of the whole batch"),
    Seam(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend",
        "HybridLinearAttnBackend.__init__",
        "hybrid models keep our backend inside theirs",
        ("full_attn_backend",),
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
        "TopkTransformMethod",
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
        _PLATFORM,
        "SRTPlatform.apply_server_args_defaults",
        "defaults of the CPU platform",
        ("server_args",),
    ),
    Seam(_PLATFORM, "SRTPlatform.get_kv_pool_cls", "our KV pool", ("kind",)),
    Seam(_PLATFORM, "SRTPlatform.init_backend", "set up each worker"),
    Seam(_PLATFORM, "SRTPlatform.get_dispatch_key_name", "the key of the indexer's forward"),
    Seam(_PLATFORM, "SRTPlatform.get_default_attention_backend", "the DSA backend"),
    Seam(_PLATFORM, "SRTPlatform.get_compile_backend", "compile nothing", ("mode",)),
    Seam(_PLATFORM, "PlatformCapabilities", "what the CPU platform cannot do"),
    Seam("sglang.srt.platforms.device_mixin", "PlatformEnum.OOT", "a platform from outside"),
    Seam("sglang.srt.platforms.device_mixin", "DeviceMixin", "device questions on a CPU"),
    Seam("sglang.srt.platforms", "current_platform", "whether ours is the one in use"),
    Seam("sglang.srt.platforms", "_resolve_platform", "how SGLang comes to take ours"),
    *(
        Seam("sglang.srt.layers.attention.base_attn_backend", f"AttentionBackend.{name}", why)
        for name, why in (
            ("forward", "calls our prefill and decode"),
            ("init_forward_metadata", "a forward begins"),
            ("support_triton", "there is no Triton"),
            ("get_cuda_graph_seq_len_fill_value", "pads batches under dp_attention"),
        )
    ),
    *(
        Seam(_BATCH, f"ForwardBatch.{name}", "the geometry of a forward")
        for name in (
            "forward_mode",
            "seq_lens",
            "extend_seq_lens",
            "req_pool_indices",
            "out_cache_loc",
        )
    ),
    Seam("sglang.srt.platforms.cpu", "CpuDeviceMixin", "device questions on a CPU"),
    Seam(
        "sglang.kernels.fused_op",
        "BaseFusedOp.register_oot_forward",
        "the indexer's forward",
        ("op_cls", "fn", "platform_key"),
    ),
    Seam(
        "sglang.kernels.fused_op",
        "BaseFusedOp._resolve_forward_method",
        "how SGLang comes to take the indexer's forward",
    ),
    Seam(
        _INDEXER,
        "Indexer.__init__",
        "the indexer's parts, and the dtype of its head gates",
        ("index_n_heads", "index_head_dim", "rope_head_dim", "index_topk", "is_neox_style"),
    ),
    Seam(_INDEXER, "Indexer._maybe_rotate", "where a GPU applies the Hadamard rotation", ("x",)),
    *(
        Seam(_INDEXER, f"Indexer.{name}", "what a GPU computes, and our CPU indexer follows")
        for name in (
            "_get_q_k_bf16",
            "_fused_q_prepare_and_store",
            "_fused_k_prepare_and_store",
            "_project_and_scale_head_gates",
            "_scale_head_gates",
            "_store_index_k_cache",
        )
    ),
    *(
        Seam("sglang.kernels.ops.kvcache.dsa_index_k_cache", name, "the layout of fp8 index keys")
        for name in ("SetKAndS", "_set_k_and_s_triton", "_set_k_and_s_triton_kernel")
    ),
    Seam(_POOL, "DSATokenToKVPool.__init__", "the sizes of our index-K cache"),
    Seam(_POOL, "MLATokenToKVPool.get_key_buffer", "the latent rows of a layer", ("layer_id",)),
    Seam(_KEYS, "IndexKeyCache.__init__", "the buffers of our index-K cache"),
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
    Seam(_BATCH, "_is_cpu", "no pinned memory"),
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
    Seam(
        _LOADER,
        "DefaultModelLoader._get_weights_iterator",
        "dequantise block-FP8 weights, for which SGLang has GPU kernels only",
        ("source",),
    ),
)
"""What the CPU platform needs."""

SEAMS = (*LAUNCH_SEAMS, *WORKER_SEAMS, *CUDA_SEAMS, *CPU_SEAMS)
