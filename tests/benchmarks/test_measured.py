"""The table from which ``auto`` chooses: it is the record's, and it is read as it says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks.card import measured
from benchmarks.records import RESULTS
from sglang_indexcache.kernels import routes
from sglang_indexcache.kernels.routes import (
    ENGINE,
    LEAST_GAIN,
    OURS,
    SECOND_TOPK,
    Operation,
    Routes,
)

H100 = "NVIDIA H100 80GB HBM3"
ROWS: list[dict[str, Any]] = json.loads(routes.TABLE.read_text())["cards"][H100]
PREFILL = Operation("select-prefill", 32)


def table(overlap: int = 0) -> Routes:
    found = Routes.of_card(H100, overlap)
    assert found is not None
    return found


def operation(row: dict[str, Any]) -> Operation:
    return Operation(row["operation"], row["heads"], row["cache"], row["verified"])


def best(rows: list[dict[str, Any]]) -> str:
    """Return what is fastest by the worst of some shapes, found by going through all names."""
    gains = {ENGINE: LEAST_GAIN}
    for name in (OURS, SECOND_TOPK):
        each = [row["times"][ENGINE] / row["times"].get(name, float("inf")) for row in rows]
        if min(each) >= LEAST_GAIN:
            gains[name] = min(each)
    return max(gains, key=lambda name: (gains[name], name != ENGINE))


def test_it_is_generated_from_the_committed_record() -> None:
    assert routes.TABLE.read_text() == measured.table()
    record = json.loads((RESULTS / "kernels" / "h100.json").read_text())
    timed = {row["workload"] for row in record["speed"]}
    assert len(ROWS) <= len(timed)
    assert len(ROWS) == 75, "shapes beside SGLang's default, but for the top-k alone"


def test_at_a_measured_shape_the_fastest_runs() -> None:
    """A decode step in a graph knows no length: there all of its rows' shapes count."""
    for row in ROWS:
        here = operation(row)
        tokens = (row["tokens"], row["tokens"])
        chosen = table(70).choose(here, row["rows"], tokens).name
        alike = [
            other
            for other in ROWS
            if operation(other) == here
            and other["rows"] == row["rows"]
            and (other["tokens"] == row["tokens"] or here.name != "select-prefill")
        ]
        assert chosen == best(alike), row
        assert all(other["times"][chosen] <= other["times"][ENGINE] for other in alike)


def test_between_measured_shapes_the_slower_neighbour_decides() -> None:
    pick = random.Random(0)
    shapes = {(row["rows"], row["tokens"]): row for row in ROWS if operation(row) == PREFILL}
    counts = sorted({rows for rows, _ in shapes})
    lengths = sorted({tokens for _, tokens in shapes})
    seen = set()
    for _ in range(300):
        rows, tokens = pick.randint(counts[0], counts[-1]), pick.randint(lengths[0], lengths[-1])
        near = [
            max(length for length in lengths if length <= tokens),
            min(length for length in lengths if length >= tokens),
        ]
        corners = [shapes[count, length] for count in counts for length in near]
        chosen = table().choose(PREFILL, rows, (tokens, tokens)).name
        assert chosen == best(corners)
        seen.add(chosen)
    assert seen == {OURS, SECOND_TOPK}


def test_a_batch_counts_by_its_shortest_and_its_longest_request() -> None:
    chosen = [
        table().choose(PREFILL, 8192, tokens).name
        for tokens in ((61_440, 204_800), (20_000, 204_800), (9_000, 204_800), None)
    ]
    assert chosen == [OURS, SECOND_TOPK, ENGINE, SECOND_TOPK]


@pytest.mark.parametrize(
    ("here", "rows", "tokens"),
    [
        (PREFILL, 255, (61_440, 61_440)),
        (PREFILL, 8193, (61_440, 61_440)),
        (PREFILL, 8192, (204_801, 204_801)),
        (PREFILL, 8192, (10_239, 61_440)),
        (Operation("select-prefill", 16), 8192, (61_440, 61_440)),
        (Operation("select-decode", 32, verified=4), 8, None),
        (Operation("sparse_mla-decode", 20, "fp8"), 8, None),
        (Operation("sparse_mla-decode", 8, "bfloat16"), 8, None),
        (Operation("sparse_mla-decode", 8, "fp8"), 257, None),
    ],
)
def test_what_no_measured_shape_encloses_is_sglangs(
    here: Operation, rows: int, tokens: routes.Tokens
) -> None:
    assert table(100).choose(here, rows, tokens).name == ENGINE


def test_a_length_out_of_reach_is_the_reason_given() -> None:
    choice = table().choose(PREFILL, 256, (5000, 20_000))
    assert "10,240 to 204,800 tokens" in choice.why


def test_a_choice_hashes_no_shape_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of a kernel asks: hashing all shapes took a tenth of a millisecond."""
    routed = table()
    choice = routed.choose(PREFILL, 8192, (61_440, 61_440))
    monkeypatch.setattr(routes.Shape, "__hash__", lambda _: pytest.fail("hashed"))
    assert routed.choose(PREFILL, 8192, (61_440, 61_440)) == choice


def test_attention_in_prefill_needs_the_overlap_with_which_it_was_timed() -> None:
    """Lists of neighbouring rows were made to share 70 %; of others the record says nothing."""
    here = Operation("sparse_mla-prefill", 8, "bfloat16")
    for overlap, name in ((0, ENGINE), (69, ENGINE), (70, OURS), (100, OURS)):
        assert table(overlap).choose(here, 4096).name == name
        assert table(overlap).choose(here, 8192).name == name, "two calls of 4,096"
    assert table(70).choose(here, 4095).name == ENGINE, "256 rows were not faster"


def test_a_card_without_a_record_has_no_routes() -> None:
    assert Routes.of_card("NVIDIA H200") is None


def test_without_ours_another_of_sglangs_own_takes_its_place() -> None:
    assert table().without(OURS).choose(PREFILL, 8192, (122_880, 122_880)).name == SECOND_TOPK


def test_a_choice_names_the_row_that_decided() -> None:
    choice = table().choose(PREFILL, 8192, (100_000, 100_000))
    assert choice == routes.KernelChoice(OURS, "1.17x at 8,192 rows, 61,440 tokens")
    lines = list(table().describe(PREFILL))
    assert "8,192 rows, 61,440 tokens: cuda (5,027 us, SGLang's default 5,898)" in lines
    assert "8,192 rows, 10,240 tokens: sglang v2 (597 us, SGLang's default 753)" in lines
