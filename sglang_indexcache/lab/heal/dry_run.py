"""Estimate whether a healing fits its GPUs, and its hours: arithmetic on ``config.json`` alone.

What stays on a GPU is counted to the byte. What one layer at work takes is at most the sum of its
tensors, which are not all alive at once, and hours are those of one row after the other.
"""

from __future__ import annotations

import math
from dataclasses import replace

from transformers import AutoConfig

from sglang_indexcache.checkpoint import fp8_blocks, reading
from sglang_indexcache.errors import TrainingError
from sglang_indexcache.lab.heal.forward_state import Stage
from sglang_indexcache.lab.heal.frozen import STATE_COPIES, shared_out
from sglang_indexcache.lab.heal.heal import DTYPES, RATES, TRIAL_STEPS, HealOptions, Target
from sglang_indexcache.library.sizes import Gpu, ModelShape

GB = 1e9
FLOAT32 = 4
"""Bytes of a number in indexers and losses."""
REACHED = 0.3
"""Share of a data sheet's rates that is taken to be reached."""
DISK = 5e9
"""Bytes a second at which weights are taken to be read."""


def dry_run(options: HealOptions, gpus: int, gpu: Gpu) -> list[tuple[str, str]]:
    """Return what a healing would take, as rows to print.

    Raises:
        CheckpointError, PatternError, LibraryError, TrainingError: as :func:`heal` would.
    """
    target = Target.of(options)
    with reading(f"the config of {options.checkpoint}"):
        shape = ModelShape.from_config(AutoConfig.from_pretrained(options.checkpoint))
    if shape is None:
        raise TrainingError(
            f"the config of {options.checkpoint} lacks dimensions that a dry run counts with; "
            "heal without --dry-run"
        )
    peaks = _peaks(options, target, shape, 1 if options.from_disk else gpus)
    hours = _hours(options, target, shape, gpu)
    rows = [
        (f"GPU {number}", f"at most {peak / GB:,.1f} of {gpu.memory / GB:,.0f} GB: {what}")
        for number, (what, peak) in enumerate(peaks)
    ]
    rows.append(
        (
            "hours",
            f"{hours:,.2g}, arithmetic and not measured: one row after the other, at "
            f"{100 * REACHED:.0f} % of the rates in {gpu.name}'s data sheet",
        )
    )
    return [*rows, ("verdict", _verdict(options, target, shape, gpu, peaks))]


def _verdict(
    options: HealOptions,
    target: Target,
    shape: ModelShape,
    gpu: Gpu,
    peaks: list[tuple[str, float]],
) -> str:
    if max(peak for _, peak in peaks) <= gpu.memory:
        return "it fits"
    if options.from_disk:
        return "it may not fit: give a shorter --context, or fewer --rows"
    [(_, alone)] = _peaks(replace(options, from_disk=True), target, shape, 1)
    fits = "fits" if alone <= gpu.memory else "may not fit either"
    return f"it may not fit. With --from-disk it {fits}: one GPU, at most {alone / GB:,.0f} GB"


def _peaks(
    options: HealOptions, target: Target, shape: ModelShape, gpus: int
) -> list[tuple[str, float]]:
    """Return for each GPU its layers, in words, and the most bytes that it holds."""
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
    """Return the most bytes of a token while a layer works, and of one whose row waits.

    Attention is taken to be a fused kernel's, without a matrix of queries and keys.
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


def _hours(options: HealOptions, target: Target, shape: ModelShape, gpu: Gpu) -> float:
    """Return the hours in which all rows pass, on one GPU at a time."""
    s, pattern = shape, target.pattern
    width, scored = s.qk_nope_head_dim + s.qk_rope_head_dim, s.index_n_heads * s.index_head_dim
    active = s.moe_intermediate_size * (s.num_experts_per_tok + s.n_shared_experts)
    dense, count = min(s.first_k_dense_replace, len(pattern)), len(pattern)
    mlps = 3 * s.hidden_size * (dense * s.intermediate_size + (count - dense) * active)
    rate = gpu.bf16 if options.dtype == "bfloat16" else gpu.float32
    seconds = 0.0
    for number, stage in enumerate(options.stages):
        length, is_sparse = target.lengths[stage.kind], stage.kind is Stage.SPARSE
        pairs = length * length / 2
        body: float = length * (count * s.attention_parameters + mlps)
        body += pairs * count * s.num_attention_heads * (width + s.v_head_dim)
        learned = min(pairs, length * s.index_topk) if is_sparse else pairs
        indexers = len(pattern.full_layers) * (3.0 * length * s.indexer_parameters + pairs * scored)
        indexers += learned * count * (3 * scored + s.num_attention_heads * width)
        row = 2 * (body / rate + indexers / gpu.float32) / REACHED
        tried = 0 if options.lr or number else len(RATES)  # first some learning rates
        judged = 1 + math.ceil(stage.steps / options.evaluate_every) + tried
        steps = stage.steps + tried * TRIAL_STEPS
        seconds += (steps * options.rows + judged * options.held_out) * row
        if options.from_disk:
            passes = steps + judged * options.held_out / options.rows
            seconds += passes * _body_bytes(options, s) / DISK
    return seconds / 3600


def _body_bytes(options: HealOptions, shape: ModelShape) -> int:
    """Return the bytes of the frozen layers as the checkpoint stores them."""
    each = 1 if fp8_blocks(options.checkpoint) else DTYPES[options.dtype].itemsize
    return each * (shape.num_hidden_layers * shape.attention_parameters + shape.mlp_parameters)


def counted_gpus(text: str) -> tuple[int, str]:
    """Return the number of GPUs that ``8xh200`` says, and which they are.

    Raises:
        TrainingError: written in another way.
    """
    count, times, name = text.partition("x")
    if not times or not (count.isascii() and count.isdigit()) or not int(count):
        raise TrainingError(f"GPUs are written as 8xh200, got {text!r}")
    return int(count), name
