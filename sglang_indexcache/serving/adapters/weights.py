"""Tensors in the form in which a checkpoint stores them: plain dtypes, and block FP8."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Plain dtypes by their safetensors names."""


SCALES = "_scale_inv"
"""Suffix that turns a block-FP8 weight's name into its scales' name, as in released checkpoints."""

E4M3 = "F8_E4M3"
"""Safetensors name of a block-FP8 weight's dtype."""


def check_form(folder: Path, names: Iterable[str]) -> None:
    """Raise unless new weights can be stored in the form of a checkpoint's tensors.

    Raises:
        CheckpointError: a tensor is missing, or is stored in a form that cannot be made here.
    """
    tensors = stored(folder)
    for name in names:
        if name not in tensors:
            raise CheckpointError(f"{folder} has no {name}, so nothing can take its place")
        kind = tensors[name][1]
        scales = tensors.get(name + SCALES)
        if kind not in DTYPES and not (kind == E4M3 and scales and scales[1] in DTYPES):
            raise CheckpointError(
                f"{folder} holds {name} as {kind}; other weights can take the place only of plain "
                "ones and of block-FP8 ones (e4m3 with weight_scale_inv). Take a checkpoint whose "
                "indexers are stored so."
            )


def like_stored(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert plain weights to the form in which a checkpoint stores the tensors of the same names.

    Each tensor gets the checkpoint's dtype. A block-FP8 tensor becomes e4m3, with its scales under
    its name plus :data:`SCALES`. The checkpoint must have passed :func:`check_form`.
    """
    originals, config = stored(folder), read_config(folder).get("quantization_config") or {}
    block = tuple(config.get("weight_block_size") or (128, 128))
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        kind = originals[name][1]
        if kind != E4M3:
            converted[name] = tensor.to(DTYPES[kind])
            continue
        power_of_two = config.get("scale_fmt") == "ue8m0"
        converted[name], scales = to_block_fp8(tensor, block, power_of_two=power_of_two)
        converted[name + SCALES] = scales.to(DTYPES[originals[name + SCALES][1]])
    return converted


def to_block_fp8(
    weight: torch.Tensor, block: tuple[int, int] = (128, 128), *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store a weight as released FP8 checkpoints do; ``weight = e4m3 * scale`` in each block.

    Source: ``weight_quant`` beside DeepSeek-V3's weights, and ``per_block_cast_to_fp8`` of SGLang.

    Args:
        weight: ``[n, k]`` floating point.
        block: rows and columns that have one scale.
        power_of_two: round scales up to powers of two, as ``scale_fmt: ue8m0`` says.

    Returns:
        e4m3 ``[n, k]``, and float32 scales ``[ceil(n / rows), ceil(k / columns)]``.
    """
    (n, k), (rows, columns) = weight.shape, block
    padded = torch.nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    tiles = padded.view(-(-n // rows), rows, -(-k // columns), columns)
    largest = tiles.abs().amax((1, 3))
    scales = torch.where(largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, 1.0)
    if power_of_two:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    values = (tiles / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:n, :k].contiguous(), scales


def dequantised(weight: torch.Tensor, scales: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Return a block-FP8 weight in float32.

    Source: ``weight_dequant`` of DeepSeek-V3's released inference code.

    Args:
        weight: ``[N, K]`` e4m3.
        scales: ``[ceil(N / blocks[0]), ceil(K / blocks[1])]``, the factor of each block.
        blocks: rows and columns of a block.
    """
    spread = scales.float().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


class StoredTensor(NamedTuple):
    """File, dtype and shape of a stored tensor; ``kind`` is the dtype's safetensors name."""

    path: Path
    kind: str
    shape: tuple[int, ...]


def stored(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor's place and form by name, without reading the tensors."""
    paths = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in tensors_in(path).items()}


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name, as :func:`stored` does.

    Raises:
        CheckpointError: it is not a safetensors file.
    """
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                n: StoredTensor(path, s.get_dtype(), tuple(s.get_shape()))
                for n, s in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
