"""Workloads of the speed tests: shapes, inputs, and the least that any kernel would need."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.engine_kernels import engine_anchors, engine_default
from benchmarks.kernels import speed, workloads
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OpName
from sglang_indexcache.kernels.indexer.cuda import select_rows

CPU = torch.device("cpu")
MULTIPROCESSORS = 132
"""Number of those on an H100 or H200."""


def test_the_engine_s_default_is_an_anchor() -> None:
    for work in workloads.workloads():
        assert engine_default(work) in engine_anchors(work)
    for work in workloads.tiny_workloads():
        inputs = speed.drawn(work, CPU)
        names = speed.contenders(work, dispatch.Machine("CPU", None), inputs)
        assert engine_default(work) in names


def test_a_workload_is_measured() -> None:
    """The reference runs on a CPU, and every other contender says why it does not."""
    for work in workloads.tiny_workloads():
        row = speed.measure(work, dispatch.Machine("CPU", None))
        assert row["times"]["reference"]["median_us"] > 0
        assert "needs" in row["missing"]["cuda"]
        assert "cuda" not in row["times"]


def test_the_least_that_a_card_needs() -> None:
    """The reference document's figures: 120K, 8192 rows, 32 heads on an H100."""
    card = workloads.gpu_of_driver("NVIDIA H100 80GB HBM3")
    assert card is not None
    work = workloads.Workload("select_prefill", 8192, 122_880, 32)
    assert work.pairs == sum(range(122_880 - 8191, 122_881))
    seconds, by = work.bound(card)
    assert by == "matrix unit"
    assert seconds == pytest.approx(4.03e-3, rel=0.01)  # 3.93 ms with K = 1000
    decode = workloads.Workload("select_decode", 64, 120_000, 32)
    seconds, by = decode.bound(card)
    assert by == "memory"
    assert seconds == pytest.approx(302.6e-6, rel=0.01)
    assert workloads.gpu_of_driver("NVIDIA H100 PCIe") is None
    assert workloads.gpu_of_driver("NVIDIA A100-SXM4-80GB") is None


def test_every_workload_is_one_of_its_family() -> None:
    todo = list(workloads.workloads())
    assert len({str(work) for work in todo}) == len(todo)
    assert {work.family for work in todo} == set(speed.OPS)
    contexts = {*workloads.CONTEXTS, *workloads.BETWEEN}
    assert {w.context for w in todo if w.family == "select_prefill"} == contexts
    for family in ("mla_prefill", "mla_decode"):
        assert {8, 16, 20, 64, 128} <= {w.heads for w in todo if w.family == family}
    overlaps = {w.overlap for w in todo if (w.family, w.heads) == ("mla_prefill", 20)}
    assert overlaps == {*workloads.OVERLAPS, workloads.OVERLAP}
    assert {w.verified for w in todo if w.family == "select_decode"} == {1, *workloads.MTP}
    for family in ("select_decode", "mla_decode"):
        assert {w.rows for w in todo if w.family == family} == {*workloads.BATCHES, workloads.MANY}


def test_both_ways_of_our_kernels_are_timed_before_one_becomes_a_default() -> None:
    """Ours takes two launches for a prefill of few rows, which make no tile for each SM."""
    for work in workloads.workloads():
        if work.family == "select_prefill":
            tiles = work.rows / select_rows(work.heads)
            assert (tiles >= MULTIPROCESSORS) == (work.rows not in (workloads.MANY, workloads.SOME))
            few = replace(work, rows=workloads.MANY)
            assert few in workloads.workloads()


@pytest.mark.parametrize("work", workloads.tiny_workloads(), ids=str)
def test_workloads_are_valid_input(work: workloads.Workload) -> None:
    """Lists without repeats, pages and slots within the pool."""
    if work.family.startswith("mla"):
        tensors = workloads.attention_tensors(work, CPU)
        assert int(tensors.slots.min()) >= 0
        assert int(tensors.slots.max()) < len(tensors.cache)
        for row in tensors.slots:
            assert len(row.unique()) == work.topk
    elif work.family.startswith("select"):
        indexer = workloads.indexer_tensors(work, CPU)
        assert sorted(indexer.block_table.flatten().tolist()) == list(range(len(indexer.pages)))
        assert int(indexer.visible.max()) == work.context
        assert int(indexer.visible.sum()) == work.pairs
        assert indexer.rows_per_request == (work.rows if work.is_prefill else work.verified)
        if work.is_prefill:
            assert indexer.keys.shape == (work.context, 128)


def test_a_name_says_what_differs_and_never_changes() -> None:
    """Records hold the first name; scripts of a card ask for the others."""
    names = {str(work) for work in workloads.workloads()}
    assert {
        "mla_prefill-rows4096-context122880-heads8",
        "mla_prefill-rows4096-context122880-heads20-overlap0",
        "mla_decode-rows8-context122880-heads20-fp8",
        "select_decode-rows16-context122880-heads32-mtp6",
        "select_prefill-rows1024-context20480-heads32",
    } <= names


@pytest.mark.parametrize("overlap", [0, 30, 70])
def test_neighbouring_lists_share_what_a_workload_says(overlap: int) -> None:
    work = workloads.Workload("mla_prefill", 64, 40_000, 8, topk=256, overlap=overlap)
    slots = workloads.attention_tensors(work, CPU).slots
    shared = [len({*a} & {*b}) for a, b in zip(slots.tolist(), slots.tolist()[1:], strict=False)]
    assert sum(shared) / len(shared) / work.topk == pytest.approx(overlap / 100, abs=0.02)


def test_gathered_keys_are_the_pages_keys() -> None:
    from sglang_indexcache.kernels.indexer.reference import request_keys

    work = workloads.Workload("select_prefill", 3, 130, 8)
    tensors = workloads.indexer_tensors(work, CPU)
    keys, scales = request_keys(tensors.pages, tensors.block_table[0], 130)
    assert torch.equal(keys.view(torch.uint8), tensors.keys.view(torch.uint8))
    assert torch.equal(scales, tensors.scales)


def test_contenders_name_ours() -> None:
    machine = dispatch.Machine("NVIDIA H100", (9, 0))
    for work in workloads.tiny_workloads():
        names = speed.contenders(work, machine, speed.drawn(work, CPU))
        assert "cuda" in names
        assert "reference" not in names
        assert len(names) > 1


def test_what_is_timed_is_checked_first() -> None:
    """The reference passes on every family's inputs, and a kernel that is wrong does not."""
    reference = dispatch.named("reference").load

    def forgetful(op: OpName) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            result = reference(op)(*arguments)
            if op == "sparse_mla":
                return 1.1 * result[0], result[1]
            return result if op == "logits" else result.flip(-1)

        return run

    for work in workloads.tiny_workloads():
        inputs = speed.drawn(work, CPU)
        assert speed.complaints(work, inputs, reference) == []
        assert len(speed.complaints(work, inputs, forgetful)) == work.rows * work.verified


def test_a_run_that_is_cut_short_has_some_of_every_family() -> None:
    order = list(speed.in_turns(workloads.workloads()))
    assert set(order) == set(workloads.workloads())
    assert {work.family for work in order[: len(speed.OPS)]} == set(speed.OPS)
