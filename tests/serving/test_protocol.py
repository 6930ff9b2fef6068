"""Checks of what a server says: its state, its layers and its answers."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.serving.client_rules import alike, check_answered_under, check_obeyed, facts
from sglang_indexcache.serving.protocol import STATE, RankState, states_of
from tests.fakes import state


def test_a_state_is_the_same_after_its_way_through_json() -> None:
    before = state("FSSF", requests={"FSSF": 2}, forwards=3, index_reuses=[0, 1, 1, 0])
    assert RankState.from_json(before.to_json(), "it") == before
    assert before.to_json()["full_layers"] == 2


def test_a_state_of_another_version_is_told_as_that() -> None:
    report = {k: v for k, v in state().to_json().items() if k != "index_reuses"} | {
        "version": "9.9"
    }
    with pytest.raises(ServerError, match=r"it .*\(index_reuses\).* 9\.9.*same on both sides"):
        RankState.from_json(report, "it")


def test_a_rank_that_could_not_report_is_told() -> None:
    info = {"internal_states": [{"other": 1}, {"indexcache": {"error": "KeyError: 'x'"}}]}
    with pytest.raises(ServerError, match="it cannot say what IndexCache does: KeyError: 'x'"):
        states_of(info, "it")


@pytest.mark.parametrize(
    ("info", "answer"),
    [
        ({"indexcache_pattern": ["FFFF"]}, "under FFFF"),
        ({"indexcache_pattern": []}, "without saying under which pattern"),
        ({}, "without saying under which pattern"),
    ],
)
def test_an_answer_under_another_pattern_or_none_is_refused(info: Any, answer: str) -> None:
    with pytest.raises(ServerError, match=f"it was asked for pattern FSFS and answered {answer}"):
        check_answered_under(info, "FSFS", "it")


def test_an_answer_under_the_pattern_is_believed() -> None:
    check_answered_under({"indexcache_pattern": ["FSFS"]}, "FSFS", "it")


def state_of(runs: list[int], reuses: list[int], forwards: int = 9, rank: int = 0) -> RankState:
    counters = {"indexer_selections": runs, "index_reuses": reuses, "forwards": forwards}
    return state("FFF", rank=rank, **counters)


START = state_of([5, 5, 5], [5, 5, 5], forwards=1)


@pytest.mark.parametrize(
    ("runs", "reuses", "patterns", "alone", "layers"),
    [
        ([6, 5, 5], [5, 6, 6], ["FSS"], True, None),
        ([6, 5, 5], [5, 6, 6], ["FSS"], False, None),
        ([6, 6, 5], [5, 6, 6], ["FSS", "FFS"], False, None),
        ([6, 6, 5], [5, 5, 6], ["FSS", "FFS"], False, None),  # mixed: layer 1 always ran
        ([6, 6, 5], [5, 6, 6], ["FSS"], False, None),  # somebody else's pattern
        ([6, 6, 5], [5, 6, 6], ["FSS"], True, "1"),
        ([6, 5, 5], [5, 5, 6], ["FSS"], False, "1"),  # an S layer that reused nothing
        ([6, 5, 5], [5, 6, 6], ["FFS"], False, "1"),  # an F layer whose indexer did not run
        ([5, 5, 5], [5, 5, 5], ["FSS"], False, "0, 1, 2"),
        ([6, 6, 6], [5, 5, 5], ["FSS"], True, "1, 2"),
    ],
)
def test_layers_do_what_the_patterns_say(
    runs: list[int], reuses: list[int], patterns: list[str], alone: bool, layers: str | None
) -> None:
    after = state_of(runs, reuses)
    if layers is None:
        check_obeyed([START], [after], patterns, "it", alone=alone)
    else:
        with pytest.raises(ServerError, match=f"it ignores the pattern.* layers {layers} did not"):
            check_obeyed([START], [after], patterns, "it", alone=alone)


def test_ranks_that_had_requests_of_one_pattern_each() -> None:
    """Together they obeyed both patterns; alone on the server, each must obey by itself."""
    start = [START, START.model_copy(update={"rank": 1})]
    first, second = state_of([6, 5, 5], [5, 6, 6]), state_of([6, 6, 5], [5, 5, 6], rank=1)
    check_obeyed(start, [first, second], ["FSS", "FFS"], "it")
    idle = state_of([5, 5, 5], [5, 5, 5], rank=1)
    check_obeyed(start, [first, idle], ["FSS"], "it")
    with pytest.raises(ServerError, match="layers 0, 1, 2 did not"):
        check_obeyed(start, [first, idle], ["FSS"], "it", alone=True)


def test_ranks_meet_their_own_counters() -> None:
    """They answer in any order, and one may overtake another meanwhile."""
    busy, idle = state_of([8, 5, 5], [5, 8, 8], forwards=8), state_of([6, 5, 5], [5, 6, 6], rank=1)
    later = [
        state_of([16, 5, 5], [5, 16, 16], forwards=16, rank=1),
        state_of([9, 5, 5], [5, 9, 9], forwards=9),
    ]
    check_obeyed([busy, idle], later, ["FSS"], "it", alone=True)
    with pytest.raises(ServerUnavailableError, match="restarted"):
        check_obeyed([busy, idle], later[:1] * 2, ["FSS"], "it")


def test_ranks_are_told_by_their_numbers() -> None:
    reports = [{STATE: state_of([5], [5], rank=rank).to_json()} for rank in (2, 0, 1)]
    assert [state.rank for state in states_of({"internal_states": reports}, "it")] == [0, 1, 2]


def test_layers_of_other_pipeline_stages_are_not_judged() -> None:
    after = state_of([6, 5, 5], [5, 6, 5]).model_copy(update={"stage": (0, 2)})
    check_obeyed([START], [after], ["FSF"], "it", alone=True)
    with pytest.raises(ServerError, match="layers 1 did not"):
        check_obeyed([START], [after], ["FFF"], "it")


@pytest.mark.parametrize("after", [[], [state_of([0, 0, 0], [0, 0, 0], forwards=0)]])
def test_a_restart_is_no_disobedience(after: list[RankState]) -> None:
    with pytest.raises(ServerUnavailableError, match="it was restarted meanwhile"):
        check_obeyed([START], after, ["FSS"], "it")


def test_alike_names_who_says_what() -> None:
    settings = {"dtype": "bfloat16", "tp_size": 1}
    assert alike({"a": settings, "b": dict(settings)}) == {}
    assert alike(
        {"a": settings, "b": settings | {"dtype": "float16"}, "c": {**settings, "device": "cpu"}}
    ) == {
        "dtype": {"bfloat16": ["a", "c"], "float16": ["b"]},
        "device": {"": ["a", "b"], "cpu": ["c"]},
    }


def test_facts_are_what_can_change_answers() -> None:
    ours = state("FS", "live", forwards=7)
    info = {"dtype": "float32", "port": 1, "internal_states": [{"indexcache": ours.to_json()}]}
    assert facts(info, "it") == {
        "dtype": "float32",
        "mode": "live",
        "architecture": ours.architecture,
        "checkpoint_pattern": "FF",
        "indexcache": ours.version,
    }
