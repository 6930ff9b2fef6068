"""The study of folding: its configurations, its least squares, and its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.fold.arms import PLAIN, SLOPES, Arm, arms, heaviest_exact, under
from benchmarks.fold.fits import TextSums, least_squares_from
from benchmarks.fold.missed import missed, rounded
from benchmarks.fold.report import paired
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.fold import SlopeSums
from tests.test_fold import brute_scores, random_row


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(shipped_checkpoint(), dtype=torch.float32).eval()


def loss(model: Any, arm: Arm, ids: torch.Tensor, boundary: int) -> torch.Tensor:
    heads = torch.ones(12, 4)
    with under(model, arm, {PLAIN: heads, SLOPES: heads}, 16, boundary), torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


IDS = torch.randint(10, 1000, (90,), generator=torch.Generator().manual_seed(0))


def test_all_folded_with_enough_candidates_is_all_full(model: Any) -> None:
    full = loss(model, Arm("", "F" * 12, "full"), IDS, 80)
    folded = loss(model, Arm("", "G" * 12, "folding", factor=6), IDS, 80)
    torch.testing.assert_close(full, folded, rtol=0, atol=0)
    alone = loss(model, Arm("", "L" * 12, "folding"), IDS, 80)
    assert not torch.allclose(full, alone, atol=1e-3)


def test_letters_of_decode_change_nothing_before_it(model: Any) -> None:
    prefill = loss(model, Arm("", "FLLL" * 3, "folding"), IDS, 80)
    both = loss(model, Arm("", "FLLL" * 3, "both", decode="FSSS" * 3), IDS, 80)
    torch.testing.assert_close(prefill[:80], both[:80], rtol=0, atol=1e-5)
    assert not torch.allclose(prefill[80:], both[80:], atol=1e-3)


def test_nothing_is_missed_by_the_exact_score_and_chance_is_by_a_blind_one(model: Any) -> None:
    ways = {
        "exact": lambda row, _: row.exact(),
        "blind": lambda row, _: row.visible.flip(-1).float().masked_fill(~row.visible, -torch.inf),
    }
    found = missed(model, IDS[None], slice(80, None), 8, ways)
    assert all(share == 0 for layer in found["exact"] for share in layer.values())
    assert min(layer["1"] for layer in found["blind"]) > 0.5


def test_all_heads_exact_is_the_exact_score() -> None:
    row = random_row((1, 6, 9, 4, 3), seed=1)
    found = heaviest_exact(row, torch.rand(4), 4).double()
    torch.testing.assert_close(found, brute_scores(row, None), rtol=1e-4, atol=1e-4)


def test_least_squares_find_slopes_that_made_the_scores() -> None:
    draw = torch.Generator().manual_seed(2)
    heads, made = torch.randn(5, 400, generator=draw).double(), torch.rand(5, generator=draw)
    sums = TextSums([SlopeSums(5)], [heads @ heads.T], [heads @ (made.double() @ heads)])
    torch.testing.assert_close(least_squares_from([sums])[0], made, rtol=0, atol=5e-3)


def test_e4m3_keeps_three_bits_and_the_largest() -> None:
    x = torch.tensor([[1.0, -448.0, 17.0]])
    assert rounded(x).tolist() == [[1.0, -448.0, 16.0]]


def test_rows_are_paired() -> None:
    lines = [
        {"arm": arm, "row": row, "text loss": value + row}
        for arm, value in (("full", 1.0), ("all L", 1.5))
        for row in range(5)
    ]
    found = paired(
        [*lines, {"arm": "all L", "row": 9, "text loss": 99.0}], "all L", "full", "text loss"
    )
    assert found is not None
    assert (found["mean"], found["rows"]) == (0.5, 5)
    assert found["half_width"] == pytest.approx(0, abs=1e-12)
    assert paired(lines, "all L", "LS", "text loss") is None


def test_work_counts_dot_products() -> None:
    made = arms(12)
    work = {name: arm.work(32) for name, arm in made.items()}
    assert work["full"] == 1
    assert work["uniform 1/2"] == 0.5
    assert work["all L"] == pytest.approx(1 / 32)
    assert work["all F folded, c = 4"] == pytest.approx(1 / 32 + 1 / 16)
    assert {len(arm.letters) for arm in made.values()} == {12}
    assert made["F at 0, 1, 5, 9, ..."].letters == "FFSSSFSSSFSS"
