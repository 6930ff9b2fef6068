"""Evaluations on servers that work, that go wrong, and that are killed."""

from __future__ import annotations

import io
import random
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_indexcache.errors import IndexCacheError, QualityError, ServerError
from sglang_indexcache.lab.evaluate import run
from sglang_indexcache.lab.evaluate.evaluation import NAME, Evaluation, load
from sglang_indexcache.lab.evaluate.evaluation_plan import CONTROL_LOOK, CORRELATION, DISCORDANCE
from sglang_indexcache.lab.evaluate.run import check_noise
from sglang_indexcache.lab.evaluate.verdict import Kind, verdicts_of
from sglang_indexcache.lab.stats.design import Design, spread
from sglang_indexcache.lab.stats.pairs import paired
from tests.fakes.server import serving
from tests.kills import PROCESSES
from tests.lab.evaluate.evaluate import ARMS, PLAN, evaluate
from tests.lab.evaluate.evaluations import LENGTHS, TASKS, evaluation
from tests.lab.evaluate.fake_server import Fake


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PAUSES", (0.0, 0.0, 0.0))


def timeless(record: Evaluation) -> Evaluation:
    return replace(record, seconds=0.0)


def test_a_whole_evaluation(tmp_path: Path) -> None:
    with serving(Fake()) as url:
        record = evaluate(tmp_path, url)
    assert record.finished
    assert record.verified
    assert record.look <= PLAN.looks
    rows = record.answers
    assert not paired(rows, "full", "full", repeat=1).values.any()
    control = [row for row in rows if row.length <= record.selects_all]
    assert control
    for arm in ("half", "few", "worst"):
        assert not paired(control, arm, "full").values.any()
    long = [row for row in rows if row.length > record.selects_all]
    lost = paired(long, "few", "full").flips
    assert lost.lost > lost.won
    assert {verdict.kind for _, verdict in verdicts_of(record).values()} <= {
        Kind.LOSS,
        Kind.UNDECIDED,
    }
    assert load(tmp_path) == record


def test_a_context_is_computed_once_for_its_questions(tmp_path: Path) -> None:
    fake = Fake()
    with serving(fake) as url:
        evaluate(tmp_path, url)
    assert all(body.get("logprob_start_len", [1])[0] > 0 for body in fake.bodies)
    for warm, questions in zip(fake.bodies[::2], fake.bodies[1::2], strict=True):
        assert "return_logprob" not in warm
        assert questions["top_logprobs_num"] == 20
        assert all(
            start == len(ids) - 2
            for ids, start in zip(
                questions["input_ids"], questions["logprob_start_len"], strict=True
            )
        )


def test_decided_patterns_are_asked_no_more(tmp_path: Path) -> None:
    fake = Fake(spread=3.0)  # whatever shares loses nearly everything
    plan = replace(PLAN, contexts=32, lengths=(128,), margin=0.2)
    with serving(fake) as url:
        record = evaluate(tmp_path, url, plan)
    assert {verdict.kind for _, verdict in verdicts_of(record).values()} == {Kind.LOSS}
    asked = dict.fromkeys(("full", "half", "few", "worst"), 0)
    for row in record.answers:
        asked[row.arm] += row.length > record.selects_all and not row.repeat
    assert record.look == 1
    assert asked["full"] == asked["half"] == 16 * 4
    assert asked["worst"] < asked["full"]  # seen to lose before the look


