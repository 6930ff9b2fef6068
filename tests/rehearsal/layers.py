"""Outputs of each layer of a rehearsed server, beside transformers' on the same input.

SGLang tells both by itself: ``--debug-tensor-dump-output-folder`` writes the residual stream, and
``--enable-return-indexer-topk`` returns what each layer selected. Every layer is given the server's
own input, so a difference is that layer's, and its bound is the rounding of one layer: what
transformers' own bfloat16 is from its float32 on the same input, the same selection, and index
queries and keys in FP8 in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang.srt.state_capturer.indexer_topk import extract_indexer_topk_from_meta_info
from transformers import AutoModelForCausalLM

from sglang_indexcache.pattern import Pattern
from tests.oracle import fp8_scores

DUMP = "--debug-tensor-dump-output-folder"
SELECTIONS = "--enable-return-indexer-topk"


@dataclass(frozen=True)
class Layer:
    """One layer on the rows that choose.

    Attributes:
        apart: what the server added to the residual stream from what transformers in float32 adds,
            relative to that, root mean square.
        rounding: the same of transformers in bfloat16.
        regret: of an F layer, what it left out by score beyond what it took, the mean of a row,
            relative to the row's best score; 0 of a selection that is right to the last bit.
        regret_of_rounding: the same of transformers in bfloat16.
    """

    apart: float
    rounding: float
    regret: float = 0.0
    regret_of_rounding: float = 0.0

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains what the server did."""
        return self.apart <= self.rounding and self.regret <= self.regret_of_rounding


def streams(folder: Path, ids: list[int]) -> torch.Tensor:
    """``[layers + 1, T, D]``: each layer's input in the server, and the last one's output."""
    parts: list[list[torch.Tensor]] = []
    for path in sorted(folder.glob("*/Pass*.pt")):
        dump = torch.load(path)
        start = int(dump["model.forward_batch_info.positions"][0])
        ids_read = dump["model.forward_batch_info.input_ids"].tolist()
        if start < len(ids) and ids_read == ids[start : start + len(ids_read)]:
            layers = sum(name.endswith(".input_layernorm") for name in dump)
            norms = [f"model.layers.{layer}.input_layernorm" for layer in range(1, layers)]
            sums = [dump[name][1] for name in (*norms, "model.norm")]
            parts.append([dump["model.embed_tokens"], *sums])
    return torch.stack([torch.cat(chunks) for chunks in zip(*parts, strict=True)])


def selections(reply: Any, count: int, layers: int, topk: int) -> torch.Tensor:
    """``[layers, count, topk]`` positions that each layer read, of a request that came first.

    SGLang hands out the places of its cache in order, so the first position has the lowest.
    """
    indices = extract_indexer_topk_from_meta_info(reply).reshape(-1, layers, topk)
    slots = torch.from_numpy(np.array(indices)).transpose(0, 1)
    places = slots - slots[:, topk:].min()
    places[:, :topk] = torch.arange(topk)  # they see no more than that
    return places[:, :count]


class Layers:
    """transformers' layers, each asked alone; every one of them has an indexer.

    Args:
        model: the checkpoint, in bfloat16.
    """

    def __init__(self, model: Path) -> None:
        self._exact, self._rounded = (
            AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, attn_implementation="eager"
            ).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )

    def compare(
        self, streams: torch.Tensor, selected: torch.Tensor, pattern: Pattern, rows: slice
    ) -> Iterator[Layer]:
        """Yield every layer beside transformers, which reads in each what ``pattern`` says.

        Args:
            streams: ``[layers + 1, T, D]``, of :func:`streams`.
            selected: ``[layers, T, k]``, of :func:`selections`.
            rows: that are compared.
        """
        for layer in range(len(pattern)):
            yield self._one(layer, pattern, streams, selected[pattern.source_of(layer)], rows)

    def _one(
        self,
        layer: int,
        pattern: Pattern,
        streams: torch.Tensor,
        selection: torch.Tensor,
        rows: slice,
    ) -> Layer:
        before, after = streams[layer].double(), streams[layer + 1].double()
        (exact, scores), (rounded, rough) = (
            _run(model, layer, streams[layer], selection) for model in (self._exact, self._rounded)
        )
        adds = (exact - before)[rows]
        apart, rounding = (
            float((output[rows] - exact[rows]).norm() / adds.norm()) for output in (after, rounded)
        )
        if not pattern.is_full(layer):
            return Layer(apart, rounding)
        regrets = (
            _regret(scores[rows], indices.long())
            for indices in (selection[rows], rough[rows].topk(selection.shape[-1]).indices)
        )
        return Layer(apart, rounding, *regrets)


def _run(
    model: Any, layer: int, hidden: torch.Tensor, selection: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decoder layer's output ``[T, D]`` on a selection that is given, and its index scores."""
    decoder = model.model.layers[layer]
    hidden = hidden[None].to(model.dtype)
    count = hidden.shape[1]
    places = torch.arange(count)
    mask = torch.zeros(count, count, dtype=model.dtype)
    mask.masked_fill_(places > places[:, None], torch.finfo(model.dtype).min)
    with (
        torch.no_grad(),
        _selecting(decoder.self_attn.indexer, selection) as scores,
        fp8_scores(0.0, is_glm=True),
    ):
        out = decoder(
            hidden,
            attention_mask=mask[None, None],
            position_embeddings=model.model.rotary_emb(hidden, places[None]),
        )
    return out[0][0].double(), scores[0][0].double()


@contextmanager
def _selecting(indexer: Any, selection: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Let an indexer tell its scores and return ``selection``."""
    select, topk = indexer.forward, torch.Tensor.topk
    scores: list[torch.Tensor] = []

    def tell(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scores.append(self)
        return topk(self, *args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        torch.Tensor.topk = tell  # type: ignore[method-assign, assignment]
        try:
            select(*args, **kwargs)
        finally:
            torch.Tensor.topk = topk  # type: ignore[method-assign]
        return selection[None]

    indexer.forward = forward
    try:
        yield scores
    finally:
        indexer.forward = select


def _regret(scores: torch.Tensor, selection: torch.Tensor) -> float:
    """Return by how much ``selection`` ``[T, k]`` scores less than the best k of ``[T, S]``."""
    best = scores.topk(selection.shape[-1]).values
    shortfall = best.sum(-1) - scores.gather(1, selection).sum(-1)
    return float((shortfall / best[:, 0].abs()).mean())
