"""The tensors of a checkpoint, read one at a time; or their shapes alone, to plan with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.stored import DTYPES, E4M3, SCALES, StoredTensor, dequantised, stored

BLOCKS = (128, 128)
"""Rows and columns that share a scale in an FP8 weight, if config.json does not say."""

META = torch.device("meta")
"""Device on which tensors have a shape and no values."""


@dataclass(frozen=True)
class Weight:
    """A tensor as it is stored: plain, or e4m3 with a scale for each of its blocks."""

    values: torch.Tensor
    scales: torch.Tensor | None
    blocks: Sequence[int]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor dequantised, in ``dtype``."""
        if self.scales is None:
            return self.values.to(dtype)
        return dequantised(self.values, self.scales, self.blocks).to(dtype)


class WeightFiles:
    """The tensors in a checkpoint's files.

    Args:
        tensors: what the files hold, if that is known without reading them.

    Raises:
        CheckpointError: no such files.
    """

    def __init__(
        self,
        folder: Path,
        blocks: Sequence[int] | None = None,
        tensors: dict[str, StoredTensor] | None = None,
    ) -> None:
        self._folder = folder
        self._blocks = tuple(blocks or BLOCKS)
        self._stored = tensors or stored(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()  # files stay open
        self._lock = Lock()
        if not self._stored:
            raise CheckpointError(f"{folder} has no *.safetensors, so there is nothing to train")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._stored

    def kind(self, name: str) -> str:
        """Return a tensor's dtype as safetensors writes it."""
        return self._stored[name].kind

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless all of these are there in a form that is understood."""
        for name in sorted(names):
            if name not in self._stored:
                raise CheckpointError(
                    f"{self._folder} has no tensor {name}: the files are incomplete, or named in "
                    "another way than released checkpoints are. Download the checkpoint again."
                )
            kind = self.kind(name)
            if kind not in DTYPES and not (kind == E4M3 and name + SCALES in self._stored):
                raise CheckpointError(
                    f"{self._folder} holds {name} as {kind}, which is not understood; plain "
                    f"dtypes and block FP8 ({E4M3} with {SCALES.strip('_')}) are. Dequantise the "
                    "checkpoint to bfloat16 first."
                )

    def bytes_of(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Count the bytes of a tensor in ``dtype``, or as it is stored with its scales."""
        if dtype is not None:
            return math.prod(self._stored[name].shape) * dtype.itemsize
        size = math.prod(self._stored[name].shape) * _dtype(self.kind(name)).itemsize
        return size + (self.bytes_of(name + SCALES) if self.kind(name) == E4M3 else 0)

    def read(self, name: str, device: torch.device) -> Weight:
        """Read a tensor as it is stored; without values on the device :data:`META`."""
        scales = self._tensor(name + SCALES, device) if self.kind(name) == E4M3 else None
        return Weight(self._tensor(name, device), scales, self._blocks)

    def _tensor(self, name: str, device: torch.device) -> torch.Tensor:
        path, kind, shape = self._stored[name]
        if device == META:
            return torch.empty(shape, dtype=_dtype(kind), device=META)
        with self._lock:
            if path not in self._open:
                self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
            tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor.to(device)


def expected_tensors(model: nn.Module, blocks: Sequence[int] | None) -> dict[str, StoredTensor]:
    """Return what a released model's files would hold, were they here: names and shapes.

    Args:
        model: on the device :data:`META`.
        blocks: of block FP8, in which all projections but the indexers' head weights are then;
            None for a plain checkpoint.
    """
    nowhere, tensors = Path(), {}
    linear = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    plain = {str(dtype): kind for kind, dtype in DTYPES.items()}

    def add(name: str, shape: Sequence[int], dtype: torch.dtype, projection: bool) -> None:
        unquantised = ("lm_head.", "weights_proj.")
        if blocks is None or not projection or any(part in name for part in unquantised):
            tensors[name] = StoredTensor(nowhere, plain[str(dtype)], tuple(shape))
            return
        scales = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
        tensors[name] = StoredTensor(nowhere, E4M3, tuple(shape))
        tensors[name + SCALES] = StoredTensor(nowhere, "F32", scales)

    for name, tensor in model.state_dict().items():
        prefix, experts, part = name.rpartition("experts.")
        if not experts or part not in FUSED:
            add(name, tensor.shape, tensor.dtype, name in linear)
            continue
        rows = tensor.shape[1] // len(FUSED[part])
        for expert in range(tensor.shape[0]):
            for projection_name in FUSED[part]:
                full = f"{prefix}experts.{expert}.{projection_name}.weight"
                add(full, (rows, tensor.shape[2]), tensor.dtype, True)
    return tensors


FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Transformers holds all experts in one tensor; released checkpoints have these of each."""


def _dtype(kind: str) -> torch.dtype:
    return torch.float8_e4m3fn if kind == E4M3 else DTYPES[kind]
