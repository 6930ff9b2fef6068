"""Inputs on which kernels go wrong: odd lengths, short rows, ties, infinities, empty batches.

What a kernel must not read is poisoned: page-table entries beyond a request point far outside the
pool, unused tokens of a page hold NaN, latent rows that nobody selected hold NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch

from sglang_indexcache.kernels.contract import (
    INDEX_DIM,
    LATENT_DIM,
    PADDING,
    PAGE_BYTES,
    PAGE_TOKENS,
    IndexerBatch,
)
from sglang_indexcache.kernels.indexer.quantization import quantize_e4m3, write_pages
from sglang_indexcache.kernels.sparse_mla.reference import quantize_latent

Fill: TypeAlias = Literal["random", "integers", "equal", "zeros", "negative", "huge", "infinite"]
UNMAPPED = 1 << 29
"""Page number of an uninitialised page-table entry: to follow it is a fault."""


@dataclass(frozen=True)
class IndexerCase:
    """One batch for the indexer's ops.

    Attributes:
        name: what is special about it.
        lens: of every request, query rows and tokens; in decode the tokens may be fewer (rows of
            padding see nothing).
        fill: the kind of values, see :func:`_keys`.
        padding: rows behind the last request.
        decode: every request has as many rows, and the batch says so (no ``query_starts``).
    """

    name: str
    heads: int
    lens: tuple[tuple[int, int], ...]
    topk: int = 64
    fill: Fill = "random"
    padding: int = 0
    decode: bool = False

    def __str__(self) -> str:
        return f"{'decode ' * self.decode}{self.name}".replace(" ", "-")


PREFILL: tuple[IndexerCase, ...] = (
    IndexerCase("one token", 64, ((1, 1),)),
    IndexerCase("odd lengths", 32, ((3, 65), (0, 0), (2, 131), (0, 70), (1, 1)), padding=2),
    IndexerCase("shorter than k", 8, ((4, 40),)),
    IndexerCase("k and one more", 64, ((2, 65),)),
    IndexerCase("equal keys", 16, ((2, 150),), fill="equal"),
    IndexerCase("zeros of the ReLU", 32, ((2, 150),), fill="zeros"),
    IndexerCase("negative weights", 64, ((2, 131),), fill="negative"),
    IndexerCase("ties", 64, ((3, 200), (2, 90)), fill="integers"),
    IndexerCase("huge scales", 8, ((2, 129),), fill="huge"),
    IndexerCase("infinities", 32, ((2, 129),), fill="infinite"),
    IndexerCase("chunk of a long prompt", 32, ((6, 700),), topk=512),
    IndexerCase("k is one", 16, ((2, 130),), topk=1),
    IndexerCase("no request", 32, (), padding=2),
    IndexerCase("no row", 32, ((0, 64),)),
)
DECODE: tuple[IndexerCase, ...] = tuple(
    replace(case, decode=True)
    for case in (
        IndexerCase("one token", 64, ((1, 1),)),
        IndexerCase("ragged", 32, ((1, 300), (1, 0), (1, 64), (1, 65), (1, 63))),
        IndexerCase("two rows", 64, ((2, 66), (2, 2), (2, 0), (2, 200)), fill="integers"),
        IndexerCase("three rows", 16, ((3, 129), (3, 3))),
        IndexerCase("four rows", 8, ((4, 257), (4, 64)), fill="integers"),
        IndexerCase("six rows", 32, ((6, 131), (6, 6), (6, 0))),
        IndexerCase("zeros of the ReLU", 32, ((1, 150),), fill="zeros"),
        IndexerCase("huge scales", 64, ((1, 129),), fill="huge"),
        IndexerCase("no request", 32, ()),
    )
)

_RAGGED = ((37, 90), (0, 0), (300, 300), (500, 700), (263, 263), (1, 64))
WIDE_PREFILL: tuple[IndexerCase, ...] = (
    IndexerCase("1101 rows of 8 heads", 8, _RAGGED, padding=3),
    IndexerCase("1101 rows of 16 heads", 16, _RAGGED, padding=3, fill="zeros"),
    IndexerCase("1101 rows of 32 heads", 32, _RAGGED, padding=3, fill="integers"),
    IndexerCase("1101 rows of 64 heads", 64, _RAGGED, padding=3),
)
"""Rows enough to fill a GPU, each short: kernels take other ways then than for few rows."""
LARGE_PREFILL: tuple[IndexerCase, ...] = (
    IndexerCase("many rows", 32, ((1100, 9001),), topk=2048),
    IndexerCase("many rows with ties", 32, ((1100, 5003),), topk=2048, fill="integers"),
    IndexerCase("many rows of zeros", 64, ((560, 9001),), topk=2048, fill="zeros"),
    IndexerCase("many rows of many requests", 64, ((90, 4100), (7, 2049)) * 6, topk=2048),
    IndexerCase("many requests", 32, ((5, 900), (1, 4097), (17, 17), (40, 2500)) * 4, topk=2048),
    IndexerCase("long", 64, ((16, 20_011),), topk=2048),
    IndexerCase("long ties", 32, ((24, 12_345),), topk=2048, fill="integers"),
    IndexerCase("long zeros", 64, ((8, 30_000),), topk=2048, fill="zeros"),
    IndexerCase("long equal", 32, ((8, 30_000),), topk=2048, fill="equal"),
    IndexerCase("very long", 32, ((4, 200_003),), topk=2048),
)
LARGE_DECODE: tuple[IndexerCase, ...] = tuple(
    replace(case, decode=True)
    for case in (
        IndexerCase("batch of 64", 32, tuple((1, 37 + 313 * b) for b in range(64)), topk=2048),
        IndexerCase("MTP", 64, tuple((4, 4 + 997 * b) for b in range(12)), topk=2048),
        IndexerCase("MTP of six", 32, tuple((6, 6 + 1997 * b) for b in range(12)), topk=2048),
        IndexerCase("long", 64, ((2, 200_003),), topk=2048),
        IndexerCase("long ties", 32, ((1, 100_001), (1, 2049)), topk=2048, fill="integers"),
        IndexerCase("a million tokens", 8, ((1, 1 << 20),), topk=2048),
    )
)
"""For a GPU only."""


def indexer_inputs(
    case: IndexerCase, generator: torch.Generator, device: torch.device
) -> IndexerBatch:
    """Draw the inputs of ``case``; ``generator`` is a CPU one, so that every device sees the same.

    Each request's pages lie in random order, and none is shared.
    """
    pages_of = [-(-keys // PAGE_TOKENS) for _, keys in case.lens]
    order = torch.randperm(sum(pages_of) + 3, generator=generator)
    pages = torch.full((len(order), PAGE_BYTES), 0x7F, dtype=torch.uint8)
    pages.view(torch.float32)[:, -PAGE_TOKENS:] = float("nan")
    # One column more than any request has: rows are not packed the way a kernel may guess.
    table = torch.full((len(case.lens), max(pages_of, default=0) + 1), UNMAPPED, dtype=torch.int32)
    start = 0
    for request, ((_, keys), count) in enumerate(zip(case.lens, pages_of, strict=True)):
        mine = order[start : start + count]
        start += count
        table[request, :count] = mine.to(torch.int32)
        slots = mine.repeat_interleave(PAGE_TOKENS)[:keys] * PAGE_TOKENS
        write_pages(
            pages,
            slots + torch.arange(keys) % PAGE_TOKENS,
            *_keys(case.fill, keys, generator),
        )
    rows = sum(queries for queries, _ in case.lens) + case.padding
    q, weights = _queries(case.fill, rows, case.heads, generator)
    starts = torch.tensor([0, *(queries for queries, _ in case.lens)]).cumsum(0)
    tensors = [q, weights, pages, table, _visible(case)] + [starts.to(torch.int32)] * (
        not case.decode
    )
    return IndexerBatch(*(tensor.to(device) for tensor in tensors))


def _visible(case: IndexerCase) -> torch.Tensor:
    """Let a request's last row see all of it, and rows of padding claim to see 7 tokens."""
    spans = [torch.arange(keys - queries, keys) + 1 for queries, keys in case.lens]
    visible = torch.cat([*spans, torch.full((case.padding,), 7)])
    return visible.clamp_min(0).to(torch.int32)


