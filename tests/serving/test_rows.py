"""Patterns that the rows of a forward obey, against a plain reading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.rows import RowPatterns, patterns_of_rows, to_device
from tests.serving.plans import plan, requests

FIRST, SECOND, THIRD = Pattern("FSS"), Pattern("FFS"), Pattern("FFF")


def of_each(rows: RowPatterns) -> list[Pattern]:
    """Return the pattern of each row, of which there are several."""
    assert rows.masks is not None
    return [Pattern("".join("FS"[not full] for full in row)) for row in rows.masks.T.tolist()]


def is_one(rows: RowPatterns, pattern: Pattern) -> bool:
    return rows.patterns == (pattern,) and rows.masks is None


def serving(mode: str = "live") -> ServingProcess:
    return ServingProcess(plan("FSF", mode=mode))


def batch(*patterns: Pattern, lengths: list[int] | None = None, padding: int = 0) -> Any:
    """A batch of requests with these patterns: a decode, or a prefill of ``lengths`` tokens."""
    count = len(patterns) if lengths is None else sum(lengths)
    return SimpleNamespace(
        rids=requests(patterns),
        forward_mode=SimpleNamespace(is_decode=lambda: lengths is None),
        extend_seq_lens_cpu=lengths,
        positions=torch.empty(count + padding),
    )


def test_requests_of_one_pattern_need_no_rows() -> None:
    rows = RowPatterns.of([Pattern("FS"), Pattern("FS")], [3, 1], torch.empty(4))
    assert is_one(rows, Pattern("FS"))


def test_rows_behind_the_last_are_full_everywhere() -> None:
    rows = RowPatterns.of([FIRST, SECOND], [1, 2], torch.empty(5))
    assert of_each(rows) == [FIRST, SECOND, SECOND, THIRD, THIRD]


def test_more_rows_than_there_are_is_an_error() -> None:
    with pytest.raises(StaleIndexError, match="requests have 5 rows, and their forward has 4"):
        RowPatterns.of([FIRST, SECOND], [3, 2], torch.empty(4))


def test_lengths_beyond_the_requests_are_those_of_padding() -> None:
    rows = RowPatterns.of([FIRST, SECOND], [1, 2, 4], torch.empty(7))
    assert of_each(rows) == [FIRST, SECOND, SECOND] + [THIRD] * 4


def test_a_part_has_the_rows_of_its_place() -> None:
    rows = RowPatterns.of([FIRST, SECOND, THIRD], [1, 2, 1], torch.empty(4))
    assert of_each(rows.cut(1, 4, 3)) == [SECOND, SECOND, THIRD]
    assert of_each(rows.cut(0, 3, 4)) == [FIRST, SECOND, SECOND, THIRD]  # padded
    assert is_one(RowPatterns((FIRST,)).cut(1, 4, 4), FIRST)


class CopiesToDevice(TorchDispatchMode):
    """Notes what torch brings from the host to a device that is not the host."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "asks the device for a value"
        tensors = [tensor for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(t.device.type == "cpu" for t in tensors) and result.device.type != "cpu":
            self.waits.append(not (kwargs or {}).get("non_blocking", False))
        return result


def test_a_mixed_forward_copies_once_and_waits_for_nothing() -> None:
    """The device is torch's without memory: whatever wanted a value from it would raise."""
    like = torch.empty(9, device="meta")
    with CopiesToDevice() as copies:
        rows = RowPatterns.of([FIRST, SECOND, FIRST], [2, 3, 1], like)
        part = rows.cut(2, 5, 4)
    assert copies.waits == [False]
    assert rows.masks is not None
    assert part.masks is not None
    assert (rows.masks.shape, part.masks.shape) == ((3, 9), (3, 4))


@pytest.mark.parametrize(("device", "pinned"), [("cuda", True), ("cpu", False)])
def test_only_from_pinned_memory_does_a_gpu_copy_by_itself(device: str, pinned: bool) -> None:
    calls = []
    host = SimpleNamespace(
        pin_memory=lambda: calls.append("pinned") or host,
        to=lambda where, non_blocking: calls.append((where.type, non_blocking)),
    )
    to_device(host, torch.device(device))  # type: ignore[arg-type]
    assert calls == ["pinned"] * pinned + [(device, True)]


@pytest.mark.parametrize("padding", [0, 2])
def test_a_decode_has_a_row_a_request(padding: int) -> None:
    rows = patterns_of_rows(batch(FIRST, SECOND, FIRST, padding=padding), serving())
    assert of_each(rows) == [FIRST, SECOND, FIRST] + [THIRD] * padding


@pytest.mark.parametrize("padding", [0, 2])
def test_a_prefill_has_a_row_a_token(padding: int) -> None:
    forward = batch(SECOND, FIRST, lengths=[2, 3], padding=padding)
    rows = patterns_of_rows(forward, serving())
    assert of_each(rows) == [SECOND] * 2 + [FIRST] * 3 + [THIRD] * padding


def test_an_idle_rank_runs_the_default() -> None:
    idle = SimpleNamespace(rids=[])
    assert is_one(patterns_of_rows(idle, serving()), Pattern("FSF"))  # type: ignore[arg-type]


def test_static_mode_has_one_pattern_whatever_requests_say() -> None:
    rows = patterns_of_rows(batch(FIRST, SECOND), serving("static"))
    assert is_one(rows, Pattern("FSF"))


def test_requests_whose_patterns_nobody_told_are_noticed() -> None:
    unknown = batch(FIRST)
    unknown.rids = ["1"]
    with pytest.raises(StaleIndexError, match="without the patterns of its requests"):
        patterns_of_rows(unknown, serving())
