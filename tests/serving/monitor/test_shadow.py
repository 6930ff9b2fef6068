"""The shadow against sets in plain Python: which rows, how much they see, what lists hold."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_indexcache.errors import SettingsError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.monitor import shadow
from sglang_indexcache.serving.monitor.shadow import ROWS, Part, Shadow, draw
from sglang_indexcache.serving.monitor.traffic import Served
from sglang_indexcache.serving.preflight.options import SHADOW, Choice
from sglang_indexcache.serving.preflight.resolve import _shadow
from tests.serving.plans import plan

TOPK = 8
A, B = Pattern("FSSS"), Pattern("FFSS")


def shadow_of(text: str = "FSSS", mode: Any = "live", one_in: int = 1) -> Shadow:
    return Shadow(plan(text, mode=mode, shadow=one_in))


# -- which rows --------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(1, 30), st.integers(0, 20)), max_size=4
)


@given(requests=requests, seed=st.integers(0, 99))
def test_rows_that_select_are_drawn_each_once(
    requests: list[tuple[Pattern, int, int]], seed: int
) -> None:
    """``requests``: pattern, rows and the tokens before them."""
    rows_served: list[Served] = [
        (pattern, rows, rows + before) for pattern, rows, before in requests
    ]
    may: dict[int, tuple[int, int]] = {}  # row of the forward: request and what it sees
    row = 0
    for number, (pattern, rows, before) in enumerate(requests):
        for place in range(rows):
            if pattern == A and before + place + 1 > TOPK:
                may[row] = (number, before + place + 1)
            row += 1
    parts = list(draw(rows_served, (A,), TOPK, random.Random(seed)))
    sampled = [
        (row, (part.request, sees))
        for part in parts
        for row, sees in zip(part.rows, part.sees, strict=True)
    ]
    assert len(sampled) == len(dict(sampled)) == min(ROWS, len(may))
    assert dict(sampled).items() <= may.items()
    assert sum(part.weight * len(part.rows) for part in parts) == pytest.approx(len(may))
    assert all(part.pattern == A for part in parts)


def test_every_row_is_drawn_as_often() -> None:
    lots, counts = random.Random(1), Counter[int]()
    for _ in range(2000):
        for part in draw([(A, 20, 20), (A, 1, 90), (A, 39, 50)], (A,), TOPK, lots):
            counts.update(part.rows)
    assert set(counts) == {*range(8, 20), 20, *range(21, 60)}
    expected = 2000 * ROWS / len(counts)
    assert all(abs(count - expected) < 5 * math.sqrt(expected) for count in counts.values())


def test_one_forward_in_so_many() -> None:
    rare, off = shadow_of(one_in=10), shadow_of(one_in=0)
    samples = 0
    for _ in range(3000):
        for drawing in (rare, off):
            drawing.begin([(A, 1, 20)], (A,), TOPK)
        samples += bool(rare.parts)
        assert not off.parts
    assert abs(samples - 300) < 5 * math.sqrt(300)


def test_the_flag() -> None:
    def one_in(value: str) -> int:
        return _shadow({SHADOW: Choice(value, SHADOW.flag)})

    assert (one_in("on"), one_in("7"), _shadow({})) == (1000, 7, 0)
    for wrong in ("0", "off", "-3", "1/1000", ""):
        with pytest.raises(SettingsError, match="give the number of forwards"):
            one_in(wrong)


# -- what is compared --------------------------------------------------------------------------

LENGTH, HEADS, WIDTH = 40, 16, 16


class Scene:
    """A forward of two requests, the second at slots of its own; keys and queries are random."""

    def __init__(self, pattern: Pattern, mode: str = "live") -> None:
        torch.manual_seed(0)
        self.served: list[Served] = [(pattern, 6, 12), (pattern, LENGTH - 5, LENGTH)]
        count = sum(rows for _, rows, _ in self.served)
        self.sees = [*range(7, 13), *range(6, LENGTH + 1)]
        self.owner = [0] * 6 + [1] * (LENGTH - 5)
        self.slots = torch.stack([torch.randperm(100)[:LENGTH] for _ in range(2)])
        self.keys = torch.randn(2, LENGTH, WIDTH)
        self.queries = torch.randn(count, HEADS, WIDTH)
        self.weights = torch.randn(count, HEADS)
        self.lists = self.some_lists()
        self.shadow = shadow_of(str(pattern), mode)
        self.shadow.begin(self.served, (pattern,), TOPK)
        self.rows = [row for part in self.shadow.parts for row in part.rows]
        assert {self.owner[row] for row in self.rows} == {0, 1}

    def some_lists(self) -> torch.Tensor:
        """Return ``[T, k]`` slots of tokens that each row sees, in no order, one entry twice."""
        lists = torch.full((len(self.sees), TOPK), -1, dtype=torch.int32)
        for row, sees in enumerate(self.sees):
            picks = torch.randperm(sees)[: TOPK - 1]
            lists[row, : len(picks)] = self.slots[self.owner[row], picks]
            lists[row, -1] = lists[row, 0]
        return lists

    def look(self, layer: int, **keywords: Any) -> None:
        self.shadow.look(
            layer, self.lists, lambda part: self.slots[part.request, : max(part.sees)], **keywords
        )

    def live(self, layer: int) -> None:
        def keys(part: Part, start: int, stop: int) -> torch.Tensor:
            return self.keys[part.request, start:stop]

        self.look(layer, queries=lambda rows: (self.queries[rows], self.weights[rows]), keys=keys)

    def tokens(self, lists: torch.Tensor, row: int) -> set[int]:
        """Positions, looked up one by one."""
        place = {int(slot): n for n, slot in enumerate(self.slots[self.owner[row]])}
        return {place[int(slot)] for slot in lists[row] if slot >= 0}

    def expected(self, row: int, own_lists: torch.Tensor | None = None) -> list[float]:
        """The sums of one row, by sets and torch.topk: so many heads give no equal scores."""
        sees, shared = self.sees[row], self.tokens(self.lists, row)
        recall = 0.0
        if own_lists is not None:
            selection = self.tokens(own_lists, row)
        else:
            dots = self.queries[row] @ self.keys[self.owner[row], :sees].T
            scores = (self.weights[row][:, None] * dots.relu()).sum(0)
            selection, mass = set(scores.topk(TOPK).indices.tolist()), scores.softmax(0)
            recall = float(
                sum(mass[n] for n in selection & shared) / sum(mass[n] for n in selection)
            )
        # Of tokens drawn blindly each is chosen as likely as any other that the row sees.
        return [1.0, len(shared & selection) / len(selection), len(shared) / sees, recall]

    def check(self, layer: int, own_lists: torch.Tensor | None = None) -> None:
        rows = [self.expected(row, own_lists) for row in self.rows]
        sums, totals = self.shadow.read()
        assert sums == totals
        stands_for = sum(sees > TOPK for sees in self.sees) / len(rows)
        total = [stands_for * sum(column) for column in zip(*rows, strict=True)]
        assert sums[layer] == pytest.approx(total)
        elsewhere = [sums[n] for n in range(len(sums)) if n != layer]
        assert not any(value for sums_there in elsewhere for value in sums_there)


@pytest.mark.parametrize("block", [7, 8192])
def test_an_inherited_list_beside_the_layers_own_selection(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow, "_KEY_BLOCK", block)
    scene = Scene(A)
    scene.live(0)  # F: its list is its own
    assert scene.shadow.read() == ([], [])
    scene.live(2)
    scene.check(2)


def test_static_mode_holds_f_layers_against_the_one_before() -> None:
    scene = Scene(Pattern("FSFS"), "static")
    own_lists = scene.some_lists()
    for layer in (1, 2):  # of which the first is S and has no list of its own
        scene.look(layer, own=own_lists)
    scene.check(2, own_lists)


def test_equal_scores_go_to_the_first() -> None:
    scores = torch.tensor([[0.0, 2.0, 0.0, 0.0, 9.0]])
    mask = shadow.best(scores, torch.tensor([4]), 3)
    assert mask.tolist() == [[True, True, True, False, False]]


# -- what becomes of it ------------------------------------------------------------------------


def test_another_pattern_begins_anew_and_nothing_is_lost() -> None:
    scene = Scene(A)
    scene.live(2)
    before = scene.shadow.read()[0]
    scene.shadow.begin(scene.served, (B,), TOPK)
    assert scene.shadow.parts == ()  # these requests name another pattern than the server's
    sums, totals = scene.shadow.read()
    assert not any(value for layer in sums for value in layer)
    assert totals == before


def test_nobody_reads_what_is_not_looked_at() -> None:
    scene = Scene(A)
    scene.shadow.skip()
    scene.live(2)
    few = Scene(A)  # ranks that share a prompt's rows have fewer lists than rows
    few.lists = few.lists[:-1]
    few.live(2)
    for quiet in (scene, few):
        assert quiet.shadow.read() == ([], [])
        assert quiet.shadow.forwards == 0


def test_a_failure_ends_the_shadow_alone(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(A)
    scene.keys = scene.keys[..., :3]  # another width than the queries'
    scene.live(2)
    assert "--indexcache-shadow stops here" in caplog.text
    assert (scene.shadow.one_in, scene.shadow.parts) == (0, ())
    scene.shadow.begin(scene.served, (A,), TOPK)
    assert not scene.shadow.parts
