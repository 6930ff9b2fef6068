"""The package's searches on SmolLM2: their evaluator, by the lean forward.

A batch is one row of the books. Patterns that begin alike are run once up to the layer where they
differ, so the candidates of one greedy step cost about half a forward each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch

from benchmarks.smollm2.books import Row
from benchmarks.smollm2.lean import Lean, State
from sglang_indexcache.lab.search.evaluators import Floats
from sglang_indexcache.lab.search.evaluators.hf import common_layers, lost_by_worst_head
from sglang_indexcache.pattern import Pattern

KEPT_RUNS = 3
"""Forwards of a row whose states are kept, those used last."""

SCORES: dict[str, Callable[[Row], torch.Tensor]] = {
    "mixed": lambda row: torch.cat([row.text, row.recall]),
    "text": lambda row: row.text,
    "recall": lambda row: row.recall,
}
"""The places whose mean loss a search minimises: of the text, of repeated passages, or both."""


@dataclass
class _Run:
    """A forward under a pattern; ``states[l]`` stands before layer l, the last behind all."""

    pattern: Pattern
    states: list[State] = field(default_factory=list)


class LeanEvaluator:
    """An :class:`~sglang_indexcache.lab.search.evaluators.Evaluator` of rows.

    Args:
        score: one of :data:`SCORES`.
        in_flight: patterns measured at a time, each in one thread.
    """

    by_batch = False  # every row's layer outputs are kept

    def __init__(self, model: Lean, rows: Sequence[Row], score: str, in_flight: int = 1) -> None:
        self.model, self.rows, self.in_flight = model, rows, in_flight
        self.kind = f"lean forward, {model.dtype}, index_topk {model.topk}, loss of {score}"
        self.num_layers = model.layers
        self.batch_tokens = tuple(len(row.ids) for row in rows)
        self._places = [SCORES[score](row) for row in rows]
        self._kept: list[list[_Run]] = [[] for _ in rows]
        self._guard = Lock()

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        """See :class:`~sglang_indexcache.lab.search.evaluators.Evaluator`."""
        return np.array([self._loss(pattern, batch) for batch in batches])

    def _loss(self, pattern: Pattern, batch: int) -> float:
        row = self.rows[batch]
        run = _Run(pattern, self._beginning(pattern, batch))
        start = run.states[-1] if run.states else None

        def note(number: int, stream: torch.Tensor, masks: list[torch.Tensor]) -> None:
            if start is None or number > start[0]:
                run.states.append((number, stream, masks))

        stream = self.model.hidden(row.ids, pattern, note=note, start=start)
        with self._guard:
            self._kept[batch] = [run, *self._kept[batch]][:KEPT_RUNS]
        return float(self.model.losses(stream, row.ids, self._places[batch])[0].double().mean())

    def _beginning(self, pattern: Pattern, batch: int) -> list[State]:
        """Return the states of the kept run that goes along with ``pattern`` the farthest."""
        with self._guard:
            runs = self._kept[batch]
            if not runs:
                return []
            nearest = max(runs, key=lambda run: common_layers(run.pattern, pattern))
            self._kept[batch] = [nearest, *(run for run in runs if run is not nearest)]
            return nearest.states[: common_layers(nearest.pattern, pattern) + 1]

    def similarity(self, batch: int) -> Floats:
        """Compare layers' attention outputs under their own lists and under earlier layers'.

        Returns:
            ``[N, N]`` float64, as
            :meth:`sglang_indexcache.lab.search.evaluators.hf.TransformersEvaluator.similarity`.
        """
        model, row = self.model, self.rows[batch]
        turned, lists = model.rotation(len(row.ids)), list[list[torch.Tensor]]()
        matrix, before = np.eye(model.layers), torch.empty(0)

        @torch.no_grad()
        def note(number: int, stream: torch.Tensor, own_list: list[torch.Tensor]) -> None:
            nonlocal before
            if number:  # ``own_list`` is that of the layer before
                layer = number - 1
                inputs = model.project(layer, model.read(before), turned)
                own_output = model.attend(inputs, own_list).float()
                for place, inherited in enumerate(lists):
                    output = model.attend(inputs, inherited).float()
                    alike = torch.cosine_similarity(own_output, output, dim=-1)
                    matrix[layer, place] = float(alike.mean())
                lists.append(own_list)
            before = stream

        model.hidden(row.ids, Pattern.full(model.layers), note=note)
        return matrix

    def kept_mass(self, batch: int) -> Floats:
        """Compare how much of its attention each head finds on its own list and on other layers'.

        Returns:
            ``[N, N]`` float64, as
            :meth:`sglang_indexcache.lab.search.evaluators.hf.TransformersEvaluator.kept_mass`.
        """
        return lost_by_worst_head(self.mass(batch))

    @torch.no_grad()
    def mass(self, batch: int) -> Floats:
        """Return ``[N, N, heads]``: the share of attention on layers' lists, at counted places."""
        model, row = self.model, self.rows[batch]
        lists, reads = list[list[torch.Tensor]](), list[torch.Tensor]()
        model.hidden(
            row.ids,
            Pattern.full(model.layers),
            keep=lambda _number, read: reads.append(read),
            note=lambda _number, _stream, picks: lists.append(picks),
        )
        # There is no list before the first layer.
        return mass_on_lists(model, reads, lists[1:], self._places[batch])

    def overlap(self, batch: int) -> Floats:
        """Return the share of their selections that layers have in common under all F.

        Returns:
            ``[N, N]`` float64, the mean over queries that see more than they select.
        """
        model, ids = self.model, self.rows[batch].ids
        lists = list[list[torch.Tensor]]()
        model.hidden(
            ids,
            Pattern.full(model.layers),
            note=lambda _number, _stream, picks: lists.append(picks),
        )
        total, queries = np.zeros((model.layers, model.layers)), 0
        for blocks in zip(*lists[1:], strict=True):  # there is none before the first layer
            masks = torch.stack(blocks)
            _, count, reach = masks.shape
            choosing = torch.arange(reach - count, reach, device=model.device) >= model.topk
            flat = masks[:, choosing].flatten(1).float()
            total += (flat @ flat.T).double().cpu().numpy() / model.topk
            queries += int(choosing.sum())
        return total / queries


def mass_on_lists(
    model: Lean,
    reads: Sequence[torch.Tensor],
    lists: Sequence[Sequence[torch.Tensor]],
    places: torch.Tensor,
) -> Floats:
    """Measure how much of its attention each head has on lists, over the queries before ``places``.

    Args:
        reads: of each layer what its attention reads, ``[T, hidden]``.
        lists: of each layer one mask a block; or of all layers in one way, then in another.

    Returns:
        ``[N, lists, heads]`` float64, shares; 0 where the list is a later layer's.
    """
    is_asked = torch.zeros(len(reads[0]), dtype=torch.bool)
    is_asked[places - 1] = True
    is_asked = is_asked.to(model.device)
    mass = np.zeros((model.layers, len(lists), model.form.heads))
    turned = model.rotation(len(reads[0]))
    for layer, read in enumerate(reads):
        columns = [column for column in range(len(lists)) if column % model.layers <= layer]
        for number, rows, weights in model.weights(model.project(layer, read, turned)):
            masks = torch.stack([lists[column][number][is_asked[rows]] for column in columns])
            on_lists = torch.einsum("hrs,irs->ih", weights[:, is_asked[rows]], masks.float())
            mass[layer, columns] += on_lists.double().cpu().numpy()
    return mass / int(is_asked.sum())
