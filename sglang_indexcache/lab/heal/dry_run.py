"""Estimate of whether a healing fits its GPUs, computed from ``config.json`` alone.

Data that stay on a GPU are counted to the byte. For a layer at work the estimate is the sum of its
tensors, an upper bound, because they are not all alive at once.
"""

from __future__ import annotations

from transformers import AutoConfig

from sglang_indexcache.checkpoint import fp8_blocks, reading
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.frozen import STATE_COPIES, shared_out
from sglang_indexcache.lab.heal.heal import DTYPES, HealOptions, Target
from sglang_indexcache.library.sizes import ModelShape, find_gpu

GB = 1e9
FLOAT32 = 4
"""Bytes per number in indexers and losses."""


def memory_needed(options: HealOptions, on: str) -> list[tuple[str, str]]:
    """Return the memory that a healing needs on GPUs such as ``8xh200``, as rows to print.

    Raises:
        CheckpointError, PatternError, LibraryError, TrainingError: as for :func:`heal`; or the GPUs
            are written in another form.
        BenchError: the GPU is unknown.
    """
    count, times, name = on.partition("x")
    if not times or not (count.isascii() and count.isdigit()) or not int(count):
        raise TrainingError(f"GPUs are written as 8xh200, got {on!r}")
    gpu, target = find_gpu(name), Target.of(options)
    with reading(f"the config of {options.checkpoint}"):
        shape = ModelShape.from_config(AutoConfig.from_pretrained(options.checkpoint))
    if shape is None:
        raise TrainingError(
            f"the config of {options.checkpoint} lacks dimensions that a dry run counts with; "
            "heal without --dry-run"
        )
    peaks = _peaks(options, target, shape, 1 if options.from_disk else int(count))
    rows = [
        (f"GPU {number}", f"at most {peak / GB:,.1f} of {gpu.memory / GB:,.0f} GB: {what}")
        for number, (what, peak) in enumerate(peaks)
    ]
    verdict = "it fits"
    if max(peak for _, peak in peaks) > gpu.memory:
        verdict = "it may not fit: give a shorter --context, fewer --rows, or --from-disk"
    return [*rows, ("verdict", verdict)]


def _peaks(
    options: HealOptions, target: Target, shape: ModelShape, gpus: int
) -> list[tuple[str, float]]:
    """Return each GPU's layers, as text, and its peak memory in bytes."""
    item, pattern = DTYPES[options.dtype].itemsize, target.pattern
    is_fp8 = fp8_blocks(options.checkpoint) is not None
    parameters = [
        shape.attention_parameters + shape.mlp_parameters_of(n) for n in range(len(pattern))
    ]
    embedding = item * shape.vocab_size * shape.hidden_size
    resident = [
        (0 if options.from_disk else (1 if is_fp8 else item) * count)
        + STATE_COPIES * FLOAT32 * shape.indexer_parameters * pattern.is_full(number)
        + embedding * (number == 0)
        for number, count in enumerate(parameters)
    ]
    passing = item * max(parameters) if is_fp8 or options.from_disk else 0
    length = max(target.lengths[stage.kind] for stage in options.stages if stage.steps)
    row, waiting = _bytes_of_a_token(shape, item, options.block)
    working = passing + length * (row + (options.rows - 1) * waiting)
    peaks: list[tuple[str, float]] = []
    for layers in shared_out(pattern, resident, gpus):
        what = f"layers {layers.start} to {layers.stop - 1}" if layers else "no layer"
        peaks.append((what, sum(resident[layers.start : layers.stop]) + working))
    return peaks


def _bytes_of_a_token(shape: ModelShape, item: int, block: int) -> tuple[int, int]:
    """Return the peak bytes per token of a layer at work, and the bytes per token of a waiting row.

    Attention is assumed to be a fused kernel, without a matrix of queries and keys.
    """
    s, heads = shape, shape.index_n_heads
    projected = heads * (s.index_head_dim + 1) + s.index_head_dim
    indexer = 2 * projected + s.hidden_size + s.q_lora_rank + 2 * s.qk_rope_head_dim + s.index_topk
    learning = 3 * block * heads + 5 * heads * (s.index_head_dim + 1)
    attention = s.num_attention_heads * (
        4 * (s.qk_nope_head_dim + s.qk_rope_head_dim) + 3 * s.v_head_dim
    )
    inputs = 5 * s.hidden_size + s.q_lora_rank + 2 * s.kv_lora_rank
    summed = 2 * (item + FLOAT32) * s.hidden_size
    expert = item * (s.hidden_size + 4 * s.moe_intermediate_size)
    mlp = max(3 * item * s.intermediate_size, s.num_experts_per_tok * max(summed, expert))
    waiting = item * s.hidden_size + FLOAT32 * indexer
    return item * (attention + inputs) + FLOAT32 * learning + mlp + waiting, waiting
