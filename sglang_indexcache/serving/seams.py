"""Every SGLang internal that this package touches or whose behaviour it follows, in one table.

SGLang offers official extension points (entry points, hook registry, resolution hooks, backend
registry, out-of-tree forwards and platforms); the table lists those we use and the internals
behind them. ``engine_version.py`` holds an SGLang against it. After a change here::

    python -m sglang_indexcache.serving.engine_version
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_indexcache import __version__

SUPPORTED_VERSION = __version__.partition(".post")[0]


@dataclass(frozen=True)
class Seam:
    """One name in SGLang that we hook, subclass, call or set.

    Attributes:
        module: dotted module.
        name: ``function``, ``Class`` or ``Class.method``, or a module-level name.
        why: what we use it for.
        parameters: parameters that we pass or rely on, in any order.
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


_TABLE = """
# What resolving the command line needs.
sglang.srt.plugins.hook_registry
    HookRegistry.
        register(target, hook, hook_type): wrap a function
        apply_hooks: wrap once a worker knows its plan
        _patched: wrap only once
    HookType: the kinds of wrapping, by name
sglang.srt.plugins
    load_plugins: what calls us in every process, and the doctor
sglang.srt.server_args
    ServerArgs.
        def add_cli_args(parser): add the flags
        from_cli_args(cls, args): keep the flags' values
        __reduce__: our bookkeeping travels to child processes
    prepare_server_args(argv): parse a command line
sglang.launch_server
    run_server(server_args): serve with these arguments
sglang.cli.serve_backends
    SERVE_BACKEND_API_VERSION, ServeBackend: sglang serve --model-type indexcache
    ServeRequest: sglang serve --model-type indexcache
sglang.srt.entrypoints.engine
    Engine.server_args_class: accept Engine keywords
sglang.srt.arg_groups.choices
    add_attention_backend_choices: the backend's name
    ATTENTION_BACKEND_CHOICES: whether this plugin was loaded
sglang.srt.arg_groups.resolution_hooks
    register_resolution_hook(name): resolve the pattern at SGLang's own pipeline steps
sglang.srt.arg_groups.pipeline
    run_resolution_pipeline(server_args): which steps surround those we wrap
sglang.srt.arg_groups.overrides
    model_config_of, resolving_view: where these two are imported from
    declare_resolution(server_args, source): declare the backend and the config overrides
sglang.srt.arg_groups.model_override_base
    resolving_view(server_args): read what is decided so far
    ResolvingConfig: read what is decided so far
    model_config_of(server_args): the model's shape, which decides whether our kernels can run
    attention_backends_of(cfg): whether a launch path left our name unresolved
    resolved_view(server_args): whether a launch path left our name unresolved
sglang.srt.arg_groups.model_path_hook
    handle_model_source_paths(server_args): a step; then the model's config can be read
sglang.srt.arg_groups.model_hook
    def handle_model_specific_adjustments(server_args):
        a step that asks CUDA questions on any platform
    _validate_dsa_tbo_index_sharing(server_args, hf_config):
        two-batch overlap, whose indices our buffer supplies
sglang.srt.utils.hf_transformers.config
    get_config(model, trust_remote_code, revision, model_override_args, model_config_parser):
        read the checkpoint's config without overrides
sglang.srt.configs.model_config
    dsa_layer_skips_topk(config, layer_id): obeys indexer_types first
    get_dsa_index_topk(config): the model's k
sglang.srt.arg_groups.serving_hook
    def handle_other_validations(server_args): a step; kernels and KV dtype are decided by then
sglang.srt.distributed.utils
    get_pp_indices: stage boundaries

# What every worker needs.
sglang.srt.managers.scheduler_components.weight_updater
    SchedulerWeightUpdaterManager.
        def update_weights_from_disk(recv_req): refuse what would replace an adapter's indexers
        def update_weights_from_distributed(recv_req):
            refuse what would replace an adapter's indexers
        def update_weights_from_tensor(recv_req): refuse what would replace an adapter's indexers
        def update_weights_from_ipc(recv_req): refuse what would replace an adapter's indexers
sglang.srt.managers.io_struct
    def UpdateWeightFromDiskReqOutput, UpdateWeightsFromDistributedReqOutput: its answer
    def UpdateWeightsFromTensorReqOutput, UpdateWeightsFromIPCReqOutput: its answer
    SetInternalStateReq.server_args: the request for a switch
    SetInternalStateReqOutput.updated: the answer to a switch
sglang.srt.model_loader.loader
    DefaultModelLoader.
        load_weights_only(model, weights): bring an adapter's indexers in behind the checkpoint's
        restore_weights_before_loading, postprocess_weights(model): replace indexers in live mode
sglang.srt.models.deepseek_common.deepseek_weight_loader
    DeepseekV2WeightLoaderMixin.
        do_load_weights(weights): takes an indexer's weights alone, as a checkpoint has them
sglang.srt.layers.attention.attention_registry
    register_attention_backend(name): register the backend
    create_dsa_backend(runner): SGLang's own DSA backend, for drafts and plain servers
sglang.srt.models.deepseek_v2
    DeepseekV2AttentionMLA.
        __init__: which layers get an indexer
        forward_prepare(prev_topk_indices): carries indices between layers
    DeepseekV2Model.forward: carries indices between layers, and between pipeline stages
sglang.srt.layers.attention.index_topk_share
    IndexTopKShareState: the indices that SGLang carries
sglang.srt.models.deepseek_common.attention_backend_handler
    handle_attention_dsa(attn, forward_batch): when attention selects tokens, and when it is dense
sglang.srt.mem_cache.index_key_cache
    IndexKeyCache._layer_num_pages(layer_idx): no index keys on S layers
sglang.srt.mem_cache.kv_cache_configurator
    KVCacheConfigurator._build_dsa_kv_pool: no index keys on S layers
sglang.srt.model_executor.pool_configurator
    DefaultPoolConfigurator._compute_dsa_indexer_cell_size: the memory that S layers save
sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla
    DeepseekMLAForwardMixin.
        should_run_indexer(prev_topk_indices): skips the indexer on S layers
        forward_absorb_core(topk_indices): hands indices to the backend
sglang.srt.managers.scheduler_components.internal_state
    SchedulerInternalStateController.
        get_internal_state(recv_req): report over /server_info
        set_internal_state(recv_req): accept a new pattern over /set_internal_state
sglang.srt.managers.scheduler
    Scheduler.is_fully_idle: whether a switch could fall between two nodes
sglang.srt.model_executor.forward_context
    get_attn_backend: the backend of the forward in progress, a sub-batch's own under overlap
sglang.srt.distributed.bootstrap
    init_parallel_runtime(server_args):
        the ranks have met and no weight is read: compare their plans
sglang.srt.managers.tokenizer_manager
    TokenizerManager.
        generate_request(obj, request): every route's requests: refuse an unknown name
        def __init__: a process takes requests from here on
        update_request_meta_info(customized_info): an answer tells its pattern
sglang.srt.entrypoints.http_server
    app: say in a header what an answer was made of
    init_multi_tokenizer: how a tokenizer process comes to its manager
sglang.srt.server_args
    ServerArgs.
        def get_tokenizer_worker_class:
            tokenizer processes load no plugins; this brings the hooks along
sglang.srt.managers.multi_tokenizer_mixin
    def TokenizerWorker: tell a tokenizer process from the launcher
sglang.srt.utils.common
    def get_device_memory_capacity: how much memory decode graphs are reserved from
sglang.srt.managers.schedule_batch
    def FINISH_ABORT: tell an aborted turn of a session
    Req.
        __init__(origin_input_ids, sampling_params, session, extra_key):
            decide a request's pattern, key its KV by it
        set_finish_with_abort(error_msg): end a request whose pattern is none
sglang.srt.sampling.sampling_params
    SamplingParams: what a request says of it
sglang.srt.session.session_controller
    Session.create_req(req_factory): which earlier turns a session goes on from
    SessionReqNode.__init__: a turn that it holds
sglang.srt.session.streaming_session
    StreamingSession.
        try_cache_finished_req: an aborted turn takes the session's KV with it
        find_active_slot: a refused turn leaves it to the next
sglang.srt.model_executor.forward_batch_info
    ForwardBatch.
        init_new(batch): tell a forward the patterns of its requests
        rids, extend_seq_lens_cpu, positions: which rows are whose
    ForwardMode.
        EXTEND, is_decode, is_decode_or_idle, is_draft_extend_v2: which phase a forward is of
        is_idle, is_target_verify: which phase a forward is of
sglang.srt.managers.scheduler_components.output_streamer
    SchedulerOutputStreamer.
        is_request_level_customized_info_key(key):
            an answer tells its pattern once, not for each token
    _GenerationStreamAccumulator: an answer tells its pattern
sglang.srt.mem_cache.utils
    get_storage_hash_str(key): stored pages are found by extra_key too
sglang.srt.disaggregation.common.conn
    CommonKVManager.
        __init__(args): tell a disaggregated peer the pattern with the KV dtype
        try_ensure_parallel_info(bootstrap_addr): turn away a prefill node with another pattern
sglang.srt.runtime_context
    get_model: the resolved config in a worker
    get_serving: how many tokenizer processes share the limit of patterns
    get_exec: whether two batches overlap
    get_parallel: the pipeline's stages
    get_disagg: whether prefill and decode are apart
sglang.srt.model_executor.runner.decode_cuda_graph_runner
    create_attention_graph_variants: several decode graphs of a batch size
    DecodeCudaGraphRunner.
        _resolve_attention_variant(forward_batch): asks before each replay which of them it is to be
sglang.srt.layers.attention.graph_variants
    create_attention_graph_variants(hf_config): what that is
    DSA_DENSE: the graph in which indexers only store keys
    DSA_SPARSE: the graph of every batch
    DsaGraphVariants.select: when SGLang takes the one or the other
sglang.srt.model_executor.runner_utils.capture_mode
    get_capture_attention_variant: which of them is captured
sglang.srt.layers.attention.dsa.dsa_indexer
    Indexer._should_skip_logits_computation(forward_batch): an indexer asks which graph is captured
sglang.srt.observability.metrics_collector
    STAT_LOGGER_ROLE_SCHEDULER, STAT_LOGGER_ROLE_TOKENIZER: where our metrics go
    def TokenizerMetricsCollector.__init__(labels): SGLang's labels of a process
    resolve_collector_class(role, default_cls): how SGLang comes to take our collector
    SchedulerMetricsCollector.
        def __init__(labels): SGLang's labels of a process
        def log_stats(stats): when a scheduler exports

# What the CUDA backend needs.
sglang.srt.layers.attention.dsa_backend
    DeepseekSparseAttnBackend.
        __init__(model_runner): the backend that ours extends
        init_forward_metadata(forward_batch): a forward begins (eager)
        init_forward_metadata_out_graph(forward_batch, in_capture): a forward begins (CUDA graph)
        forward_extend(layer, forward_batch, topk_indices): attention in prefill
        forward_decode(layer, forward_batch, topk_indices): attention in decode
        get_topk_transform_method(forward_mode):
            whether indices are pool slots or offsets into a flattened batch
        set_dsa_prefill_impl(forward_batch): when a prefill is dense (use_mha) and takes no indices
        get_indexer_metadata(layer_id, forward_batch): the geometry of a forward
        _forward_flashmla_sparse(q_all, kv_cache, page_table_1, sm_scale, topk_length, attn_sink):
            sparse attention, where ours takes over; how many entries each list has
        _forward_flashmla_kv(q_all, kv_cache, page_table_1, sm_scale):
            sparse attention, where ours takes over
        _forward_fa3(q_nope, q_rope, kv_cache, page_table, cache_seqlens, sm_scale, logit_cap):
            sparse attention, where ours takes over; how many entries each list has
    TopkTransformMethod: where it is imported from
    DSAMetadata.
        page_size, cu_seqlens_q, real_page_table, dsa_seqlens_expanded: the geometry of a forward
        topk_indices_offset, indexer_k_start_end: the geometry of a forward
        indexer_logical_page_table: the geometry of a forward
sglang.srt.model_executor.forward_batch_info
    ForwardBatch.tbo_parent_token_range: a sub-batch's rows of the whole batch
sglang.srt.layers.attention.hybrid_linear_attn_backend
    HybridLinearAttnBackend.
        __init__(full_attn_backend): hybrid models keep our backend inside theirs
sglang.srt.layers.attention.dsa.dsa_indexer
    Indexer.
        forward_cuda(x, q_lora, positions, forward_batch, layer_id, return_indices):
            the branch of live mode
        _forward_cuda_k_only(x, positions, forward_batch, layer_id, act_quant, metadata,
            return_indices):
            live mode: store the key, select nothing
        _get_q_k_bf16(q_lora, x, positions, enable_dual_stream, forward_batch):
            the queries of a shadow; and what our CPU indexer follows
        _weights_proj_bf16_in_fp32_out(x): and the weights of its heads
        _get_topk_ragged(enable_dual_stream, forward_batch, layer_id, q_fp8, weights, metadata,
            topk_result):
            prefill: from quantised queries to indices
        _get_topk_paged(forward_batch, layer_id, q_fp8, weights, metadata):
            the same in decode and MTP
        _get_index_k_read_buffer(pool, layer_id): a layer's index-K pages
sglang.kernels.ops.quantization.act_quant_triton
    act_quant: the quantiser that the key-only path takes
sglang.srt.layers.attention.tbo_backend
    TboAttnBackend.__init__(primary, children): a backend for whole batches and one per sub-batch
sglang.srt.model_executor.model_runner_components.layer_setup
    ModelLayerInfo.start_layer: whose indices come from an earlier pipeline stage
sglang.srt.model_executor.runner_backend.full_cuda_graph_backend
    FullCudaGraphBackend.
        capture_one(forward_fn): a captured forward begins once and runs its layers three times
sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend
    BreakableCudaGraphBackend.capture_one(forward_fn): the same in prefill
sglang.srt.layers.radix_attention
    RadixAttention.
        _eager_attention(output): a prefill graph's replay runs attention with the batch of now
sglang.srt.state_capturer.indexer_topk
    maybe_capture_indexer_topk(layer_id, topk_indices):
        return_indexer_topk shows what each layer used
    IndexerTopkCapturer.
        __init__(num_tokens, num_indexer_layers, index_topk, max_running_requests, device):
            the same on the CPU platform
    def create_indexer_capturer(model_config, num_tokens, max_running_requests, device):
        the same, where SGLang has none for the device
sglang.srt.model_executor.model_runner
    create_indexer_capturer: the same, where SGLang calls it
sglang.srt.mem_cache.pool_host.common
    ALLOC_MEMORY_FUNCS: the same, in memory that is not pinned
sglang.srt.configs.model_config
    get_num_indexer_layers(config): the same, how many layers a token's record has
sglang.srt.layers.attention.dsa.dsa_indexer_metadata
    DSAIndexerMetadata.
        attn_metadata, topk_transform_method, force_unfused_topk: the geometry of a forward
        get_seqlens_int32, get_page_table_64, get_seqlens_expanded: the geometry of a forward
        get_indexer_kvcache_range, get_dsa_extend_len_cpu: the geometry of a forward
sglang.srt.layers.attention.dsa.dsa_topk_backend
    TopkTransformMethod: what indices of a prefill point at
sglang.kernels.ops.attention.utils
    concat_mla_absorb_q_general(q_nope, q_rope): join the two parts of a query

# What the CPU platform needs.
sglang.srt.platforms.interface
    SRTPlatform.
        apply_server_args_defaults(server_args): defaults of the CPU platform
        get_kv_pool_cls(kind): our KV pool
        init_backend: set up each worker
        get_dispatch_key_name: the key of the indexer's forward
        get_default_attention_backend: the DSA backend
        get_compile_backend(mode): compile nothing
    PlatformCapabilities: what the CPU platform cannot do
sglang.srt.platforms.device_mixin
    PlatformEnum.OOT: a platform from outside
    DeviceMixin: device questions on a CPU
sglang.srt.platforms
    current_platform: whether ours is the one in use
    _resolve_platform: how SGLang comes to take ours
sglang.srt.layers.attention.base_attn_backend
    AttentionBackend.
        forward: calls our prefill and decode
        init_forward_metadata: a forward begins
        support_triton: there is no Triton
        get_cuda_graph_seq_len_fill_value: pads batches under dp_attention
sglang.srt.model_executor.forward_batch_info
    ForwardBatch.
        forward_mode, seq_lens, extend_seq_lens, req_pool_indices: the geometry of a forward
        out_cache_loc: the geometry of a forward
    _is_cpu: no pinned memory
sglang.srt.platforms.cpu
    CpuDeviceMixin: device questions on a CPU
sglang.kernels.fused_op
    BaseFusedOp.
        register_oot_forward(op_cls, fn, platform_key): the indexer's forward
        _resolve_forward_method: how SGLang comes to take the indexer's forward
sglang.srt.layers.attention.dsa.dsa_indexer
    Indexer.
        __init__(index_n_heads, index_head_dim, rope_head_dim, index_topk, is_neox_style):
            the indexer's parts, and the dtype of its head gates
        _maybe_rotate(x): where a GPU applies the Hadamard rotation
        _fused_q_prepare_and_store: what a GPU computes, and our CPU indexer follows
        _fused_k_prepare_and_store: what a GPU computes, and our CPU indexer follows
        _project_and_scale_head_gates: what a GPU computes, and our CPU indexer follows
        _scale_head_gates, _store_index_k_cache: what a GPU computes, and our CPU indexer follows
sglang.kernels.ops.kvcache.dsa_index_k_cache
    SetKAndS, _set_k_and_s_triton, _set_k_and_s_triton_kernel: the layout of fp8 index keys
sglang.srt.mem_cache.memory_pool
    DSATokenToKVPool.
        __init__: the sizes of our index-K cache
        _create_index_key_cache: our index-K cache
    MLATokenToKVPool.
        get_key_buffer(layer_id): the latent rows of a layer
        _scatter_mla_rows(dst_buffer, loc, cache_k_nope, cache_k_rope):
            a Triton writer that we replace
        set_mla_kv_buffer(layer, loc_info, cache_k_nope, cache_k_rope): store latent rows
sglang.srt.mem_cache.index_key_cache
    IndexKeyCache.
        __init__: the buffers of our index-K cache
        _buffer_shape(num_pages): layout of our index-K cache
        move(tgt_loc, src_loc): relocate tokens
sglang.srt.layers.rotary_embedding.factory
    get_rope_wrapper(device): its CPU branch knows only DeepSeek-YaRN; the generic one works
sglang.srt.distributed.parallel_state
    _is_cpu: take the plain collectives instead of ops registered for another device
sglang.srt.layers.dp_attention
    memcpy_func: no Triton copy under dp_attention
    memcpy_cpu: the copy to use instead
sglang.srt.managers.data_parallel_controller
    sock_recv: let the idle controller of dp_attention rest
sglang.srt.managers.scheduler
    Scheduler.maybe_sleep_on_idle: let an idle scheduler rest under dp_attention too
sglang.srt.utils.numa_utils
    init_threads_binding: reads the core binding we set
sglang.srt.model_loader.loader
    DefaultModelLoader.
        _get_weights_iterator(source):
            dequantise block-FP8 weights, for which SGLang has GPU kernels only
"""
"""Below a module its names, and below a class (with a dot) its members: ``name(parameters): why``.
``def`` before a name says that only its signature matters."""

_ENTRY = re.compile(r"(def )?([\w., ]+?)(?:\(([\w, ]+)\))?: (.+)")


def _read(table: str) -> Iterator[Seam]:
    module = owner = ""
    for line in re.sub(r"(?<=[,:])\n +", " ", table).splitlines():
        said = line.strip()
        if not said or said.startswith("#"):
            continue
        if line == said:
            module = said
        elif said.endswith("."):
            owner = said
        else:
            entry = _ENTRY.fullmatch(said)
            assert entry is not None, said
            signature, names, parameters, why = entry.groups()
            inside = owner if line.startswith(" " * 8) else ""
            takes = tuple(parameters.split(", ")) if parameters else ()
            for name in names.split(", "):
                yield Seam(module, inside + name, why, takes, by_signature=bool(signature))


SEAMS = tuple(_read(_TABLE))
