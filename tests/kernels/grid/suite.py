"""Run an implementation on the grid's cases and say what breaks the contract, if anything.

Every result goes to memory that was poisoned and lies between guards, every call is repeated and
must give the same bits. A check returns its complaints, so that one run can report them all.

``python -m tests.kernels.grid`` runs it from the command line.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import torch

from sglang_indexcache.kernels.contract import (
    VALUE_DIM,
    IndexerBatch,
    Kept,
    OpName,
)
from sglang_indexcache.kernels.dispatch import Implementation, Machine
from sglang_indexcache.kernels.indexer import reference as indexer_reference
from sglang_indexcache.kernels.indexer.reference import (
    FLOAT32_BITS,
    HOPPER_FP8_BITS,
    logits_tolerance,
)
from sglang_indexcache.kernels.sparse_mla import reference as mla_reference
from sglang_indexcache.kernels.sparse_mla.reference import dequantize_latent, mla_tolerance
from tests.kernels.grid import cases
from tests.kernels.grid.cases import IndexerCase, SparseMlaInputs

Op = Callable[..., Any]
_GUARD = 256
_POISON = {torch.int32: -0x35014542, torch.float32: 1.2345e33, torch.bfloat16: -7.5e30}
_EXACT_FILLS = ("integers", "zeros")
_ROWS_AT_ONCE = 64
"""Rows checked at a time: the tolerance takes memory for every row, head and key."""
_FLOAT32_MAX = torch.finfo(torch.float32).max

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
    "clusters": OpGroup(("sparse_mla",), (cases.CLUSTERS, (), ())),
}


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of an implementation on one case; no complaint if the contract holds."""

    case: str
    complaints: tuple[str, ...]


def run(
    implementation: Implementation,
    group: str,
    sizes: Sizes,
    machine: Machine,
    seed: int = 0,
    only: str = "",
) -> Iterator[CaseOutcome]:
    """Run every case of one of :data:`GROUPS`; an exception is a complaint.

    Args:
        implementation: one that can run on ``machine``.
        sizes: "small" cases; "wide" ones too, many short rows for a GPU; or all, "large".
        only: the one case of this name; "" for all.
    """
    ops = GROUPS[group].ops
    # What the matrix unit keeps when it adds, see ``logits_tolerance``.
    on_gpu = machine.device.type == "cuda" and implementation.name != "reference"
    bits = HOPPER_FP8_BITS if on_gpu else FLOAT32_BITS
    for case in chain(*GROUPS[group].cases[: SIZES.index(sizes) + 1]):
        if only and str(case) != only:
            continue
        generator = torch.Generator().manual_seed(seed)
        try:
            functions = [implementation.load(op) for op in ops]
            complaints = _check(case, functions, generator, machine.device, bits)
        except Exception as error:  # whatever a kernel raises is a finding, not an end
            complaints = [f"{type(error).__name__}: {str(error)[:500]}"]
        yield CaseOutcome(str(case), tuple(complaints))


def _check(
    case: object,
    functions: list[Op],
    generator: torch.Generator,
    device: torch.device,
    bits: int,
) -> list[str]:
    if isinstance(case, cases.TopKCase):
        logits, visible = cases.topk_inputs(case, generator, device)
        return check_topk(functions[0], logits, visible, case.topk)
    if isinstance(case, cases.AttentionCase):
        return check_sparse_mla(functions[0], cases.attention_inputs(case, generator, device))
    assert isinstance(case, IndexerCase), case
    batch = cases.indexer_inputs(case, generator, device)
    return check_indexer(functions[0], functions[1], case, batch, bits)


