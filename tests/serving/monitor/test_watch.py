"""``server watch``: what is drawn of the states of a server's ranks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import Overlaps, RankState
from sglang_indexcache.cli import app
from sglang_indexcache.serving.monitor.watch import frame, watch
from tests.fakes import state
from tests.fakes.server import FakeServer, serving


def screen(before: list[RankState], after: list[RankState], seconds: float) -> str:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(frame(before, after, seconds))
    return " ".join(console.export_text().split())


BEFORE = state(
    "FSSS",
    pairs={"prefill 2Ki scored": 100, "prefill 2Ki skipped": 100},
    tokens={"prefill FSSS": 50},
    indexer_selections=[4, 4, 0, 0],
    index_reuses=[0, 0, 4, 4],
)
AFTER = BEFORE.model_copy(
    update={
        "pairs": {
            "prefill 2Ki scored": 110,
            "prefill 2Ki skipped": 130,
            "decode more scored": 20,
            "decode more skipped": 60,
        },
        "tokens": {"prefill FSSS": 70, "decode FSSS": 10},
        "requests": {"FSSS": 3, "FFSS": 1},
        "rejections": {"switch": 2},
        "indexer_selections": [8, 5, 0, 0],
        "index_reuses": [0, 3, 8, 4],
    }
)


def test_what_changed_and_what_was_so_far() -> None:
    output = screen([BEFORE], [AFTER], 2.0)
    assert "prefill, up to 2Ki tokens 75.0% 54.2%" in output
    assert "decode, longer 75.0% 75.0%" in output
    assert "all 75.0% 59.4%" in output
    assert "FSSS 15 80 3" in output
    assert "FFSS 0 0 1" in output
    assert "refused 2 by switch" in output
    assert "pattern by layer FSSS" in output
    assert "by layer, now █▂ ·" in output  # always, one of four, never, not at all
    assert "since the start █▅" in output


def test_ranks_are_added_up() -> None:
    ranks = [AFTER, BEFORE.model_copy(update={"rank": 1})]
    output = screen(ranks, ranks, 1.0)
    assert "2 ranks" in output
    assert "all - 55.8%" in output
    assert "FSSS 0 130 3" in output


def test_a_restarted_server_begins_anew() -> None:
    assert "FSSS 0 50 0" in screen([AFTER], [BEFORE], 1.0)


def test_it_looks_again_and_again_until_interrupted() -> None:
    fake = FakeServer("FSFS", mode="live")
    with serving(fake) as url:
        output = io.StringIO()
        watch(Client(url), 0.01, Console(file=output, width=100), times=2)
        assert "live mode, 1 rank: FSFS" in output.getvalue()


def test_interrupted_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_indexcache.serving.monitor.watch.watch", stop)
    assert CliRunner().invoke(app, ["server", "watch"]).exit_code == 0


OVERLAP = {
    "one_in": 1000,
    "forwards": 3,
    # rows; overlap, chance, by score mass
    "layers": {
        2: [40.0, 26.0, 12.0, 32.0],
        3: [10.0, 9.0, 5.0, 9.5],
    },
    "reference": (None, None, 0.75, None),
}


def test_overlap_by_layer_and_the_worst() -> None:
    state_now = AFTER.model_copy(update={"mode": "live", "overlap": Overlaps(**OVERLAP)})
    output = screen([state_now], [state_now, state_now], 1.0)
    assert "S layers have 78% of their own selection in common with the list they" in output
    assert "65% beyond chance (found with 75%)" in output  # of layer 2 it is half, of 3 four fifths
    assert "(found with 75%); 6 forwards were sampled" in output
    assert "overlap by layer: ··▆█" in output
    assert "2 65.0% 50.0% 75.0% 80.0% 3 90.0% 80.0% - 95.0%" in output
    static = state_now.model_copy(update={"mode": "static"})
    assert "F layers" in screen([static], [static], 1.0)
    assert "2 65.0% 50.0% 75.0% - 3" in screen([static], [static], 1.0)


def test_a_shadow_that_saw_nothing_or_is_off() -> None:
    waiting = AFTER.model_copy(update={"overlap": Overlaps(one_in=5)})
    assert "no row with more than index_topk tokens was sampled yet" in screen(
        [waiting], [waiting], 1.0
    )
    assert "overlap" not in screen([AFTER], [AFTER], 1.0)
