"""The configurations that are compared, and a model whose every layer does what one says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_indexcache.fold import IndexRow, largest, places, read_row, select
from sglang_indexcache.pattern import Pattern

PLAIN, SLOPES, LEAST_SQUARES = "plain", "slopes", "least squares"

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

    def work(self, heads: int) -> float:
        """Return the share of all F's dot products that is left, at 128Ki tokens, lists of 2,048.

        For an indexer of so many heads; counted, not timed.
        """
        cost = {"F": 1.0, "S": 0.0, "L": (1 + self.heads) / heads}
        cost["G"] = 1 / heads + self.factor / NOMINAL
        return sum(cost[letter] for letter in self.letters) / len(self.letters)


def arms(layers: int) -> dict[str, Arm]:
    """Every configuration for a model of so many layers, those that the gate asks for first."""

    def every(letters: str) -> str:
        return (letters * layers)[:layers]

    late = str(Pattern.from_layers(layers, {0, *range(1, layers, 4)}))
    found = [
        Arm("full", every("F"), "full"),
        Arm("all L", every("L"), "folding"),
        Arm("all F folded, c = 4", every("G"), "folding", 4),
        Arm("uniform 1/2", every("FS"), "sharing"),
        Arm("uniform 1/4", every("FSSS"), "sharing"),
        Arm("FLLL", every("FLLL"), "folding"),
        Arm("all L, plain", every("L"), "folding", fit=PLAIN),
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
    return {arm.name: arm for arm in found}


def heaviest_exact(row: IndexRow, slopes: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, S, T]``: every query's heads of the largest weights exact, the others folded."""
    heavy = row.weights.abs().topk(heads, -1).indices
    chosen = torch.zeros_like(row.weights).scatter_(-1, heavy, 1.0)
    exact = replace(row, weights=row.weights * chosen).exact()
    rest = replace(row, weights=row.weights * (1 - chosen)).folded(slopes)
    return exact + rest


def picks(row: IndexRow, topk: int, slopes: torch.Tensor, arm: Arm, letter: str) -> torch.Tensor:
    """Select as a layer of this letter, not S, does: ``[B, S, k]`` int32."""
    if letter == "F":
        return select(row, topk, None)
    if letter == "G":
        return select(row, topk, slopes, arm.factor)
    if not arm.heads:
        return select(row, topk, slopes)
    found = []
    for part in row.blocks():
        chosen = largest(heaviest_exact(part, slopes, arm.heads), min(topk, row.keys.shape[1]))
        found.append(places(chosen))
    return torch.cat(found, dim=1)


def indexers(model: Any) -> list[Any]:
    """A transformers model's indexers, by layer."""
    return [module.indexer for module in model.modules() if hasattr(module, "indexer")]


@contextmanager
def replaced(model: Any, forward: Callable[[int, IndexRow], torch.Tensor | None]) -> Iterator[None]:
    """Let ``forward`` answer for every indexer; where it says None, the exact score selects."""

    def stand_in(layer: int, indexer: Any) -> Callable[..., torch.Tensor]:
        @torch.no_grad()
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            row = read_row(indexer, *args, **kwargs)
            answer = forward(layer, row)
            return select(row, indexer.index_topk, None) if answer is None else answer

        return run

    found = indexers(model)
    for layer, indexer in enumerate(found):
        indexer.forward = stand_in(layer, indexer)
    try:
        yield
    finally:
        for indexer in found:
            del indexer.forward


@contextmanager
def under(
    model: Any, arm: Arm, fits: Mapping[str, torch.Tensor], topk: int, boundary: int
) -> Iterator[None]:
    """Run forwards without a cache as ``arm`` says.

    Args:
        fits: the slopes ``[layers, H]`` of every way to fit them.
        boundary: the first token that is decoded.
    """
    decode = arm.decode or arm.letters
    held: dict[str, torch.Tensor] = {}

    def forward(layer: int, row: IndexRow) -> torch.Tensor:
        slopes = fits[arm.fit][layer]
        letters = arm.letters[layer], decode[layer]
        if letters[0] == letters[1]:
            if letters[0] != "S":
                held["all"] = picks(row, topk, slopes, arm, letters[0])
            return held["all"]
        parts = slice(boundary), slice(boundary, None)
        found = []
        for letter, part in zip(letters, parts, strict=True):
            if letter == "S":
                found.append(held["all"][:, part])
            else:
                found.append(picks(row.part(part), topk, slopes, arm, letter))
        return torch.cat(found, dim=1)

    with replaced(model, forward):
        yield
