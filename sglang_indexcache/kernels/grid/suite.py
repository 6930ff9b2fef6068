"""Run an implementation on a case and say what breaks the contract, if anything.

Every result goes to memory that was poisoned and lies between guards, every call is repeated and
must give the same bits. A check returns its complaints, so that one run can report them all.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from sglang_indexcache.kernels.contract import (
    HOPPER_FP8_BITS,
    VALUE_DIM,
    logits_tolerance,
    mla_tolerance,
)
from sglang_indexcache.kernels.grid.cases import (
    AttentionInputs,
    IndexerCase,
    IndexerInputs,
)
from sglang_indexcache.kernels.indexer import reference as indexer_reference
from sglang_indexcache.kernels.sparse_mla import reference as mla_reference
from sglang_indexcache.kernels.sparse_mla.layout import dequantize_latent
from sglang_indexcache.kernels.topk import reference as topk_reference

Op = Callable[..., Any]
_GUARD = 256
_POISON = {torch.int32: -0x35014542, torch.float32: 1.2345e33, torch.bfloat16: -7.5e30}
_EXACT_FILLS = ("integers", "zeros")
_ROWS_AT_ONCE = 64
"""Rows checked at a time: the tolerance takes memory for every row, head and key."""
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass
class Guarded:
    """A poisoned output between guards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    tensor: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        count = 1
        for size in self.shape:
            count *= size
        poison = _POISON[self.dtype]
        self._memory = torch.full(
            (count + 2 * _GUARD,), poison, dtype=self.dtype, device=self.device
        )
        self._clean = self._memory[:_GUARD].clone()
        self.tensor = self._memory[_GUARD : _GUARD + count].view(self.shape)

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
    expected = topk_reference.topk(logits, visible, k)
    complaints += _same_rows("topk", out, expected)
    for number, (row, limit, chosen) in enumerate(zip(logits, visible.tolist(), out, strict=True)):
        kept = chosen[chosen >= 0].long().clamp_max(max(row.numel() - 1, 0))
        best = row[:limit].topk(min(k, limit)).values
        if len(kept) == len(best) and not torch.equal(row[kept].sort(descending=True)[0], best):
            complaints.append(f"topk: row {number} has other values than torch.topk")
    return complaints


def check_indexer_prefill(
    logits: Op, select: Op, case: IndexerCase, inputs: IndexerInputs, bits: int = HOPPER_FP8_BITS
) -> list[str]:
    """Both prefill ops of one implementation.

    Args:
        bits: of its matrix unit, see ``logits_tolerance``.
    """
    arguments = (
        inputs.q,
        inputs.weights,
        inputs.pages,
        inputs.block_table,
        inputs.query_starts,
        inputs.visible,
    )
    owners = _owners(inputs.query_starts, len(inputs.visible))
    visible = torch.where(owners < len(inputs.block_table), inputs.visible, 0).to(torch.int32)
    complaints = _check_indexer("prefill", logits, select, case, inputs, arguments, visible, bits)
    return complaints + _alone(select, case, inputs)


def check_indexer_decode(
    logits: Op, select: Op, case: IndexerCase, inputs: IndexerInputs, bits: int = HOPPER_FP8_BITS
) -> list[str]:
    """Both decode ops of one implementation."""
    batch = len(case.lens)
    next_n = case.lens[0][0] if batch else 1
    cut = [
        tensor.view(batch, next_n, *tensor.shape[1:])
        for tensor in (inputs.q, inputs.weights, inputs.visible)
    ]
    arguments = (cut[0], cut[1], inputs.pages, inputs.block_table, cut[2])
    return _check_indexer("decode", logits, select, case, inputs, arguments, inputs.visible, bits)