def test_a_server_for_each_arm(tmp_path: Path) -> None:
    fakes = {arm.name: Fake(mode="static", pattern=arm.pattern) for arm in ARMS}
    with (
        serving(fakes["full"]) as a,
        serving(fakes["half"]) as b,
        serving(fakes["few"]) as c,
        serving(fakes["worst"]) as d,
    ):
        urls = dict(zip(fakes, (a, b, c, d), strict=True))
        record = evaluate(tmp_path, urls)
        assert record.finished
        assert record.verified
        with pytest.raises(QualityError, match=r"few.*is FSSS.*runs FFFF.*--indexcache-p"):
            evaluate(tmp_path / "b", {**urls, "few": a})
        with pytest.raises(QualityError, match="no server is given for few"):
            evaluate(tmp_path / "b", {name: u for name, u in urls.items() if name != "few"})
        fakes["few"].info = {"dtype": "float16", "kv_cache_dtype": "fp8_e4m3"}
        differing = r"full and few differ.*dtype \('bfloat16' and 'float16'\); kv_cache_dtype"
        with pytest.raises(QualityError, match=differing):
            evaluate(tmp_path / "b", urls)


# What is refused of a single answer is in tests/lab/client/test_score.py.
REFUSED = {
    "ignores": "ignores the pattern, or answers from another arm's cache.*server show",
    "idle layers": "ignores the pattern: .* layers .* did not do what that says",
    "one cache": "took .* tokens of .* from its cache.*shares cached prefixes between patterns",
    "garbage": "answered .* prompts with something else.*SGLang's own /generate",
    "stops": "was not answered: .*is kept: start the same command again",
    "one context": "was not answered: .*too hard.*start the same command again",
    "control": r"control failed at 48 tokens: .*(half|few) differs from full \(\d+ lost",
    "deaf to names": "asked for pattern F.*S.* and answered under FFFFFFFFFFFF",
    "names no pattern": "asked for pattern F.* and answered without saying under which pattern",
}
SINCE_LONG = ("ignores", "one cache")
"""Faults that begin behind the control, where they can be seen."""
AFTER_CONTROL = 2 * 2 * 2
"""Calls for the control: two contexts, each computed and then asked about, and again (A/A)."""


@pytest.mark.parametrize("fault", REFUSED)
def test_what_goes_wrong_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    fake = Fake(fault=fault, after=AFTER_CONTROL if fault in SINCE_LONG else 0)
    with serving(fake) as url, pytest.raises(IndexCacheError, match=REFUSED[fault]):
        evaluate(tmp_path, url)


def test_a_server_that_begins_to_ignore_patterns_midway_is_refused(tmp_path: Path) -> None:
    """Though the first long contexts were answered as they should be."""
    fake = Fake(fault="ignores", after=AFTER_CONTROL + 10)
    with serving(fake) as url, pytest.raises(QualityError, match="ignores the pattern, or answers"):
        evaluate(tmp_path, url)
    assert fake.calls > AFTER_CONTROL + 10


def test_a_server_of_one_arm_must_name_its_pattern_too(tmp_path: Path) -> None:
    fakes = [Fake(mode="static", pattern=arm.pattern, fault="names no pattern") for arm in ARMS]
    with ExitStack() as stack:
        urls = {
            arm.name: stack.enter_context(serving(f)) for arm, f in zip(ARMS, fakes, strict=True)
        }
        with pytest.raises(ServerError, match="answered without saying under which pattern"):
            evaluate(tmp_path, urls)


def test_one_server_in_static_mode_is_refused(tmp_path: Path) -> None:
    message = "does not run in live mode.*--indexcache-mode live, or start one server for each"
    with serving(Fake(mode="static")) as url, pytest.raises(QualityError, match=message):
        evaluate(tmp_path, url)


def test_a_restart_in_the_middle_is_survived(tmp_path: Path) -> None:
    with serving(Fake()) as url:
        expected = evaluate(tmp_path / "a", url)
    output = io.StringIO()
    with serving(Fake(fault="restart", after=20)) as url:
        record = evaluate(tmp_path / "b", url, output=output)
    assert timeless(replace(record, tokens=0)) == timeless(replace(expected, tokens=0))
    assert "restarted meanwhile: it counts anew" in output.getvalue()


