"""Run the whole grid on the implementations that can run here, one outcome a case.

As a program, one group of ops on one implementation, and a line of JSON a case::

    python -m sglang_indexcache.kernels.grid.runner --implementation cuda --group topk

It is a process of its own, because a kernel that faults takes the process's GPU context with it,
and it needs torch only. A person has ``indexcache kernels check``.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias, get_args

import torch

from sglang_indexcache.kernels.contract import FLOAT32_BITS, HOPPER_FP8_BITS, OpName
from sglang_indexcache.kernels.dispatch import NAMES, Implementation, Machine, named
from sglang_indexcache.kernels.grid import cases, suite

Sizes: TypeAlias = Literal["small", "wide", "large"]
SIZES: tuple[Sizes, ...] = get_args(Sizes)


@dataclass(frozen=True)
class OpGroup:
    """Ops that are checked together, and the cases of each of :data:`SIZES`."""

    ops: tuple[OpName, ...]
    cases: tuple[tuple[object, ...], ...]


GROUPS: dict[str, OpGroup] = {
    "topk": OpGroup(("topk",), (cases.TOPK, (), cases.LARGE_TOPK)),
    "indexer_prefill": OpGroup(
        ("logits", "select"), (cases.PREFILL, cases.WIDE_PREFILL, cases.LARGE_PREFILL)
    ),
    # Apart, because a fault ends its process and shall not take the other cases along.
    "indexer_decode": OpGroup(("logits", "select"), (cases.DECODE, (), cases.LARGE_DECODE)),
    "sparse_mla": OpGroup(
        ("sparse_mla",), (cases.ATTENTION, cases.WIDE_ATTENTION, cases.LARGE_ATTENTION)
    ),
}


@dataclass(frozen=True)
class CaseOutcome:
    """What one implementation did on one case.

    Attributes:
        group: one of :data:`GROUPS`.
        implementation: its name.
        case: its name.
        complaints: empty if the contract holds.
        skipped: why the case was not run, or None.
        seconds: of the check, drawing the inputs and the reference included.
    """

    group: str
    implementation: str
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

    implementation: Implementation
    machine: Machine
    device: torch.device
    sizes: Sizes
    seed: int

    def run(self, group: str) -> Iterator[CaseOutcome]:
        """Every case of ``group``; an exception is a complaint."""
        for case in chain(*GROUPS[group].cases[: SIZES.index(self.sizes) + 1]):
            started = time.perf_counter()
            complaints, skipped = self._attempt(group, case)
            seconds = time.perf_counter() - started
            name = self.implementation.name
            yield CaseOutcome(group, name, str(case), complaints, skipped, seconds)

    def _attempt(self, group: str, case: object) -> tuple[tuple[str, ...], str | None]:
        for op in GROUPS[group].ops:
            obstacle = self.implementation.obstacle(op, self.machine)
            if obstacle:
                return (), obstacle
        try:
            functions = [self.implementation.load(op) for op in GROUPS[group].ops]
            return tuple(self._check(case, functions)), None
        except Exception as error:  # whatever a kernel raises is a finding, not an end
            return (f"{type(error).__name__}: {str(error)[:500]}",), None

    def _check(self, case: object, functions: list[Callable[..., Any]]) -> list[str]:
        generator = torch.Generator().manual_seed(self.seed)
        if isinstance(case, cases.TopKCase):
            logits, visible = cases.topk_inputs(case, generator, self.device)
            return suite.check_topk(functions[0], logits, visible, case.topk)
        if isinstance(case, cases.AttentionCase):
            inputs = cases.attention_inputs(case, generator, self.device)
            return suite.check_sparse_mla(functions[0], inputs)
        assert isinstance(case, cases.IndexerCase), case
        batch = cases.indexer_inputs(case, generator, self.device)
        return suite.check_indexer(functions[0], functions[1], case, batch, self._bits)

    @property
    def _bits(self) -> int:
        on_gpu = self.device.type == "cuda" and not self.implementation.is_reference
        return HOPPER_FP8_BITS if on_gpu else FLOAT32_BITS


def main() -> None:
    """Check, and print as each case ends."""
    parser = argparse.ArgumentParser(description="One group of ops on one implementation.")
    parser.add_argument("--implementation", choices=NAMES, required=True)
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    machine = Machine.here()
    implementation = named(options.implementation)
    runner = Runner(implementation, machine, machine.device, options.sizes, options.seed)
    for outcome in runner.run(options.group):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
