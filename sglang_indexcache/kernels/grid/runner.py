"""Run the whole grid on the implementations that can run here, one outcome a case.

As a program, one group of ops on one implementation, and a line of JSON a case::

    python -m sglang_indexcache.kernels.grid.runner --implementation cuda --group topk

It is a process of its own, because a kernel that faults takes the process's GPU context with it,
and it needs torch only. A person has ``indexcache kernels check``.
"""

import argparse
import dataclasses
import json
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
    """What an implementation did on one case.

    Attributes:
        case: its name.
        complaints: empty if the contract holds.
    """

    case: str
    complaints: tuple[str, ...]


def run(
    implementation: Implementation, group: str, sizes: Sizes, machine: Machine, seed: int = 0
) -> Iterator[CaseOutcome]:
    """Run every case of one of :data:`GROUPS`; an exception is a complaint.

    Args:
        implementation: one that can run on ``machine``.
        sizes: "small" cases; "wide" ones too, many short rows for a GPU; or all, "large".
        seed: of the inputs.
    """
    ops = GROUPS[group].ops
    # What the matrix unit keeps when it adds, see ``logits_tolerance``.
    on_gpu = machine.device.type == "cuda" and implementation.name != "reference"
    bits = HOPPER_FP8_BITS if on_gpu else FLOAT32_BITS
    for case in chain(*GROUPS[group].cases[: SIZES.index(sizes) + 1]):
        generator = torch.Generator().manual_seed(seed)
        try:
            functions = [implementation.load(op) for op in ops]
            complaints = _check(case, functions, generator, machine.device, bits)
        except Exception as error:  # whatever a kernel raises is a finding, not an end
            complaints = [f"{type(error).__name__}: {str(error)[:500]}"]
        yield CaseOutcome(str(case), tuple(complaints))


def _check(
    case: object,
    functions: list[Callable[..., Any]],
    generator: torch.Generator,
    device: torch.device,
    bits: int,
) -> list[str]:
    if isinstance(case, cases.TopKCase):
        logits, visible = cases.topk_inputs(case, generator, device)
        return suite.check_topk(functions[0], logits, visible, case.topk)
    if isinstance(case, cases.AttentionCase):
        inputs = cases.attention_inputs(case, generator, device)
        return suite.check_sparse_mla(functions[0], inputs)
    assert isinstance(case, cases.IndexerCase), case
    batch = cases.indexer_inputs(case, generator, device)
    return suite.check_indexer(functions[0], functions[1], case, batch, bits)


def main() -> None:
    """Check, and print as each case ends."""
    parser = argparse.ArgumentParser(description="One group of ops on one implementation.")
    parser.add_argument("--implementation", choices=NAMES, required=True)
    parser.add_argument("--group", choices=GROUPS, required=True)
    parser.add_argument("--sizes", choices=SIZES, default="small")
    options = parser.parse_args()
    machine = Machine.here()
    implementation = named(options.implementation).check(machine)
    for outcome in run(implementation, options.group, options.sizes, machine):
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
