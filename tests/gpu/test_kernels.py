"""Our kernels in CUDA graphs; the phases build them and run the grid by its own command."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    PAGE_BYTES,
    PAGE_TOKENS,
    VALUE_DIM,
    IndexerBatch,
)
from sglang_indexcache.kernels.dispatch import Machine, named
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, write_pages
from tests.kernels.grid import cases

INDEXER = (
    cases.IndexerCase("ragged", 32, ((1, 3000), (1, 0), (1, 700), (1, 65)), topk=512, decode=True),
    cases.IndexerCase("MTP", 64, ((4, 1500), (4, 66)), topk=512, decode=True),
    cases.IndexerCase("prefill", 32, ((40, 900), (7, 300), (1100, 4100)), topk=512, padding=3),
)
ATTENTION = tuple(
    (
        cases.AttentionCase((1024, 100, 0, 7), 1024, heads, fp8),
        cases.AttentionCase((3, 1024, 64, 0), 1024, heads, fp8),
    )
    for heads in (8, 20, 64)
    for fp8 in (False, True)
)
OURS = named("cuda")
CARD = torch.device("cuda")
Tensors = tuple[torch.Tensor, ...]


def test_sglang_s_key_store_writes_the_pages_that_we_read() -> None:
    """Byte for byte, keys near zero included: in live mode S layers store theirs by it alone."""
    store = pytest.importorskip("sglang.kernels.ops.kvcache.dsa_fused_store_index_cache")
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(150, INDEX_DIM, generator=generator).to(torch.bfloat16)
    keys[-5:] *= 1e-6
    slots = torch.randperm(6 * PAGE_TOKENS, generator=generator)[: len(keys)]
    pages = torch.full((6, PAGE_BYTES), 0x55, dtype=torch.uint8)
    stored = pages.cuda()
    write_pages(pages, slots, *quantize_e4m3(keys))
    store.fused_store_index_k_cache(keys.cuda(), stored, slots.cuda(), PAGE_TOKENS)
    assert torch.equal(stored.cpu(), pages)


# -- in a graph ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel with two sets of inputs of the same shapes.

    Attributes:
        call: runs it: the inputs, then the outputs.
    """

    name: str
    first: Tensors
    second: Tensors
    outputs: Tensors
    call: Callable[[Tensors, Tensors], Any]


def seeded(seed: int) -> torch.Generator:
    """Return a generator on the CPU, so that every device draws the same."""
    return torch.Generator().manual_seed(seed)


def jobs(load: Callable[[Any], Callable[..., Any]], device: torch.device) -> Iterator[Job]:
    """The operations in the forms that serving uses; the second inputs see less, and elsewhere."""
    select, topk, attend = load("select"), load("topk"), load("sparse_mla")
    for case in INDEXER:
        first, second = (cases.indexer_inputs(case, seeded(seed), device) for seed in (1, 2))
        second = dataclasses.replace(second, visible=second.visible // 2)
        out = torch.empty(len(first.visible), case.topk, dtype=torch.int32, device=device)
        for slots in (False, True):

            def run(inputs: Tensors, out: Tensors, k: int = case.topk, s: bool = slots) -> None:
                select(IndexerBatch(*inputs), k, as_slots=s, out=out[0])

            yield Job(f"select {case}", fields(first), fields(second), (out,), run)
    drawn = cases.TopKCase(5000, 2048)
    left, right = (cases.topk_inputs(drawn, seeded(seed), device) for seed in (1, 2))
    out = torch.empty(len(left[1]), drawn.topk, dtype=torch.int32, device=device)
    yield Job(
        "topk", left, (right[0], right[1] // 2), (out,), lambda i, o: topk(*i, 2048, out=o[0])
    )
    for pair in ATTENTION:
        a, b = (
            cases.attention_inputs(case, seeded(n), device) for n, case in enumerate(pair, start=1)
        )
        rows, heads, _ = a.q.shape
        output = torch.empty(rows, heads, VALUE_DIM, dtype=torch.bfloat16, device=device)
        lse = torch.empty(rows, heads, dtype=torch.float32, device=device)

        def run(inputs: Tensors, out: Tensors, scale: float = a.scale) -> None:
            attend(*inputs, scale, out=out[0], lse=out[1])

        inputs_of_both = [(inputs.q, inputs.cache, inputs.slots) for inputs in (a, b)]
        yield Job(f"sparse_mla {pair[0]}", *inputs_of_both, (output, lse), run)


def fields(batch: IndexerBatch) -> Tensors:
    """Return the batch's tensors, without those that are left out."""
    values = (getattr(batch, field.name) for field in dataclasses.fields(batch))
    return tuple(field for field in values if field is not None)


def captured(body: Callable[[], Any]) -> Callable[[], None]:
    """Run once to warm up, capture, and return what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        body()
    return graph.replay


def check_replays(
    job: Job, capture: Callable[[Callable[[], Any]], Callable[[], Any]] = captured
) -> None:
    """A replay takes nothing from the time of the capture but addresses and shapes.

    Before each, all inputs are overwritten in place (lengths, page tables, lists and values), and
    the outputs with rubbish; it must give the bits of a call outside of the graph.
    """
    expected = []
    for inputs in (job.first, job.second):
        job.call(inputs, job.outputs)
        expected.append([bits(output) for output in job.outputs])
    assert any(not torch.equal(a, b) for a, b in zip(*expected, strict=True)), "nothing can be seen"
    static = tuple(tensor.clone() for tensor in job.first)
    replay = capture(lambda: job.call(static, job.outputs))
    for number in (1, 0):
        for tensor, source in zip(static, (job.first, job.second)[number], strict=True):
            tensor.copy_(source)
        for output in job.outputs:
            output.fill_(77)
        replay()
        for output, right in zip(job.outputs, expected[number], strict=True):
            assert torch.equal(bits(output), right), f"{job.name}: a replay differs"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in which NaNs equal themselves."""
    return tensor.contiguous().view(torch.uint8).clone()


@pytest.mark.hopper
def test_replays_give_what_calls_give() -> None:
    machine = Machine.here()
    for job in jobs(OURS.check(machine).load, machine.device):
        check_replays(job)
