"""Block-FP8 checkpoints on the CPU platform: weights are dequantised while they load.

SGLang multiplies block-FP8 weights by kernels of Triton, of CUDA or of Intel's AMX, and asserts
AMX where it knows the CPU (``Fp8LinearMethod``). So here its model is built for plain weights, and
each weight that comes from a checkpoint is multiplied by its blocks' scales first. That is what the
GPU computes with, but for the activations, which only the GPU's products round to FP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from sglang_indexcache.checkpoint import block_size
from sglang_indexcache.errors import CheckpointError

BLOCKS = "indexcache_fp8_blocks"
"""The config's key for rows and columns of a block, where weights are to be dequantised."""

Named = tuple[str, torch.Tensor]


def overrides(config: Any) -> dict[str, Any]:
    """Return the changes to a block-FP8 checkpoint's config; none for another's."""
    size = block_size(getattr(config, "quantization_config", None) or {})
    return {} if size is None else {"quantization_config": None, BLOCKS: list(size)}


def blocks() -> Sequence[int] | None:
    """Return rows and columns of a block, if this server dequantises weights."""
    from sglang.srt.runtime_context import get_model

    block_size: Sequence[int] | None = json.loads(get_model().json_model_override_args).get(BLOCKS)
    return block_size


def read_plain(
    original: Callable[..., Iterator[Named]], *args: Any, **kwargs: Any
) -> Iterator[Named]:
    """Read a checkpoint's weights as SGLang does, dequantised where this server does so."""
    weights, size = original(*args, **kwargs), blocks()
    return weights if size is None else plain(weights, size)


def plain(weights: Iterable[Named], size: Sequence[int]) -> Iterator[Named]:
    """Yield the weights by name, each in block-FP8 turned to float32 and without its scales.

    Raises:
        CheckpointError: scales without a weight, or a weight without scales.
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
