"""Tiny checkpoints on disk, also in the block-FP8 format of released models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.lab.heal.models import LAYERS, make
from tests.lab.heal.tokenizers import tokenizer

BLOCK = 16
"""Small, so that tiny weights have several; some at the edges are not whole."""


def checkpoint(folder: Path, family: str = "glm-5", dtype: torch.dtype = torch.float32) -> Any:
    """Write a random model, half of its layers MoE, with its tokenizer; return the model."""
    words = tokenizer()
    model = make(family, dtype, vocab_size=len(words), first_k_dense_replace=LAYERS // 2)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data.normal_()
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model


def quantise(folder: Path) -> None:
    """Turn a checkpoint's projections into block FP8, as DeepSeek-V3.2's and GLM-5-FP8's are."""
    [path] = folder.glob("*.safetensors")
    tensors = load_file(path)
    for name in list(tensors):
        indexer = ".indexer.wq_b.weight" in name or ".indexer.wk.weight" in name
        if indexer or (name.endswith("_proj.weight") and "weights_proj" not in name):
            tensors[name], tensors[name + "_scale_inv"] = _blocks(tensors[name].float())
    save_file(tensors, path, metadata={"format": "pt"})
    requantise(folder, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"})


def requantise(folder: Path, method: dict[str, Any]) -> None:
    """Let a checkpoint's config say how its weights are quantised."""
    config = folder / "config.json"
    quantised_config = {**json.loads(config.read_text()), "quantization_config": method}
    config.write_text(json.dumps(quantised_config))


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each block divided by its own scale, which takes its largest value to e4m3's."""
    rows, columns = (-(-size // BLOCK) for size in weight.shape)
    quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = (
                slice(row * BLOCK, (row + 1) * BLOCK),
                slice(column * BLOCK, (column + 1) * BLOCK),
            )
            scales[row, column] = weight[block].abs().max() / 448
            quantised[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return quantised, scales
