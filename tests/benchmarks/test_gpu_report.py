"""Report of the GPU tests, and proof that their checks can fail, without a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

from benchmarks.card.pack import ROOT
from benchmarks.kernels.machine import preflight
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.serving.protocol import PATTERN_OF_REQUEST, RankState
from tests.conftest import wants_card
from tests.gpu import test_kernels as kernels
from tests.gpu import test_served as served
from tests.kernels.grid import cases

# -- the report ----------------------------------------------------------------------------------

TESTS = """
import os, pytest
def test_passes(request): request.node.gpu_evidence = {"us": 7}
def test_fails(): assert 1 == 2, "one is not two"
def test_skips(): pytest.skip("needs a card")
def test_ends_the_process(): os._exit(9)
"""


def test_what_tests_found_is_written_before_one_ends_the_process(tmp_path: Path) -> None:
    (tmp_path / "test_made.py").write_text(TESTS)
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.report"]
    command += ["-p", "no:cacheprovider", "--gpu-report", str(report), "test_made.py"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    process = subprocess.run(command, cwd=tmp_path, env=environment, check=False)
    assert process.returncode == 9
    tests = json.loads(report.read_text())["tests"]
    assert {name.partition("::test_")[2]: test["outcome"] for name, test in tests.items()} == {
        "passes": "passed",
        "fails": "failed",
        "skips": "skipped",
    }
    passes, fails, skips = tests.values()
    assert passes["evidence"] == {"us": 7}
    assert "one is not two" in fails["why"]
    assert "needs a card" in skips["why"]


def test_without_a_card_nor_packages_everything_is_collected_and_skipped_for_one_reason() -> None:
    """Collect as a bare machine with the kit alone does: torch and pytest, nothing of SGLang's."""
    blocked = ("pydantic", "sglang", "tvm_ffi", "transformers", "safetensors", "msgspec")
    code = (
        f"import sys; sys.modules |= dict.fromkeys({blocked}); import pytest; "
        "sys.exit(pytest.main(['-q', '-rs', '-m', 'gpu', 'tests/gpu', '-p', 'no:cacheprovider']))"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    reasons = set(re.findall(r"^SKIPPED .*?: ((?:needs|could).*)$", process.stdout, re.MULTILINE))
    assert reasons == {"needs an NVIDIA GPU (H100 or H200): torch sees none"}, process.stdout
    assert re.search(r"^\d+ skipped", process.stdout, re.MULTILINE), "none failed, none passed"
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("marks", ["gpu", "gpu and not slow", "e2e or gpu"])
def test_gpu_tests_see_the_card(marks: str) -> None:
    assert wants_card(marks)
    assert not wants_card(marks.replace("gpu", "not gpu"))


def test_all_other_tests_do_not_see_a_card() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not wants_card("")
    assert not torch.accelerator.is_available()


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        ({"python": "3.12.4", "torch": "2.11.0+cu130"}, "is the machine that the archive was"),
        ({"python": "3.11.9", "torch": "2.11.0"}, "is for python 3.12, here is python 3.11"),
        ({"python": "3.12.4", "torch": "2.13.0"}, "is for torch 2.11.0, here is"),
        ({"python": "3.12.4", "torch": "2.11.0", "sources": "b"}, "names other code"),
    ],
)
def test_preflight(machine: dict[str, str], says: str) -> None:
    here = {"sources": "a", **machine}
    assert says in preflight(here, {"python": "3.12", "torch": "2.11.0", "sources": "a"})
    assert "no archive" in preflight(here)


# -- the checks of a server ----------------------------------------------------------------------


MIXED_FROM = 9 + 9 + 27
"""Requests alone and of one pattern, before the mixed ones."""


