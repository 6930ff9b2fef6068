"""Two points of a layer, and who is called there in which order."""

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


class Appending(Observer):
    """Appends its number to the lists that it is given, and notes what was selected."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.noted: list[tuple[Any, ...]] = []

    def selected(self, layer: int, batch: Any, lists: Tensor | None, **own: Any) -> None:
        self.noted.append((layer, batch, lists, own))

    def served(self, layer: int, batch: Any, indices: Tensor) -> Tensor:
        return torch.cat([indices, torch.tensor([[self.number]])], dim=1)


def observed(*observers: Observer) -> Observed:
    backend = Observed()
    backend.observers = observers
    return backend


def test_attention_gets_what_the_last_observer_returns() -> None:
    backend = observed(Appending(7), Observer(), Appending(8))
    assert backend.served(3, None, torch.tensor([[1]])).tolist() == [[1, 7, 8]]


def test_every_observer_follows_what_is_selected() -> None:
    first, last = Appending(0), Appending(1)
    observed(first, last).selected(3, "batch", None, own="its list")
    assert first.noted == last.noted == [(3, "batch", None, {"own": "its list"})]


def test_a_backend_without_observers_hands_lists_on() -> None:
    indices = torch.tensor([[1]])
    assert Observed().served(0, None, indices) is indices


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
        backend.served(layer, None, torch.tensor([[1]]))
    assert active.counters.indexer_selections == selections
    assert active.counters.index_reuses == [1 - count for count in selections]
