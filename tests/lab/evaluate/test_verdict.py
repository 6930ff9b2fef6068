"""Each verdict from a table that calls for it, the order of the checks, and the sentence."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from sglang_indexcache.errors import QualityError
from sglang_indexcache.lab.evaluate.evaluation import Evaluation
from sglang_indexcache.lab.evaluate.evaluation_plan import Arm, Planned, Role
from sglang_indexcache.lab.evaluate.verdict import (
    SAFE,
    SAME,
    Kind,
    Look,
    Verdict,
    exceeds_noise,
    judge,
    sees,
)
from sglang_indexcache.lab.stats.design import Design
from sglang_indexcache.lab.stats.pairs import Answer, Differences, Flips
from tests.lab.evaluate.evaluations import answer

CONTEXTS = 200
DESIGN = Design(contexts=2 * CONTEXTS, margin=0.02)
LONG, SHORT = 65536, 1536


def evaluation(seed: int = 0, blind: bool = False, **losses: float) -> list[Answer]:
    """Two tasks at one long length and the control; an arm loses its share of right answers."""
    draw = random.Random(seed)
    rows = []
    for task in ("needles", "tracking"):
        for number in range(CONTEXTS):
            for question in range(4):
                right = draw.random() < 0.9
                place = (f"{task}-{number}", f"q{question}", task, LONG)
                again = right if draw.random() < 0.99 else not right
                rows.append(answer(place, "full", right))
                if number % 4 == 0:
                    rows.append(answer(place, "full", again, repeat=1))
                bad = {"bad": 0.0 if blind and task == "tracking" else 0.5}
                for arm, loss in {**bad, **losses}.items():
                    rows.append(answer(place, arm, right and draw.random() >= loss))
        for number in range(4):
            for question in ("a", "b", "c"):
                place = (f"{task}-short-{number}", question, task, SHORT)
                rows += [answer(place, arm, 1) for arm in ("full", "bad", *losses)]
                rows.append(answer(place, "full", 1, repeat=1))
    return rows


def losing_in_tracking(rows: list[Answer], share: float, seed: int) -> list[Answer]:
    """Return rows in which "same" loses this share of one cell of two."""
    draw = random.Random(seed)
    cell = ("same", "tracking", LONG)
    return [
        replace(row, right=0.0)
        if (row.arm, row.task, row.length) == cell and draw.random() < share
        else row
        for row in rows
    ]


def verdicts(rows: list[Answer], *patterns: str, look: int = 4) -> list[Verdict]:
    verdicts_so_far: list[Verdict] = []
    for pattern in patterns:
        safe = all(verdict.kind in SAFE for verdict in verdicts_so_far)
        verdicts_so_far.append(verdict_on(rows, pattern, look=look, permitted=safe))
    return verdicts_so_far


def verdict_on(
    rows: list[Answer],
    pattern: str,
    design: Design = DESIGN,
    look: int = 4,
    permitted: bool = True,
) -> Verdict:
    return judge(look_at(rows, design, look), pattern, permitted)


def look_at(rows: list[Answer], design: Design, number: int, topk: int | None = 2048) -> Look:
    """Return all rows, of an evaluation whose arms are those that they name."""
    roles = {"full": Role.REFERENCE, "bad": Role.BAD}
    names = dict.fromkeys(row.arm for row in rows)
    arms = tuple(Arm(name, "", roles.get(name, Role.CANDIDATE)) for name in names | {"bad": None})
    planned = {row.context: Planned(row.context, row.task, row.length, 1, False) for row in rows}
    arms = arms if topk else tuple(arm for arm in arms if arm.role is not Role.BAD)  # a log's
    return Look(Evaluation({}, design, topk, arms, tuple(planned.values()), tuple(rows)), number)


def test_a_pattern_that_loses_nothing() -> None:
    (verdict,) = verdicts(evaluation(same=0.0), "same")
    assert verdict.kind is Kind.NO_LOSS
    assert verdict.interval is not None
    assert verdict.interval[0] > -0.02
    assert "same: no loss beyond 2 points" in verdict.sentence
    assert "0 lost, 0 won of 1,600" in verdict.sentence
    assert "A/A: " in verdict.sentence


def test_a_pattern_that_loses() -> None:
    (verdict,) = verdicts(evaluation(worse=0.1), "worse")
    assert verdict.kind is Kind.LOSS
    assert verdict.difference == pytest.approx(-0.09, abs=0.03)
    assert verdict.interval is not None
    assert verdict.interval[0] < verdict.difference < verdict.interval[1] < 0
    assert f"a loss of {-100 * verdict.difference:.1f} points" in verdict.sentence


def test_an_early_look_needs_more() -> None:
    rows = [row for row in evaluation(same=0.0) if int(row.context.split("-")[-1]) < 50]
    (verdict,) = verdicts(rows, "same", look=1)
    assert verdict.kind is Kind.UNDECIDED
    assert verdict.more == 300
    assert "300 more contexts" in verdict.sentence
    assert "interval for this look" in verdict.sentence  # the tables' are of a single look


def test_where_no_context_is_missing_a_run_of_the_same_size_is_advised() -> None:
    # It has enough for its margin, and chance had it undecided.
    draw, rows = np.random.default_rng(3), []
    for number, change in enumerate(draw.choice([0, 1, -1], size=600, p=[0.5, 0.22, 0.28])):
        for question in range(8):
            place = (f"c{number}", f"q{question}", "needles", LONG)
            rows.append(answer(place, "full", float(bool(question) or change < 0)))
            rows.append(answer(place, "same", float(bool(question) or change > 0)))
    verdict = judge(look_at(rows, Design(600, margin=0.01), 4, topk=None), "same")
    assert (verdict.kind, verdict.more) == (Kind.UNDECIDED, 0)
    assert "undecided; a new run of 600 contexts would probably decide" in verdict.sentence


def test_a_cell_in_which_a_bad_pattern_loses_nothing_leaves_the_claim() -> None:
    (verdict,) = verdicts(evaluation(blind=True, same=0.0), "same")
    assert verdict.blind == (("tracking", LONG),)
    assert verdict.flips is not None
    assert verdict.flips.pairs == 800
    assert "Cannot see: tracking at 64Ki (bad was not seen to lose there: " in verdict.sentence


def test_a_bad_pattern_that_loses_on_a_few_contexts_was_asked_too_few() -> None:
    rows = [row for row in evaluation(same=0.0) if int(row.context.split("-")[-1]) < 4]
    (verdict,) = verdicts(rows, "same", look=1)
    assert "too few contexts to show that bad loses there: " in verdict.sentence


def test_contexts_of_cells_that_cannot_see_show_nothing() -> None:
    rows = evaluation(blind=True, same=0.0)
    fine, half = replace(DESIGN, margin=0.005), replace(DESIGN, contexts=CONTEXTS, margin=0.005)
    verdict = verdict_on(rows, "same", fine, 4)
    assert verdict.kind is Kind.UNDECIDED
    assert verdict.detectable == pytest.approx(half.detectable(0.0, 0.0))
    assert verdict.more == half.needed(0.0, 0.0) - CONTEXTS
    early = [row for row in rows if int(row.context.split("-")[-1]) < 50]
    verdict = verdict_on(early, "same", DESIGN, 1)
    assert verdict.more == 150


def with_right(rows: list[Answer], task: str, chance: float, bad: float) -> list[Answer]:
    """Make so many of a task's long questions right, the same in every arm but the bad one."""

    def value(row: Answer) -> float:
        if row.task != task or row.length == SHORT:
            return row.right
        right = float(random.Random(f"{row.context} {row.question}").random() < chance)
        return bad if row.arm == "bad" else right

    return [replace(row, right=value(row)) for row in rows]