class Guarded:
    """A poisoned output between guards."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        count = prod(shape)
        self._memory = torch.full((count + 2 * _GUARD,), _POISON[dtype], dtype=dtype, device=device)
        self._clean = self._memory[:_GUARD].clone()
        self.tensor = self._memory[_GUARD : _GUARD + count].view(shape)

    def complaints(self, name: str) -> list[str]:
        """Whether the guards are intact."""
        ends = self._memory[:_GUARD], self._memory[-_GUARD:]
        intact = all(torch.equal(end, self._clean) for end in ends)
        return [] if intact else [f"{name}: wrote outside of its output"]


def check_topk(topk: Op, logits: torch.Tensor, visible: torch.Tensor, k: int) -> list[str]:
    """Exact top-k against the reference and, by values, against torch.topk."""
    before = logits.clone()
    out, complaints = _twice("topk", topk, logits, visible, k, shape=(len(logits), k))
    if not torch.equal(logits, before):
        complaints.append("topk: changed its input")
    expected = indexer_reference.topk(logits, visible, k)
    complaints += _same_rows("topk", out, expected)
    for number, (row, limit, selection) in enumerate(
        zip(logits, visible.tolist(), out, strict=True)
    ):
        valid = selection[selection >= 0].long().clamp_max(max(row.numel() - 1, 0))
        best = row[:limit].topk(min(k, limit)).values
        if len(valid) == len(best) and not torch.equal(row[valid].sort(descending=True)[0], best):
            complaints.append(f"topk: row {number} has other values than torch.topk")
    return complaints


def check_indexer(
    logits: Op, select: Op, case: IndexerCase, batch: IndexerBatch, bits: int = HOPPER_FP8_BITS
) -> list[str]:
    """Logits within tolerance; the selection exactly the top-k of those very logits.

    Args:
        bits: of the implementation's matrix unit, see ``logits_tolerance``.
    """
    visible = torch.zeros_like(batch.visible)  # whatever it says, a row of padding sees nothing
    for _, rows in indexer_reference.requests(batch):
        visible[rows] = batch.visible[rows]
    width = (int(batch.visible.max()) if len(visible) else 0) + 3
    shape = (len(visible), width)
    scores, complaints = _twice("logits", logits, batch, width, shape=shape, compare=False)
    visible_at = torch.arange(width, device=scores.device) < visible[:, None]
    if not torch.equal(scores[visible_at], logits(batch, width)[visible_at]):
        complaints.append("logits: another run gave other bits")
    complaints += _close_logits(case, batch, scores, bits)
    expected = indexer_reference.topk(
        scores.masked_fill(~visible_at, float("nan")), visible, case.topk
    )
    for as_slots in (False, True):
        name = f"select{' as slots' * as_slots}"
        run = partial(select, as_slots=as_slots)
        selection, more = _twice(name, run, batch, case.topk, shape=(len(visible), case.topk))
        complaints += more + _same_rows(
            name, selection, _mapped(expected, batch) if as_slots else expected
        )
    return complaints + _alone(select, case, batch)


def _close_logits(
    case: IndexerCase, batch: IndexerBatch, scores: torch.Tensor, bits: int
) -> list[str]:
    """Compare visible logits with exact arithmetic; bit for bit where all arithmetic is exact."""
    complaints = []
    for request, rows_of in indexer_reference.requests(batch):
        for low in range(rows_of.start, rows_of.stop, _ROWS_AT_ONCE):
            rows = slice(low, min(low + _ROWS_AT_ONCE, rows_of.stop))
            if wrong := _wrong_logits(case, batch, scores, request, rows, bits):
                how = "exact" if case.fill in _EXACT_FILLS else "within the tolerance"
                complaints.append(
                    f"logits: {wrong} of rows {rows.start} to {rows.stop - 1} (request {request}) "
                    f"are not {how}"
                )
    return complaints


def _wrong_logits(
    case: IndexerCase,
    batch: IndexerBatch,
    scores: torch.Tensor,
    request: int,
    rows: slice,
    bits: int,
) -> int:
    """Count the visible logits of ``rows`` of one request that are wrong."""
    longest = int(batch.visible[rows].max())
    keys, scales = indexer_reference.request_keys(batch.pages, batch.block_table[request], longest)
    q, weights = batch.q[rows], batch.weights[rows]
    visible = torch.arange(longest, device=q.device) < batch.visible[rows, None]
    logits = scores[rows, :longest][visible].double()
    per_head = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu_()
    exact = (torch.einsum("th,ths->ts", weights.double(), per_head) * scales.double())[visible]
    if case.fill in _EXACT_FILLS:
        return int((logits != exact).sum())
    bound = logits_tolerance(q, keys, weights, scales, bits)[visible]
    overflowed = logits.isinf() & (logits.sign() == exact.sign())
    overflowed &= exact.abs() + bound >= _FLOAT32_MAX
    return int((~(((logits - exact).abs() <= bound) | overflowed)).sum())


def _alone(select: Op, case: IndexerCase, batch: IndexerBatch) -> list[str]:
    """The longest request selects the same without its neighbours."""
    spans = list(indexer_reference.requests(batch))
    if len(batch.block_table) < 2 or not spans:
        return []
    request, rows = max(spans, key=lambda span: case.lens[span[0]][1])
    starts = batch.query_starts
    if starts is not None:
        starts = starts.new_tensor([0, rows.stop - rows.start])
    alone = IndexerBatch(
        batch.q[rows].clone(),
        batch.weights[rows].clone(),
        batch.pages,
        batch.block_table[request : request + 1],
        batch.visible[rows].clone(),
        starts,
    )
    together = select(batch, case.topk)[rows]
    return _same_rows("select, a request alone", select(alone, case.topk), together)


def check_sparse_mla(attend: Op, inputs: SparseMlaInputs) -> list[str]:
    """Output and LSE against float64 attention over the rows that the cache stands for."""
    tokens, heads, _ = inputs.q.shape
    device = inputs.q.device
    arguments = (inputs.q, inputs.cache, inputs.slots, inputs.scale)
    results = []
    complaints: list[str] = []
    derived: Kept = {}  # the second run finds what the first derived from the slots
    places = torch.arange(1, inputs.slots.shape[1] + 1, device=device)
    lengths = (places * (inputs.slots >= 0)).amax(-1).to(torch.int32)
    for known in (None, None, lengths):
        out = Guarded((tokens, heads, VALUE_DIM), torch.bfloat16, device)
        lse = Guarded((tokens, heads), torch.float32, device)
        results_in = {"out": out.tensor, "lse": lse.tensor, "kept": derived}
        attend(*arguments, sinks=inputs.sinks, lengths=known, **results_in)
        complaints += out.complaints("sparse MLA output") + lse.complaints("sparse MLA LSE")
        results.append((out.tensor, lse.tensor))
    if not all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True)):
        complaints.append("sparse MLA: another run gave other bits")
    for result in results[::2]:
        complaints += _far_from_exact(inputs, *result)
    return complaints


def _far_from_exact(
    inputs: SparseMlaInputs, got_out: torch.Tensor, got_lse: torch.Tensor
) -> list[str]:
    """Say in which rows an output or LSE is further from float64 than the contract allows."""
    arguments, complaints = (inputs.cache, inputs.slots, inputs.scale), []
    exact_out, exact_lse = mla_reference.sparse_mla(
        inputs.q.double(), *arguments, sinks=inputs.sinks
    )
    for row, slots in enumerate(inputs.slots):
        latents = inputs.cache[slots[slots >= 0].long()]
        if len(latents) == 0:
            if (got_out[row] != 0).any() or (got_lse[row] != float("-inf")).any():
                complaints.append(f"sparse MLA: row {row} selects nothing, but is not 0 and -inf")
            continue
        rows = dequantize_latent(latents) if latents.dtype == torch.uint8 else latents
        bounds = mla_tolerance(inputs.q[row], rows, inputs.scale)
        for name, output, exact, bound in (
            ("output", got_out[row], exact_out[row], bounds[0]),
            ("LSE", got_lse[row], exact_lse[row], bounds[1]),
        ):
            error = (output.double() - exact.double()).abs()
            if not (error <= bound).all():
                worst = float((error / bound).nan_to_num(float("inf")).max())
                complaints.append(f"sparse MLA: {name} of row {row} errs {worst:.2g}x the bound")
    return complaints


def _twice(
    name: str, op: Op, *arguments: Any, shape: tuple[int, ...], compare: bool = True
) -> tuple[torch.Tensor, list[str]]:
    """Run into guarded memory, twice where the whole output is defined; the first result."""
    dtype = torch.int32 if compare else torch.float32
    first = arguments[0]
    device = first.q.device if isinstance(first, IndexerBatch) else first.device
    complaints: list[str] = []
    results = []
    for _ in range(2 if compare else 1):
        out = Guarded(shape, dtype, device)
        output = op(*arguments, out=out.tensor)
        complaints += out.complaints(name)
        if output.data_ptr() != out.tensor.data_ptr():
            complaints.append(f"{name}: did not return its output")
        results.append(out.tensor)
    if compare and not torch.equal(*results):
        complaints.append(f"{name}: another run gave other bits")
    return results[0], complaints


def _same_rows(name: str, output: torch.Tensor, expected: torch.Tensor) -> list[str]:
    wrong = (output != expected).any(-1).nonzero().flatten().tolist()
    return [f"{name}: rows {wrong[:8]} differ, {len(wrong)} of {len(output)}"] if wrong else []


def _mapped(positions: torch.Tensor, batch: IndexerBatch) -> torch.Tensor:
    """Positions of every row as slots."""
    slots = positions.clone()
    for request, rows in indexer_reference.requests(batch):
        block_row = batch.block_table[request]
        slots[rows] = indexer_reference.slots_of(positions[rows], block_row).int()
    return slots
