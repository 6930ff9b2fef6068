"""The appendix's similarity search in small, beside interleaved patterns and those of the library.

    python -m benchmarks.paper.similarity --quick
    python -m benchmarks.paper.similarity

F layers are those whose attention outputs resemble most what the S layers would have had (appendix
"Similarity-based Pattern Search"). Such patterns stand beside interleaved ones and the library's,
which were searched by their loss. Writes similarity.json and .md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.paper import SMALL
from benchmarks.paper.table_2 import QUICK, lines, options, write
from benchmarks.records import read_arguments
from sglang_indexcache.errors import SearchError
from sglang_indexcache.hf import SharedForward, share
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.evaluators import Floats
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator, hold
from sglang_indexcache.search.rules import Constraints, parse_targets
from sglang_indexcache.search.setup import Setup

RATIOS = ["1/2", "1/4"]


class Similarity(TransformersEvaluator):
    """Compares what layers put out with their own indices and with other layers'."""

    def matrix(self, batches: Sequence[int]) -> Floats:
        """The matrix of the paper's appendix "Similarity-based Pattern Search".

        Returns:
            ``[N, N]`` float64; entry (i, j), j < i, is the mean cosine similarity between layer
            i's core attention output (before the output projection) with its own indices and with
            layer j's, over all queries. 1 on the diagonal, 0 above it.
        """
        total = np.eye(self.num_layers)
        queries = 0
        for batch in batches:
            for ids in self.calibration.batches[batch]:
                total += np.tril(self._of(ids), -1) * len(ids)
                queries += len(ids)
        return np.tril(total, -1) / queries + np.eye(self.num_layers)

    def _of(self, ids: tuple[int, ...]) -> Floats:
        run = self.run(self.own, ids)
        self._learn_arguments(len(ids))
        found = np.eye(self.num_layers)
        barred = Pattern.from_layers(self.num_layers, [0])  # no later layer selects by itself
        with torch.no_grad(), share(self._model, barred) as sharing:
            for layer in range(1, self.num_layers):
                outputs = []
                for j in range(layer + 1):
                    hold(sharing, 0, run.indices[j])
                    outputs.append(self._core_output(layer, run.hidden[layer], sharing))
                own = outputs.pop()
                for j, other in enumerate(outputs):
                    found[layer, j] = float(torch.cosine_similarity(own, other, dim=-1).mean())
        return found

    def _core_output(
        self, number: int, hidden: torch.Tensor, sharing: SharedForward
    ) -> torch.Tensor:
        """``[length, heads * v_head_dim]`` of layer ``number`` over held indices, in float32."""
        seen: list[torch.Tensor] = []
        layer = self._layers[number]
        handle = layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _module, args: seen.append(args[0][0].float())
        )
        try:
            self._layer(number, hidden, sharing)
        finally:
            handle.remove()
        return seen[0]


def most_similar(similarity: Floats, full_layers: int, constraints: Constraints) -> Pattern:
    """The pattern with the largest total similarity, exactly, by the appendix's recurrence.

    ``dp[i][k] = max_{j<i} dp[j][k-1] + sum_{m=j+1}^{i-1} S[m, j]``; the sum over the last group is
    the same with i one past the last layer.

    Args:
        similarity: ``[N, N]``; entry (i, j), j < i, is the similarity of layer i's attention
            output with its own indices and with layer j's.
        full_layers: M, the number of F layers.
        constraints: fixed layers are F, layers that are S in its start pattern stay S.

    Raises:
        SearchError: no pattern with M F layers satisfies the constraints.
    """
    count = len(constraints.start)
    if similarity.shape != (count, count):
        raise SearchError(f"the similarity matrix is {similarity.shape}, the model has {count}")
    allowed = [constraints.start.is_full(layer) for layer in range(count)]
    group = _group_values(similarity, constraints.fixed)
    best = np.full((count + 1, full_layers + 1), -np.inf)
    source = np.zeros((count + 1, full_layers + 1), dtype=np.int64)
    best[0, 1] = 0.0
    for kept in range(2, full_layers + 2):
        for layer in range(1, count + 1):
            at_end = layer == count
            if at_end != (kept == full_layers + 1) or (not at_end and not allowed[layer]):
                continue
            totals = best[:layer, kept - 1] + group[:layer, layer]
            source[layer, kept - at_end] = chosen = int(totals.argmax())
            best[layer, kept - at_end] = totals[chosen]
    if not np.isfinite(best[count, full_layers]):
        raise SearchError(f"no pattern with {full_layers} F layers satisfies the constraints")
    layers = [int(source[count, full_layers])]
    for kept in range(full_layers, 1, -1):
        layers.append(int(source[layers[-1], kept]))
    return constraints.keeping(layers)


def _group_values(similarity: Floats, fixed: frozenset[int]) -> Floats:
    """``[N, N+1]``: similarity gained where F layer j serves j+1..i-1; -inf if that is barred."""
    count = len(similarity)
    values = np.full((count, count + 1), -np.inf)
    for source in range(count):
        total = 0.0
        for end in range(source + 1, count + 1):
            values[source, end] = total
            if end in fixed:
                break
            if end < count:
                total += float(similarity[end, source])
    return values


def main(argv: list[str] | None = None) -> None:
    """Search, score and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=16, help="documents to search on")
    options(parser)
    arguments = read_arguments(parser, "similarity", argv, {**QUICK, "batches": 4})
    setup = Setup.read(SMALL, batches=arguments.batches)
    rules = Constraints.make(setup.checkpoint.own)
    matrix = Similarity(SMALL, setup.calibration).matrix(range(arguments.batches))
    similar = {
        mark.label: str(most_similar(matrix, mark.full_layers, rules))
        for mark in parse_targets(RATIOS, rules).marks
    }
    patterns = ["full"]
    for ratio in RATIOS:
        patterns += [f"uniform:{ratio}", similar[ratio], ratio]
    found = lines(SMALL, patterns, arguments.rows, arguments.length, arguments.text_characters)
    for line in found:
        for ratio, pattern in similar.items():
            if line["name"] == pattern:
                line["name"] = f"{ratio} by similarity, {pattern}"
    write(found, arguments, "the appendix's similarity search in small")


if __name__ == "__main__":
    main()
