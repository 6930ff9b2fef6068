"""Two points of a layer at which observers are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.monitor.observer import Counting, Observed, Observer
from sglang_indexcache.serving.rows import RowPatterns
from tests.serving.plans import plan


class Noting(Observer):
    """An observer that notes all it is told."""

    def __init__(self) -> None:
        self.noted: list[tuple[Any, ...]] = []

    def selected(self, layer: int, batch: Any, lists: Tensor | None, **evidence: Any) -> None:
        self.noted.append((layer, batch, lists, evidence))

    def served(self, layer: int) -> None:
        self.noted.append((layer,))


def observed(*observers: Observer) -> Observed:
    backend = Observed()
    backend.observers = observers
    return backend


def test_every_observer_follows_what_is_selected_and_what_is_served() -> None:
    first, last = Noting(), Noting()
    backend = observed(first, Observer(), last)
    backend.selected(3, "batch", None, own="its list")
    backend.served(3)
    assert first.noted == last.noted == [(3, "batch", None, {"own": "its list"}), (3,)]


@pytest.mark.parametrize(
    ("patterns", "selections"), [(["FSSF"], [1, 0, 0, 1]), (["FSSF", "FFSS"], [1, 1, 0, 1])]
)
def test_a_layer_counts_as_selecting_where_it_is_full_for_some_row(
    patterns: list[str], selections: list[int]
) -> None:
    active = ActivePattern(plan("FSSF", mode="live"))
    buffer = IndexBuffer(active)
    buffer.begin(RowPatterns.of([Pattern(text) for text in patterns], [1, 1], torch.empty(2)))
    backend = observed(Counting(active, buffer))
    for layer in range(4):
        backend.served(layer)
    assert active.counters.indexer_selections == selections
    assert active.counters.index_reuses == [1 - count for count in selections]