def _keys(fill: Fill, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[count, 128]`` e4m3 and ``[count]`` scales.

    random      normal, quantised
    integers    small integers and three scales: every implementation is exact, and ties abound
    equal       one key throughout
    zeros       no dot product is positive, so every logit is 0
    negative    random; all weights are negative, so the zeros of the ReLU are the best
    huge        scales from 2^-60 to 2^60
    infinite    some logits overflow to +-inf
    """
    if fill in ("integers", "zeros"):
        low = -4 if fill == "integers" else 0
        values = torch.randint(low, 5, (count, INDEX_DIM), generator=generator).float()
        scales = 2.0 ** torch.randint(-1, 2, (count,), generator=generator)
        return values.to(torch.float8_e4m3fn), scales
    normal = torch.randn(1 if fill == "equal" else count, INDEX_DIM, generator=generator)
    values, scales = quantize_e4m3(normal.expand(count, INDEX_DIM))
    if fill == "huge":
        scales = 2.0 ** torch.randint(-60, 61, (count,), generator=generator).float()
    if fill == "infinite":
        overflows = torch.rand(count, generator=generator) < 0.2
        scales = torch.where(overflows, 2.0**127, scales)
    return values, scales


def _queries(
    fill: Fill, rows: int, heads: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``[rows, heads, 128]`` e4m3 and ``[rows, heads]`` weights."""
    shape = (rows, heads, INDEX_DIM)
    weights = torch.randn(rows, heads, generator=generator)
    if fill in ("integers", "zeros"):
        high = 5 if fill == "integers" else 1
        values = torch.randint(-4, high, shape, generator=generator).float()
        weights = torch.randint(-3, 4, weights.shape, generator=generator).float()
        return values.to(torch.float8_e4m3fn), weights
    if fill == "negative":
        weights = -weights.abs()
    return quantize_e4m3(torch.randn(shape, generator=generator))[0], weights


@dataclass(frozen=True)
class TopKCase:
    """One matrix of logits; its rows are all of :data:`ROWS`."""

    width: int
    topk: int

    def __str__(self) -> str:
        return f"{self.topk}-of-{self.width}"


TOPK = tuple(TopKCase(*case) for case in [(1, 1), (1, 64), (63, 64), (700, 64), (2500, 2048)])
LARGE_TOPK = tuple(
    TopKCase(width, 2048) for width in (2047, 2048, 2049, 8191, 60_001, 200_003, 1 << 20)
)
"""For a GPU only."""

_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "random": lambda noise: noise,
    "ReLU": lambda noise: noise.relu(),
    "all equal": lambda noise: torch.full_like(noise, -1.5),
    "all -inf": lambda noise: torch.full_like(noise, float("-inf")),
    "both zeros": lambda noise: torch.where(noise > 0, 0.0, -0.0),
    "few values": lambda noise: noise.round(),
    "mostly -inf": lambda noise: torch.where(noise > 1, noise, float("-inf")),
    "some +inf": lambda noise: torch.where(noise.abs() > 2, noise * float("inf"), noise),
    "huge and tiny": lambda noise: noise.sign() * torch.exp2(40 * noise),
    "subnormal": lambda noise: noise * 2.0**-140,
    "one exponent": lambda noise: 1 + noise.abs() * 2.0**-22,
    "rising": lambda noise: noise.sort().values,
    "falling": lambda noise: noise.sort(descending=True).values,
}
ROWS = tuple(_ROWS)


