"""The body of a DSA checkpoint, forward only: a layer's weights are there while it runs.

They come from memory, where the checkpoint fits, or from its files each time. Block-FP8 weights
stay FP8 in memory; one layer of them is dequantised at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.func import functional_call
from torch.nn.functional import embedding
from transformers import AutoConfig, AutoModelForCausalLM

from sglang_indexcache.errors import CheckpointError
from sglang_indexcache.heal.indexer import LightningIndexer, Rotation
from sglang_indexcache.heal.model import check_trainable, install, is_indexer
from sglang_indexcache.heal.sharing import Sharing
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.stored import DTYPES, SCALES, dequantised, stored

FP8 = "F8_E4M3"

_FUSED = ("experts.gate_up_proj", "experts.down_proj")
EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


class FrozenBody:
    """A model without an LM head, whose indexers alone are in memory for good.

    Args:
        folder: a DSA checkpoint, in a plain dtype or in block FP8.
        pattern: which layers have an indexer.
        sharing: where the indexers' selections and the attentions' targets go.
        dtype: of the body's weights and activations; indexers are float32 at least.
        devices: layers are spread over these, an F layer with those that it serves.
        from_disk: read a layer's weights each time it runs.

    Attributes:
        indexers: by layer.

    Raises:
        CheckpointError: weights that are missing, or quantised in another way.
        PatternError: F where the checkpoint has no indexer.
        TrainingError: a model of another type.
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
        config = AutoConfig.from_pretrained(folder)
        blocks = (getattr(config, "quantization_config", None) or {}).get("weight_block_size")
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weights are dequantised here
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        check_trainable(model, pattern)
        install(model, pattern, sharing)
        model.eval().requires_grad_(False)
        self._files = WeightFiles(folder, blocks)
        self._float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
        self._experts = int(getattr(config, "n_routed_experts", None) or 0)
        self._layers: list[Any] = list(model.model.layers)
        self._dtype, self._from_disk = dtype, from_disk
        self.devices = placed(pattern, devices)
        self._kept: dict[int, Tensors] = {}
        self._sources = [self._layer_sources(number) for number in range(len(self._layers))]
        self._files.check({name for layer in self._sources for s in layer.values() for name in s})
        self._files.check({EMBEDDING})
        self.indexers: dict[int, LightningIndexer] = {}
        for number in pattern.full_layers:
            self.indexers[number] = self._load_indexer(number)
        self._embedding = self._files.plain(EMBEDDING, self.devices[0]).to(dtype)
        self._rotary = type(model.model.rotary_emb)(config=config).to(self.devices[0])

    def start(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, Rotation]:
        """What the first layer reads, on its device.

        Args:
            ids: ``[B, T]`` int64.
            positions: ``[B, T]`` int64.

        Returns:
            ``[B, T, hidden_size]``, and the rotation for :meth:`layer`.
        """
        device = self.devices[0]
        hidden = embedding(ids.to(device), self._embedding)
        return hidden, self._rotary(hidden, position_ids=positions.to(device))

    def layer(self, number: int) -> Callable[[torch.Tensor, Rotation], torch.Tensor]:
        """Layer ``number`` with its weights; drop it to free them."""
        weights, module = self._weights(number), self._layers[number]
        # Never read: attention and indexers mask by the layout, block by block.
        no_mask = torch.empty(1, 1, 1, 1, device=self.devices[number])

        def run(hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
            found: Any = functional_call(
                module,
                weights,
                (hidden,),
                {"attention_mask": no_mask, "position_embeddings": rotation},
            )
            output: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return output

        return run

    def indexer_tensors(self) -> dict[str, nn.Parameter]:
        """Every parameter of the indexers by its name in the checkpoint."""
        return {
            f"{_indexer_prefix(number)}{name}": parameter
            for number, indexer in self.indexers.items()
            for name, parameter in indexer.named_parameters()
        }

    def plain_dtype(self, name: str) -> torch.dtype:
        """The dtype that the checkpoint has a tensor in; bfloat16 for a quantised one."""
        return DTYPES.get(self._files.kind(name), torch.bfloat16)

    def _load_indexer(self, number: int) -> LightningIndexer:
        indexer: Any = self._layers[number].self_attn.indexer
        prefix, device = _indexer_prefix(number), self.devices[number]
        names = list(indexer.state_dict())
        self._files.check({prefix + name for name in names})
        master = torch.promote_types(self._dtype, torch.float32)
        found = {name: self._files.plain(prefix + name, device).to(master) for name in names}
        indexer.load_state_dict(found, assign=True)
        trained: LightningIndexer = indexer.requires_grad_(True)
        return trained

    def _layer_sources(self, number: int) -> dict[str, list[str]]:
        """The stored tensors that each of a layer's parameters and buffers is made of."""
        names = [name for name in self._layers[number].state_dict() if not is_indexer(f".{name}")]
        return {name: self._source_names(f"model.layers.{number}.{name}") for name in names}

    def _source_names(self, name: str) -> list[str]:
        """Transformers holds all experts in one tensor; released checkpoints have one of each."""
        before, experts, part = name.rpartition("experts.")
        if experts and part in ("gate_up_proj", "down_proj") and not self._files.has(name):
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            return [
                f"{before}experts.{expert}.{each}.weight"
                for expert in range(self._experts)
                for each in parts
            ]
        return [name]

    def _weights(self, number: int) -> Tensors:
        """A layer's parameters and buffers."""
        sources = self._sources[number]
        names = [name for source in sources.values() for name in source]
        raw = self._kept.get(number) or self._files.raw(names, self.devices[number])
        quantised = any(self._files.kind(name) == FP8 for name in names)
        if number in self._kept and not quantised:
            return raw
        plain = self._files.dequantised(raw, self._dtype)
        ready = {
            name: self._cast(name, _joined(name, [plain[part] for part in source]))
            for name, source in sources.items()
        }
        if not self._from_disk:
            self._kept[number] = raw if quantised else ready
        return ready

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        float32 = any(part in name for part in self._float32)
        return tensor.to(torch.float32 if float32 else self._dtype)


class WeightFiles:
    """The tensors in a checkpoint's files.

    Args:
        folder: with ``*.safetensors``.
        blocks: rows and columns that share a scale in an FP8 weight; 128 x 128 if not said.

    Raises:
        CheckpointError: no such files.
    """

    def __init__(self, folder: Path, blocks: Sequence[int] | None = None) -> None:
        self._folder = folder
        self._blocks = tuple(blocks or (128, 128))
        self._stored = stored(folder)
        self._open: dict[Path, Any] = {}
        self._stack = ExitStack()  # files stay open
        if not self._stored:
            raise CheckpointError(f"{folder} has no *.safetensors, so there is nothing to train")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._stored

    def kind(self, name: str) -> str:
        """Its dtype as safetensors writes it."""
        return self._stored[name][1]

    def check(self, names: set[str]) -> None:
        """Raise CheckpointError unless all of these are there in a form that is understood."""
        for name in sorted(names):
            if name not in self._stored:
                raise CheckpointError(
                    f"{self._folder} has no tensor {name}: the files are incomplete, or named in "
                    "another way than released checkpoints are. Download the checkpoint again."
                )
            kind = self.kind(name)
            if kind not in DTYPES and not (kind == FP8 and name + SCALES in self._stored):
                raise CheckpointError(
                    f"{self._folder} holds {name} as {kind}, which is not understood; plain "
                    f"dtypes and block FP8 ({FP8} with {SCALES.strip('_')}) are. Dequantise the "
                    "checkpoint to bfloat16 first."
                )

    def raw(self, names: Sequence[str], device: torch.device) -> Tensors:
        """These tensors as they are stored, with their scales."""
        wanted = [*names, *(n + SCALES for n in names if self.kind(n) == FP8)]
        return {name: self._read(name).to(device) for name in wanted}

    def plain(self, name: str, device: torch.device) -> torch.Tensor:
        """One tensor, in float32 if it is quantised."""
        return self.dequantised(self.raw([name], device), torch.float32)[name]

    def dequantised(self, raw: Tensors, dtype: torch.dtype) -> Tensors:
        """The same tensors; what has scales is multiplied by them, and comes in ``dtype``."""
        return {
            name: dequantised(tensor, raw[name + SCALES], self._blocks).to(dtype)
            if name + SCALES in raw
            else tensor
            for name, tensor in raw.items()
            if not name.endswith(SCALES)
        }

    def _read(self, name: str) -> torch.Tensor:
        path = self._stored[name][0]
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(path, "pt"))
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor


def placed(pattern: Pattern, devices: Sequence[torch.device]) -> list[torch.device]:
    """The device of each layer: equal shares in order, no group of layers parted."""
    share = len(pattern) / len(devices)
    return [devices[int(pattern.source_of(layer) / share)] for layer in range(len(pattern))]


def _indexer_prefix(number: int) -> str:
    return f"model.layers.{number}.self_attn.indexer."


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    if not name.endswith(_FUSED) or parts[0].dim() == 3:
        return parts[0]
    if name.endswith("gate_up_proj"):
        gates, ups = torch.stack(parts[0::2]), torch.stack(parts[1::2])
        return torch.cat((gates, ups), dim=1)
    return torch.stack(parts)
