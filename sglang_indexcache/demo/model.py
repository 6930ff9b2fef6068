"""Make a small DSA checkpoint with random weights that transformers and SGLang load unchanged.

The shapes are those of GLM-5 or DeepSeek-V3.2 in small; the weights are seeded noise, so what it
says is noise too, but every layer, every indexer and every file is where a real one has it.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_indexcache.errors import SettingsError

PRESETS = ("glm-5", "deepseek-v3.2")

SIZES: Mapping[str, Mapping[str, Any]] = {
    # For tests: seconds to make, selection matters from 65 tokens on.
    "tiny": {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "index_n_heads": 8,
        "index_topk": 64,
    },
    # For the demo: the indexer has as large a share of a long prefill as in a real model.
    "small": {
        "num_hidden_layers": 12,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "index_n_heads": 32,
        "index_topk": 256,
    },
}

_COMMON: Mapping[str, Any] = {
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 128,  # SGLang's index-K pages allow no other width
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    # SGLang applies it to the two low-rank norms as well, where transformers has 1e-6 fixed.
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}

# What SGLang reads and transformers' config classes do not write. Real checkpoints have it.
_FOR_SGLANG: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_END, _PAD = "<|endoftext|>", "<|pad|>"
_SPECIAL_TOKENS = (_END, _PAD, "<|system|>", "<|user|>", "<|assistant|>")

TOKENIZER_TEXT_BYTES = 4_000_000
"""How much of the Python standard library the tokenizer is trained on."""


@dataclass(frozen=True)
class ModelSpec:
    """What to make.

    Attributes:
        preset: one of :data:`PRESETS`.
        size: one of :data:`SIZES`.
        seed: of the weights.
        vocab_size: of the tokenizer and the model.
        dtype: of the stored weights, a torch dtype's name.
        overrides: config fields that replace those of the preset and the size.
    """

    preset: str = "glm-5"
    size: str = "small"
    seed: int = 0
    vocab_size: int = 4096
    dtype: str = "bfloat16"
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def config_fields(self) -> dict[str, Any]:
        """The HF config fields of this model.

        Raises:
            SettingsError: an unknown preset or size.
        """
        if self.preset not in PRESETS:
            raise SettingsError(f"preset {self.preset!r} is unknown; there are {_or(PRESETS)}")
        if self.size not in SIZES:
            raise SettingsError(f"size {self.size!r} is unknown; there are {_or(tuple(SIZES))}")
        fields = {**_COMMON, **SIZES[self.size], **_preset_fields(self.preset), **self.overrides}
        fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
        return {**fields, "vocab_size": self.vocab_size, "tie_word_embeddings": False}


def _preset_fields(preset: str) -> dict[str, Any]:
    if preset == "glm-5":
        rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
        return {"n_group": 1, "topk_group": 1, "rope_parameters": rope}
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": rope,
        "max_position_embeddings": 163840,
    }


def make_model(spec: ModelSpec, folder: Path) -> int:
    """Write the checkpoint and its tokenizer.

    Args:
        spec: what to make.
        folder: created if missing; files of the same name are replaced.

    Returns:
        The number of parameters.

    Raises:
        SettingsError: an impossible spec.
    """
    fields = spec.config_fields()
    folder.mkdir(parents=True, exist_ok=True)
    ends = make_tokenizer(spec.vocab_size, folder)
    count = _make_weights(spec, {**fields, **ends}, folder)
    complete_config(spec.preset, fields["n_routed_experts"], folder / "config.json")
    return count


def _make_weights(spec: ModelSpec, fields: dict[str, Any], folder: Path) -> int:
    import torch
    from transformers import (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would break the caller's own
    torch.manual_seed(spec.seed)
    if spec.preset == "glm-5":
        model = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields))
    else:
        model = DeepseekV32ForCausalLM(DeepseekV32Config(**fields))
    model.to(getattr(torch, spec.dtype)).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def complete_config(preset: str, experts: int, path: Path) -> None:
    """Add to a ``config.json`` what SGLang reads and transformers does not write.

    Args:
        preset: one of :data:`PRESETS`.
        experts: routed experts.
        path: of the ``config.json``.
    """
    config = json.loads(path.read_text())
    # transformers >= 5.19 maps num_experts onto n_routed_experts; SGLang reads both.
    config |= {**_FOR_SGLANG, "n_routed_experts": experts, "num_experts": experts}
    if preset == "glm-5":
        config["indexer_rope_interleave"] = True
    path.write_text(json.dumps(config, indent=2) + "\n")


def make_tokenizer(vocab_size: int, folder: Path) -> dict[str, int]:
    """Train a byte-level BPE tokenizer on the machine's text and save it.

    Returns:
        The ids that the config names, by their config field.

    Raises:
        SettingsError: a vocabulary smaller than the bytes and the special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = 256 + len(_SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise SettingsError(f"the vocabulary needs at least {smallest} entries, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(machine_text(TOKENIZER_TEXT_BYTES), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=_END,
        pad_token=_PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    end, pad = fast.convert_tokens_to_ids([_END, _PAD])
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad}


def machine_text(limit: int) -> Iterator[str]:
    """Text that every machine with Python has: the standard library's sources, in name order.

    Args:
        limit: bytes, at most.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    left = limit
    for path in sorted(folder.glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="ignore")[:left]
        left -= len(text)
        yield text
        if left <= 0:
            return


def _or(names: tuple[str, ...]) -> str:
    return " and ".join(names)
