"""The converted model without what conversion made wide, so that studies fit two cores.

It reads the checkpoint and computes what transformers computes from it: queries and keys are taken
out of the places where they lie, identity latents and zeros are left out. What every forward does
is in :meth:`Lean.hidden`; the tests compare it with transformers, on a random model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy, layer_norm, linear, silu

from benchmarks.smollm2.convert import Form
from sglang_indexcache.pattern import Pattern

BLOCK, BLOCK_ON_GPU = 64, 1024
"""Queries that are scored and attend at a time: few stay in a CPU's cache, many keep a GPU busy."""

INDEXER = {
    "wq_b.weight": "index_q",
    "wk.weight": "index_k",
    "weights_proj.weight": "index_w",
    "k_norm.weight": "norm",
    "k_norm.bias": "bias",
}
"""The names of an indexer's parameters in the checkpoint, and here."""

Tables = tuple[torch.Tensor, torch.Tensor]
State = tuple[int, torch.Tensor, list[torch.Tensor]]
"""A layer, the residual stream before it, and one mask a block of the F layer before it."""


@dataclass(frozen=True)
class Projected:
    """The inputs of a layer's attention, rotated.

    Attributes:
        queries: ``[N, T, d]``.
        keys: ``[G, T, d]``.
        values: ``[G, T, d]``.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def to(self, device: str) -> Projected:
        """Return the same on a device."""
        return Projected(*(part.to(device) for part in (self.queries, self.keys, self.values)))


class Lean:
    """A converted checkpoint, frozen.

    Args:
        folder: written by ``build``.
        dtype: of matrix products; the rest is float32. Without AVX512_BF16 or AMX bfloat16 takes
            longer.
        device: a torch device's name; what comes back lies there.

    Attributes:
        topk: tokens that a query attends to; set it to what is asked.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors", device=device)
        self.device = torch.device(device)
        self.dtype, self.layers = dtype, int(config["num_hidden_layers"])
        self.topk = int(config["index_topk"])
        self.epsilon = float(config["rms_norm_eps"])
        width = int(config["v_head_dim"])
        self.form = Form(
            int(config["num_attention_heads"]), int(config["qk_rope_head_dim"]) // width, width
        )
        self.index_heads = int(config["index_n_heads"])
        self.frequencies = frequencies(config).to(self.device)
        self._embedding = stored["model.embed_tokens.weight"]
        self._head, self._norm = stored["lm_head.weight"].to(dtype), stored["model.norm.weight"]
        self._layers = [self._layer(stored, number) for number in range(self.layers)]

    @classmethod
    def of_study(cls, arguments: argparse.Namespace) -> Lean:
        """Read the model that a study was told: ``model``, ``dtype`` and ``device``."""
        return cls(arguments.model, getattr(torch, arguments.dtype), arguments.device)

    def _layer(self, stored: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        """Return a layer's weights under short names, as they are used."""
        prefix, form = f"model.layers.{number}.", self.form

        def weight(name: str) -> torch.Tensor:
            return stored[f"{prefix}{name}.weight"]

        wide = weight("self_attn.q_b_proj").unflatten(0, (form.heads, -1))[:, form.nope :]
        rope_key = weight("self_attn.kv_a_proj_with_mqa")[-form.rope :]
        per_group = form.heads // form.groups
        places = [form.places(group) for group in range(form.groups)]
        queries = torch.cat([wide[h, places[h // per_group]] for h in range(form.heads)])
        values = weight("self_attn.kv_b_proj").unflatten(0, (form.heads, -1))[::per_group]
        used = {
            "q": queries / form.gain,
            "k": rope_key[torch.cat(places)],
            "v": values[:, form.nope :].flatten(0, 1),
            "o": weight("self_attn.o_proj"),
            "up": torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            "down": weight("mlp.down_proj"),
            "index_q": weight("self_attn.indexer.wq_b"),
            "index_k": weight("self_attn.indexer.wk"),
        }
        exact = {
            "mlp_norm": weight("post_attention_layernorm"),
            "index_w": weight("self_attn.indexer.weights_proj"),
            "norm": weight("self_attn.indexer.k_norm"),
            "bias": stored[f"{prefix}self_attn.indexer.k_norm.bias"],
        }
        return {
            **{name: part.to(self.dtype).contiguous() for name, part in used.items()},
            **{name: part.float() for name, part in exact.items()},
        }

    def adopt(self, indexers: Mapping[str, torch.Tensor]) -> None:
        """Take these indexers, by the checkpoint's names, in the place of the model's own."""
        for name, tensor in indexers.items():
            layer, _, part = name.removeprefix("model.layers.").partition(".self_attn.indexer.")
            short = INDEXER[part]
            dtype = self._layers[int(layer)][short].dtype
            self._layers[int(layer)][short] = tensor.to(self.device, dtype).contiguous()

    # -- a forward ------------------------------------------------------------------------------

    @torch.no_grad()
    def hidden(
        self,
        ids: torch.Tensor,
        pattern: Pattern | None = None,
        *,
        keep: Callable[[int, torch.Tensor], None] | None = None,
        note: Callable[[int, torch.Tensor, list[torch.Tensor]], None] | None = None,
        start: State | None = None,
    ) -> torch.Tensor:
        """Return the output of the last layer before the final norm, ``[T, hidden]`` float32.

        Args:
            ids: ``[T]`` int64.
            pattern: which layers select; None attends to every visible token.
            keep: called with each layer's number and what its attention reads, ``[T, hidden]``.
            note: called before each layer, and behind the last, with the number of the layer that
                would come, the residual stream, and the masks of the F layer before it.
            start: what ``note`` was given: go on from there.
        """
        first, stream, masks = start or (0, self._embedding[ids.to(self.device)].float(), [])
        turned = self.rotation(len(ids))
        for number in range(first, self.layers):
            if note is not None:
                note(number, stream, masks)
            read = self.read(stream)
            if keep is not None:
                keep(number, read)
            if pattern is not None and pattern.is_full(number):
                masks = self.selected(number, read)
            projected = self.project(number, read, turned)
            visible = None if pattern is None else self.taken(number, read, masks)
            stream = self.after(number, stream, self.attend(projected, visible))
        if note is not None:
            note(self.layers, stream, masks)
        return stream

    def read(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream with RMS 1, ``[T, hidden]``: attention and indexer read it."""
        return self._normed(stream).to(self.dtype)

    def project(self, number: int, read: torch.Tensor, turned: Tables) -> Projected:
        """Return a layer's queries, keys and values; ``turned`` from :meth:`rotation`."""
        weights, form = self._layers[number], self.form
        cosine, sine = (part.to(self.dtype) for part in turned)  # [T, rope / 2]
        by_group = [
            part.unflatten(-1, (-1, form.groups)).permute(2, 0, 1) for part in (cosine, sine)
        ]
        by_head = [part.repeat_interleave(form.heads // form.groups, 0) for part in by_group]

        def heads(name: str) -> torch.Tensor:
            return linear(read, weights[name]).unflatten(-1, (-1, form.width)).transpose(0, 1)

        return Projected(rotate(heads("q"), *by_head), rotate(heads("k"), *by_group), heads("v"))

    def attend(self, inputs: Projected, visible: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return ``[T, N * d]``; ``visible`` has a block's mask ``[rows, S]``, None for causal."""
        groups, width, blocks = self.form.groups, self.form.width, []
        for number, rows in enumerate(self.row_blocks(inputs.queries.shape[1])):
            mask = self.causal(rows) if visible is None else visible[number]
            keys, values = inputs.keys[:, : rows.stop], inputs.values[:, : rows.stop]
            if visible is not None and self.device.type == "cpu":
                # What none of so few queries selected is most of a long text.
                seen = mask.any(0).nonzero()[:, 0]
                mask, keys, values = mask[:, seen], keys[:, seen], values[:, seen]
            output = torch.nn.functional.scaled_dot_product_attention(
                inputs.queries[:, rows].reshape(groups, -1, width)[None],
                keys[None],
                values[None],
                attn_mask=mask.repeat(self.form.heads // groups, 1),
            )[0]
            blocks.append(output.reshape(self.form.heads, -1, width).transpose(0, 1))
        return torch.cat(blocks).flatten(1)

    def weights(self, inputs: Projected) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """Yield each block's number, rows and attention to all visible keys, ``[N, rows, S]``."""
        groups, width = self.form.groups, self.form.width
        keys = inputs.keys.float().repeat_interleave(self.form.heads // groups, 0)
        for number, rows in enumerate(self.row_blocks(inputs.queries.shape[1])):
            scores = inputs.queries[:, rows].float() @ keys[:, : rows.stop].mT * width**-0.5
            yield number, rows, scores.masked_fill_(~self.causal(rows), float("-inf")).softmax(-1)

    def after(self, number: int, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream behind a layer."""
        weights = self._layers[number]
        stream = stream + linear(attended, weights["o"]).float()
        read = (self._normed(stream) * weights["mlp_norm"]).to(self.dtype)
        gate, up = linear(read, weights["up"]).chunk(2, -1)
        return stream + linear(silu(gate) * up, weights["down"]).float()

    def losses(self, stream: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> Any:
        """Return the cross entropy of tokens at ``places`` in nats, and whether greedy is right."""
        ids, places = ids.to(self.device), places.to(self.device)
        logits = [self.logits(part) for part in stream[places - 1].split(512)]
        targets = ids[places].split(512)
        loss = [cross_entropy(a, b, reduction="none") for a, b in zip(logits, targets, strict=True)]
        right = [a.argmax(-1) == b for a, b in zip(logits, targets, strict=True)]
        return torch.cat(loss), torch.cat(right)

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        """Return ``[T, vocabulary]`` float32 of a stream behind the last layer."""
        read = (self._normed(stream) * self._norm.float()).to(self.dtype)
        return linear(read, self._head).float()

    def _normed(self, stream: torch.Tensor) -> torch.Tensor:
        return stream * torch.rsqrt(stream.pow(2).mean(-1, keepdim=True) + self.epsilon)

    # -- the indexers ---------------------------------------------------------------------------

    def selected(self, number: int, read: torch.Tensor) -> list[torch.Tensor]:
        """Return a mask ``[rows, S]`` for each block: the ``topk`` best visible keys."""
        masks = []
        for rows, scores in self.scores(number, read):
            mask = self.causal(rows)
            if rows.stop > self.topk:
                best = scores.masked_fill_(~mask, float("-inf")).topk(self.topk).indices
                mask = torch.zeros_like(mask).scatter_(-1, best, True) & mask
            masks.append(mask)
        return masks

    def taken(
        self, number: int, read: torch.Tensor, masks: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return what a layer takes of the F layer's selection that stands before it: all of it."""
        return masks

    def scores(self, number: int, read: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each block's rows and scores ``[rows, S]`` float32, unseen keys' among them."""
        queries, keys, weights = self.index_inputs(number, read)
        for rows in self.row_blocks(len(read)):
            if rows.stop <= self.topk:  # all are selected, whatever their scores
                yield rows, torch.empty(0)
                continue
            block = queries[rows].flatten(0, 1)
            hits = linear(block, keys[: rows.stop]).relu_().unflatten(0, (-1, self.index_heads))
            yield rows, (weights[rows].unsqueeze(1) @ hits.float()).squeeze(1)

    def index_inputs(
        self, number: int, read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return an indexer's queries ``[T, H, D]``, keys ``[T, D]`` and weights, rotated."""
        layer, width = self._layers[number], self.form.rope
        cosine, sine = (part.to(self.dtype) for part in self.rotation(len(read)))
        queries = linear(read, layer["index_q"]).unflatten(-1, (self.index_heads, width))
        raw = linear(read, layer["index_k"]).float()
        keys = layer_norm(raw, (width,), layer["norm"], layer["bias"], 1e-6).to(self.dtype)
        weights = linear(read.float(), layer["index_w"]) * (self.index_heads * width) ** -0.5
        return rotate(queries, cosine[:, None], sine[:, None]), rotate(keys, cosine, sine), weights

    def rotation(self, length: int) -> Tables:
        """Return cosine and sine by position and slot, ``[T, rope / 2]`` float32."""
        angles = torch.arange(length, device=self.device)[:, None].float() * self.frequencies
        return angles.cos(), angles.sin()

    # -- blocks of queries ----------------------------------------------------------------------

    def row_blocks(self, length: int) -> Iterator[slice]:
        """Yield blocks of queries, the first of them first."""
        size = BLOCK if self.device.type == "cpu" else BLOCK_ON_GPU
        return (slice(start, min(start + size, length)) for start in range(0, length, size))

    def causal(self, rows: slice) -> torch.Tensor:
        """Return ``[rows, S]`` bool: what these queries see of the S keys up to the last one."""
        positions = torch.arange(rows.stop, device=self.device)
        return positions <= positions[rows, None]


def frequencies(config: dict[str, Any]) -> torch.Tensor:
    """Return ``[rope / 2]`` float32, as transformers computes them."""
    width, base = config["qk_rope_head_dim"], config["rope_parameters"]["rope_theta"]
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float) / width))


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring dimensions; the result has each pair's first before the second."""
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
