"""The steps of a device check: what they do when things break. ``test_card.py`` runs them dry."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.children import Clock, Finished
from benchmarks.kernels import device_check, speed, workloads
from sglang_indexcache.bench.roofline import gpu_of_driver
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import OPS

ROOT = Path(__file__).parent.parent.parent
CPU = torch.device("cpu")


def test_a_contender_that_kills_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second try goes on where the first ended, without the one that ended it."""
    commands: list[list[str]] = []
    died = Finished(
        [
            {"begin": "cuda", "workload": "a"},
            {"number": 0, "result": {"workload": "a"}},
            {"begin": "cuda", "workload": "b"},
            {"begin": "flash_mla", "workload": "b"},
        ],
        "exit code -11",
        "Segmentation fault",
    )
    survived = Finished([{"number": 1, "result": {"workload": "b"}}], None, "")
    answers = [died, survived]

    def answer(command: list[str], seconds: float) -> Finished:
        commands.append(command)
        return answers.pop(0)

    monkeypatch.setattr(device_check, "run", answer)
    timed = device_check.time_all(Clock(100), tiny=False)
    assert [result["workload"] for result in timed["results"]] == ["a", "b"]
    assert "Segmentation fault" in timed["ended_the_process"]["flash_mla"]
    assert commands[1][commands[1].index("--skip") + 1 :] == ["flash_mla"]
    assert commands[1][commands[1].index("--from") + 1] == "1"


def test_time_that_runs_out_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Finished([{"out_of_time": ["x", "y"]}], None, "")
    monkeypatch.setattr(device_check, "run", lambda *_: late)
    timed = device_check.time_all(Clock(100), tiny=False)
    assert timed["not_measured"] == ["x", "y"]
    hung = Finished([], "stopped after 50 s", "")
    monkeypatch.setattr(device_check, "run", lambda *_: hung)
    timed = device_check.time_all(Clock(100), tiny=True)
    assert len(timed["not_measured"]) == len(list(workloads.tiny_workloads()))


def outcome(name: str, complaints: list[str], skipped: str | None = None) -> dict[str, Any]:
    return {"case": name, "complaints": complaints, "skipped": skipped, "seconds": 0.1}


@pytest.mark.parametrize(
    ("lines", "problem", "right"),
    [
        ([outcome("a", [])], None, True),
        ([outcome("a", []), outcome("b", ["wrong"])], None, False),
        ([outcome("a", [])], "exit code 1", False),
        ([outcome("a", [], "no GPU")], None, False),
        ([], None, False),
    ],
)
def test_verdicts(
    monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]], problem: str | None, right: bool
) -> None:
    """Correct is what ran, passed everything and came to an end."""
    done = Finished(lines, problem, "")
    monkeypatch.setattr(device_check, "run", lambda *_: done)
    found = device_check.check(Clock(100), ["cuda"], large=True)
    assert device_check.verdicts(found) == {"cuda": dict.fromkeys(OPS, right)}


def timed(family: str, **medians: float) -> dict[str, Any]:
    names = {
        "anchor": "flash_mla",
        "rival": "torch.topk",
        "other": "deep_gemm + torch.topk",
        "default": "deep_gemm + sglang v2",
    }
    times = {names.get(name, name): {"median_us": us} for name, us in medians.items()}
    return {"family": family, "times": times}


def test_faster_means_everywhere() -> None:
    results = [
        timed("mla_prefill", cuda=5, triton=9, anchor=7),
        timed("mla_prefill", cuda=6, triton=6, anchor=7),
        timed("topk", cuda=1, rival=2),
        timed("select_decode", cuda=1, other=2),
        timed("select_prefill", cuda=3, triton=1, other=4, default=2),
        timed("select_prefill", cuda=3, triton=1, other=2, default=4),
    ]
    found = device_check.faster({"results": results})
    assert found["cuda"]["mla_prefill"] is True
    assert found["triton"]["mla_prefill"] is False
    assert found["cuda"]["topk"] is None  # torch.topk is not what the engine runs
    assert found["cuda"]["select_decode"] is None  # the engine's own top-k did not run
    assert found["cuda"]["select_prefill"] is False
    assert found["triton"]["select_prefill"] is True


def test_the_engine_s_defaults_are_anchors() -> None:
    for work in workloads.tiny_workloads():
        names = speed.contenders(work, dispatch.Machine("CPU", None), CPU)
        assert device_check.ENGINE_DEFAULTS[work.family] in names
        assert device_check.ENGINE_DEFAULTS[work.family] in device_check.ENGINE_ANCHORS


def test_roofline() -> None:
    """The reference document's figures: 120K, 8192 rows, 32 heads on an H100."""
    card = gpu_of_driver("NVIDIA H100 80GB HBM3")
    assert card is not None
    work = workloads.Workload("select_prefill", 8192, 122_880, 32)
    assert work.pairs == sum(range(122_880 - 8191, 122_881))
    seconds, by = card.bound(work.flops, work.memory_bytes, fp8=True)
    assert by == "matrix unit"
    assert seconds == pytest.approx(4.03e-3, rel=0.01)  # 3.93 ms with K = 1000
    decode = workloads.Workload("select_decode", 64, 120_000, 32)
    seconds, by = card.bound(decode.flops, decode.memory_bytes, fp8=True)
    assert by == "memory"
    assert seconds == pytest.approx(302.6e-6, rel=0.01)
    assert gpu_of_driver("NVIDIA H100 PCIe") is None
    assert gpu_of_driver("NVIDIA A100-SXM4-80GB") is None


def test_every_workload_is_one_of_its_family() -> None:
    todo = list(workloads.workloads())
    assert len({str(work) for work in todo}) == len(todo)
    assert {work.family for work in todo} == set(speed.OPS)
    for family, heads in (("select_prefill", {32, 64}), ("mla_prefill", {20, 64, 128})):
        for context in workloads.CONTEXTS:
            assert {w.heads for w in todo if w.family == family and w.context == context} == heads


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
        if work.is_prefill:
            assert int(indexer.visible.sum()) == work.pairs
            assert indexer.keys.shape == (work.context, 128)


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
        names = speed.contenders(work, machine, CPU)
        assert {"cuda", "triton"} <= set(names)
        assert "reference" not in names
        assert len(names) > 2
