"""Contract of every implementation of an op: signatures, layouts, order of arithmetic, ties.

There are four ops: ``logits``, ``select``, ``topk`` and ``sparse_mla``. The reference and the CUDA
implementation of an op are functions of its name with one signature, the ``__call__`` of a protocol
below, and pass one test grid. Nothing here runs on a device.

**Names.** T query rows, B requests, H indexer heads, D = 128 their width, Hq MLA heads, k top-k.

**Index-K pages** (SGLang's ``IndexKeyCache``): ``pages`` is ``[P, 8448]`` uint8, contiguous,
16-byte aligned. A page holds 64 tokens: 64 x 128 bytes of e4m3, then 64 float32 scales, positive
and finite, of any value.

**Requests.** ``block_table`` is ``[B, W]`` int32, rows any stride apart: token ``s`` of request
``b`` is token ``s % 64`` of page ``block_table[b, s // 64]``. Entries past the pages that a row of
``b`` may see are not initialised and must not be followed.

**Query rows.** ``visible[row]`` int32 in ``[0, 64 * W]`` is how many tokens of its request, counted
from the first, a row may see; 0 for a row of padding. The rows of request ``b`` are
``query_starts[b]`` up to ``query_starts[b + 1]`` (``[B + 1]`` int32, from 0, never decreasing,
equal for an empty request); rows from ``query_starts[B]`` to T are padding whatever ``visible``
says (dp_attention pads batches). Decode is a batch in which every request has the same number of
rows, 1 to 8 (MTP): then ``query_starts`` is left out and the host knows whose row is whose, for
which an implementation may choose another schedule. Within a request ``visible`` usually rises by
one a row; a kernel may rely on that for speed only.

**No host synchronisation.** Lengths live on the device and no op may read them back, so that every
op can be captured in a CUDA graph. Shapes, ``topk`` and ``width`` are all the host knows.
Scratch memory is bounded independently of T x L (:data:`WORKSPACE_BYTES`).

**Logits**, in this order of float32 arithmetic::

    dot[h]  = sum_i q[h, i] * key[i]           the matrix unit's own order and precision
    part[l] = fma chain over the heads h with (h // 2) % 4 == l, ascending, from +0:
              part[l] = fma(weight[h], max(dot[h], 0), part[l])
    logit   = ((part[0] + part[1]) + (part[2] + part[3])) * scale

The order of ``part`` is how a Hopper accumulator lies in a warp (thread ``l`` of a quad holds the
columns ``8j + 2l`` and ``8j + 2l + 1``). An implementation that cannot promise it (a compiler may
choose its own) states its own; whatever it is, one row's logits must depend on nothing but that
row's inputs: not on T, the other requests, its place in a tile, or the run.
Against float64 every logit is within :func:`.indexer.reference.logits_tolerance`.

**Selection.** Of the first ``visible[row]`` logits the ``min(k, visible[row])`` largest, equal
values to the smaller position, output ascending by position, padded with -1. ``-0.0`` equals
``+0.0``; ``-inf`` and ``+inf`` are values like any other; NaN never occurs in valid input (an
implementation must then still end, in bounds). ``select`` selects exactly, bit for bit, what
:class:`TopK` selects from the logits of **the same implementation**. Across implementations sets
may differ only where logits are within the tolerance of the k-th.

**Slots.** With ``as_slots`` ``select`` maps each selected position ``s`` to the physical token
``block_table[b, s // 64] * 64 + s % 64``, in the same (position) order; -1 stays -1.

**Latent cache** of sparse MLA, one row a physical slot, contiguous, 16-byte aligned:

- bfloat16 ``[N, 576]``: 512 latent (the values), 64 rotary;
- uint8 ``[N, 656]`` (FlashMLA's FP8 format): 512 e4m3, 4 float32 scales (one for each 128), 64
  bfloat16 rotary. A row means ``bfloat16(float32(e4m3) * scale)`` and its rotary part as stored:
  attention over an FP8 cache is by definition attention over those bfloat16 rows.

**Attention.** ``slots[row]`` lists physical slots; -1 is no slot, wherever it stands. Our
selections have it at the end only, where it costs nothing; another's may not, and a kernel that
stopped at the first would drop rows silently. A slot may occur twice and then counts twice. With
``s_j = scale * q . row_j`` in float32, ``lse = ln(sum_j exp(s_j))``, ``out = sum_j exp(s_j - lse)
* row_j[:512]``, probabilities rounded to bfloat16 before the second product. ``sinks`` (``[Hq]``
float32, infinities allowed) adds ``exp(sink)`` to the denominator of ``out`` and leaves ``lse`` as
it is, so that splits combine (FlashMLA's ``attn_sink``). A row without any slot gives zeros and
``-inf``. Within :func:`.sparse_mla.reference.mla_tolerance` of float64, and the same bits on every
run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # not at run time: server options and doctor only list names and need no torch
    import torch

INDEX_DIM = 128
PAGE_TOKENS = 64
SCALE_BYTES = 4
INDEX_KEY_BYTES = INDEX_DIM + SCALE_BYTES
"""Bytes of an index key on GPUs, per token and layer: e4m3 entries and one float32 scale."""
E4M3_MAX = 448.0


def page_bytes(head_dim: int) -> int:
    """Return the size in bytes of one page of index keys with ``head_dim`` entries."""
    return PAGE_TOKENS * (head_dim + SCALE_BYTES)


PAGE_BYTES = page_bytes(INDEX_DIM)
LATENT_DIM, VALUE_DIM, ROPE_DIM = 576, 512, 64
FP8_ROW_BYTES = 656
FP8_GROUP = 128
PADDING = -1

MAX_TOPK = 2048
MAX_NEXT_N = 8
"""Largest number of rows per request in a batch without ``query_starts``."""
MAX_TOKENS = 1 << 20
"""Largest number of tokens that a row may see. A block table may be wider: engines round up."""
MAX_PAGES = 1 << 16
"""Largest number of columns in a block table. The order in which the fused kernel visits pages
multiplies two page numbers in 32 bits (``spread_page`` of csrc/indexer/schedule.h); with more
columns it would overflow and repeat pages."""
MAX_MLA_HEADS = 128
INDEXER_HEADS = (8, 16, 32, 64)
WORKSPACE_BYTES = 512 << 20
"""Bytes that an op may allocate besides its output."""

OpName: TypeAlias = Literal["logits", "select", "topk", "sparse_mla"]
OPS: dict[OpName, str] = {
    "logits": "indexer",
    "select": "indexer",
    "topk": "indexer",
    "sparse_mla": "sparse_mla",
}
"""Every op and its folder: ``kernels/<folder>/<implementation>.py`` has a function with the op's
name."""


@dataclass(frozen=True)
class IndexerBatch:
    """Queries, and the paged keys that each may see; the module's docstring defines the layout.

    Attributes:
        q: ``[T, H, 128]`` float8_e4m3fn, contiguous.
        weights: ``[T, H]`` float32, contiguous: gate * scale of q * softmax scale; any sign.
    """

    q: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    block_table: torch.Tensor
    visible: torch.Tensor
    query_starts: torch.Tensor | None = None

    @property
    def rows_per_request(self) -> int:
        """Number of rows of every request, if ``query_starts`` is left out."""
        requests = len(self.block_table)
        return len(self.visible) // requests if requests else 1

    def part(self, low: int, high: int) -> IndexerBatch:
        """Return rows ``low`` up to ``high``: whole requests, if ``query_starts`` is None."""
        table, starts = self.block_table, self.query_starts
        if starts is None:
            requests = slice(low // self.rows_per_request, high // self.rows_per_request)
            table = table[requests]
        else:
            starts = (starts - low).clamp(0, high - low)
        rows = slice(low, high)
        return IndexerBatch(
            self.q[rows], self.weights[rows], self.pages, table, self.visible[rows], starts
        )


class Logits(Protocol):
    """The op ``logits``: all logits as a matrix, for tests and for the unfused path."""

    def __call__(
        self, batch: IndexerBatch, width: int, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return ``[T, width]`` float32, in ``out`` if given; its rows may be any stride apart.

        ``width`` is at least ``max(visible)``. Columns from ``visible[t]`` on, and rows of padding,
        hold anything (DeepGEMM's ``clean_logits=False``); nothing beyond ``width`` is touched.
        """
        ...


