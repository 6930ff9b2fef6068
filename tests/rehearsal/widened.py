"""The trained checkpoint that the wheel ships, in a card's widths: what it says does not change.

A vector that was ``w`` wide becomes several signed copies of itself, one behind the other, and who
reads it takes a weighted sum of them. Signs and weights are powers of two, so the wider weights are
exact in bfloat16. Copies leave a mean of squares as it was, so norms keep their weights and their
epsilon, which zeros would not. No dimension of a latent, of a key or of a value is without effect.

Two things are not copied. Rotary pairs keep their frequencies: 32 pairs of ``theta`` squared begin
with the 16 of ``theta``, and the others of MLA are zero. In the indexer those 32 dimensions were
not rotated and now are, by at most 0.0001 radians a token: its scores move a little, so what it
selects may, where it has to choose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_indexcache.lab.demo import shipped_checkpoint
from sglang_indexcache.models import BY_NAME
from tests.fixtures.models import random_model, save_checkpoint, small_config
from tests.fixtures.training import MachineText

TOPK = 2048
LAYERS = 12
_KEPT = ("num_hidden_layers", "vocab_size", "index_head_dim", "first_k_dense_replace")
_WIDTHS = {
    "hidden_size": 512,
    "intermediate_size": 384,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_topk": TOPK,
    "max_position_embeddings": 8192,
    "mlp_layer_types": ["dense"] * LAYERS,
}

Tensors = dict[str, torch.Tensor]


class _Width:
    """Maps of a vector of ``narrow`` values into ``wide`` ones, and back.

    Attributes:
        write: ``[wide, narrow]``, of each copy a row with its sign.
        read: ``[wide, narrow]``, the same with the share of each copy: ``read.T @ write`` is 1.
    """

    def __init__(self, narrow: int, wide: int, signed: bool = True) -> None:
        shares = _shares(wide // narrow)
        draw = torch.Generator().manual_seed(wide)
        signs = torch.randint(0, 2, (len(shares), narrow), generator=draw).double() * 2 - 1
        if not signed:
            signs.fill_(1)
        self.write = torch.cat([torch.diag(row) for row in signs])
        self.read = torch.cat(
            [share * torch.diag(row) for share, row in zip(shares, signs, strict=True)]
        )


def _shares(copies: int) -> list[float]:
    """Return ``copies`` powers of two that sum to 1."""
    shares = [1.0]
    while len(shares) < copies:
        largest = shares.pop(0)
        shares += [largest / 2, largest / 2]
    return shares


def _pad(narrow: int, wide: int) -> torch.Tensor:
    """Return ``[wide, narrow]``: the values, then zeros."""
    return torch.eye(wide, narrow, dtype=torch.float64)


def _along(tensor: torch.Tensor, **matrices: torch.Tensor) -> torch.Tensor:
    """Apply matrices ``[wide, narrow]`` along dimensions: ``d0=``, ``d1=`` and so on."""
    for name, matrix in matrices.items():
        dim = int(name[1:])
        tensor = (tensor.movedim(dim, -1) @ matrix.T).movedim(-1, dim)
    return tensor


def widen(folder: Path, *, heads: int = 8, index_heads: int = 8) -> Path:
    """Write the wider checkpoint: 12 dense layers, in bfloat16.

    Args:
        folder: created if missing.
        heads: of attention, and ``index_heads`` of the indexer: multiples of the shipped one's 4.
    """
    from transformers import AutoTokenizer

    source, family = shipped_checkpoint(), BY_NAME["glm-5"]
    narrow = json.loads((source / "config.json").read_text())
    fields = {name: narrow[name] for name in _KEPT} | _WIDTHS
    fields |= {"num_attention_heads": heads, "index_n_heads": index_heads}
    theta = narrow["rope_parameters"]["rope_theta"]
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta**2}
    config = small_config(family, "small", narrow["vocab_size"], fields)
    tokenizer = AutoTokenizer.from_pretrained(source)
    with torch.device("meta"):
        model = random_model(family, config, tokenizer, seed=0)
    weights = _widened(load_file(source / "model.safetensors"), narrow, fields)
    model.load_state_dict(weights, assign=True)
    save_checkpoint(model, tokenizer, "bfloat16", folder)
    return folder


def _widened(
    narrow_tensors: Tensors, narrow: Mapping[str, Any], wide: Mapping[str, Any]
) -> Tensors:
    """Return every weight of the checkpoint, widened, in float32 that bfloat16 holds.

    Raises:
        ValueError: a value that bfloat16 does not hold.
    """
    weights = _Weights(narrow, wide)
    tensors = {name: weights.of(name, tensor.double()) for name, tensor in narrow_tensors.items()}
    for name, tensor in tensors.items():
        if not torch.equal(tensor.bfloat16().double(), tensor):
            raise ValueError(f"{name} is not exact in bfloat16")
    return {name: tensor.float() for name, tensor in tensors.items()}


class _Weights:
    """Wider forms of weights by their place in the model."""

    def __init__(self, narrow: Mapping[str, Any], wide: Mapping[str, Any]) -> None:
        def of(name: str, signed: bool = True) -> _Width:
            return _Width(narrow[name], wide[name], signed)

        self._narrow = narrow
        self._hidden, self._query, self._latent = map(
            of, ("hidden_size", "q_lora_rank", "kv_lora_rank")
        )
        self._nope, self._value = of("qk_nope_head_dim"), of("v_head_dim")
        self._heads = of("num_attention_heads", signed=False)
        self._index_heads = of("index_n_heads", signed=False)
        self._rope, self._inner = (
            _pad(narrow[name], wide[name]) for name in ("qk_rope_head_dim", "intermediate_size")
        )
        was, now = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"] for c in (narrow, wide))
        self._query_scale = (now / was) ** 0.5  # softmax divides by the root of the width

    def of(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the wider form of a weight."""
        kind = name.removesuffix(".weight").rpartition(".")[2]
        norms = {"q_a_layernorm": self._query, "kv_a_layernorm": self._latent}
        reads_hidden = {
            "lm_head": None,
            "gate_proj": self._inner,
            "up_proj": self._inner,
            "q_a_proj": self._query.write,
            "wk": None,
            "weights_proj": self._index_heads.read,
        }
        if kind == "embed_tokens":
            return _along(weight, d1=self._hidden.write)
        if kind in reads_hidden:
            rows = reads_hidden[kind]
            wide = _along(weight, d1=self._hidden.read)
            return wide if rows is None else _along(wide, d0=rows)
        if "k_norm" in name:
            return weight
        if kind.endswith("norm"):
            return _along(weight, d0=norms.get(kind, self._hidden).write.abs())
        return getattr(self, f"_{kind}")(weight)

    def _kv_a_proj_with_mqa(self, weight: torch.Tensor) -> torch.Tensor:
        latent, rope = weight.split(
            (self._narrow["kv_lora_rank"], self._narrow["qk_rope_head_dim"])
        )
        rows = _along(latent, d0=self._latent.write), _along(rope, d0=self._rope)
        return _along(torch.cat(rows), d1=self._hidden.read)

    def _q_b_proj(self, weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(0, (self._narrow["num_attention_heads"], -1))
        nope, rope = by_head.split(
            (self._narrow["qk_nope_head_dim"], self._narrow["qk_rope_head_dim"]), 1
        )
        wide = torch.cat((_along(nope, d1=self._nope.read), _along(rope, d1=self._rope)), 1)
        wide = _along(wide, d0=self._heads.write, d2=self._query.read)
        return wide.flatten(0, 1) * self._query_scale

    def _kv_b_proj(self, weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(0, (self._narrow["num_attention_heads"], -1))
        nope, value = by_head.split(
            (self._narrow["qk_nope_head_dim"], self._narrow["v_head_dim"]), 1
        )
        parts = _along(nope, d1=self._nope.write), _along(value, d1=self._value.write)
        wide = _along(torch.cat(parts, 1), d0=self._heads.write, d2=self._latent.read)
        return wide.flatten(0, 1)

    def _o_proj(self, weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(1, (self._narrow["num_attention_heads"], -1))
        wide = _along(by_head, d0=self._hidden.write, d1=self._heads.read, d2=self._value.read)
        return wide.flatten(1)

    def _down_proj(self, weight: torch.Tensor) -> torch.Tensor:
        return _along(weight, d0=self._hidden.write, d1=self._inner)

    def _wq_b(self, weight: torch.Tensor) -> torch.Tensor:
        by_head = weight.unflatten(0, (self._narrow["index_n_heads"], -1))
        wide = _along(by_head, d0=self._index_heads.write, d2=self._query.read)
        return wide.flatten(0, 1)


@cache
def _held_out() -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint())
    return MachineText.read(tokenizer, 1_000_000).held_out.tolist()


def real_text(start: int, length: int) -> list[int]:
    """Return tokens of source files of Python's library that training never saw.

    Raises:
        ValueError: this Python's library has fewer.
    """
    tokens = _held_out()[start : start + length]
    if len(tokens) < length:
        raise ValueError(
            f"{start + length} held-out tokens are wanted, {len(_held_out())} are there"
        )
    return tokens
