"""``server show``: layers that do not skip are seen, and servers that differ."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest
from rich.console import Console

from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.serving.operating.show import (
    ask_servers,
    describe_index_keys,
    describe_row_shares,
    describe_skipped_work,
    judge,
)
from tests.fakes import state
from tests.fakes.server import FakeServer, serving


def counts(pattern: str = "FFSS", forwards: int = 16, **fields: Any) -> Any:
    """Return a rank whose layers did what ``pattern`` says in every forward, but for ``fields``."""
    obeyed = {
        "indexer_selections": [forwards * (kind == "F") for kind in pattern],
        "index_reuses": [forwards * (kind == "S") for kind in pattern],
    }
    return state(pattern, **{"forwards": forwards, **obeyed, **fields})


def test_layers_that_skip() -> None:
    verdict = judge(counts("FFFSSSSSSSSS"))
    assert verdict.proven
    assert verdict.text == "indexer ran 16 of 16 forwards in layers 0-2, 0 of 16 in layers 3-11: OK"
    assert verdict.uncounted == ""


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"indexer_selections": [16, 16, 16, 0], "index_reuses": [0, 0, 0, 16]}, "layer 2"),
        ({"indexer_selections": [16, 0, 0, 0], "index_reuses": [0, 0, 16, 16]}, "layer 1"),
        ({"index_reuses": [0, 0, 16, 0]}, "layer 3"),
        ({"indexer_selections": [16] * 4, "index_reuses": [0] * 4}, "layers 2-3"),
    ],
    ids=["an S layer ran", "an F layer did not", "an S layer did nothing", "nothing skips"],
)
def test_layers_that_do_not(fields: dict[str, list[int]], wrong: str) -> None:
    verdict = judge(counts(**fields))
    assert verdict.proven is False
    assert f"NOT OK, for {wrong} did not do what the pattern says" in verdict.text


def test_skipped_work_is_a_share_of_all_phases() -> None:
    pairs = {"prefill 2Ki scored": 110, "prefill 2Ki skipped": 130, "decode more scored": 20}
    rank = counts(pairs={**pairs, "decode more skipped": 60})
    assert describe_skipped_work(rank) == "skipped 59.4% of the indexers' work so far"
    assert describe_skipped_work(counts()) == ""


def test_nothing_was_counted() -> None:
    verdict = judge(counts(forwards=0))
    assert verdict.proven is None
    assert "Send a request" in verdict.text


def test_what_graphs_hide_is_said() -> None:
    prefilled = counts(forwards=16).model_copy(update={"forwards": 100})
    for replays, text in (
        ({"decode": 84}, "of 100 forwards 84 replayed CUDA graphs, in which"),
        ({"decode": 80}, "80 replayed CUDA graphs and 4 attended densely, as short prompts do on"),
        ({}, "of 100 forwards 84 attended densely, as short prompts do on GPUs, in which"),
    ):
        verdict = judge(prefilled.model_copy(update={"graph_replays": replays}))
        assert verdict.proven
        assert text in verdict.uncounted
    halves = judge(counts(forwards=16).model_copy(update={"forwards": 8}))
    assert "halves of an overlapped batch" in halves.uncounted


def test_requests_of_several_patterns() -> None:
    """A layer is F for some: it ran in their forwards alone."""
    fields = {"indexer_selections": [16, 12, 0, 0], "index_reuses": [0, 4, 16, 16]}
    verdict = judge(counts(mode="live", tokens={"prefill FFSS": 100, "decode FSSS": 40}, **fields))
    assert verdict.proven
    assert "12 of 16 in layer 1, 0 of 16 in layers 2-3" in verdict.text
    alone = judge(counts(mode="live", tokens={"prefill FSSS": 160}, **fields))
    assert "NOT OK, for layer 1 did not" in alone.text
    assert alone.proven is False


@pytest.mark.parametrize("rows", [{}, {"FSSS": 10, "others": 3}], ids=["an older server", "many"])
def test_what_was_served_is_not_known(rows: dict[str, int]) -> None:
    fields = {"indexer_selections": [16, 12, 0, 0], "index_reuses": [0, 4, 16, 16]}
    verdict = judge(counts("FSSS", mode="live", rows=rows, **fields))
    assert verdict.proven is None
    assert "does not name every pattern" in verdict.text


def test_a_pipeline_stage_is_judged_by_its_own_layers() -> None:
    fields = {"indexer_selections": [16, 0, 0, 0], "index_reuses": [0, 16, 0, 0]}
    verdict = judge(counts("FSFS", stage=(0, 2), **fields))
    assert verdict.proven
    assert verdict.text == "indexer ran 16 of 16 forwards in layer 0, 0 of 16 in layer 1: OK"
    assert "pipeline stages that do not report" in verdict.uncounted
    assert judge(counts("FFFS", stage=(0, 2), **fields)).proven is False


def test_many_pieces_are_counted() -> None:
    assert "in 8 layers, 0 of 16 in 8 layers: OK" in judge(counts("FS" * 8)).text
    text = judge(counts("FSSFSS")).text
    assert "in layers 0 and 3, 0 of 16 in layers 1-2 and 4-5" in text


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "264 bytes per token; plain DSA: 528"),
        ({"mode": "live"}, "264 bytes per token; plain DSA: 264"),
        (
            {"stage": (1, 3)},
            "264 bytes per token; plain DSA: 528 (in the layers of one pipeline stage)",
        ),
        ({"stage": (2, 4)}, "264 bytes per token (in the layers of one pipeline stage)"),
    ],
    ids=str,
)
def test_index_keys_beside_those_of_plain_dsa(fields: Any, sentence: str) -> None:
    assert describe_index_keys(counts(index_k_bytes_per_token=264, **fields)) == sentence


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, ""),
        ({"scored_rows": (0, 0)}, "row split over 2 ranks: no prefill was scored yet"),
        (
            {"scored_rows": (4, 6, 5, 5), "selected_rows": 20},
            "row split over 4 ranks: "
            "their indexers scored 20%, 30%, 25%, 25% of the prefills' rows",
        ),
    ],
    ids=["unsplit", "idle", "split"],
)
def test_shares_of_split_rows_are_told(fields: dict[str, Any], text: str) -> None:
    assert describe_row_shares(counts(**fields)) == text


# -- servers that run ----------------------------------------------------------------------------


def examine(*fakes: FakeServer) -> tuple[bool, str]:
    output = io.StringIO()
    with ExitStack() as stack:
        clients = [Client(stack.enter_context(serving(fake))) for fake in fakes]
        servers = ask_servers(clients)
    servers.tell(Console(file=output, width=200))
    return servers.fine, output.getvalue()


def test_servers_that_do_the_same() -> None:
    fine, answer = examine(
        FakeServer("FSFS", role="prefill", dp=2), FakeServer("FSFS", role="decode", mode="static")
    )
    assert fine
    assert answer.count("2 of 4 layers keep") == 3  # once for each rank
    assert "rank 0" in answer
    assert "rank 1" in answer
    assert "problem" not in answer


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
        servers = ask_servers([client])
    assert "rank 1 was started with IndexCache" in servers.problems[0]
    assert [rank.name.split()[-1] for rank in servers.ranks] == [*"02"]


def test_a_server_without_indexcache() -> None:
    fine, text = examine(FakeServer("FSFS"), FakeServer("FSFS", plugins=(False,), launched=False))
    assert not fine
    assert "does not run IndexCache. Start it with --attention-backend indexcache" in text


def test_a_rank_whose_report_failed() -> None:
    fine, text = examine(FakeServer("FSFS"), FakeServer("FSFS", fault="no report"))
    assert not fine
    assert "cannot say what IndexCache does: KeyError: 'x'. Its log has the details" in text


def test_a_server_that_does_not_answer() -> None:
    [problem] = ask_servers([Client("http://127.0.0.1:9")]).problems
    assert problem.startswith("cannot reach the server at http://127.0.0.1:9")


def test_it_needs_no_more_than_the_base_install() -> None:
    """A job that checks servers should not need 11 GB of SGLang and torch."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'sglang', 'transformers', 'numpy')))\n"
        "from sglang_indexcache.cli import app\n"
        "app(['server', 'show', '--url', 'http://127.0.0.1:9'])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "problem: cannot reach the server at http://127.0.0.1:9" in process.stdout, (
        process.stderr
    )
    assert process.returncode == 1