class Select(Protocol):
    """The op ``select``: logits and selection in one, never with all logits in memory."""

    def __call__(
        self,
        batch: IndexerBatch,
        topk: int,
        *,
        as_slots: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[T, topk]`` int32, contiguous, every element written."""
        ...


class TopK(Protocol):
    """The op ``topk``: exact, deterministic top-k of given logits."""

    def __call__(
        self,
        logits: torch.Tensor,
        visible: torch.Tensor,
        topk: int,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[T, topk]`` int32 positions, contiguous, every element written.

        Args:
            logits: ``[T, S]`` float32, unit stride in a row, rows any stride apart; not changed.
            visible: ``[T]`` int32 in ``[0, S]``.
        """
        ...


Kept: TypeAlias = dict[object, Any]


class SparseMLA(Protocol):
    """The op ``sparse_mla``: attention over selected latent rows, for prefill and decode alike."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        scale: float,
        *,
        sinks: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        kept: Kept | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``[T, Hq, 512]`` bfloat16 output and ``[T, Hq]`` float32 LSE in nats.

        Args:
            q: ``[T, Hq, 576]`` bfloat16, contiguous, any ``Hq`` from 1 to 128.
            cache: ``[N, 576]`` bfloat16 or ``[N, 656]`` uint8.
            slots: ``[T, k]`` int32, contiguous, any ``k`` >= 1.
            scale: softmax scale, a natural-logarithm one.
            lengths: ``[T]`` int32, the index from which on a row has no slot. If it is left out, a
                kernel that profits from it computes it.
            kept: a cache for data that an implementation derives from ``slots`` alone, for the next
                call with these slots. The caller passes the same dictionary again only while
                ``slots`` is unchanged, as among layers that share a selection.
        """
        ...
