"""``server watch``: what is drawn of the states of a server's ranks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sglang_indexcache.cli import app
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.serving.operating.watch import frame, watch
from sglang_indexcache.serving.protocol import RankState
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

    monkeypatch.setattr("sglang_indexcache.serving.operating.watch.watch", stop)
    assert CliRunner().invoke(app, ["server", "watch"]).exit_code == 0
