"""Check 3: our kernels in a CUDA graph give what they give outside of one.

A captured kernel must take nothing from the time of its capture but addresses and shapes. So before
a replay all its inputs are overwritten in place (lengths, page tables, lists and values), and its
outputs with rubbish.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.card.claims import MissingError, RefutedError, Report, expect
from benchmarks.card.device import Replayed
from sglang_indexcache.kernels.contract import PADDING, VALUE_DIM, IndexerBatch
from sglang_indexcache.kernels.dispatch import Machine, named
from sglang_indexcache.kernels.grid.cases import (
    AttentionCase,
    IndexerCase,
    TopKCase,
    attention_inputs,
    indexer_inputs,
    topk_inputs,
)

INDEXER = (
    IndexerCase("ragged", 32, ((1, 3000), (1, 0), (1, 700), (1, 65)), topk=512, decode=True),
    IndexerCase("MTP", 64, ((4, 1500), (4, 66)), topk=512, decode=True),
    IndexerCase("prefill", 32, ((40, 900), (7, 300), (1100, 4100)), topk=512, padding=3),
)
ATTENTION = tuple(
    (
        AttentionCase((1024, 100, 0, 7), 1024, heads, fp8),
        AttentionCase((3, 1024, 64, 0), 1024, heads, fp8),
    )
    for heads in (20, 64)
    for fp8 in (False, True)
)
TOPK = TopKCase(5000, 2048)
TINY_INDEXER = (
    IndexerCase("ragged", 8, ((1, 200), (1, 0), (1, 65)), topk=64, decode=True),
    IndexerCase("prefill", 8, ((3, 90), (2, 70)), topk=64, padding=1),
)
TINY_ATTENTION = ((AttentionCase((64, 0), 64, 4), AttentionCase((5, 64), 64, 4)),)
TINY_TOPK = TopKCase(300, 64)


@dataclass(frozen=True)
class Job:
    """One kernel with two sets of inputs of the same shapes, and its outputs.

    Attributes:
        call: runs it: the inputs, then the outputs.
    """

    name: str
    first: tuple[torch.Tensor, ...]
    second: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    call: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], Any]


def jobs(implementation: str, report: Report) -> Iterator[Job]:
    """Every op that the implementation has, in the forms that serving uses.

    Raises:
        MissingError: it cannot run here.
    """
    machine, one = Machine.here(), named(implementation)
    ops: dict[str, Callable[..., Any]] = {}
    for op in ("select", "topk", "sparse_mla"):
        if obstacle := one.obstacle(op, machine):
            raise MissingError(f"{implementation} {op}: {obstacle}")
        ops[op] = one.load(op)
    device = machine.device
    for case in TINY_INDEXER if report.dry else INDEXER:
        yield from (select_job(ops["select"], case, slots, device) for slots in (False, True))
    yield topk_job(ops["topk"], TINY_TOPK if report.dry else TOPK, device)
    for first, second in TINY_ATTENTION if report.dry else ATTENTION:
        yield attention_job(ops["sparse_mla"], first, second, device)


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU, so that every device draws the same."""
    return torch.Generator().manual_seed(seed)


def select_job(
    select: Callable[..., Any], case: IndexerCase, as_slots: bool, device: torch.device
) -> Job:
    """The fused indexer; the second batch has other pages and sees half as much."""
    first, second = (indexer_inputs(case, seeded(seed), device) for seed in (1, 2))
    second = dataclasses.replace(second, visible=second.visible // 2)
    out = (torch.empty(len(first.visible), case.topk, dtype=torch.int32, device=device),)

    def call(inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        batch = IndexerBatch(*inputs)
        select(batch, case.topk, as_slots=as_slots, out=outputs[0])

    name = f"select {case}{' as slots' * as_slots}"
    return Job(name, tensors(first), tensors(second), out, call)


def tensors(batch: IndexerBatch) -> tuple[torch.Tensor, ...]:
    """The fields of a batch, without the last ones where they are left out."""
    fields = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return tuple(field for field in fields if field is not None)


def topk_job(topk: Callable[..., Any], case: TopKCase, device: torch.device) -> Job:
    """Top-k of given logits; the second batch sees less."""
    first, second = (topk_inputs(case, seeded(seed), device) for seed in (1, 2))
    second = (second[0], second[1] // 2)
    out = torch.empty(len(first[1]), case.topk, dtype=torch.int32, device=device)

    def call(inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        topk(*inputs, case.topk, out=outputs[0])

    return Job(f"topk {case}", first, second, (out,), call)


def attention_job(
    attend: Callable[..., Any], one: AttentionCase, other: AttentionCase, device: torch.device
) -> Job:
    """Sparse MLA; the second batch lists other slots, and as many elsewhere."""
    first, second = (
        attention_inputs(case, seeded(seed), device) for seed, case in ((1, one), (2, other))
    )
    rows = len(one.counts)
    out = torch.empty(rows, one.heads, VALUE_DIM, dtype=torch.bfloat16, device=device)
    lse = torch.empty(rows, one.heads, dtype=torch.float32, device=device)

    def call(inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
        attend(*inputs, first.scale, out=outputs[0], lse=outputs[1])

    given = [(inputs.q, inputs.cache, inputs.slots) for inputs in (first, second)]
    return Job(f"sparse_mla {one}", given[0], given[1], (out, lse), call)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs equal themselves this way."""
    return tensor.contiguous().view(torch.uint8)


def spoil(tensor: torch.Tensor) -> None:
    """Rubbish that no kernel returns."""
    tensor.fill_(PADDING - 6 if tensor.dtype == torch.int32 else 77.0)


def replays(job: Job, dry: bool) -> int:
    """Capture once, then replay with the second inputs and with the first again.

    Returns:
        Bytes that the graph took.

    Raises:
        RefutedError: a replay differs from a run outside the graph, in any bit.
    """
    wanted = []
    for inputs in (job.first, job.second):
        job.call(inputs, job.outputs)
        wanted.append([output.clone() for output in job.outputs])
    expect(
        any(not torch.equal(bits(a), bits(b)) for a, b in zip(*wanted, strict=True)),
        f"{job.name}: both inputs give the same, so nothing could be seen",
    )
    static = tuple(tensor.clone() for tensor in job.first)
    graph = Replayed(lambda: job.call(static, job.outputs), dry)
    for number in (1, 0):
        for tensor, given in zip(static, (job.first, job.second)[number], strict=True):
            tensor.copy_(given)
        for output in job.outputs:
            spoil(output)
        graph.replay()
        for output, right in zip(job.outputs, wanted[number], strict=True):
            if not torch.equal(bits(output), bits(right)):
                which = ("first", "second")[number]
                raise RefutedError(f"{job.name}: the replay with the {which} inputs differs")
    return graph.pool_bytes


def run(report: Report) -> None:
    """One claim for each of our implementations."""
    for claim, name in zip(report.claims, ("cuda", "triton"), strict=True):
        with report.claim(claim) as evidence:
            # The reference stands for each of them on a CPU.
            for job in jobs("reference" if report.dry else name, report):
                evidence[job.name] = {"graph bytes": replays(job, report.dry)}