def test_a_cell_in_which_the_reference_can_hardly_lose_leaves_the_claim() -> None:
    # 7 % right: the bad pattern, always wrong, is seen to lose; a loss of 7 points is all there is.
    (verdict,) = verdicts(with_right(evaluation(same=0.0), "tracking", 0.07, bad=0), "same")
    assert verdict.blind == (("tracking", LONG),)
    assert "(full gets 7% right there, hardly more than guessing)" in verdict.sentence
    (verdict,) = verdicts(with_right(evaluation(same=0.0), "tracking", 0.2, bad=0), "same")
    assert verdict.blind == ()


def test_a_cell_that_is_too_easy_says_so() -> None:
    (verdict,) = verdicts(with_right(evaluation(same=0.0), "tracking", 1.0, bad=1), "same")
    assert verdict.blind == (("tracking", LONG),)
    assert "(too easy: even bad gets 100% right there)" in verdict.sentence


def test_no_cell_that_sees_means_no_claim() -> None:
    rows = [row for row in evaluation(same=0.0) if row.arm != "bad"]
    (verdict,) = verdicts(rows, "same")
    assert verdict.kind is Kind.CANNOT_SEE
    assert verdict.difference is None


def flipped(rows: list[Answer], arm: str, count: int, repeat: int = 0) -> list[Answer]:
    """The arm says other than the others on the first questions of the control."""
    places = [i for i, r in enumerate(rows) if (r.length, r.arm, r.repeat) == (SHORT, arm, repeat)]
    changed = {i: replace(rows[i], right=1 - rows[i].right) for i in places[:count]}
    return [changed.get(i, row) for i, row in enumerate(rows)]