@dataclasses.dataclass
class FakeServer:
    """Answers by a rule instead of a model, with at most one fault."""

    fault: str = ""
    asked: int = 0

    def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], **logprobs: Any
    ) -> dict[str, Any]:
        self.asked += 1
        pattern = sampling_params.get("custom_params", {}).get(PATTERN_OF_REQUEST)
        under = (
            str(served.FULL) if self.fault == "ignores patterns" else pattern or str(served.PATTERN)
        )
        if self.fault == "mixes patterns" and self.asked > MIXED_FROM:
            under = "FSSSSS"
        tokens = [crc32(f"{input_ids} {under} {n}".encode()) % 500 for n in range(served.TOKENS)]
        if self.fault == "one other token":
            tokens[-1] += 1
        if self.fault == "never the same":
            tokens = [crc32(f"{self.asked} {token}".encode()) % 500 for token in tokens]
        answered = [str(served.FULL)] if self.fault == "says another pattern" else [pattern]
        meta: dict[str, Any] = {PATTERN_OF_REQUEST: answered} if pattern else {}
        if logprobs:
            meta["input_token_logprobs"] = [(-token / 100, 0) for token in tokens]
        return {"output_ids": tokens, "meta_info": meta}

    def states(self) -> list[RankState]:
        pattern = (
            str(served.FULL) if self.fault == "serves another pattern" else str(served.PATTERN)
        )
        full = range(12) if self.fault == "runs every indexer" else served.PATTERN.full_layers
        state = RankState(
            version="0",
            pattern=pattern,
            policy=pattern,
            source="a test",
            mode="live",
            architecture="GlmMoeDsaForCausalLM",
            checkpoint_pattern=str(served.FULL),
            indexer_selections=[int(layer in full) for layer in range(12)],
            index_reuses=[int(layer not in full) for layer in range(12)],
            index_key_writes=[0] * 12,
            index_k_bytes_per_token=132 * (12 if "bytes" in self.fault else 3),
        )
        return [state]


PROMPTS = [(1, 2, 3), (4, 5), (6,)]
CHECKS: dict[str, Callable[[Any], Any]] = {
    "stock": lambda server: served.compare_with_stock(server, FakeServer(), PROMPTS),
    "stock, as reference": lambda server: served.compare_with_stock(FakeServer(), server, PROMPTS),
    "indexers": lambda server: served.ran_where_full(server.states()[0], served.PATTERN),
    "mixed": lambda server: served.compare_mixed(server, PROMPTS),
}
FAULTS = {
    "stock": ("one other token", "serves another pattern", "keeps all bytes"),
    "indexers": ("runs every indexer",),
    "mixed": ("ignores patterns", "mixes patterns", "says another pattern"),
}


def test_a_right_server_passes() -> None:
    for check in CHECKS.values():
        check(FakeServer())
    assert CHECKS["stock"](FakeServer())["prompts compared"] == 3
    found = CHECKS["mixed"](FakeServer())
    assert found["control"] == found["mixed"] == 0 < found["other pattern"]


@pytest.mark.parametrize(
    ("check", "fault"), [(check, fault) for check, faults in FAULTS.items() for fault in faults]
)
def test_a_server_with_a_fault_fails(check: str, fault: str) -> None:
    with pytest.raises((AssertionError, IndexCacheError)):
        CHECKS[check](FakeServer(fault))


@pytest.mark.parametrize("check", ["stock, as reference", "mixed"])
def test_what_cannot_be_compared_is_not_called_right(check: str) -> None:
    with pytest.raises(pytest.skip.Exception):
        CHECKS[check](FakeServer("never the same"))


# -- the checks of kernels -----------------------------------------------------------------------

CPU = torch.device("cpu")
SMALL = {
    "INDEXER": (
        cases.IndexerCase("ragged", 8, ((1, 200), (1, 0), (1, 65)), topk=64, decode=True),
        cases.IndexerCase("prefill", 8, ((3, 90), (2, 70)), topk=64, padding=1),
    ),
    "ATTENTION": ((cases.AttentionCase((64, 0), 64, 4), cases.AttentionCase((5, 64), 64, 4)),),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[kernels.Job]:
    for name, few in SMALL.items():
        monkeypatch.setattr(kernels, name, few)
    return list(kernels.jobs(dispatch.named("reference").load, CPU))


def test_a_kernel_that_reads_its_inputs_anew_passes(small: list[kernels.Job]) -> None:
    assert {job.name.split()[0] for job in small} == {"select", "topk", "sparse_mla"}
    for job in small:
        kernels.check_replays(job, capture=lambda body: body)


def test_a_kernel_that_keeps_what_it_saw_at_capture_fails(small: list[kernels.Job]) -> None:
    """A kernel does so that reads lengths on the host, or copies its inputs."""
    for job in small:

        def frozen(body: Callable[[], Any], job: kernels.Job = job) -> Callable[[], Any]:
            body()
            copies = [output.clone() for output in job.outputs]
            return lambda: [out.copy_(old) for out, old in zip(job.outputs, copies, strict=True)]

        with pytest.raises(AssertionError, match="a replay differs"):
            kernels.check_replays(job, capture=frozen)
