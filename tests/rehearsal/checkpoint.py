"""Small checkpoints of a card's widths in both families, on which a comparison means something.

Their weights are noise, but tame: experts are weighed and never chosen between, so rounding flips
none of them, and the head is sharp enough that answers are no coin tosses. SGLang's Hopper path
wants an ``index_topk`` of 2,048; the references take 128, so that prompts of 300 tokens select.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_indexcache.lab.heal.merge import merge
from sglang_indexcache.models import BY_NAME
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.adapters.folder import indexer_layer
from sglang_indexcache.serving.adapters.writing import write_adapter
from tests.fixtures.models import make_tokenizer, random_model, save_checkpoint, small_config
from tests.rehearsal.stage.kernels.quantized import E4M3, GROUP, LARGEST, from_blocks
from tests.rehearsal.widened import widen

FP8 = "-fp8"
MTP = "-mtp"
TWENTY_HEADS = "-20-heads"
TRAINED = "glm-5-trained"
ADAPTED = "-adapted"
IN_BFLOAT16 = "bfloat16"
ADAPTER, MERGED = "adapter", "merged"
ADAPTED_PATTERN = "FSSSFS"
TOPK = 128
LAYERS = 6
VOCAB = 1024
_FIELDS: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": LAYERS - 2,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_topk": TOPK,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "max_position_embeddings": 8192,
}
_HEADS: dict[str, dict[str, int]] = {
    "glm-5": {"qk_nope_head_dim": 192, "v_head_dim": 256},
    "deepseek-v3.2": {"qk_nope_head_dim": 128, "v_head_dim": 128},
}


def make(folder: Path, family: str = "glm-5", **fields: Any) -> Path:
    """Write the checkpoint: 6 layers, 8 heads, 50 MB in bfloat16.

    The widths that kernels insist on are a card's: latents of 512 and 64, index keys of 128.

    Args:
        folder: created if missing.
        family: ``glm-5`` or ``deepseek-v3.2``; with ``-fp8`` its products are quantised by blocks,
            and the folder ``bfloat16`` in it holds the same values for who reads no FP8; with
            ``-mtp`` there is a draft layer behind the others; with ``-20-heads`` it has the
            paper's number of attention heads; with ``-adapted`` the folder
            ``adapter`` in it holds other indexers, and ``merged`` the checkpoint with those.
            ``glm-5-trained`` is the shipped checkpoint, widened: 12 layers, lists of 2,048.
        fields: of the config, other than usual.
    """
    if family.endswith(MTP):
        # The kernel in front of a draft takes no 256.
        return _add_draft(make(folder, family.removesuffix(MTP), hidden_size=512))
    if family.endswith(TWENTY_HEADS):
        return make(folder, family.removesuffix(TWENTY_HEADS), num_attention_heads=20)
    if family.endswith(ADAPTED):
        return _adapt(make(folder, family.removesuffix(ADAPTED)))
    if family == TRAINED:
        return widen(folder)
    if family.endswith(FP8):
        return _quantize(make(folder / IN_BFLOAT16, family.removesuffix(FP8)), folder)
    config = small_config(BY_NAME[family], "small", VOCAB, {**_FIELDS, **_HEADS[family], **fields})
    tokenizer = make_tokenizer(VOCAB)
    model = random_model(BY_NAME[family], config, tokenizer, seed=0)
    _tame(model)
    save_checkpoint(model, tokenizer, "bfloat16", folder)
    return folder


def _tame(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.0 if "embed" in name else weight.shape[-1] ** -0.5)
            if "lm_head" in name:
                weight.mul_(4)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05)


def _add_draft(folder: Path) -> Path:
    """Add a layer that drafts the second next token, and is right about it now and then.

    Large embeddings let the newest token decide much of the next, which is what this layer hands
    through: it is the last layer again, with small contributions of its own.
    """
    path = next(folder.glob("*.safetensors"))
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] *= 4
    width = tensors["model.embed_tokens.weight"].shape[1]
    draft = f"model.layers.{LAYERS}."
    for name, tensor in list(tensors.items()):
        if name.startswith(last := f"model.layers.{LAYERS - 1}."):
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name.replace(last, draft)] = tensor * (1 / 8 if adds else 1)
    ones = torch.ones(width, dtype=torch.bfloat16)
    tensors |= {draft + name: ones.clone() for name in ("enorm.weight", "hnorm.weight")}
    tensors[draft + "shared_head.norm.weight"] = ones.clone()
    tensors[draft + "eh_proj.weight"] = torch.cat(
        (torch.eye(width), torch.zeros(width, width)), 1
    ).bfloat16()
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _adapt(folder: Path) -> Path:
    """Write other indexers for a pattern: half their own values, half noise of their size."""
    torch.manual_seed(1)
    pattern = Pattern(ADAPTED_PATTERN)
    tensors = {
        name: (tensor + tensor.std() * torch.randn(tensor.shape)) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(next(folder.glob("*.safetensors"))).items()
        if indexer_layer(name) in pattern.full_layers
    }
    write_adapter(folder / ADAPTER, pattern=pattern, checkpoint=folder, tensors=tensors, record={})
    merge(folder / ADAPTER, folder, folder / MERGED, lambda _: None)
    return folder


def is_quantized(name: str) -> bool:
    """Whether a released FP8 checkpoint stores the weight ``name`` in FP8."""
    return name.endswith(("_proj.weight", "_with_mqa.weight", "wq_b.weight", "wk.weight")) and (
        "weights_proj" not in name
    )


def _quantize(exact: Path, folder: Path) -> Path:
    """Write ``exact`` in FP8, and ``exact`` again with what FP8 could hold of it.

    Scales are powers of two, so that bfloat16 holds the same values.
    """
    path = next(exact.glob("*.safetensors"))
    quantised: dict[str, torch.Tensor] = {}
    dequantised: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        quantised[name] = dequantised[name] = tensor
        if is_quantized(name):
            quantised[name], quantised[name + "_scale_inv"] = _by_blocks(tensor)
            dequantised[name] = from_blocks(quantised[name], quantised[name + "_scale_inv"]).to(
                tensor.dtype
            )
    save_file(dequantised, path, {"format": "pt"})
    for file in exact.iterdir():
        if file != path:
            shutil.copy(file, folder)
    save_file(quantised, folder / path.name, {"format": "pt"})
    config = json.loads((exact / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [GROUP, GROUP],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _by_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[N, K]`` as e4m3, and scales for 128 times 128 values."""
    n, k = weight.shape
    padded = torch.nn.functional.pad(weight.double(), (0, -k % GROUP, 0, -n % GROUP))
    blocks = padded.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = torch.exp2((blocks.abs().amax((1, 3)) / LARGEST).log2().ceil())
    values = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:n, :k]
    return values.float().to(E4M3).contiguous(), scales.float()
