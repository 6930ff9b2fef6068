"""The package's searches on SmolLM2: their evaluator, by the lean forward.

A batch is one row of the books. Patterns that begin alike are run once up to the layer where they
differ, so the candidates of one greedy step cost about half a forward each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch

from benchmarks.smollm2.books import Row
from benchmarks.smollm2.lean import Lean, State
from sglang_indexcache.lab.search.evaluators import RATINGS, Floats
from sglang_indexcache.lab.search.evaluators.hf import common_layers, lost_by_worst_head
from sglang_indexcache.lab.search.judged import Judged, TokenChanges
from sglang_indexcache.pattern import Pattern

KEPT_RUNS = 3
"""Forwards of a row whose states are kept, those used last."""

SCORES: dict[str, Callable[[Row], torch.Tensor]] = {
    "mixed": lambda row: torch.cat([row.text, row.recall, row.keys]),
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
        self._full: dict[int, list[torch.Tensor]] = {}
        self._guard = Lock()

    def loss(self, pattern: Pattern, batches: Sequence[int]) -> Floats:
        """See :class:`~sglang_indexcache.lab.search.evaluators.Evaluator`."""
        return np.array([self._loss(pattern, batch) for batch in batches])

    def _loss(self, pattern: Pattern, batch: int) -> float:
        row, stream = self.rows[batch], self._stream(pattern, batch)
        return float(self.model.losses(stream, row.ids, self._places[batch])[0].double().mean())

    def _stream(self, pattern: Pattern, batch: int) -> torch.Tensor:
        """Return the output of the last layer, and keep the states that lead to it."""
        run = _Run(pattern, self._beginning(pattern, batch))
        start = run.states[-1] if run.states else None

        def note(number: int, stream: torch.Tensor, masks: list[torch.Tensor]) -> None:
            if start is None or number > start[0]:
                run.states.append((number, stream, masks))

        stream = self.model.hidden(self.rows[batch].ids, pattern, note=note, start=start)
        with self._guard:
            self._kept[batch] = [run, *self._kept[batch]][:KEPT_RUNS]
        return stream

    def judge(self, pattern: Pattern, batches: Sequence[int]) -> list[Judged]:
        """See :class:`~sglang_indexcache.lab.search.evaluators.Evaluator`; of all of a row."""
        return [self._judged(pattern, batch) for batch in batches]

    @torch.no_grad()
    def _judged(self, pattern: Pattern, batch: int) -> Judged:
        row, model = self.rows[batch], self.model
        kinds = row.kinds
        counted = torch.from_numpy(np.flatnonzero(kinds))
        if batch not in self._full:
            self._full[batch] = [*self._predictions(Pattern.full(model.layers), batch, counted)]
        values = np.full((4, len(kinds)), np.nan)
        predictions = self._predictions(pattern, batch, counted)
        for places, full, under in zip(
            counted.split(256), self._full[batch], predictions, strict=True
        ):
            text = row.ids[places + 1].to(under.device)
            part = (
                -under.gather(1, text[:, None])[:, 0],
                (full.exp() * (full - under)).sum(-1),
                under.argmax(-1) == full.argmax(-1),
                under.argmax(-1) == text,
            )
            values[:, places] = torch.stack([each.double() for each in part]).cpu().numpy()
        return Judged.of(TokenChanges(*values), kinds)

    def _predictions(
        self, pattern: Pattern, batch: int, places: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """Yield ``[256, vocabulary]`` log-probabilities of the tokens behind ``places``."""
        for part in self._stream(pattern, batch)[places].split(256):
            yield torch.log_softmax(self.model.logits(part), -1)

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
            ``[1, N, N]`` float64, as
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
        return matrix[None]

    @torch.no_grad()
    def kept_mass(self, batch: int) -> Floats:
        """Compare how much of its attention each head finds on its own list and on other layers'.

        Returns:
            ``[2, N, N]`` float64, as
            :meth:`sglang_indexcache.lab.search.evaluators.hf.TransformersEvaluator.kept_mass`.
        """
        model, row = self.model, self.rows[batch]
        lists, reads = list[list[torch.Tensor]](), list[torch.Tensor]()
        model.hidden(
            row.ids,
            Pattern.full(model.layers),
            keep=lambda _number, read: reads.append(read),
            note=lambda _number, _stream, picks: lists.append(picks),
        )
        # There is no list before the first layer.
        return rated_lists(model, reads, lists[1:], self._places[batch] - 1)

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


def rated_lists(
    model: Lean,
    reads: Sequence[torch.Tensor],
    lists: Sequence[Sequence[torch.Tensor]],
    queries: torch.Tensor,
) -> Floats:
    """Rate every layer's list for every later layer, by attention at ``queries``.

    Args:
        reads: of each layer what its attention reads, ``[T, hidden]``.
        lists: of each layer one mask a block.
    """
    is_asked = torch.zeros(len(reads[0]), dtype=torch.bool)
    is_asked[queries] = True
    is_asked = is_asked.to(model.device)
    matrices = np.eye(model.layers)[None].repeat(RATINGS, axis=0)
    turned = model.rotation(len(reads[0]))
    for layer, read in enumerate(reads):
        mass = []
        for number, rows, weights in model.weights(model.project(layer, read, turned)):
            masks = torch.stack([one[number][is_asked[rows]] for one in lists[: layer + 1]])
            on_lists = torch.einsum("hrs,irs->ihr", weights[:, is_asked[rows]], masks.float())
            mass.append(on_lists.cpu().numpy())
        matrices[:, layer, :layer] = lost_by_worst_head(np.concatenate(mass, axis=2))[:, :layer]
    return matrices
