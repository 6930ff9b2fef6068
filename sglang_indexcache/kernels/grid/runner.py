"""Run the whole grid on the implementations that can run here, one outcome a case."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias, get_args

import torch

from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import FLOAT32_BITS, HOPPER_FP8_BITS, OpName
from sglang_indexcache.kernels.grid import cases, suite

Group: TypeAlias = Literal["topk", "indexer_prefill", "indexer_decode", "sparse_mla"]
GROUPS: tuple[Group, ...] = get_args(Group)
Sizes: TypeAlias = Literal["small", "wide", "large"]
SIZES: tuple[Sizes, ...] = get_args(Sizes)


@dataclass(frozen=True)
class Outcome:
    """What one implementation did on one case.

    Attributes:
        group: the ops that are checked together.
        case: its name.
        complaints: empty if the contract holds.
        skipped: why the case was not run, or None.
        seconds: of the check, drawing the inputs and the reference included.
    """

    group: Group
    implementation: dispatch.Implementation
    case: str
    complaints: tuple[str, ...]
    skipped: str | None
    seconds: float


@dataclass(frozen=True)
class Runner:
    """One implementation on one device.

    Attributes:
        sizes: "small" cases; "wide" ones too, many short rows for a GPU; or all, "large".
        seed: of the inputs.
    """

    implementation: dispatch.Implementation
    machine: dispatch.Machine
    device: torch.device
    sizes: Sizes
    seed: int

    def run(self, group: Group) -> Iterator[Outcome]:
        """Every case of ``group``; an exception is a complaint."""
        grids: dict[Group, tuple[tuple[object, ...], ...]] = {
            "topk": (cases.TOPK, (), cases.LARGE_TOPK),
            "indexer_prefill": (cases.PREFILL, cases.WIDE_PREFILL, cases.LARGE_PREFILL),
            "indexer_decode": (cases.DECODE, (), cases.LARGE_DECODE),
            "sparse_mla": (cases.ATTENTION, cases.WIDE_ATTENTION, cases.LARGE_ATTENTION),
        }
        for case in chain(*grids[group][: SIZES.index(self.sizes) + 1]):
            started = time.perf_counter()
            complaints, skipped = self._attempt(case)
            seconds = time.perf_counter() - started
            yield Outcome(group, self.implementation, str(case), complaints, skipped, seconds)

    def _attempt(self, case: object) -> tuple[tuple[str, ...], str | None]:
        try:
            return tuple(self._check(case)), None
        except NotHere as reason:
            return (), str(reason)
        except Exception as error:  # whatever a kernel raises is a finding, not an end
            return (f"{type(error).__name__}: {str(error)[:500]}",), None

    def _check(self, case: object) -> list[str]:
        generator = torch.Generator().manual_seed(self.seed)
        if isinstance(case, cases.TopKCase):
            op = self._op("topk", dispatch.Shape(topk=case.topk))
            logits, visible = cases.topk_inputs(case, generator, self.device)
            return suite.check_topk(op, logits, visible, case.topk)
        if isinstance(case, cases.AttentionCase):
            cache = torch.uint8 if case.fp8 else torch.bfloat16
            op = self._op("sparse_mla_prefill", dispatch.Shape(heads=case.heads, cache=cache))
            return suite.check_sparse_mla(op, cases.attention_inputs(case, generator, self.device))
        assert isinstance(case, cases.IndexerCase), case
        decode = case in cases.DECODE + cases.LARGE_DECODE
        next_n = case.lens[0][0] if decode and case.lens else 1
        shape = dispatch.Shape(heads=case.heads, topk=case.topk, next_n=next_n)
        inputs = cases.indexer_inputs(case, generator, self.device)
        ops: tuple[OpName, OpName] = (
            ("indexer_logits_decode", "indexer_select_decode")
            if decode
            else ("indexer_logits_prefill", "indexer_select_prefill")
        )
        scores, select = (self._op(op, shape) for op in ops)
        check = suite.check_indexer_decode if decode else suite.check_indexer_prefill
        return check(scores, select, case, inputs, self._bits)

    @property
    def _bits(self) -> int:
        on_gpu = self.device.type == "cuda" and self.implementation != "reference"
        return HOPPER_FP8_BITS if on_gpu else FLOAT32_BITS

    def _op(self, op: OpName, shape: dispatch.Shape) -> Callable[..., object]:
        verdict = dispatch.judge(op, self.implementation, self.machine, shape)
        if not verdict.runs:
            raise NotHere(verdict.why)
        return dispatch.load(op, self.implementation)


class NotHere(Exception):  # noqa: N818 - it reports, it is no error
    """The implementation says that it cannot run a case here."""
