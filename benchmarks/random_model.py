"""Make a small DSA checkpoint with random weights that transformers and SGLang load unchanged.

    python -m benchmarks.random_model --preset deepseek-v3.2 --field num_hidden_layers=4 -o model

The shapes are those of GLM-5 or DeepSeek-V3.2 in small; the weights are seeded noise, so what it
says is noise too, but every layer, every indexer and every file is where a real one has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from sglang_indexcache.lab.data.documents import MACHINE, files_of
from sglang_indexcache.library.writing import write_whole
from sglang_indexcache.models import BY_NAME, TRAINABLE, Family

TOKENIZER_TEXT_BYTES = 4_000_000
"""How much of the Python standard library the tokenizer is trained on."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_END, _PAD = "<|endoftext|>", "<|pad|>"
_SPECIAL_TOKENS = (_END, _PAD, "<|system|>", "<|user|>", "<|assistant|>")

_FIELDS: Mapping[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_head_dim": 128,  # a GPU's index-K pages hold no other width; the CPU platform does
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    # SGLang applies it to the two low-rank norms as well, where transformers has 1e-6 fixed.
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""HF config fields of a small model, of whatever family."""

_FAMILY_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "glm-5": {
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "deepseek-v3.2": {
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 163840,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}

SIZES: Mapping[str, Mapping[str, Any]] = {
    # For tests: seconds to make, selection matters from 65 tokens on.
    "tiny": {"num_hidden_layers": 6, "index_n_heads": 8, "index_topk": 64},
    # For timing: the indexer has as large a share of a long prefill as in a real model.
    "small": {"num_hidden_layers": 12, "index_n_heads": 32, "index_topk": 256},
}


def machine_text(limit: int) -> Iterator[str]:
    """Yield the standard library's sources by file name, at most ``limit`` characters."""
    remaining = limit
    for path in files_of(MACHINE):
        text = path.read_text(encoding="utf-8", errors="ignore")[:remaining]
        remaining -= len(text)
        yield text
        if remaining <= 0:
            return


def small_config(
    family: Family, size: str, vocab_size: int, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the HF config of a small model.

    Args:
        family: a trainable one.
        size: one of :data:`SIZES`.
        vocab_size: entries of the embedding.
        overrides: fields that replace those of the family and the size.
    """
    fields = {**_FIELDS, **SIZES[size], **_FAMILY_FIELDS[family.name], **overrides}
    fields.setdefault("num_key_value_heads", fields["num_attention_heads"])
    fields["architectures"] = [family.architecture]
    return {**fields, "vocab_size": vocab_size}


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at least 261 entries on the machine's text.

    It has end and padding tokens and a chat template.
    """
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
    return fast


def make_model(
    folder: Path,
    preset: str = "glm-5",
    size: str = "small",
    *,
    seed: int = 0,
    vocab_size: int = 4096,
    dtype: str = "bfloat16",
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint with its tokenizer.

    Args:
        folder: created if missing; files of the same name are replaced.
        preset: a trainable family's name.
        size: one of :data:`SIZES`.
        seed: of the weights.
        vocab_size: at least 261.
        dtype: of the stored weights, a torch dtype's name.
        fields: config fields that replace those of the preset and the size.
    """
    disable_progress_bar()
    family = BY_NAME[preset]
    config = small_config(family, size, vocab_size, fields or {})
    tokenizer = make_tokenizer(vocab_size)
    save_checkpoint(random_model(family, config, tokenizer, seed), tokenizer, dtype, folder)


def random_model(family: Family, config: Mapping[str, Any], tokenizer: Any, seed: int) -> Any:
    """Make a transformers model in float32 with random weights.

    Args:
        family: a trainable one.
        config: HF config fields.
        tokenizer: gives the ids of the end and padding tokens.
        seed: of the weights.
    """
    ends = {
        "bos_token_id": tokenizer.eos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model_config = AutoConfig.for_model(family.model_type, **{**config, **ends})
    return AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)


def save_checkpoint(model: Any, tokenizer: Any, dtype: str, folder: Path) -> None:
    """Save weights, config and tokenizer so that transformers and SGLang load them unchanged.

    Args:
        dtype: of the stored weights, a torch dtype's name; what transformers keeps in float32
            stays so.
        folder: created if missing; a checkpoint in it is replaced, its config.json last, so that
            a folder that has one is whole.
    """
    in_float32 = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    state = {
        name: t if any(part in name for part in in_float32) else t.to(getattr(torch, dtype))
        for name, t in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder, prefix=".part-") as part:
        model.save_pretrained(part, state_dict=state)
        tokenizer.save_pretrained(part)
        (folder / "config.json").unlink(missing_ok=True)
        for old in folder.glob("model*.safetensors*"):
            old.unlink()
        for path in Path(part).iterdir():
            if path.name != "config.json":
                path.replace(folder / path.name)
        config = {**json.loads((Path(part) / "config.json").read_text()), "dtype": dtype}
    # transformers >= 5.19 maps num_experts onto n_routed_experts; SGLang reads both.
    experts = model.config.n_routed_experts
    config |= {"n_routed_experts": experts, "num_experts": experts}
    config |= TRAINABLE[model.config.model_type].extra_config
    write_whole(folder / "config.json", json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Make one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=BY_NAME, default="glm-5")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--field", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument("--output", "-o", type=Path, required=True)
    arguments = parser.parse_args()
    pairs = (text.split("=") for text in arguments.field)
    fields = {name: json.loads(value) for name, value in pairs}
    make_model(arguments.output, arguments.preset, arguments.size, fields=fields)


if __name__ == "__main__":
    main()
