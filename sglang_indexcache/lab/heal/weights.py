"""The tensors of a checkpoint, read one at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.serving.adapters.weights import DTYPES, E4M3, SCALES, dequantised, stored

BLOCKS = (128, 128)
"""Rows and columns that share a scale in an FP8 weight, if config.json does not say."""

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Transformers holds all experts in one tensor; released checkpoints have these of each."""


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

    Raises:
        CheckpointError: no such files.
    """

    def __init__(self, folder: Path, blocks: Sequence[int] | None = None) -> None:
        self._folder = folder
        self._blocks = tuple(blocks or BLOCKS)
        self._stored = stored(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()  # files stay open
        if not self._stored:
            raise CheckpointError(f"{folder} has no *.safetensors, so there is nothing to train")

    def has(self, name: str) -> bool:
        """Return whether there is such a tensor."""
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
        """Read a tensor as it is stored."""
        scales = self._tensor(name + SCALES, device) if self.kind(name) == E4M3 else None
        return Weight(self._tensor(name, device), scales, self._blocks)

    def _tensor(self, name: str, device: torch.device) -> torch.Tensor:
        path = self._stored[name].path
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor.to(device)


def _dtype(kind: str) -> torch.dtype:
    return torch.float8_e4m3fn if kind == E4M3 else DTYPES[kind]
