"""Several decode graphs of one batch size: a captured graph replays the pattern it was made with.

SGLang can hold more than one graph of a batch size, and then asks before each replay which one the
batch wants (``attention/graph_variants.py``). Ours, by label:

``dense``
    Every request has at most index_topk tokens, so whatever selects, selects everything. The first
    layer lists all tokens; the others share the list and at most store their keys. Exact.
``sparse``
    Static mode: the server's pattern, right for every batch.
a pattern
    Live mode: the batch's only pattern, declared at the start.
``mixed``
    Live mode, every other batch: all indexers run, and each row takes from a layer what its own
    pattern says. Who takes what stands in a buffer that is written before each replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.graph_variants import DSA_DENSE, DSA_SPARSE

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.hooks import around
from sglang_indexcache.serving.monitor.traffic import Served, served_in
from sglang_indexcache.serving.plan import SHORT
from sglang_indexcache.serving.rows import (
    RowPatterns,
    full_layers,
    patterns_of_requests,
    to_device,
)

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

MIXED = "mixed"


class GraphVariants:
    """Choice of the decode graphs that are captured, and of the one that a batch replays.

    Args:
        starts: the pattern positions at which pipeline stages start.
    """

    def __init__(self, active: ActivePattern, starts: Sequence[int], index_topk: int) -> None:
        plan = active.plan
        self._active = active
        self._index_topk = index_topk
        self._is_live = plan.mode == "live"
        # A later stage of static mode gets its list from the one before, unless it starts on F.
        always = {at for at in starts if self._is_live or plan.pattern.is_full(at)}
        self._fewest = Pattern.from_layers(len(plan.pattern), {0} | always)
        self._declared = {str(pattern): pattern for pattern in plan.graph_patterns}
        self.served: Sequence[Served] = ()
        """The requests of the batch for which a graph was last selected."""
        self.label = ""
        """The graph that was last selected."""
        self._masks: torch.Tensor | None = None
        labels = [DSA_DENSE] if SHORT in plan.graphs else []
        labels += [*self._declared, MIXED] if self._is_live else [DSA_SPARSE]
        # For each batch size in this order; the one that needs the most memory comes last.
        self.capture_labels = tuple(labels)

    def select(self, forward_batch: ForwardBatch) -> str:
        """Return the label of the graph that ``forward_batch`` replays.

        SGLang asks just before the replay, on the replay's stream, so this is also where a mixed
        batch's masks are written. Without padding it asks once more, and may then not replay.

        Raises:
            StaleIndexError: live mode, and the batch's requests came without their patterns.
        """
        patterns = patterns_of_requests(forward_batch) if self._is_live else []
        self.served = served_in(forward_batch, patterns, self._active.pattern)
        self.label = self._label(forward_batch, patterns)
        if self.label == MIXED:
            self._write_masks(patterns)
        return self.label

    def _label(self, forward_batch: ForwardBatch, patterns: Sequence[Pattern]) -> str:
        if DSA_DENSE in self.capture_labels and self._is_short(forward_batch):
            return DSA_DENSE
        if not self._is_live:
            return DSA_SPARSE
        if len(set(patterns)) == 1 and str(patterns[0]) in self._declared:
            return str(patterns[0])
        return MIXED

    def rows(self, label: str, count: int, device: torch.device) -> RowPatterns:
        """Return the patterns that a forward obeys while the graph ``label`` is captured.

        The graph of the most rows is captured first.
        """
        if label == DSA_DENSE:
            return RowPatterns((self._fewest,))
        if label == MIXED:
            if self._masks is None:
                shape = (len(self._fewest), count)
                self._masks = torch.ones(shape, dtype=torch.bool, device=device)
            # To the index buffer a mix of two extremes: each layer is F for some row, while another
            # still shares what the last layer left that is F for all.
            extremes = (Pattern.full(len(self._fewest)), self._fewest)
            return RowPatterns(extremes, self._masks[:, :count])
        return RowPatterns((self._declared.get(label, self._active.plan.pattern),))

    def _is_short(self, forward_batch: ForwardBatch) -> bool:
        """Return whether no request is longer than k; its token of this step is counted already."""
        lengths = forward_batch.seq_lens_cpu  # kept on the host, so nothing waits for the GPU
        return (
            lengths is not None and lengths.numel() > 0 and int(lengths.max()) <= self._index_topk
        )

    def _write_masks(self, patterns: Sequence[Pattern]) -> None:
        """Write each row's pattern; rows behind the requests are padding that nobody reads."""
        if self._masks is None or not patterns:
            return
        masks = torch.stack([full_layers(pattern) for pattern in patterns], dim=1)
        self._masks[:, : len(patterns)].copy_(to_device(masks, self._masks.device))


def install(variants: GraphVariants) -> None:
    """Let the runner of this process's decode graphs capture and ask ``variants``."""
    around(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.create_attention_graph_variants",
        lambda _original, _hf_config: variants,
    )
