"""Rows that SGLang pads for its collectives: its own RadixAttention around the CPU's backend.

Under dp_attention with tensor parallelism inside attention, or an all-to-all backend, a prefill's
rows are padded to a multiple. Indexers see all of them, attention those in front.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cpu import backend as backend_cpu
from sglang_indexcache.serving.cpu import indexer as indexer_cpu
from sglang_indexcache.serving.cpu.select import HostBatch
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.rows import patterns_of_rows
from tests.serving.plans import plan, requests

LAYERS, WIDTH, ROPE, REACH = 6, 4, 2, 100
MODES = {
    "static": ("static", ["FSSFSS"]),
    "live, one pattern": ("live", ["FSSFSS"]),
    "live, mixed": ("live", ["FSSFSS", "FFSSSF"]),
}


@dataclass
class Forward:
    """A prefill of one request a pattern, its rows ``real`` of ``padded``.

    Attributes:
        seen: what each layer's attention was given, ``[real]``.
    """

    mode: str
    patterns: list[Pattern]
    real: int
    padded: int
    seen: dict[int, list[int]]

    @property
    def lengths(self) -> list[int]:
        first = self.real // len(self.patterns)
        return [self.real] if len(self.patterns) == 1 else [first, self.real - first]

    @property
    def owners(self) -> list[Pattern]:
        """Pattern of each real row."""
        pairs = zip(self.patterns, self.lengths, strict=True)
        return [pattern for pattern, length in pairs for _ in range(length)]

    def process(self) -> ServingProcess:
        return ServingProcess(plan(str(self.patterns[0]), mode=self.mode))

    def batch(self, rows: slice, padded: int, **fields: Any) -> Any:
        defaults: dict[str, Any] = {
            "rids": requests(self.patterns),
            "forward_mode": ForwardMode.EXTEND,
            "positions": torch.arange(padded),
            "out_cache_loc": torch.arange(padded),
            "extend_seq_lens_cpu": self.lengths,
            "global_num_token_non_padded_cpu": rows.stop - rows.start,
            "rows": rows,
            "_attn_output": None,
            "mha_return_lse": False,
        }
        return SimpleNamespace(**defaults | fields)

    def has_indexer(self, layer: int) -> bool:
        return self.mode == "live" or self.patterns[0].is_full(layer)

    def expected(self) -> dict[int, list[int]]:
        """Return what every row must attend to: what its own F layer selected for it."""
        return {
            layer: [p.source_of(layer) * 10 + row for row, p in enumerate(self.owners)]
            for layer in range(LAYERS)
        }


def selection(layer: int, rows: slice, padded: int) -> torch.Tensor:
    """Return ``[padded, 1]`` int32: what tells the layer and the row of the whole batch."""
    return (layer * 10 + torch.arange(rows.start, rows.start + padded, dtype=torch.int32))[:, None]


def radix_attention(layer: int) -> RadixAttention:
    return RadixAttention(1, WIDTH + ROPE, 1.0, 1, layer_id=layer, v_head_dim=WIDTH)


def attend(layer: int, batch: Any, padded: int, carried: torch.Tensor | None) -> None:
    """Attend as a model's layer does, with all rows of the forward."""
    radix_attention(layer)(
        torch.zeros(padded, 1, WIDTH),
        torch.zeros(padded, 1, WIDTH),
        torch.zeros(padded, 1, WIDTH),
        batch,
        q_rope=torch.zeros(padded, 1, ROPE),
        k_rope=torch.zeros(padded, 1, ROPE),
        topk_indices=carried,
    )


@contextmanager
def within(backend: Any) -> Iterator[None]:
    with forward_context(ForwardContext(attn_backend=backend)):
        yield


@pytest.fixture
def torch_stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores and the product, not what decides over rows and indices."""
    monkeypatch.setattr(indexer_cpu, "_keys", lambda *_: None)
    inputs = torch.zeros(REACH, 1), torch.ones(REACH, 1)
    monkeypatch.setattr(indexer_cpu, "index_queries", lambda *_: inputs)


def on_cpu(forward: Forward) -> None:
    monkeypatch = pytest.MonkeyPatch()
    backend = backend_cpu.CpuIndexCacheBackend.__new__(backend_cpu.CpuIndexCacheBackend)
    batch = forward.batch(slice(0, forward.real), forward.padded)
    keys = torch.zeros(REACH, 1, WIDTH + ROPE)
    slots = torch.arange(REACH).repeat(len(forward.patterns), 1)
    vars(backend).update(
        process=(process := forward.process()),
        index_buffer=IndexBuffer(process),
        index_keys=SimpleNamespace(store=lambda *_: None),
        token_to_kv_pool=SimpleNamespace(
            set_mla_kv_buffer=lambda *_: None, get_key_buffer=lambda _: keys
        ),
        batch=HostBatch(tuple(forward.lengths), (REACH,) * len(forward.patterns), slots),
        prefill_attention_backend_str="dsa",
        decode_attention_backend_str="dsa",
        _slots_of=None,
        splitter=None,
        split=None,
    )
    backend.index_buffer.begin(patterns_of_rows(batch, process))
    carried = None
    for layer in range(LAYERS):

        def note(q: Any, _latent: Any, indices: Any, *_: Any, layer: int = layer) -> Any:
            assert len(q) == len(indices) == forward.real
            forward.seen[layer] = indices.flatten().tolist()
            return torch.zeros(len(q), 1, WIDTH)

        monkeypatch.setattr(backend_cpu, "sparse_mla", note)
        monkeypatch.setattr(
            indexer_cpu, "select_topk", lambda *_, n=layer: selection(n, batch.rows, forward.padded)
        )
        with within(backend):
            if forward.has_indexer(layer):
                x = torch.zeros(forward.padded, 1)
                config = SimpleNamespace(index_topk=1)
                carried = indexer_cpu.indexer_forward(config, x, x, x, batch, layer)  # type: ignore[arg-type]
            attend(layer, batch, forward.padded, carried)
    monkeypatch.undo()


def run(mode: str, real: int, padded: int) -> None:
    kind, texts = MODES[mode]
    forward = Forward(kind, [Pattern(text) for text in texts], real, padded, {})
    on_cpu(forward)
    assert forward.seen == forward.expected()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("real", "padded"), [(6, 6), (6, 8), (5, 8)])
def test_each_row_reads_its_own_f_layers_selection(
    torch_stubs: None, mode: str, real: int, padded: int
) -> None:
    run(mode, real, padded)


def test_on_a_cpu_what_sglang_carries_is_what_the_f_layer_selected(
    monkeypatch: pytest.MonkeyPatch, torch_stubs: None
) -> None:
    original = backend_cpu.CpuIndexCacheBackend._indices

    def elsewhere(self: Any, layer: int, batch: Any, carried: Any, rows: int) -> torch.Tensor:
        return original(self, layer, batch, carried.clone() if layer == 4 else carried, rows)

    monkeypatch.setattr(backend_cpu.CpuIndexCacheBackend, "_indices", elsewhere)
    with pytest.raises(StaleIndexError, match="carried other indices to layer 4"):
        run("static", 5, 8)
