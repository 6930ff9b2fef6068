"""Reading of a rank's counters for ``server show``, which sees layers that do not skip."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_indexcache.serving.operating.skipping import (
    describe_index_keys,
    describe_row_shares,
    judge,
)
from tests.fakes import state


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
