"""A model whose every layer selects as one says: in transformers, or by SmolLM2's fast forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

from benchmarks.fold.arms import Select
from benchmarks.smollm2 import lean
from sglang_indexcache.fold import IndexRow, places, replaced, select
from sglang_indexcache.pattern import Pattern


class Model(Protocol):
    """A model as a study asks it.

    Attributes:
        layers: how many.
        heads: of an indexer.
        width: of an index key.
    """

    layers: int
    heads: int
    width: int

    def states(self, ids: torch.Tensor, select: Select) -> torch.Tensor:
        """Return ``[T, hidden]`` for ``[T]`` tokens, every layer selecting as ``select`` says."""

    def losses(
        self, states: torch.Tensor, ids: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss in nats of the tokens at ``asked``, and whether greedy picks each."""

    def inputs(self, ids: torch.Tensor, topk: int, queries: slice) -> list[IndexRow]:
        """Return what each layer's indexer multiplies for some of the queries, under all F."""


def copied(row: IndexRow) -> IndexRow:
    """Copy to memory of its own: some of the queries must not keep all of them."""
    return IndexRow(row.queries.clone(), row.keys, row.weights.clone(), row.visible)


class InTransformers:
    """A checkpoint in transformers, float32.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self._indexers = [m.indexer for m in self.model.modules() if hasattr(m, "indexer")]
        self.layers = len(self._indexers)
        self.heads, self.width = self._indexers[0].n_heads, self._indexers[0].head_dim

    def states(self, ids: torch.Tensor, select: Select) -> torch.Tensor:
        """See :class:`Model`."""
        return self._run(ids, lambda n, row: places(torch.cat(select(n, row.blocks), dim=1)))

    @torch.no_grad()
    def losses(
        self, states: torch.Tensor, ids: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Model`."""
        logits = self.model.lm_head(states[places - 1]).float()
        loss = torch.nn.functional.cross_entropy(logits, ids[places], reduction="none")
        return loss, logits.argmax(-1) == ids[places]

    def inputs(self, ids: torch.Tensor, topk: int, queries: slice) -> list[IndexRow]:
        """See :class:`Model`."""
        rows: list[IndexRow] = []

        def forward(_: int, row: IndexRow) -> torch.Tensor:
            rows.append(copied(row.part(queries)))
            return select(row, topk, None)

        self._run(ids, forward)
        return rows

    @torch.no_grad()
    def _run(
        self, ids: torch.Tensor, forward: Callable[[int, IndexRow], torch.Tensor]
    ) -> torch.Tensor:
        with replaced(dict(enumerate(self._indexers)), forward):
            states: torch.Tensor = self.model.model(ids[None], use_cache=False).last_hidden_state
        return states[0]


class InLean(lean.Lean):
    """SmolLM2 by the fast forward.

    Args:
        folder: of the checkpoint.
        device: a torch device's name.
        dtype: of matrix products.
    """

    def __init__(
        self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(folder, dtype, device)
        self.heads, self.width = self.index_heads, self.form.rope
        self._every = Pattern.full(self.layers)
        self._select: Select | None = None

    def states(
        self,
        ids: torch.Tensor,
        select: Select,
        keep: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """See :class:`Model`; ``keep`` as of :meth:`~benchmarks.smollm2.lean.Lean.hidden`."""
        self._select = select
        try:
            return self.hidden(ids, self._every, keep=keep)
        finally:
            self._select = None

    def inputs(self, ids: torch.Tensor, topk: int, queries: slice) -> list[IndexRow]:
        """See :class:`Model`; attention is dense here, for the indexers were trained so."""
        del topk
        rows: list[IndexRow] = []
        visible = self.causal(slice(0, len(ids)))

        def keep(number: int, read: torch.Tensor) -> None:
            rows.append(copied(self._row(number, read, visible).part(queries)))

        self.hidden(ids, keep=keep)
        return rows

    def selected(self, number: int, read: torch.Tensor) -> list[torch.Tensor]:
        """Return a mask ``[rows, S]`` for each block, as ``select`` says if there is one."""
        if self._select is None:
            return super().selected(number, read)
        allowed = self.causal(slice(0, len(read)))

        def blocks() -> Iterator[IndexRow]:
            full_row = self._row(number, read, allowed)
            for rows in self.row_blocks(len(read)):
                part = full_row.part(rows)
                visible = part.visible[..., : rows.stop]
                yield IndexRow(part.queries, part.keys[:, : rows.stop], part.weights, visible)

        masks = self._select(number, blocks)
        blocks_of_masks = zip(masks, self.row_blocks(len(read)), strict=True)
        return [mask[0] & allowed[rows, : rows.stop] for mask, rows in blocks_of_masks]

    def _row(self, number: int, read: torch.Tensor, visible: torch.Tensor) -> IndexRow:
        queries, keys, weights = self.index_inputs(number, read)
        scale = (self.heads * self.width) ** 0.5  # which IndexRow leaves out
        return IndexRow(
            queries.float()[None], keys.float()[None], weights[None] * scale, visible[None]
        )
