"""Workloads that are timed, and the least that any kernel would need for them.

Prefill is the last chunk of a prompt (8192 query rows, as SGLang's chunked prefill sends them);
decode is one token of every request of a batch, or the tokens that multi-token prediction (MTP)
has verified. Values are random: what a selection costs depends on the distribution of the logits,
so these figures are not those of a model's.

A workload's name never changes, because records and scripts ask for it by name:
``FAMILY-rowsR-contextC-headsH``, with ``-fp8`` for an FP8 cache, ``-overlapN`` where neighbouring
lists share another part than 70 %, ``-mtpN`` where a request has N rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from sglang_indexcache.kernels.contract import (
    FP8_ROW_BYTES,
    INDEX_DIM,
    LATENT_DIM,
    PAGE_BYTES,
    PAGE_TOKENS,
    SCALE_BYTES,
    VALUE_DIM,
    IndexerBatch,
)
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3
from sglang_indexcache.kernels.sparse_mla.reference import quantize_latent
from sglang_indexcache.library.sizes import GPUS, Gpu

Family: TypeAlias = Literal["select_prefill", "select_decode", "mla_prefill", "mla_decode"]
OVERLAP = 70
"""Percent of a list that neighbouring rows share unless a workload says otherwise; an assumption:
eight rows then select 3.1 lists between them, those of the small checkpoint 2.2 to 3.5
(``results/kernels/unions.json``)."""


def gpu_of_driver(name: str) -> Gpu | None:
    """Return the data sheet of the driver's ``name``; PCIe and NVL versions have none."""
    if "PCIe" in name or "NVL" in name:
        return None
    return next((gpu for model, gpu in GPUS.items() if model.upper() in name), None)


