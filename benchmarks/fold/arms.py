"""The configurations that are compared, and what their layers select."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from sglang_indexcache.fold import IndexRow, largest
from sglang_indexcache.pattern import Pattern

PLAIN, SLOPES, LEAST_SQUARES = "plain", "slopes", "least squares"
ALL_SLOPES, SECANTS = "slopes over all tokens", "secants"
"""Ways to fit the slopes: see ``fits``. SLOPES looks at the best tokens only."""

NOMINAL = 128 * 1024 / 2048
"""Tokens seen for each that is selected, at 128Ki tokens with the lists of released models."""


@dataclass(frozen=True)
class Arm:
    """One configuration.

    Attributes:
        name: in tables.
        letters: one for each layer: F exact, L folded alone, G folded with candidates that the
            exact score ranks again, S what the nearest layer before selected.
        kind: "full", "sharing", "folding" or "both", for the figure.
        factor: of G layers, how many times as many candidates.
        fit: where the slopes come from.
        heads: this many of a query's heaviest heads are exact beside the folded rest of L layers.
        decode: the letters of the tokens from the passage on, if they differ.
    """

    name: str
    letters: str
    kind: str
    factor: int = 1
    fit: str = SLOPES
    heads: int = 0
    decode: str = ""

    @property
    def folds(self) -> bool:
        """Whether any layer does, so that slopes are needed."""
        return bool({"L", "G"} & set(self.letters))

    def work(self, heads: int) -> float:
        """Return the share of all F's dot products that is left, at 128Ki tokens, lists of 2,048.

        For an indexer of so many heads; counted, not timed.
        """
        cost = {"F": 1.0, "S": 0.0, "L": (1 + self.heads) / heads}
        cost["G"] = 1 / heads + self.factor / NOMINAL
        return sum(cost[letter] for letter in self.letters) / len(self.letters)


def arms(layers: int) -> dict[str, Arm]:
    """Return every configuration for a model of so many layers, the gate's own first."""

    def every(letters: str) -> str:
        return (letters * layers)[:layers]

    late = str(Pattern.from_layers(layers, {0, *range(1, layers, 4)}))
    arms_of_study = [
        Arm("full", every("F"), "full"),
        Arm("all L", every("L"), "folding"),
        Arm("all F folded, c = 4", every("G"), "folding", 4),
        Arm("uniform 1/2", every("FS"), "sharing"),
        Arm("uniform 1/4", every("FSSS"), "sharing"),
        Arm("FLLL", every("FLLL"), "folding"),
        Arm("all L, plain", every("L"), "folding", fit=PLAIN),
        Arm("FLLL, plain", every("FLLL"), "folding", fit=PLAIN),
        Arm("all F folded, c = 4, plain", every("G"), "folding", 4, fit=PLAIN),
        Arm("LSSS, plain", every("LSSS"), "both", fit=PLAIN),
        Arm("all L, secants", every("L"), "folding", fit=SECANTS),
        Arm("all L, slopes over all tokens", every("L"), "folding", fit=ALL_SLOPES),
        Arm("F at 0, 1, 5, 9, ...", late, "sharing"),
        Arm("FLLL in prefill, FSSS in decode", every("FLLL"), "both", decode=every("FSSS")),
        Arm("LSSS", every("LSSS"), "both"),
        Arm("all F folded, c = 2", every("G"), "folding", 2),
        Arm("all L, one head exact", every("L"), "folding", heads=1),
        Arm("all L, least squares", every("L"), "folding", fit=LEAST_SQUARES),
        Arm("LS", every("LS"), "both"),
        Arm("uniform 1/4, F folded, c = 4", every("GSSS"), "both", 4),
        Arm("all L, two heads exact", every("L"), "folding", heads=2),
        Arm("all F folded, c = 8", every("G"), "folding", 8),
    ]
    return {arm.name: arm for arm in arms_of_study}


def heaviest_exact(row: IndexRow, slopes: torch.Tensor, heads: int) -> torch.Tensor:
    """Return ``[B, S, T]``: every query's heads of the largest weights exact, the others folded."""
    if not heads:
        return row.folded(slopes)
    heavy = row.weights.abs().topk(heads, -1).indices
    chosen = torch.zeros_like(row.weights).scatter_(-1, heavy, 1.0)
    exact = replace(row, weights=row.weights * chosen).exact()
    rest = replace(row, weights=row.weights * (1 - chosen)).folded(slopes)
    return exact + rest


def marked(row: IndexRow, topk: int, slopes: torch.Tensor, arm: Arm, letter: str) -> torch.Tensor:
    """Mark what a layer of this letter, not S, selects: ``[B, S, T]`` bool.

    Where a query sees fewer tokens than ``topk``, tokens that it does not see are marked too.
    """
    length = row.keys.shape[1]
    count = min(topk, length)
    if letter == "L":
        return largest(heaviest_exact(row, slopes, arm.heads), count)
    exact = row.exact()
    if letter == "G" and arm.factor * topk < length:
        candidates = largest(row.folded(slopes), arm.factor * topk)
        exact.masked_fill_(~candidates, -torch.inf)
    return largest(exact, count)


Blocks = Callable[[], Iterable[IndexRow]]
"""A layer's queries, some at a time, computed when they are asked for."""
Select = Callable[[int, Blocks], list[torch.Tensor]]
"""Return what a layer selects: a mask a block."""


def selecting(arm: Arm, slopes: torch.Tensor, topk: int, boundary: int) -> Select:
    """Select as ``arm`` says in one forward without a cache.

    Args:
        slopes: ``[layers, H]``.
        boundary: the first token that is decoded.
    """
    decode = arm.decode or arm.letters
    held: list[torch.Tensor] = []

    def select(layer: int, blocks: Blocks) -> list[torch.Tensor]:
        letters = arm.letters[layer], decode[layer]
        if letters == ("S", "S"):
            return held
        masks, start = [], 0
        for number, block in enumerate(blocks()):
            stop = start + block.queries.shape[1]
            cut = min(max(boundary, start), stop) - start
            parts = []
            for letter, rows in zip(letters, (slice(cut), slice(cut, None)), strict=True):
                if letter == "S":
                    parts.append(held[number][:, rows])
                elif (part := block.part(rows)).queries.shape[1]:
                    parts.append(marked(part, topk, slopes[layer], arm, letter))
            masks.append(torch.cat(parts, dim=1))
            start = stop
        held[:] = masks
        return masks

    return select
