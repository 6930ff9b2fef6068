"""Indexers for the converted model: copies of the attention, or random ones, then warmed up.

An index key is as wide as the rope key here, so an indexer can start as the attention itself: one
index head a query head, the same rotated keys, and a constant weight. Warm-up is DSA's: the KL
divergence of the mean of the heads' attention to the softmax of the index scores, over all visible
keys; after it, over the selected keys (sparse). The body is frozen and attention is dense, so what
a layer reads does not depend on any indexer: it is computed once, and the layers are trained one
after the other, each on some queries of a row at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.smollm2.convert import Form
from benchmarks.smollm2.lean import Lean
from sglang_indexcache.lab.heal.forward_state import Sharing
from sglang_indexcache.lab.heal.losses import (
    AttentionInputs,
    IndexInputs,
    captured_mass,
    distillation_loss,
    select_top_k,
)
from sglang_indexcache.lab.heal.model import LightningIndexer
from sglang_indexcache.lab.heal.packing import Layout
from sglang_indexcache.pattern import Pattern


@dataclass(frozen=True)
class Recipe:
    """A schedule that trains indexers.

    Attributes:
        steps: over all visible keys.
        sparse_steps: after these, over the selected keys.
        queries: of a row, in a step.
        rate: learning rate of the first steps; it falls to a tenth along a cosine.
        topk: keys that are selected in sparse steps.
    """

    steps: int
    queries: int
    rate: float
    sparse_steps: int = 0
    topk: int = 256


BUILT = Recipe(steps=40, queries=96, rate=1e-3)
"""For copies of the attention: under two minutes for all layers."""

RANDOM = Recipe(steps=300, queries=64, rate=2e-3, sparse_steps=60)
"""For indexers from random weights, DSA's own way."""


def collect(model: Lean, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return what every layer reads of each row, under dense attention: ``[N, T, hidden]``."""
    reads_by_layer = []
    for ids in rows:
        reads: list[torch.Tensor] = []
        model.hidden(ids, keep=lambda _number, read, to=reads: to.append(read))
        reads_by_layer.append(torch.stack(reads))
    return reads_by_layer


@torch.no_grad()
def copy_attention(indexer: Any, attention: Any, form: Form, reads: torch.Tensor) -> None:
    """Make an indexer with one head a query head a copy of its layer's attention.

    Args:
        indexer: transformers' indexer.
        attention: transformers' attention of the same layer, converted.
        reads: ``[n, hidden]`` float32, some of what the layer reads.
    """
    wide = attention.q_b_proj.weight.unflatten(0, (form.heads, -1))[:, form.nope :]
    rope_key = attention.kv_a_proj_with_mqa.weight[-form.rope :]
    # The norm of the index key takes the key's length away; the queries get it back.
    length = (reads @ rope_key.T).std(-1).mean()
    indexer.wq_b.weight.copy_((wide * length / form.gain).flatten(0, 1))
    indexer.wk.weight.copy_(rope_key)
    indexer.k_norm.weight.fill_(1.0)
    indexer.k_norm.bias.zero_()
    constant = _constant(reads) * 0.3 * form.heads**0.5
    indexer.weights_proj.weight.copy_(constant.expand(form.heads, -1))


def _constant(reads: torch.Tensor) -> torch.Tensor:
    """Return ``[hidden]``: nearly 1 with every token that a layer reads (ridge regression)."""
    square = reads.T @ reads / len(reads) + 1e-3 * torch.eye(reads.shape[1])
    return torch.linalg.solve(square, reads.mean(0))


class Layer:
    """A layer's indexer in training, and the attention that it learns from.

    Args:
        model: for the layer's queries and keys.
        number: the layer.
        indexer: transformers' indexer of it, trained in place.
        reads: of each row what the layer reads, ``[T, hidden]``.
        device: that the indexer is trained on, and moved to.
    """

    def __init__(
        self,
        model: Lean,
        number: int,
        indexer: Any,
        reads: Sequence[torch.Tensor],
        device: str = "cpu",
    ) -> None:
        full = Pattern.from_layers(model.layers, range(model.layers))
        self.indexer = LightningIndexer(indexer.to(device), True, Sharing(full, model.topk))
        self.reads, self.model = [read.to(device) for read in reads], model
        turned = [model.rotation(len(read)) for read in reads]
        self._rotation = [tuple(part[None].to(device) for part in rotation) for rotation in turned]
        with torch.no_grad():
            self._attention = [
                model.project(number, read, rotation).to(device)
                for read, rotation in zip(reads, turned, strict=True)
            ]

    def asked(self, row: int, places: torch.Tensor) -> tuple[IndexInputs, AttentionInputs, Layout]:
        """Return the inputs of the losses for the queries at ``places`` of a row."""
        read, attention = self.reads[row][None], self._attention[row]
        places = places.to(read.device)
        index = self.indexer.inputs(read, read, self._rotation[row], places)
        target = AttentionInputs(
            attention.queries[None, :, places], attention.keys[None], self.model.form.width**-0.5
        )
        documents = torch.zeros(1, read.shape[1], dtype=torch.int64, device=read.device)
        return index, target, Layout(documents, places)

    def train(self, recipe: Recipe, seed: int, rows: int | None = None) -> list[float]:
        """Take the steps of a recipe; returns the mean loss of a query in each, in nats.

        Args:
            rows: only the first so many.
        """
        rows = rows or len(self.reads)
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.AdamW(
            self.indexer.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        losses, total = [], recipe.steps + recipe.sparse_steps
        for step in range(total):
            warm = min(1.0, (step + 1) / 8)
            falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / total))
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * warm * falling
            row = step % rows
            places = torch.randint(64, len(self.reads[row]), (recipe.queries,), generator=generator)
            index, target, layout = self.asked(row, places.unique())
            sparse = step >= recipe.steps
            selected = select_top_k(index, layout, recipe.topk) if sparse else None
            loss = distillation_loss(index, [target], layout, selected) / len(
                layout.query_documents[0]
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.indexer.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def captured(self, row: int, topk: int) -> tuple[float, float]:
        """Measure attention mass in ``topk`` selected keys of a row, and the most possible."""
        places = torch.arange(len(self.reads[row]) // 2, len(self.reads[row]), 16)
        index, target, layout = self.asked(row, places)
        mass, queries = captured_mass(target, layout, select_top_k(index, layout, topk))
        scores = torch.einsum(
            "gaqd,gsd->gaqs",
            target.queries[0].unflatten(0, (self.model.form.groups, -1)).float(),
            target.keys[0].float(),
        )
        hidden = ~layout.visible(slice(0, len(places)))[0]
        scores = scores[..., : hidden.shape[-1]] * target.scale
        best = scores.masked_fill(hidden, float("-inf")).softmax(-1).mean((0, 1))
        return float(mass / queries), float(best.topk(topk).values.sum(-1).mean())