def test_a_reference_that_can_only_guess_is_refused(tmp_path: Path) -> None:
    with serving(Fake(level=0.05)) as url, pytest.raises(QualityError, match="hardly more than gu"):
        evaluate(tmp_path, url)


def test_another_evaluation_is_refused(tmp_path: Path) -> None:
    with serving(Fake()) as url:
        evaluate(tmp_path, url)
        with pytest.raises(QualityError, match="belongs to another evaluation; different: plan"):
            evaluate(tmp_path, url, replace(PLAN, contexts=16))  # an extension that nobody planned


def test_twenty_kills_leave_the_same_evaluation(tmp_path: Path, seed: int) -> None:
    with serving(Fake()) as url:
        expected = evaluate(tmp_path / "whole", url)
        lines = (tmp_path / "whole" / NAME).read_bytes().count(b"\n")
        draw = random.Random(seed)
        folder = tmp_path / "killed"
        for kill in range(20):
            process = PROCESSES.Process(target=evaluate, args=(folder, url))
            process.start()
            # At a random moment between two lines, or in the middle of one.
            target = (kill + draw.random()) * lines / 20
            while process.is_alive() and _lines(folder) < target:
                time.sleep(0.002)
            process.kill()
            process.join()
        last = PROCESSES.Process(target=evaluate, args=(folder, url))
        last.start()
        last.join()
    assert last.exitcode == 0
    assert timeless(replace(load(folder), tokens=0)) == timeless(replace(expected, tokens=0))


def _lines(folder: Path) -> int:
    path = folder / NAME
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_only_whole_contexts_count(tmp_path: Path) -> None:
    with serving(Fake()) as url:
        complete = evaluate(tmp_path, url)
    path = tmp_path / NAME
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]) + lines[len(lines) // 2][:40])
    part = load(tmp_path)
    assert part.answers == complete.answers[: len(part.answers)]
    assert not part.finished
    assert part.look <= complete.look
    assert {row.arm for row in part.answers if row.length > part.selects_all} in (
        set(),
        {arm.name for arm in ARMS},
    )


def test_the_control_comes_first() -> None:
    looks = [planned.look for planned in PLAN.planned]
    assert looks == sorted(looks)
    assert looks[0] == CONTROL_LOOK
    assert [looks.count(look) for look in (0, 1, 2)] == [2, 8, 8]


CELLS = len(TASKS) * len(LENGTHS)


def restless(flips: float, contexts: int, margin: float) -> Evaluation:
    """The reference gives another answer so often when it is asked again."""
    record, draw = evaluation(contexts), random.Random(4)
    answers = tuple(
        replace(row, right=abs(row.right - (draw.random() < flips))) if row.repeat else row
        for row in record.answers
    )
    return replace(record, answers=answers, design=Design(CELLS * contexts, margin=margin))


def test_an_engine_that_flips_too_much_for_the_margin_is_refused() -> None:
    with pytest.raises(QualityError) as caught:
        check_noise(restless(0.6, 60, 0.03))
    for part in ("A/A: ", "a margin of 3 points needs ", "240 are planned", "(--contexts)"):
        assert part in str(caught.value)
    check_noise(restless(0.02, 60, 0.03))


def test_the_noise_of_single_contexts_is_not_known_yet() -> None:
    # One context of each cell was asked twice: their spread is nobody's to know.
    record = restless(0.6, 4, 0.3)
    again = [row for row in record.answers if row.repeat and row.length in LENGTHS]
    assert len({row.context for row in again}) == CELLS
    check_noise(record)


@pytest.mark.parametrize("margin", [0.005, 0.0225])
def test_a_plan_too_small_for_its_margin_is_not_blamed_on_the_engine(margin: float) -> None:
    """Four questions behind a context tell less than eight, with which the second would do."""
    small = Design(CELLS * 60, margin=margin).needed(*spread(DISCORDANCE, CORRELATION, 8)) > 240
    assert small == (margin == 0.005)
    check_noise(restless(0.6, 60, margin))
