"""The frozen body of a DSA checkpoint, forward only: a layer has its weights only while it runs.

The weights come from memory, if the checkpoint fits, or from its files each time. Block-FP8 weights
stay FP8 in memory, and are dequantised one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from torch.nn.functional import embedding
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.checkpoint import fp8_blocks, reading
from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.lab.heal.forward_state import ForwardState, Sharing
from sglang_indexcache.lab.heal.model import (
    LightningIndexer,
    Rotation,
    install,
    is_indexer,
)
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.weights import DTYPES, E4M3, SCALES, dequantised, stored

EMBEDDING = "model.embed_tokens.weight"
STATE_COPIES = 4
"""Copies of an indexer's parameters: weights, gradients, and AdamW's two moments."""

BLOCKS = (128, 128)
"""Rows and columns that share a scale in an FP8 weight, if config.json does not say it."""

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Names in released checkpoints, for each expert, of tensors that transformers holds as one for all
experts."""

Tensors = dict[str, torch.Tensor]


class FrozenBody:
    """A model without an LM head, of which only the indexers stay in memory as parameters.

    Args:
        folder: a DSA checkpoint, in a plain dtype or in block FP8.
        dtype: dtype of the body's weights and activations; indexers have at least float32.
        devices: devices over which layers are distributed by their bytes.
        from_disk: whether to read a layer's weights each time it runs.

    Attributes:
        shares: the layers of each device.
        devices: the device of each layer.

    Raises:
        CheckpointError: weights are missing, or quantised in another way.
        PatternError: the pattern has F where the checkpoint has no indexer.
        TrainingError: the model has another type.
    """

    def __init__(
        self,
        folder: Path,
        pattern: Pattern,
        sharing: Sharing,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
        from_disk: bool = False,
    ) -> None:
        with reading(f"the config of {folder}"):
            config = AutoConfig.from_pretrained(folder)
        blocks = fp8_blocks(folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # this module dequantises the weights
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        install(model, pattern, sharing)
        self._files = WeightFiles(folder, blocks)
        model.eval().requires_grad_(False)
        self._float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self._experts = int(getattr(config, "n_routed_experts", None) or 0)
        self._layers: list[Any] = list(model.model.layers)
        self._dtype, self.from_disk = dtype, from_disk
        self._ready: dict[int, Tensors] = {}
        self._stored: dict[int, dict[str, Weight]] = {}
        self._sources = [self._layer_sources(number) for number in range(len(self._layers))]
        layers = range(len(pattern))
        self._files.check({EMBEDDING, *(name for layer in layers for name in self._names(layer))})
        self._quantised = [
            any(self._files.kind(name) == E4M3 for name in self._names(layer)) for layer in layers
        ]
        self.shares = shared_out(pattern, [self._resident(n) for n in layers], len(devices))
        self.devices = [
            device for device, share in zip(devices, self.shares, strict=True) for _ in share
        ]
        self.indexers = {number: self._load_indexer(number) for number in pattern.full_layers}
        self._embedding = self._files.read(EMBEDDING, self.devices[0]).plain(dtype)
        self._rotary = type(model.model.rotary_emb)(config=config).to(self.devices[0])

    def _resident(self, number: int) -> int:
        """Count the bytes that a layer keeps: weights, the embedding before it, training state."""
        dtype = None if self._quantised[number] else self._dtype
        body = sum(self._files.bytes_of(name, dtype) for name in self._names(number))
        resident = 0 if self.from_disk else body
        if number == 0:
            resident += self._files.bytes_of(EMBEDDING, self._dtype)
        indexer: nn.Module = self._layers[number].self_attn.indexer
        trained = sum(p.numel() for p in indexer.parameters())
        master = torch.promote_types(self._dtype, torch.float32)
        return resident + STATE_COPIES * trained * master.itemsize

    def start(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Rotation]:
        """Return the first layer's input, on its device, for ids and positions ``[B, T]`` int64.

        Returns:
            ``[B, T, hidden_size]``, and the rotation for :meth:`layer`.
        """
        device = self.devices[0]
        hidden = embedding(ids.to(device), self._embedding)
        return hidden, self._rotary(hidden, position_ids=positions.to(device))

    def layer(self, number: int) -> Callable[[torch.Tensor, Rotation], torch.Tensor]:
        """Return layer ``number`` with its weights, which are freed when the caller drops it."""
        weights, module = self._weights(number), self._layers[number]
        # A placeholder that is never read: attention and indexers mask by the layout, block by
        # block.
        no_mask = torch.empty(1, 1, 1, 1, device=self.devices[number])

        def run(hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            result: Any = functional_call(
                module,
                weights,
                (hidden,),
                {"attention_mask": no_mask, "position_embeddings": rotation},
            )
            output: torch.Tensor = result[0] if isinstance(result, tuple) else result
            return output

        return run

    def indexer_tensors(self) -> dict[str, nn.Parameter]:
        """Return all parameters of the indexers by their names in the checkpoint."""
        return {
            f"{_indexer_prefix(number)}{name}": parameter
            for number, indexer in self.indexers.items()
            for name, parameter in indexer.named_parameters()
        }

    def plain_dtype(self, name: str) -> torch.dtype:
        """Return the checkpoint's dtype of a tensor; bfloat16 for quantised tensors."""
        return DTYPES.get(self._files.kind(name), torch.bfloat16)

    def _load_indexer(self, number: int) -> LightningIndexer:
        indexer: Any = self._layers[number].self_attn.indexer
        prefix, device = _indexer_prefix(number), self.devices[number]
        names = list(indexer.state_dict())
        self._files.check({prefix + name for name in names})
        master = torch.promote_types(self._dtype, torch.float32)
        tensors = {name: self._files.read(prefix + name, device).plain(master) for name in names}
        indexer.load_state_dict(tensors, assign=True)
        trained: LightningIndexer = indexer.requires_grad_(True)
        return trained

    def _layer_sources(self, number: int) -> dict[str, list[str]]:
        """Return the stored tensors from which each of a layer's parameters and buffers is made."""
        names = [name for name in self._layers[number].state_dict() if not is_indexer(f".{name}")]
        return {name: self._source_names(f"model.layers.{number}.{name}") for name in names}

    def _source_names(self, name: str) -> list[str]:
        prefix, experts, part = name.rpartition("experts.")
        if experts and part in FUSED and not self._files.has(name):
            return [
                f"{prefix}experts.{expert}.{projection}.weight"
                for expert in range(self._experts)
                for projection in FUSED[part]
            ]
        return [name]

    def _names(self, number: int) -> list[str]:
        """Return the names of a layer's stored tensors, without its indexer's."""
        return [name for source in self._sources[number].values() for name in source]

    def _weights(self, number: int) -> Tensors:
        """Return a layer's parameters and buffers."""
        if number in self._ready:
            return self._ready[number]
        device = self.devices[number]
        stays = not self.from_disk
        if stays and self._quantised[number] and number not in self._stored:
            names = self._names(number)
            self._stored[number] = {name: self._files.read(name, device) for name in names}
        weights = self._stored.get(number)
        read = weights.__getitem__ if weights else lambda name: self._files.read(name, device)
        sources = self._sources[number]
        ready = {name: self._whole(number, name, sources[name], read) for name in sources}
        if stays and not weights:
            self._ready[number] = ready
        return ready

    def _whole(
        self, number: int, name: str, sources: list[str], read: Callable[[str], Weight]
    ) -> torch.Tensor:
        """Read a parameter; one with all experts is filled one by one, and never held twice."""
        float32 = any(part in name for part in self._float32)
        dtype = torch.float32 if float32 else self._dtype
        if sources[0].endswith(name):
            return read(sources[0]).plain(dtype)
        shape = self._layers[number].state_dict()[name].shape
        stacked = torch.empty(shape, dtype=dtype, device=self.devices[number])
        for place, source in zip(_parts(stacked, len(sources)), sources, strict=True):
            place.copy_(read(source).plain(dtype))
        return stacked


@dataclass
class Passing:
    """Rows on their way through the layers, with the next layer's input ``[B, T, hidden_size]``."""

    run: ForwardState
    hidden: torch.Tensor
    rotation: Rotation

    def through(
        self,
        layer: Callable[[torch.Tensor, Rotation], torch.Tensor],
        device: torch.device,
        sharing: Sharing,
    ) -> None:
        """Run a layer that is on ``device``.

        All layers that an indexer serves are on one device, so no state of a group moves here.
        """
        self.run.layout = self.run.layout.to(device)
        cosine, sine = self.rotation
        self.rotation = cosine.to(device), sine.to(device)
        sharing.forward = self.run
        self.hidden = layer(self.hidden.to(device), self.rotation)


def pass_through(body: FrozenBody, sharing: Sharing, rows: Sequence[Passing]) -> None:
    """Run all layers on all rows, with gradients if they are enabled.

    A layer processes all rows before the next one starts, so it is dequantised or read once.
    """
    for number, device in enumerate(body.devices):
        layer = body.layer(number)
        for row in rows:
            row.through(layer, device, sharing)


def shared_out(pattern: Pattern, loads: Sequence[int], devices: int) -> list[range]:
    """Return the layers of each device, in order, with the smallest load on the fullest device.

    The layers that an indexer serves stay together. ``loads`` has the bytes of each layer. If there
    are too few groups, some devices get no layer.
    """
    groups = pattern.groups
    sizes = [sum(loads[number] for number in group) for group in groups]
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_filled(sizes, middle)) <= devices:
            high = middle
        else:
            low = middle + 1
    ends = [groups[last].stop for last in _filled(sizes, low)]
    ends += [len(loads)] * (devices - len(ends))
    return [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]


def _filled(sizes: Sequence[int], room: int) -> list[int]:
    """Return the last group of each device, if each takes as many groups as it has ``room`` for."""
    lasts, load = [], 0
    for number, size in enumerate(sizes):
        if load + size > room:
            lasts.append(number - 1)
            load = 0
        load += size
    return [*lasts, len(sizes) - 1]


def _parts(whole: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    """Yield views of ``count`` tensors in ``[experts, rows, columns]``, gates before ups."""
    for expert in whole:
        yield from expert.chunk(count // len(whole))


def _indexer_prefix(number: int) -> str:
    return f"model.layers.{number}.self_attn.indexer."


@dataclass(frozen=True)
class Weight:
    """A tensor in its stored form: plain, or e4m3 with a scale for each block."""

    values: torch.Tensor
    scales: torch.Tensor | None
    blocks: Sequence[int]

    def plain(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor dequantised, in ``dtype``."""
        if self.scales is None:
            return self.values.to(dtype)
        return dequantised(self.values, self.scales, self.blocks).to(dtype)


class WeightFiles:
    """Reader of the tensors in a checkpoint's files.

    Raises:
        CheckpointError: there are no such files.
    """

    def __init__(self, folder: Path, blocks: Sequence[int] | None = None) -> None:
        self._folder = folder
        self._blocks = tuple(blocks or BLOCKS)
        self._stored = stored(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()  # keeps files open
        if not self._stored:
            raise CheckpointError(f"{folder} has no *.safetensors, so there is nothing to train")

    def has(self, name: str) -> bool:
        """Return whether a tensor of this name exists."""
        return name in self._stored

    def kind(self, name: str) -> str:
        """Return the safetensors name of a tensor's dtype."""
        return self._stored[name].kind

    def check(self, names: Iterable[str]) -> None:
        """Raise CheckpointError unless all of these tensors exist in a known form."""
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
        """Count the bytes of a tensor in ``dtype``, or in its stored form with its scales."""
        if dtype is not None:
            return math.prod(self._stored[name].shape) * dtype.itemsize
        size = math.prod(self._stored[name].shape) * _dtype(self.kind(name)).itemsize
        return size + (self.bytes_of(name + SCALES) if self.kind(name) == E4M3 else 0)

    def read(self, name: str, device: torch.device) -> Weight:
        """Read a tensor in its stored form."""
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