def test_a_control_that_differs_is_refused() -> None:
    (verdict,) = verdicts(flipped(evaluation(same=0.0), "same", 8), "same")
    assert verdict.kind is Kind.INVALID
    assert "(8 lost, 0 won of 24), which differs from itself in 0" in verdict.sentence


def test_a_control_that_differs_as_the_reference_from_itself_is_not() -> None:
    """One flip refused whole runs: an engine that flips 0.5 % of answers lost 62 % of them."""
    rows = flipped(evaluation(same=0.0), "same", 1)
    assert verdicts(rows, "same")[0].kind is Kind.NO_LOSS
    rows = flipped(flipped(rows, "same", 9), "full", 12, repeat=1)
    assert verdicts(rows, "same")[0].kind is Kind.NO_LOSS


def test_gains_and_losses_that_cancel_differ_too() -> None:
    rows = evaluation(same=0.0)
    cancelling = [
        answer(("short", f"{number}", "needles", SHORT), arm, (number + (arm == "same")) % 2)
        for number in range(8)
        for arm in ("full", "same")
    ]
    (verdict,) = verdicts(rows + cancelling, "same")
    assert verdict.kind is Kind.INVALID
    assert "4 lost, 4 won" in verdict.sentence


def test_of_sound_runs_the_control_refuses_hardly_any() -> None:
    """Sum binomials for every number of questions on which one of the two differs."""
    for count in range(60):
        alone = np.arange(count + 1)
        is_refused = exceeds_noise(alone, count - alone)
        chances = [math.comb(count, n) / 2**count for n in alone[is_refused]]
        assert sum(chances) <= SAME
        assert is_refused[-1] == (count >= 8)


def one_cell(values: np.ndarray) -> Differences:
    count = values.shape[-1]
    cells, questions = np.zeros(count, dtype=np.int64), np.full(count, 8)
    return Differences(values, cells, (("needles", LONG),), Flips(0, 0, count), questions)


def test_a_loss_of_few_points_is_seen_by_probabilities() -> None:
    """Right answers show 5 points in 40 contexts hardly ever, and left such cells blind."""
    draw = np.random.default_rng(3)
    right = -draw.binomial(8, 0.05, (400, 40)) / 8
    moved = -0.05 + 0.03 * draw.standard_normal((400, 40))
    assert sees(one_cell(right), 0.05).mean() < 0.2
    assert sees(one_cell(right), 0.05, one_cell(moved), 0.01).mean() > 0.99
    still = np.zeros((4000, 40))
    nothing = sees(one_cell(still), 0.05, one_cell(0.1 * draw.standard_normal((4000, 40))), 0.01)
    assert nothing.mean() < 0.05
    little = np.full((1, 40), -0.005)  # however sure, it is less than the margin
    assert not sees(one_cell(still[:1]), 0.05, one_cell(little), 0.01).any()