def _check_indexer(
    phase: str,
    logits: Op,
    select: Op,
    case: IndexerCase,
    inputs: IndexerInputs,
    arguments: tuple[torch.Tensor, ...],
    visible: torch.Tensor,
    bits: int,
) -> list[str]:
    """Logits within tolerance; the selection exactly the top-k of those very logits."""
    rows = tuple(arguments[-1].shape)
    width = inputs.width + 3
    scores, complaints = _twice(
        f"logits {phase}", logits, *arguments, width, shape=(*rows, width), compare=False
    )
    scores = scores.view(len(visible), width)
    shown = torch.arange(width, device=scores.device) < visible[:, None]
    again = logits(*arguments, width).view_as(scores)
    if not torch.equal(scores[shown], again[shown]):
        complaints.append(f"logits {phase}: another run gave other bits")
    complaints += _close_logits(phase, case, inputs, scores, bits)
    masked = scores.masked_fill(~shown, float("nan"))
    own = topk_reference.topk(masked, visible, case.topk)
    for as_slots in (False, True):
        name = f"select {phase}{' as slots' * as_slots}"
        run = partial(select, as_slots=as_slots)
        shape = (*rows, case.topk)
        found, more = _twice(name, run, *arguments, case.topk, shape=shape)
        expected = _mapped(own, inputs) if as_slots else own
        complaints += more + _same_rows(name, found.view(-1, case.topk), expected)
    return complaints


def _close_logits(
    phase: str, case: IndexerCase, inputs: IndexerInputs, scores: torch.Tensor, bits: int
) -> list[str]:
    """Every visible logit against exact arithmetic; bit for bit where all arithmetic is exact."""
    complaints = []
    for request, (start, end) in enumerate(_spans(inputs)):
        for low in range(start, end, _ROWS_AT_ONCE):
            rows = slice(low, min(low + _ROWS_AT_ONCE, end))
            wrong = _wrong_logits(case, inputs, scores, request, rows, bits)
            if wrong:
                how = "exact" if case.fill in _EXACT_FILLS else "within the tolerance"
                complaints.append(
                    f"logits {phase}: {wrong} of rows {rows.start} to {rows.stop - 1} (request "
                    f"{request}) are not {how}"
                )
    return complaints


def _wrong_logits(
    case: IndexerCase,
    inputs: IndexerInputs,
    scores: torch.Tensor,
    request: int,
    rows: slice,
    bits: int,
) -> int:
    """How many visible logits of ``rows`` of one request are wrong."""
    longest = int(inputs.visible[rows].max())
    block_row = inputs.block_table[request]
    keys, scales = indexer_reference.request_keys(inputs.pages, block_row, longest)
    q, weights = inputs.q[rows], inputs.weights[rows]
    shown = torch.arange(longest, device=q.device) < inputs.visible[rows, None]
    got = scores[rows, :longest][shown].double()
    per_head = torch.einsum("thd,sd->ths", q.double(), keys.double()).relu_()
    wanted = (torch.einsum("th,ths->ts", weights.double(), per_head) * scales.double())[shown]
    if case.fill in _EXACT_FILLS:
        return int((got != wanted).sum())
    bound = logits_tolerance(q, keys, weights, scales, bits)[shown]
    overflowed = got.isinf() & (got.sign() == wanted.sign())
    overflowed &= wanted.abs() + bound >= _FLOAT32_MAX
    return int((~(((got - wanted).abs() <= bound) | overflowed)).sum())


def _alone(select: Op, case: IndexerCase, inputs: IndexerInputs) -> list[str]:
    """The longest request selects the same without its neighbours."""
    spans = _spans(inputs)
    if len(spans) < 2:
        return []
    request = max(range(len(spans)), key=lambda b: (spans[b][1] > spans[b][0]) * case.lens[b][1])
    start, end = spans[request]
    shared = (inputs.pages, inputs.block_table, inputs.query_starts, inputs.visible, case.topk)
    together = select(inputs.q, inputs.weights, *shared)[start:end]
    alone = select(
        inputs.q[start:end].clone(),
        inputs.weights[start:end].clone(),
        inputs.pages,
        inputs.block_table[request : request + 1],
        torch.tensor([0, end - start], dtype=torch.int32, device=inputs.q.device),
        inputs.visible[start:end].clone(),
        case.topk,
    )
    return _same_rows("select prefill, a request alone", alone, together)


