"""Block-FP8 checkpoints on the CPU platform, whose weights are dequantised while they load.

SGLang multiplies block-FP8 weights with Triton, CUDA or Intel AMX kernels, and asserts AMX on CPUs
that it knows (``Fp8LinearMethod``). So here SGLang builds the model for plain weights, and each
weight from a checkpoint is first multiplied by its blocks' scales. The GPU computes with the same
weights; only its matrix products also round the activations to FP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from sglang_indexcache.checkpoint import block_size
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.models import read_field

BLOCKS = "indexcache_fp8_blocks"
"""Config key with the rows and columns of a block, if weights are to be dequantised."""

Named = tuple[str, torch.Tensor]


def overrides(config: Any) -> dict[str, Any]:
    """Return the config changes for a block-FP8 checkpoint; none for plain weights.

    Raises:
        CheckpointError: the checkpoint is quantised in a format that needs a GPU.
    """
    stored = getattr(config, "quantization_config", None) or {}
    size = block_size(stored)
    if stored and size is None:
        raise CheckpointError(
            f"the checkpoint is quantised ({read_field(stored, 'quant_method')}), and the CPU "
            "platform reads plain weights and block FP8 only. Take its bfloat16 or block-FP8 "
            "checkpoint."
        )
    return {} if size is None else {"quantization_config": None, BLOCKS: list(size)}


def blocks() -> Sequence[int] | None:
    """Return the rows and columns of a block if this server dequantises weights, else None."""
    from sglang.srt.runtime_context import get_model

    block_size: Sequence[int] | None = json.loads(get_model().json_model_override_args).get(BLOCKS)
    return block_size


def read_plain(
    original: Callable[..., Iterator[Named]], *args: Any, **kwargs: Any
) -> Iterator[Named]:
    """Read a checkpoint's weights as SGLang does, and dequantise them if this server does so."""
    weights, size = original(*args, **kwargs), blocks()
    return weights if size is None else plain(weights, size)


def plain(weights: Iterable[Named], size: Sequence[int]) -> Iterator[Named]:
    """Yield the weights by name, with block-FP8 weights turned to float32 and scales left out.

    Raises:
        CheckpointError: there are scales without a weight, or a weight without scales.
    """
    from sglang_indexcache.serving.adapters.weights import SCALES, dequantised

    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        weight_name = name.removesuffix(SCALES)
        if name == weight_name and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif weight_name not in waiting:
            waiting[weight_name] = tensor
        else:
            partner = waiting.pop(weight_name)
            weight, scales = (tensor, partner) if name == weight_name else (partner, tensor)
            yield weight_name, dequantised(weight, scales, size)
    if waiting:
        raise CheckpointError(
            f"the checkpoint has only one of {next(iter(waiting))} and its block scales. Download "
            "it again."
        )
