"""Counters of a process's forwards, from lengths that the host knows.

Counting waits for no GPU, and the replay of a CUDA graph counts like any other forward.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang_indexcache.checkpoint import text_config
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.models import read_field
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.protocol import OTHERS

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_indexcache.serving.plan import Plan

BINS = (2048, 8192, 32768, 131072)
"""Upper bound of each bin, in tokens; the last bin, "more", has none."""

LENGTHS = (*map(format_length, BINS), "more")
"""Names of the bins."""

MAX_LABELS = 100
"""Number of patterns with a label of their own; all later patterns share one label."""

Served = tuple[Pattern, int, int]
"""A request's part of a forward: its pattern, its number of rows, and its length including them."""


@dataclass
class Traffic:
    """Counters for the layers of this process, which never go back to 0.

    A query-key pair is a row and one of the tokens that it may see, at one layer; indexers score
    pairs. Forwards whose requests all have at most ``topk`` tokens are not counted: their indexers
    select everything without scores, so sharing saves none.

    Attributes:
        here: the pattern positions of this process's layers.
        own: the positions among these at which the checkpoint has an indexer.
        flops: operations for one pair: a multiplication and an addition for each dimension of each
            head.
        index_k_bytes: bytes of index keys per token, as allocated for these layers.
        tokens: number of rows by phase ("prefill", "decode") and pattern.
        pairs: number of pairs by phase, bin of the request's length and "scored" or "skipped". A
            layer that is F for one request in a forward scores the pairs of all requests.
        rejections: number of refused patterns, by "switch" or "request".
    """

    here: range = range(0)
    own: frozenset[int] = frozenset()
    topk: int = 0
    flops: int = 0
    index_k_bytes: int = 0
    tokens: Counter[tuple[str, ...]] = field(default_factory=Counter)
    pairs: Counter[tuple[str, ...]] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)

    def look_at(self, plan: Plan, runner: Any) -> None:
        """Read the layers, k and index-K memory from SGLang's model ``runner``."""
        layers, config = runner.layer_info, text_config(runner.model_config.hf_config)
        start, stop = (
            sum(layer < limit for layer in plan.layer_ids)
            for limit in (layers.start_layer, layers.end_layer)
        )
        self.here = range(start, stop)
        self.own = frozenset(filter(plan.own.is_full, self.here))
        self.topk = int(read_field(config, "index_topk"))
        heads, width = (read_field(config, f"index_{name}") for name in ("n_heads", "head_dim"))
        self.flops = 2 * int(width) * int(heads)
        self.index_k_bytes = _index_k_bytes(runner.token_to_kv_pool)

    def count(self, phase: str, served: Sequence[Served]) -> None:
        """Count a forward with these requests, in ``phase``."""
        labels = {key[-1] for key in self.tokens}
        for pattern, rows, _ in served:
            name = label_for(str(pattern), labels, MAX_LABELS, OTHERS)
            labels.add(name)
            self.tokens[phase, name] += rows
        if max((length for _, _, length in served), default=0) <= self.topk:
            return
        scoring = _scoring(frozenset(pattern for pattern, *_ in served), self.own)
        layers = {"scored": scoring, "skipped": len(self.own) - scoring}
        for _, rows, length in served:
            visible = _pairs_of(length) - _pairs_of(length - rows)
            for kind, count in layers.items():
                self.pairs[phase, length_bin(length), kind] += visible * count

    @property
    def flops_saved(self) -> int:
        """Number of operations that sharing saved in the counted pairs; it never falls."""
        skipped = (count for (*_, kind), count in self.pairs.items() if kind == "skipped")
        return self.flops * sum(skipped)

    def report(self) -> dict[str, dict[str, int]]:
        """Return the counters for a rank's state, with the parts of each key joined by spaces."""
        return {
            "tokens": {" ".join(key): count for key, count in self.tokens.items()},
            "pairs": {" ".join(key): count for key, count in self.pairs.items()},
            "rejections": dict(self.rejections),
        }


def label_for(name: Any, labels: Collection[Any], most: int, rest: Any) -> Any:
    """Return the label for ``name``: itself for the first ``most`` names, then ``rest``."""
    return name if name in labels or len(labels) < most else rest


@lru_cache(maxsize=256)
def _scoring(patterns: frozenset[Pattern], layers: frozenset[int]) -> int:
    """Count the ``layers`` that are F in any of a forward's patterns; they score for all rows."""
    return sum(any(pattern.is_full(layer) for pattern in patterns) for layer in layers)


def _pairs_of(rows: int) -> int:
    """Count the pairs in a request's first ``rows`` rows."""
    return rows * (rows + 1) // 2


def length_bin(length: int) -> str:
    """Return the bin of a request with ``length`` tokens, named by its bound: "2Ki" to "more"."""
    return LENGTHS[bisect_left(BINS, length)]


def served_in(batch: ForwardBatch, patterns: Sequence[Pattern], default: Pattern) -> list[Served]:
    """Return the requests of ``batch`` from data on the host, or [] if it lacks their lengths.

    ``batch`` may be SGLang's view of a replayed graph. Without ``patterns`` all requests have the
    default.
    """
    lengths: Any = getattr(batch, "seq_lens_cpu", None)
    if lengths is None or batch.forward_mode.is_idle():
        return []
    rids = getattr(batch, "rids", None)
    count = batch.batch_size - getattr(batch, "num_padding", 0) if rids is None else len(rids)
    rows: Any = getattr(batch, "extend_seq_lens_cpu", None)
    if batch.forward_mode.is_decode() or rows is None:
        speculated = getattr(getattr(batch, "spec_info", None), "num_tokens_per_req", 0)
        rows = [max(1, speculated)] * count
    requests = zip(patterns or [default] * count, rows, lengths[:count].tolist(), strict=False)
    return [(pattern, int(new), int(length)) for pattern, new, length in requests]


def is_idle(batch: ForwardBatch) -> bool:
    """Return whether a rank's forward has no request of its own, as happens under dp_attention.

    SGLang may pad such a forward to look like one with a request. ``batch`` may be SGLang's view of
    a replayed graph.
    """
    if (rids := getattr(batch, "rids", None)) is not None:
        return not rids
    mode = getattr(batch, "actual_forward_mode", batch.forward_mode)
    return mode.is_idle() or batch.batch_size <= getattr(batch, "num_padding", 0)


def phase_of(batch: ForwardBatch) -> str:
    """Return "prefill" for a forward that fills the cache, "decode" for one that generates."""
    mode = batch.forward_mode
    return "decode" if mode.is_decode() or mode.is_target_verify() else "prefill"


def _index_k_bytes(pool: Any) -> int:
    """Return the bytes of index keys per token in this process's layers, from a pool's buffers."""
    pool = getattr(pool, "full_kv_pool", pool)
    slots = pool.index_buf_size + pool.page_size
    return round(sum(buffer.nbytes for buffer in pool.index_key_cache.buffer) / slots)
