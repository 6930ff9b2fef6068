"""``server doctor --url``: what servers say of themselves, and where they differ."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from rich.console import Console

from sglang_indexcache import __version__
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.serving.operating.fleet import examine_servers
from tests.fakes.server import FakeServer, serving


def examine(*fakes: FakeServer) -> tuple[bool, str]:
    output = io.StringIO()
    with ExitStack() as stack:
        clients = [Client(stack.enter_context(serving(fake))) for fake in fakes]
        fleet = examine_servers(clients)
    fleet.tell(Console(file=output, width=200))
    return not fleet.problems, output.getvalue()


def test_servers_that_do_the_same() -> None:
    fine, answer = examine(
        FakeServer("FSFS", role="prefill", dp=2), FakeServer("FSFS", role="decode", mode="static")
    )
    assert fine
    assert answer.count("FSFS") == 3  # one for each rank
    for text in (
        "rank 0",
        "rank 1",
        "prefill",
        "decode",
        "0.5.23",
        __version__,
        "no problem found",
    ):
        assert text in answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pattern": "FSSS"}, "they differ in the pattern."),
        ({"mode": "live"}, "they differ in the mode."),
        ({"overrides": {"version": "0.0.9"}}, "they differ in sglang-indexcache's version."),
        ({"overrides": {"architecture": "DeepseekV32ForCausalLM"}}, "they differ in the model."),
    ],
)
def test_servers_that_differ(change: dict[str, Any], message: str) -> None:
    fine, text = examine(FakeServer("FSFS"), FakeServer(**{"pattern": "FSFS", **change}))
    assert not fine
    assert message in text
    assert text.count("problem") == 1
    value = next(iter(change.get("overrides", change).values()))
    assert value in text.partition(message)[2]


def test_a_rank_whose_worker_did_not_load_the_plugin() -> None:
    """SGLang logs a plugin that raises, and goes on without it."""
    fine, text = examine(FakeServer("FSFS", dp=2, plugins=(True, False)))
    assert not fine
    assert "rank 1 was started with IndexCache, but its worker did not load the plugin" in text
    assert "rank 0 was started" not in text


def test_ranks_that_answer_out_of_turn_keep_their_numbers() -> None:
    with serving(FakeServer("FSFS", dp=3, plugins=(True, False, True))) as url:
        client = Client(url)
        info = client.server_info()
        info["internal_states"].reverse()
        client.server_info = lambda: info  # type: ignore[method-assign]
        fleet = examine_servers([client])
    assert "rank 1 was started with IndexCache" in fleet.problems[0]
    assert [rank.name.split()[-1] for rank in fleet.ranks] == [*"012"]


def test_a_server_without_indexcache() -> None:
    fine, text = examine(FakeServer("FSFS"), FakeServer("FSFS", plugins=(False,), launched=False))
    assert not fine
    assert "does not run IndexCache. Start it with --attention-backend indexcache" in text


def test_a_rank_whose_report_failed() -> None:
    fine, text = examine(FakeServer("FSFS"), FakeServer("FSFS", fault="no report"))
    assert not fine
    assert "cannot say what IndexCache does: KeyError: 'x'. Its log has the details" in text


def test_a_server_that_does_not_answer() -> None:
    [problem] = examine_servers([Client("http://127.0.0.1:9")]).problems
    assert problem.startswith("cannot reach the server at http://127.0.0.1:9")


def test_it_needs_no_more_than_the_base_install() -> None:
    """A job that checks servers should not need 11 GB of SGLang and torch."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'sglang', 'transformers', 'numpy')))\n"
        "from sglang_indexcache.cli import app\n"
        "app(['server', 'doctor', '--url', 'http://127.0.0.1:9'])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "problem: cannot reach the server at http://127.0.0.1:9" in process.stdout, (
        process.stderr
    )
    assert process.returncode == 1