def test_a_reference_that_differs_from_itself_is_refused() -> None:
    rows = [
        replace(row, right=0) if row.repeat and random.Random(row.context).random() < 0.3 else row
        for row in evaluation(same=0.0)
    ]
    (verdict,) = verdicts(rows, "same")
    assert verdict.kind is Kind.INVALID
    assert "differs from itself" in verdict.sentence


def test_without_a_second_asking_nothing_is_claimed() -> None:
    rows = [row for row in evaluation(same=0.0) if not row.repeat]
    assert verdicts(rows, "same")[0].kind is Kind.INVALID


def test_patterns_are_called_safe_in_order_until_one_is_not() -> None:
    rows = evaluation(half=0.0, quarter=0.1, eighth=0.0, sixteenth=0.3)
    in_order = verdicts(rows, "half", "quarter", "eighth", "sixteenth")
    kinds = [verdict.kind for verdict in in_order]
    assert kinds == [Kind.NO_LOSS, Kind.LOSS, Kind.UNDECIDED, Kind.LOSS]
    assert "a pattern that is judged before it was not shown to be safe" in in_order[2].sentence


def test_a_run_without_the_control_is_refused() -> None:
    rows = [row for row in evaluation(same=0.0) if row.length == LONG]
    with pytest.raises(QualityError, match="obligatory"):
        verdicts(rows, "same")


def test_a_proven_loss_within_the_margin_is_said() -> None:
    rows = evaluation(less=0.05)
    verdict = verdict_on(rows, "less", replace(DESIGN, margin=0.1), 4)
    assert verdict.kind is Kind.SMALL_LOSS
    assert verdict.interval is not None
    assert -0.1 < verdict.interval[0] < verdict.interval[1] < 0
    assert "points, less than the margin of 10 points" in verdict.sentence


def test_the_sentence_names_the_worst_cell_with_a_bound_for_all() -> None:
    """Nine points lost in one cell cannot hide in a mean."""
    rows = losing_in_tracking(evaluation(same=0.0), 0.12, seed=8)
    verdict = verdict_on(rows, "same", replace(DESIGN, margin=0.2), 4)
    assert verdict.worst is not None
    assert verdict.worst.task == "tracking"
    assert verdict.worst.difference == pytest.approx(-0.11, abs=0.03)
    assert -verdict.worst.difference < verdict.worst.bound < 0.2
    assert "worst: tracking at 64Ki, -9.1)" in verdict.sentence
    assert "bound for all 2 of them together" in verdict.sentence


def test_nothing_is_claimed_while_a_visible_loss_is_left_out() -> None:
    """The control loses nothing in a cell where the pattern does, which would leave the claim."""
    rows = losing_in_tracking(evaluation(blind=True, same=0.0), 0.5, seed=9)
    (verdict,) = verdicts(rows, "same")
    assert verdict.blind == (("tracking", LONG),)
    assert verdict.kind is Kind.UNDECIDED
    assert "not claimed, because a pattern visibly loses at tracking at 64Ki" in verdict.sentence


def test_safety_waits_until_every_task_was_seen_to_show_a_loss() -> None:
    """The first claim is final, and a task that has shown nothing yet would be left out."""
    rows = evaluation(blind=True, same=0.0)
    early = verdict_on(rows, "same", replace(DESIGN, margin=0.1), 2)
    assert early.kind is Kind.UNDECIDED
    assert "not claimed, because not every task has been seen to show a loss" in early.sentence
    last = verdict_on(rows, "same", replace(DESIGN, margin=0.1), 4)
    assert (last.kind, last.blind) == (Kind.NO_LOSS, (("tracking", LONG),))
    easy = with_right(evaluation(same=0.0), "tracking", 1.0, bad=1)
    verdict = verdict_on(easy, "same", replace(DESIGN, margin=0.1), 2)
    assert verdict.kind is Kind.NO_LOSS  # nothing more can be seen there


def test_a_proven_loss_within_the_margin_waits_too() -> None:
    rows = with_right(evaluation(less=0.05), "tracking", 0.9, bad=0.9)
    kinds = [verdict_on(rows, "less", replace(DESIGN, margin=0.15), look).kind for look in (3, 4)]
    assert kinds == [Kind.UNDECIDED, Kind.SMALL_LOSS]
