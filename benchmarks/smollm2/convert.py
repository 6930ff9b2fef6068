"""A Llama's weights as a ``GlmMoeDsaForCausalLM``: multi-head latent attention that does the same.

- Every input norm's gain is folded into the projections behind it, so that the hidden state has
  RMS 1 and passes identity latents (``q_lora_rank = kv_lora_rank = hidden_size``) and their norms
  unchanged.
- One rope key holds the keys of all KV heads side by side; a query head is zero outside its
  group's places. The part without RoPE is zeros.
- RoPE has one ladder of frequencies for all of these places, ``theta ** (-2 s / width)`` at slot
  s. A group's frequency j lies in slot ``groups * j + group``, so each group sees nearly the
  ladder that it was trained with, at positions scaled by a constant. With a theta of
  ``base ** 0.98`` the scales of three groups are 1, 0.89 and 0.79 for fast frequencies, and 26 %
  more for the slowest.

The result equals the Llama but for these scales, and for what the latents' norms add to a mean
square before they take its root (1e-6 in transformers, ``rms_norm_eps`` in SGLang).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

STEEPNESS = 0.98
"""The power of the Llama's RoPE base that is the new one."""


@dataclass(frozen=True)
class Form:
    """The places of a Llama's heads in the latent attention.

    Attributes:
        heads: query heads.
        groups: KV heads.
        width: of a Llama's head.
    """

    heads: int
    groups: int
    width: int

    @classmethod
    def of(cls, llama: Any) -> Form:
        """Read the form from a Llama's config."""
        heads = llama.num_attention_heads
        width = getattr(llama, "head_dim", None) or llama.hidden_size // heads
        return cls(heads, llama.num_key_value_heads, width)

    @property
    def rope(self) -> int:
        """``qk_rope_head_dim``."""
        return self.groups * self.width

    @property
    def gain(self) -> float:
        """The factor of the queries, because attention divides by the root of a wider head.

        A power of two, so that stored weights round as the Llama's own do.
        """
        return 2.0 ** (math.floor(math.log(self.groups, 4)) + 1)

    @property
    def nope(self) -> int:
        """``qk_nope_head_dim``: zeros that make a head ``gain ** 2`` Llama heads wide."""
        return int(self.gain**2) * self.width - self.rope

    def places(self, group: int) -> torch.Tensor:
        """Return ``[width]``: where a group's dimensions lie in the rope part, pair after pair."""
        slots = self.groups * torch.arange(self.width // 2) + group
        return torch.stack([2 * slots, 2 * slots + 1], dim=1).flatten()

    def pairs(self, weight: torch.Tensor) -> torch.Tensor:
        """Return Llama heads' rows ``[n * width, hidden]`` as ``[n, width, hidden]``, by pairs.

        A Llama turns dimensions j and j + width / 2 together; DSA's RoPE here neighbours.
        """
        halves = weight.unflatten(0, (-1, 2, self.width // 2))
        return halves.transpose(1, 2).flatten(1, 2)


def dsa_config(llama: Any, *, index_heads: int, index_topk: int, theta: float | None = None) -> Any:
    """Make the config of the converted model.

    Args:
        llama: the Llama's config.
        index_heads: of each indexer. Its keys are as wide as the rope key: an indexer rotates its
            first ``qk_rope_head_dim`` dimensions, so they cannot be narrower.
        index_topk: tokens that a query attends to.
        theta: the base of RoPE; by default the one that this module describes.
    """
    from transformers import GlmMoeDsaConfig

    form, layers = Form.of(llama), llama.num_hidden_layers
    base = llama.rope_parameters["rope_theta"]
    ends = {name: getattr(llama, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return GlmMoeDsaConfig(
        architectures=["GlmMoeDsaForCausalLM"],
        vocab_size=llama.vocab_size,
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=form.heads,
        num_key_value_heads=form.heads,
        q_lora_rank=llama.hidden_size,
        kv_lora_rank=llama.hidden_size,
        qk_rope_head_dim=form.rope,
        qk_nope_head_dim=form.nope,
        v_head_dim=form.width,
        index_head_dim=form.rope,
        index_n_heads=index_heads,
        index_topk=index_topk,
        max_position_embeddings=llama.max_position_embeddings,
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": theta or base**STEEPNESS},
        tie_word_embeddings=False,
        attention_bias=False,
        # No layer is a mixture of experts; SGLang reads these fields all the same.
        first_k_dense_replace=layers,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **ends,
    )


@torch.no_grad()
def convert(llama: Any, config: Any) -> Any:
    """Convert the model, in float32; its indexers are as they were initialised.

    Args:
        llama: a ``LlamaForCausalLM`` without biases.
        config: from :func:`dsa_config`.
    """
    from transformers import GlmMoeDsaForCausalLM

    form = Form.of(llama.config)
    model = GlmMoeDsaForCausalLM(config).float().eval()
    model.model.embed_tokens.weight.copy_(llama.model.embed_tokens.weight)
    model.model.norm.weight.copy_(llama.model.norm.weight)
    model.lm_head.weight.copy_(llama.lm_head.weight)
    for new, old in zip(model.model.layers, llama.model.layers, strict=True):
        new.input_layernorm.weight.fill_(1.0)
        new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight)
        new.mlp.load_state_dict(old.mlp.state_dict())
        _convert_attention(new.self_attn, old.self_attn, old.input_layernorm.weight, form)
    return model


def _convert_attention(new: Any, old: Any, gain: torch.Tensor, form: Form) -> None:
    """Fill one layer's attention; ``gain`` is that of the norm before it."""
    identity = torch.eye(len(gain))
    queries, keys = form.pairs(old.q_proj.weight * gain), form.pairs(old.k_proj.weight * gain)
    values = (old.v_proj.weight * gain).unflatten(0, (form.groups, form.width))
    wide = torch.zeros(form.heads, form.nope + form.rope, len(gain))
    rope_key = torch.zeros(form.rope, len(gain))
    per_group = form.heads // form.groups
    for group in range(form.groups):
        places = form.places(group)
        mine = slice(group * per_group, (group + 1) * per_group)
        wide[mine, form.nope + places] = form.gain * queries[mine]
        rope_key[places] = keys[group]
    no_keys = torch.zeros(form.heads, form.nope, len(gain))
    expanded = torch.cat([no_keys, values.repeat_interleave(per_group, 0)], dim=1)
    new.q_a_proj.weight.copy_(identity)
    new.q_a_layernorm.weight.fill_(1.0)
    new.q_b_proj.weight.copy_(wide.flatten(0, 1))
    new.kv_a_proj_with_mqa.weight.copy_(torch.cat([identity, rope_key]))
    new.kv_a_layernorm.weight.fill_(1.0)
    new.kv_b_proj.weight.copy_(expanded.flatten(0, 1))
    new.o_proj.weight.copy_(old.o_proj.weight)


def original_frequencies(llama: Any) -> torch.Tensor:
    """Return ``[rope / 2]`` float32, the Llama's own frequencies by slot: they make it exact."""
    form = Form.of(llama)
    steps = torch.arange(0, form.width, 2, dtype=torch.float64) / form.width
    ladder = llama.rope_parameters["rope_theta"] ** -steps
    return ladder.repeat_interleave(form.groups).float()