def topk_inputs(
    case: TopKCase, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits ``[len(ROWS) + 4, width]``, a view of wider rows, and ``visible``.

    The kinds of row see everything; four more random rows see nothing, one token, k and k + 1.
    """
    noise = torch.randn(len(ROWS) + 4, case.width + 5, generator=generator)
    for row, make in zip(noise, _ROWS.values(), strict=False):
        row[: case.width] = make(row[: case.width])
    noise[:, case.width :] = float("inf")  # what a kernel that reads on would select
    few = [0, 1, case.topk, case.topk + 1]
    visible = torch.tensor([case.width] * len(ROWS) + few).clamp_max(case.width)
    return noise.to(device)[:, : case.width], visible.to(torch.int32).to(device)


@dataclass(frozen=True)
class AttentionCase:
    """One batch for sparse MLA.

    Attributes:
        counts: selected rows of every query.
        topk: width of the lists.
        sinks: "infinite" is one +inf and one -inf.
        repeats: a slot may be listed more than once.
        holes: padding stands anywhere in the lists, and not at their ends.
        rising: what is listed later scores ever higher, so that no early maximum stands.
    """

    counts: tuple[int, ...]
    topk: int
    heads: int
    fp8: bool = False
    sinks: Literal["random", "infinite"] | None = None
    repeats: bool = False
    holes: bool = False
    rising: bool = False

    def __str__(self) -> str:
        parts = [f"{self.heads}-heads", "fp8" if self.fp8 else "bf16", f"k{self.topk}"]
        parts += [f"{self.sinks}-sinks"] * bool(self.sinks) + ["repeats"] * self.repeats
        parts += ["holes"] * self.holes + ["rising"] * self.rising
        return f"{'-'.join(parts)}-rows{len(self.counts)}"


ATTENTION: tuple[AttentionCase, ...] = (
    AttentionCase((1,), 1, 1),
    AttentionCase((64, 0, 37), 64, 20, sinks="random"),
    AttentionCase((64, 0, 37), 64, 20, fp8=True),
    AttentionCase((5, 63), 63, 8, fp8=True, sinks="infinite"),
    AttentionCase((65, 130), 130, 16, repeats=True),
    AttentionCase((100, 1), 100, 64),
    AttentionCase((70,), 128, 128, fp8=True, sinks="random"),
    AttentionCase((40, 0, 1, 300), 520, 20, holes=True),
    AttentionCase((40, 0, 1, 130), 200, 20, fp8=True, sinks="random", holes=True),
    AttentionCase((200, 130, 70), 200, 20, rising=True),
    AttentionCase((200, 130, 70), 200, 20, fp8=True, rising=True),
    AttentionCase((0, 0), 64, 3),
    AttentionCase((), 64, 20),
)
CLUSTERS = tuple(AttentionCase((k,), k, 8) for k in (64, 128, 256, 1024))
"""One row, whose list clusters of 1, 2, 4 and 16 blocks share."""
_UNEVEN = (64, 0, 63, 1, 64, 40, 64)
WIDE_ATTENTION: tuple[AttentionCase, ...] = (
    AttentionCase(_UNEVEN * 304, 64, 5),
    AttentionCase(_UNEVEN * 304, 64, 8, fp8=True),
    AttentionCase(_UNEVEN * 152, 64, 16),
    AttentionCase(_UNEVEN * 115, 64, 20, sinks="random"),
    AttentionCase(_UNEVEN * 115, 64, 20, fp8=True, repeats=True),
    AttentionCase(_UNEVEN * 80, 64, 32, fp8=True),
    AttentionCase(_UNEVEN * 80, 100, 20, holes=True),
    AttentionCase(_UNEVEN * 40, 64, 100),
)
"""Queries enough to fill a GPU, see :data:`WIDE_PREFILL`."""
_EVERY_LENGTH = (2048, 2047, 1, 0, 1500, 64, 63, 2048)
LARGE_ATTENTION: tuple[AttentionCase, ...] = (
    *(
        AttentionCase(_EVERY_LENGTH, 2048, heads, fp8, "random" if fp8 else None)
        for heads in (1, 5, 16, 20, 32, 64, 100, 128)
        for fp8 in (False, True)
    ),
    *(
        AttentionCase((2048, 1500) * pairs, 2048, 8, fp8)
        for pairs in (8, 16)
        for fp8 in (False, True)
    ),
    *(AttentionCase((1900, 3, 0, 700), 2048, 20, fp8, holes=True) for fp8 in (False, True)),
    *(AttentionCase((2048, 1500), 2048, 20, fp8, rising=True) for fp8 in (False, True)),
    *(
        AttentionCase((2048, 1999) * (400 if heads == 20 else 150), 2048, heads, fp8)
        for heads in (20, 128)
        for fp8 in (False, True)
    ),
)
"""For a GPU only."""


@dataclass(frozen=True)
class SparseMlaInputs:
    """Arguments of sparse MLA."""

    q: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    scale: float
    sinks: torch.Tensor | None


def attention_inputs(
    case: AttentionCase, generator: torch.Generator, device: torch.device
) -> SparseMlaInputs:
    """Draw the inputs of ``case``; rows of the cache that no query lists are NaN."""
    pool = max(case.counts, default=0) * 2 + 10
    rows = torch.randn(pool, LATENT_DIM, generator=generator)
    rows *= torch.exp(torch.randn(pool, 1, generator=generator))  # some rows stand out
    toward = torch.zeros(LATENT_DIM)
    if case.rising:  # a query's score of a row rises by a ninth from slot to slot
        toward = torch.nn.functional.normalize(torch.randn(LATENT_DIM, generator=generator), dim=0)
        rows += torch.arange(pool)[:, None] / 9 * toward
    cache = rows.bfloat16()
    cache = quantize_latent(cache) if case.fp8 else cache
    slots = torch.full((len(case.counts), case.topk), PADDING, dtype=torch.int32)
    for row, count in zip(slots, case.counts, strict=True):
        if case.repeats:
            selection = torch.randint(0, pool // 4, (count,), generator=generator)
        else:
            selection = torch.randperm(pool, generator=generator)[:count]
            selection = selection.sort().values if case.rising else selection
        row[:count] = selection.to(torch.int32)
        if case.holes:
            row[:] = row[torch.randperm(case.topk, generator=generator)]
    is_listed = torch.zeros(pool, dtype=torch.bool)
    is_listed[slots[slots >= 0].long()] = True
    cache[~is_listed] = 0x7F if case.fp8 else float("nan")
    q = torch.randn(len(case.counts), case.heads, LATENT_DIM, generator=generator)
    q = (q + LATENT_DIM**0.5 * toward).bfloat16()
    # About as large as the sums that they join, or leaving them out would not show.
    sinks = None if case.sinks is None else 6 + 2 * torch.randn(case.heads, generator=generator)
    if sinks is not None and case.sinks == "infinite":
        sinks[0], sinks[-1] = float("inf"), float("-inf")
    return SparseMlaInputs(
        q.to(device),
        cache.to(device),
        slots.to(device),
        LATENT_DIM**-0.5,
        None if sinks is None else sinks.to(device),
    )