def check_sparse_mla(attend: Op, inputs: AttentionInputs) -> list[str]:
    """Output and LSE against float64 attention over the rows that the cache stands for."""
    tokens, heads, _ = inputs.q.shape
    device = inputs.q.device
    arguments = (inputs.q, inputs.cache, inputs.slots, inputs.scale)
    results = []
    complaints: list[str] = []
    for _ in range(2):
        out = Guarded((tokens, heads, VALUE_DIM), torch.bfloat16, device)
        lse = Guarded((tokens, heads), torch.float32, device)
        attend(*arguments, sinks=inputs.sinks, out=out.tensor, lse=lse.tensor)
        complaints += out.complaints("sparse MLA output") + lse.complaints("sparse MLA LSE")
        results.append((out.tensor, lse.tensor))
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        complaints.append("sparse MLA: another run gave other bits")
    got_out, got_lse = results[0]
    wanted_out, wanted_lse = mla_reference.sparse_mla(
        inputs.q.double(), *arguments[1:], sinks=inputs.sinks
    )
    for row, listed in enumerate(inputs.slots):
        chosen = inputs.cache[listed[listed >= 0].long()]
        if len(chosen) == 0:
            if (got_out[row] != 0).any() or (got_lse[row] != float("-inf")).any():
                complaints.append(f"sparse MLA: row {row} selects nothing, but is not 0 and -inf")
            continue
        rows = dequantize_latent(chosen) if chosen.dtype == torch.uint8 else chosen
        bounds = mla_tolerance(inputs.q[row], rows, inputs.scale)
        for name, got, wanted, bound in (
            ("output", got_out[row], wanted_out[row], bounds[0]),
            ("LSE", got_lse[row], wanted_lse[row], bounds[1]),
        ):
            error = (got.double() - wanted.double()).abs()
            if not (error <= bound).all():
                worst = float((error / bound).nan_to_num(float("inf")).max())
                complaints.append(f"sparse MLA: {name} of row {row} errs {worst:.2g}x the bound")
    return complaints


def _twice(
    name: str, op: Op, *arguments: Any, shape: tuple[int, ...], compare: bool = True
) -> tuple[torch.Tensor, list[str]]:
    """Run into guarded memory, twice where the whole output is defined; the first result."""
    dtype = torch.int32 if compare else torch.float32
    complaints: list[str] = []
    results = []
    for _ in range(2 if compare else 1):
        out = Guarded(shape, dtype, arguments[0].device)
        returned = op(*arguments, out=out.tensor)
        complaints += out.complaints(name)
        if returned.data_ptr() != out.tensor.data_ptr():
            complaints.append(f"{name}: did not return its output")
        results.append(out.tensor)
    if compare and not torch.equal(*results):
        complaints.append(f"{name}: another run gave other bits")
    return results[0], complaints


def _same_rows(name: str, got: torch.Tensor, expected: torch.Tensor) -> list[str]:
    wrong = (got != expected).any(-1).nonzero().flatten().tolist()
    return [f"{name}: rows {wrong[:8]} differ, {len(wrong)} of {len(got)}"] if wrong else []


def _spans(inputs: IndexerInputs) -> list[tuple[int, int]]:
    starts = inputs.query_starts.tolist()
    return list(pairwise(starts))


def _owners(query_starts: torch.Tensor, rows: int) -> torch.Tensor:
    """The request of every row; the number of requests for padding."""
    numbers = torch.arange(rows, device=query_starts.device, dtype=torch.int32)
    return torch.searchsorted(query_starts[1:].contiguous(), numbers, right=True)


def _mapped(positions: torch.Tensor, inputs: IndexerInputs) -> torch.Tensor:
    """Positions of every row as slots."""
    slots = positions.clone()
    for request, (start, end) in enumerate(_spans(inputs)):
        block_row = inputs.block_table[request]
        slots[start:end] = indexer_reference.slots_of(positions[start:end], block_row).int()
    return slots