@dataclass(frozen=True)
class Workload:
    """One shape of one family.

    Attributes:
        rows: query rows of the chunk; requests in decode.
        context: tokens of every request.
        heads: of the indexer or of MLA.
        topk: k.
        fp8: layout of the latent cache.
        overlap: percent of its list that a row of a prefill takes over from the row before.
        verified: query rows of each request of a decode; MTP verifies several.
    """

    family: Family
    rows: int
    context: int
    heads: int
    topk: int = 2048
    fp8: bool = False
    overlap: int = OVERLAP
    verified: int = 1

    def __str__(self) -> str:
        shape = f"rows{self.rows}-context{self.context}-heads{self.heads}"
        marks = (
            "-fp8" * self.fp8,
            f"-overlap{self.overlap}" * (self.overlap != OVERLAP),
            f"-mtp{self.verified}" * (self.verified > 1),
        )
        return f"{self.family}-{shape}{''.join(marks)}"

    @property
    def is_prefill(self) -> bool:
        """Whether the rows are one request's, each seeing one token more."""
        return self.family.endswith("prefill")

    @property
    def pairs(self) -> int:
        """Query rows times the tokens that each sees."""
        if self.is_prefill:
            return self.rows * self.context - self.rows * (self.rows - 1) // 2
        return self.rows * (self.verified * self.context - self.verified * (self.verified - 1) // 2)

    @property
    def flops(self) -> int:
        """Multiplications and additions of the matrix products, none for heads of padding."""
        if self.family.startswith("select"):
            return 2 * INDEX_DIM * self.heads * self.pairs
        return 2 * (LATENT_DIM + VALUE_DIM) * self.heads * self.rows * self.topk

    def bound(self, gpu: Gpu) -> tuple[float, str]:
        """Return the least seconds that a card needs for it, and what sets them."""
        # These cards multiply FP8 twice as fast as bfloat16.
        compute = self.flops / (gpu.bf16 * (1 if self.family.startswith("mla") else 2))
        memory = self.memory_bytes / gpu.bandwidth
        return (compute, "matrix unit") if compute > memory else (memory, "memory")

    @property
    def memory_bytes(self) -> int:
        """Bytes that have to cross the memory bus once, whatever the algorithm."""
        written = 4 * self.rows * self.verified * self.topk
        if self.family.startswith("select"):
            requests = 1 if self.is_prefill else self.rows
            queries = self.rows * self.verified * self.heads * (INDEX_DIM + SCALE_BYTES)
            return requests * self.context * (INDEX_DIM + SCALE_BYTES) + queries + written
        row = FP8_ROW_BYTES if self.fp8 else 2 * LATENT_DIM
        gathered = self.rows * self.topk * row
        pool = self.context * row * (1 if self.is_prefill else self.rows)
        ends = self.rows * self.heads * 2 * (LATENT_DIM + VALUE_DIM)
        return min(gathered, pool) + ends + written


SHORT = 10_240
CONTEXTS = (122_880, 204_800, 61_440, SHORT)
BETWEEN = (20_480, 32_768, 40_960)
"""Lengths at which the faster selection changes, somewhere between 10K and 60K tokens."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MANY = 256
"""Requests of a decode, rows of a prefill behind a cached prefix: kernels take other ways then."""
SOME = 1024
"""Rows of a prefill between :data:`MANY` and a whole chunk."""
OVERLAPS = (0, 30, 50)
"""Beside :data:`OVERLAP`: where lists share less, attention in tiles of several rows gains less."""
MTP = (4, 6)
"""Tokens that a step verifies; SGLang's low-latency recipe has six."""


def workloads() -> Iterator[Workload]:
    """Return everything that is timed, the shapes that matter most first.

    A default is taken for all lengths and batches of an operation, or, in prefill, for all from a
    length on. So the ends are here, too: short contexts, few rows, many requests.
    """
    for context in CONTEXTS:
        for heads in (32, 64):
            yield Workload("select_prefill", 8192, context, heads)
            yield Workload("select_prefill", MANY, context, heads)
    for heads in (8, 16, 32, 64, 128):
        yield Workload("mla_prefill", 4096, 122_880, heads)
        yield Workload("mla_prefill", MANY, 122_880, heads)
    for batch in BATCHES:
        for context in (122_880, 204_800):
            yield Workload("select_decode", batch, context, 32)
        for heads in (8, 16):
            for fp8 in (False, True):
                yield Workload("mla_decode", batch, 122_880, heads, fp8=fp8)
    for requests in (1, 8, 64, MANY):
        for heads in (32, 64):
            yield Workload("select_decode", requests, SHORT, heads)
    for heads in (8, 16):
        for fp8 in (False, True):
            yield Workload("mla_decode", MANY, SHORT, heads, fp8=fp8)
    for batch in (1, 8, 64):
        yield Workload("select_decode", batch, 122_880, 64)
        for heads in (64, 128):
            yield Workload("mla_decode", batch, 122_880, heads, fp8=True)
    for heads in (64, 128):
        yield Workload("mla_decode", MANY, SHORT, heads, fp8=True)
    yield from _between_the_ends()


def _between_the_ends() -> Iterator[Workload]:
    """Yield what the first record lacks: ``kernels/routes.py`` decides nothing without a row."""
    for context in (*BETWEEN, *CONTEXTS):
        yield Workload("select_prefill", SOME, context, 32)
    for context in BETWEEN:
        for rows in (8192, MANY):
            yield Workload("select_prefill", rows, context, 32)
    for rows in (4096, SOME, MANY):
        yield Workload("mla_prefill", rows, 122_880, 20)
    for heads in (8, 20):
        for overlap in OVERLAPS:
            yield Workload("mla_prefill", 4096, 122_880, heads, overlap=overlap)
        yield Workload("mla_prefill", 4096, BETWEEN[0], heads)
        yield Workload("mla_prefill", 8192, 122_880, heads)
    yield Workload("mla_prefill", SOME, 122_880, 8)
    for batch in BATCHES:
        for fp8 in (False, True):
            yield Workload("mla_decode", batch, 122_880, 20, fp8=fp8)
    for fp8 in (False, True):
        yield Workload("mla_decode", MANY, SHORT, 20, fp8=fp8)
    for verified in MTP:
        for batch in (1, 8, 16):
            for context in (122_880, 204_800, 61_440):
                yield Workload("select_decode", batch, context, 32, verified=verified)


def tiny_workloads() -> Iterator[Workload]:
    """Return one of each family, for a run without a GPU."""
    yield Workload("select_prefill", 5, 130, 8, topk=32)
    yield Workload("select_decode", 2, 130, 8, topk=32)
    yield Workload("select_decode", 2, 130, 8, topk=32, verified=6)
    yield Workload("mla_prefill", 3, 90, 20, topk=32)
    yield Workload("mla_decode", 2, 90, 20, topk=32, fp8=True)


@dataclass(frozen=True, kw_only=True)
class IndexerTensors(IndexerBatch):
    """A batch, and the keys of its request gathered for kernels that need them so (prefill)."""

    keys: torch.Tensor
    scales: torch.Tensor


def indexer_tensors(work: Workload, device: torch.device) -> IndexerTensors:
    """Draw on the device: a pool whose pages belong to the requests in random order."""
    requests = 1 if work.is_prefill else work.rows
    per_request = -(-work.context // PAGE_TOKENS)
    count = requests * per_request
    pages = torch.empty(count, PAGE_BYTES, dtype=torch.uint8, device=device)
    fill_index_pages(pages, device)
    table = torch.randperm(count, device=device).view(requests, per_request).to(torch.int32)
    rows, of_request = work.rows * work.verified, work.rows if work.is_prefill else work.verified
    queries = torch.randn(rows, work.heads, INDEX_DIM, device=device)
    weights = torch.randn(rows, work.heads, device=device)
    q = quantize_e4m3(queries)[0]
    before = torch.arange(of_request - 1, -1, -1, dtype=torch.int32, device=device)
    visible = (work.context - before).repeat(requests)
    pages_of_first = pages[table[0].long()] if work.is_prefill else pages[:0]
    keys = pages_of_first[:, : PAGE_TOKENS * INDEX_DIM].reshape(-1, INDEX_DIM)[: work.context]
    gathered = pages_of_first[:, PAGE_TOKENS * INDEX_DIM :].contiguous().view(torch.float32)
    starts = torch.tensor([0, work.rows], dtype=torch.int32, device=device)
    return IndexerTensors(
        q=q,
        weights=weights,
        pages=pages,
        block_table=table,
        visible=visible,
        query_starts=starts if work.is_prefill else None,
        keys=keys.contiguous().view(torch.float8_e4m3fn),
        scales=gathered.flatten()[: work.context],
    )


def fill_index_pages(pages: torch.Tensor, device: torch.device) -> None:
    """Draw the keys of pages ``[count, PAGE_BYTES]``, uint8, in parts."""
    for low in range(0, len(pages), 4096):
        part = pages[low : low + 4096]
        drawn = torch.randn(len(part), PAGE_TOKENS, INDEX_DIM, device=device)
        values, scales = quantize_e4m3(drawn)
        part[:, : PAGE_TOKENS * INDEX_DIM] = values.view(torch.uint8).flatten(1)
        part[:, PAGE_TOKENS * INDEX_DIM :] = scales.view(torch.uint8)


def fill_latent_rows(cache: torch.Tensor, device: torch.device) -> None:
    """Draw the rows of a cache in parts: packing takes several times its memory.

    Args:
        cache: ``[count, FP8_ROW_BYTES]`` in uint8, or ``[count, LATENT_DIM]`` in bfloat16.
    """
    for low in range(0, len(cache), 1 << 20):
        part = cache[low : low + (1 << 20)]
        rows = torch.randn(len(part), LATENT_DIM, device=device).bfloat16()
        part.copy_(quantize_latent(rows) if cache.dtype == torch.uint8 else rows)


@dataclass(frozen=True)
class AttentionTensors:
    """Arguments of sparse MLA."""

    q: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: float


def attention_tensors(work: Workload, device: torch.device) -> AttentionTensors:
    """Draw rows of a prompt: so much of the row before as ``overlap``, redrawn every 64 rows."""
    pool = work.context * (1 if work.is_prefill else work.rows)
    width, dtype = (FP8_ROW_BYTES, torch.uint8) if work.fp8 else (LATENT_DIM, torch.bfloat16)
    cache = torch.empty(pool, width, dtype=dtype, device=device)
    fill_latent_rows(cache, device)
    base = 0 if work.is_prefill else work.context
    slots = torch.empty(work.rows, work.topk, dtype=torch.int32, device=device)
    for row in range(work.rows):
        if not work.is_prefill or row % 64 == 0:
            chosen = torch.randperm(work.context, device=device)[: work.topk]
        else:
            keep = torch.randperm(work.topk, device=device)
            keep = keep[work.topk * (100 - work.overlap) // 100 :]
            fresh = torch.randperm(work.context, device=device)[: work.topk]
            is_listed = torch.zeros(work.context, dtype=torch.bool, device=device)
            is_listed[chosen[keep]] = True
            fresh = fresh[~is_listed[fresh]][: work.topk - len(keep)]
            short = work.topk - len(keep) - len(fresh)
            chosen = torch.cat([chosen[keep], fresh, chosen[keep][:short]])
        slots[row] = (chosen.sort().values + base * row).to(torch.int32)
    q = torch.randn(work.rows, work.heads, LATENT_DIM, device=device).bfloat16()
    return AttentionTensors(q, cache, slots, LATENT_DIM**-0.5)
