"""The study of folding: its configurations, its least squares, and its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.fold.arms import ALL_SLOPES, SECANTS, Arm, arms, heaviest_exact, selecting
from benchmarks.fold.fits import FITS, all_slopes
from benchmarks.fold.missed import missed, rounded
from benchmarks.fold.models import InTransformers
from benchmarks.fold.report import paired
from sglang_indexcache.demo import shipped_checkpoint
from sglang_indexcache.fold import IndexRow
from tests.test_fold import brute_scores, brute_slopes, random_row


@pytest.fixture(scope="module")
def model() -> InTransformers:
    return InTransformers(shipped_checkpoint())


IDS = torch.randint(10, 1000, (90,), generator=torch.Generator().manual_seed(0))


def states(model: Any, arm: Arm, ids: torch.Tensor, boundary: int) -> torch.Tensor:
    slopes = torch.ones(model.layers, model.heads)
    return model.states(ids, selecting(arm, slopes, 16, boundary))


def test_all_folded_with_enough_candidates_is_all_full(model: InTransformers) -> None:
    full = states(model, Arm("", "F" * 12, "full"), IDS, 80)
    folded = states(model, Arm("", "G" * 12, "folding", factor=6), IDS, 80)
    torch.testing.assert_close(full, folded, rtol=0, atol=0)
    alone = states(model, Arm("", "L" * 12, "folding"), IDS, 80)
    assert not torch.allclose(full, alone, atol=1e-3)


def test_letters_of_decode_change_nothing_before_it(model: InTransformers) -> None:
    prefill = states(model, Arm("", "FLLL" * 3, "folding"), IDS, 80)
    with_decode = states(model, Arm("", "FLLL" * 3, "both", decode="FSSS" * 3), IDS, 80)
    torch.testing.assert_close(prefill[:80], with_decode[:80], rtol=0, atol=1e-5)
    assert not torch.allclose(prefill[80:], with_decode[80:], atol=1e-3)


def test_nothing_is_missed_by_the_exact_score_and_chance_is_by_a_blind_one(
    model: InTransformers,
) -> None:
    ways = {
        "exact": lambda row, _: row.exact(),
        "blind": lambda row, _: row.visible.flip(-1).float().masked_fill(~row.visible, -torch.inf),
    }
    rows = model.inputs(IDS, 8, slice(80, None))
    shares = [missed(row, layer, 8, ways) for layer, row in enumerate(rows)]
    assert all(share == 0 for layer in shares for share in layer["exact"].values())
    assert min(layer["blind"]["1"] for layer in shares) > 0.5


def test_all_heads_exact_is_the_exact_score() -> None:
    row = random_row((1, 6, 9, 4, 3), seed=1)
    scores = heaviest_exact(row, torch.rand(4), 4).double()
    torch.testing.assert_close(scores, brute_scores(row, None), rtol=1e-4, atol=1e-4)


def always_positive(seed: int) -> tuple[IndexRow, torch.Tensor]:
    """A row of which ReLU passes some heads and stops the others, and the slopes that say so."""
    row = random_row((1, 40, 60, 4, 8), seed)
    row.keys.abs_(), row.queries.abs_()
    row.queries[:, :, 2:] *= -1
    return row, torch.tensor([1.0, 1.0, 0.0, 0.0])


@pytest.mark.parametrize("fit", FITS)
def test_every_fit_finds_slopes_that_make_the_score(fit: str) -> None:
    rows, slopes = zip(*(always_positive(seed) for seed in (2, 3)), strict=True)
    torch.testing.assert_close(FITS[fit](rows, 4), slopes[0], rtol=0, atol=2e-2)


def test_slopes_are_the_packages_own() -> None:
    row = random_row((1, 12, 20, 3, 4), seed=4)
    assert all_slopes([row], 4).tolist() == pytest.approx(brute_slopes(row), rel=1e-5)


def test_a_rare_match_leads_by_secants_as_under_relu_and_by_slopes_hardly() -> None:
    """One head, 1 for one key of a hundred and -1 for the others."""
    keys = torch.full((1, 100, 1), -1.0)
    keys[0, 7] = 1.0
    ones = torch.ones(1, 1, 1)
    row = IndexRow(ones[..., None], keys, ones, torch.ones(1, 1, 100, dtype=torch.bool))
    # From the average token, (-0.98, 0.01), to the one that passes, (1, 1).
    assert FITS[SECANTS]([row], 4).item() == pytest.approx((1 - 0.01) / (1 + 0.98), rel=1e-5)
    draw = torch.Generator().manual_seed(7)
    keys[0, :, 0] -= 4 * torch.rand(100, generator=draw)
    keys[0, 7] = 1.0
    assert FITS[SECANTS]([row], 4).item() > 5 * FITS[ALL_SLOPES]([row], 4).item()


def test_e4m3_keeps_three_bits_and_the_largest() -> None:
    x = torch.tensor([[1.0, -448.0, 17.0]])
    assert rounded(x).tolist() == [[1.0, -448.0, 16.0]]


def test_rows_are_paired() -> None:
    lines = [
        {"arm": arm, "row": row, "text loss": value + row}
        for arm, value in (("full", 1.0), ("all L", 1.5))
        for row in range(5)
    ]
    change = paired(
        [*lines, {"arm": "all L", "row": 9, "text loss": 99.0}], "all L", "full", "text loss"
    )
    assert change is not None
    assert (change["mean"], change["rows"]) == (0.5, 5)
    assert change["half_width"] == pytest.approx(0, abs=1e-12)
    assert paired(lines, "all L", "LS", "text loss") is None


def test_work_counts_dot_products() -> None:
    by_name = arms(12)
    work = {name: arm.work(32) for name, arm in by_name.items()}
    assert work["full"] == 1
    assert work["uniform 1/2"] == 0.5
    assert work["all L"] == pytest.approx(1 / 32)
    assert work["all F folded, c = 4"] == pytest.approx(1 / 32 + 1 / 16)
    assert {len(arm.letters) for arm in by_name.values()} == {12}
    assert by_name["F at 0, 1, 5, 9, ..."].letters == "FFSSSFSSSFSS"
