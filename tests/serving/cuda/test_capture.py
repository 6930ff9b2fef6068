"""Captured forwards: SGLang begins once, runs the layers three times, and replays what it recorded.

Every pattern of the library, each cut into pipeline stages, with and without two-batch overlap. A
stage's layers run as ``DeepseekV2Model.forward`` runs them; an attention notes what it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import eager_on_graph
from sglang.srt.model_executor.runner_utils.forward_batch import (
    get_forward_batch,
    set_forward_batch,
)
from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

from sglang_indexcache.errors import PatternError, StaleIndexError
from sglang_indexcache.library.resolve import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
from sglang_indexcache.serving.index_buffer import IndexBuffer
from sglang_indexcache.serving.process import ServingProcess
from sglang_indexcache.serving.refusals import stage_starts
from tests.serving.cuda.graphs import runner_backend, sglang_graphs
from tests.serving.cuda.test_backend import runner
from tests.serving.plans import plan

ROWS = 4
KEY = ShapeKey(ROWS)
PATTERNS = {name: str(entry.parsed) for name, entry in Library.default().entries.items()} | {
    "GLM-5, uniform 1/2": str(Pattern.uniform(78, 2)),
    "GLM-5, uniform 1/4": str(Pattern.uniform(78, 4)),
    "GLM-5.2, its own": str(Pattern.from_freq(78, 4, 3)),
    "DeepSeek-V3.2, uniform 1/4": str(Pattern.uniform(61, 4)),
    "a stage of S alone": "FSSSSSSS",
}


class Model:
    """The layers of one pipeline stage around a real :class:`IndexCacheBackend`.

    An F layer's indexer selects ``[rows, 1]`` numbers that tell the layer, the row and what the
    batch holds now, so that nothing of another layer, pass or batch can be mistaken for it.
    """

    def __init__(self, pattern: Pattern, start: int, end: int, first_overlapped: int) -> None:
        self.pattern, self.start, self.end = pattern, start, end
        self.batch = torch.zeros(ROWS, 1, dtype=torch.int64)  # written in place for each forward
        self.carried = torch.zeros_like(self.batch)  # SGLang's static buffer of the stage before
        self.attended = torch.full((len(pattern), ROWS), -1)
        self.first_overlapped = max(first_overlapped, start)
        stand_in = runner(start, first_k_dense_replace=first_overlapped)
        process = ServingProcess(plan(str(pattern)))
        primary, *parts = (IndexCacheBackend(stand_in, process) for _ in range(3))
        for backend in (primary, *parts):
            backend.use_mha = False
        self.backend = TboAttnBackend.__new__(TboAttnBackend)
        vars(self.backend).update(primary=primary, children=parts)
        stand_in.attn_backend = self.backend

    def selected(self, layer: int, rows: slice = slice(None)) -> torch.Tensor:
        """Return what ``layer``'s indexer selects for the batch as it is."""
        return self.batch[rows] * 1000 + layer

    def forward(self, parts: tuple[Any, ...] = ()) -> torch.Tensor:
        """Run as ``DeepseekV2Model.forward``; without ``parts`` each layer sees the whole batch."""
        carried = torch.empty_like(self.carried)
        carried.copy_(self.carried)
        previous = carried if self.start else None
        all_rows = batch(slice(0, ROWS), None)
        boundary = self.first_overlapped if parts else self.end
        for layer in range(self.start, min(boundary, self.end)):
            previous = self._layer(self.backend.primary, layer, all_rows, previous)
        for layer in range(boundary, self.end):
            for part, backend in zip(parts, self.backend.children, strict=True):
                self._layer(backend, layer, part, None)
        return self.attended

    def _layer(
        self, backend: IndexCacheBackend, layer: int, part: Any, previous: torch.Tensor | None
    ) -> torch.Tensor | None:
        if self.pattern.is_full(layer):
            previous = self.selected(layer, part.rows)
        noting = SimpleNamespace(layer_id=layer, notes=(self.attended, part.rows))
        q = self.batch[part.rows]
        backend.forward_decode(q, None, None, noting, part, topk_indices=previous)
        return previous

    def expected(self) -> torch.Tensor:
        """Return what every layer of the stage must have attended to."""
        expected = torch.full_like(self.attended, -1)
        for layer in range(self.start, self.end):
            expected[layer] = self.selected(self.pattern.source_of(layer)).flatten()
        return expected


def batch(rows: slice, of_whole: tuple[int, int] | None) -> Any:
    return SimpleNamespace(
        rows=rows,
        tbo_parent_token_range=of_whole,
        tbo_padded_len=None,
        forward_mode=ForwardMode.DECODE,
        batch_size=rows.stop - rows.start,
    )


@pytest.fixture(autouse=True)
def recorded_graphs() -> Iterator[None]:
    """SGLang captures and replays; a recording stands for the device's graphs."""
    with sglang_graphs():
        yield


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_attention(monkeypatch)


def replace_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's attention, replaced by a kernel that notes the indices it reads."""

    def note(self: Any, q: Any, k: Any, v: Any, layer: Any, part: Any, **call: Any) -> None:
        attended, rows = layer.notes
        indices = call["topk_indices"]
        attended[layer.layer_id, rows].copy_(indices.flatten())

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        monkeypatch.setattr(DeepseekSparseAttnBackend, name, lambda self, *_, **__: None)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "forward_decode", note)


def stages(pattern: Pattern, count: int) -> Iterator[tuple[int, int]]:
    for rank in range(count):
        yield get_pp_indices(len(pattern), rank, count)


@pytest.mark.parametrize("text", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize(
    ("count", "first_overlapped"), [(1, 1), (2, None), (2, 3), (4, 1), (8, None), (8, 3)]
)
def test_decode_graph_of_every_stage(text: str, count: int, first_overlapped: int | None) -> None:
    pattern = Pattern(text)
    for start, end in stages(pattern, count):
        if first_overlapped is not None and not pattern.is_full(start):
            with pytest.raises(PatternError, match="pattern has S"):  # such a server is refused
                pattern.check_stages(stage_starts(range(len(pattern)), len(pattern), count))
            continue
        replay_stage(pattern, start, end, first_overlapped)


def replay_stage(
    pattern: Pattern, start: int, end: int, first_overlapped: int | None = None
) -> None:
    """One begin, two warm-ups, one capture; then replays with other batches."""
    model = Model(pattern, start, end, first_overlapped or 0)
    overlap = first_overlapped is not None
    parts = (batch(slice(0, 1), (0, 1)), batch(slice(1, ROWS), (1, ROWS))) if overlap else ()
    all_rows = SimpleNamespace(**vars(batch(slice(0, ROWS), None)), tbo_children=parts or None)
    model.backend.init_forward_metadata_out_graph(all_rows, in_capture=True)
    graphs = runner_backend(FullCudaGraphBackend, _reuse_output_buffer=False, _output_buffer=None)
    graphs.capture_one(KEY, lambda: model.forward(parts))
    for number in (1, 2):
        model.batch.copy_(torch.arange(ROWS).view(-1, 1) + 10 * number)
        model.carried.copy_(model.selected(pattern.source_of(start)))
        model.attended.fill_(-1)
        graphs.replay(KEY, None)
        assert torch.equal(model.attended, model.expected()), (start, end, number)


def test_adopting_only_into_an_empty_buffer_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffer once did, and every pass but the first read what the first had left."""
    replay_stage(Pattern("FSSFS"), 2, 5)

    def adopt(self: IndexBuffer, layer: int, indices: torch.Tensor | None) -> None:
        if self._indices is None:
            original(self, layer, indices)

    original = IndexBuffer.adopt
    monkeypatch.setattr(IndexBuffer, "adopt", adopt)
    with pytest.raises(StaleIndexError):
        replay_stage(Pattern("FSSFS"), 2, 5)
    with pytest.raises(AssertionError):
        replay_stage(Pattern("FSSSS"), 2, 5)


class PrefillModel:
    """A stage under SGLang's default on CUDA: prefill graphs that break at every attention.

    At a replay the attention's Python runs again, with the arguments of the capture (a graph's
    buffers, padded to its size) and the batch of now, of which only the real rows are handed on.
    """

    def __init__(self, pattern: Pattern, start: int, end: int) -> None:
        self.pattern, self.start, self.end = pattern, start, end
        self.layers = {number: radix_attention(number) for number in range(start, end)}
        self.carried = torch.zeros(ROWS, 1, dtype=torch.int64)
        self.attended = torch.full((len(pattern), ROWS), -1.0)
        self.backend = IndexCacheBackend(runner(start), ServingProcess(plan(str(pattern))))
        self.backend.use_mha = False

    def forward(self) -> torch.Tensor:
        carried = torch.empty_like(self.carried)
        carried.copy_(self.carried)
        previous = carried
        for number, layer in self.layers.items():
            if self.pattern.is_full(number):
                previous = torch.full((ROWS, 1), -7)  # real rows are written, padding keeps this
                select_into(number, previous)
            q = torch.zeros(ROWS, 1, 1)
            output = layer(q, None, None, get_forward_batch(), topk_indices=previous)
            self.attended[number].copy_(output.flatten())
        return self.attended


def radix_attention(number: int) -> RadixAttention:
    return RadixAttention(num_heads=1, head_dim=1, scaling=1.0, num_kv_heads=1, layer_id=number)


def selection(layer: int, rows: int, mark: int) -> torch.Tensor:
    return torch.arange(1, rows + 1).view(-1, 1) * 10000 + mark * 1000 + layer


@eager_on_graph
def select_into(layer: int, result: torch.Tensor) -> None:
    """Select for a prefill as an indexer does: eager as well, into a buffer of the graph."""
    live = get_forward_batch()
    rows = live.global_num_token_non_padded_cpu
    result[:rows] = selection(layer, rows, live.mark)


def prefill_batch(rows: int, mark: int) -> Any:
    return SimpleNamespace(
        global_num_token_non_padded_cpu=rows,
        batch_size=1,
        mark=mark,
        mha_return_lse=False,
        out_cache_loc=torch.arange(ROWS),
        positions=torch.arange(ROWS),
        _attn_output=None,
        forward_mode=ForwardMode.EXTEND,
        tbo_parent_token_range=None,
    )


@pytest.mark.parametrize("text", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("count", [1, 4])
def test_breakable_prefill_graph_of_every_stage(
    monkeypatch: pytest.MonkeyPatch, text: str, count: int
) -> None:
    pattern = Pattern(text)
    for start, end in stages(pattern, count):
        replay_prefill(monkeypatch, pattern, start, end)


def replay_prefill(monkeypatch: pytest.MonkeyPatch, pattern: Pattern, start: int, end: int) -> None:
    """Replays with a full batch, a padded one, an idle rank's empty one, and a full one again."""

    def attend(self: Any, q: Any, k: Any, v: Any, layer: Any, live: Any, **call: Any) -> Any:
        indices = call["topk_indices"]
        assert len(indices) == len(q), "padding must not reach the attention"
        return indices.view_as(q).float()

    monkeypatch.setattr(DeepseekSparseAttnBackend, "forward_extend", attend)
    model = PrefillModel(pattern, start, end)
    graphs = runner_backend(
        BreakableCudaGraphBackend,
        _capture_inputs={},
        _shared_output_buffer=None,
        _debug_eager=False,
    )
    with prefill(model, prefill_batch(ROWS, mark=0)), graphs.replay_session():
        model.backend.init_forward_metadata(get_forward_batch())
        graphs.capture_one(KEY, model.forward)
    for mark, rows in enumerate((ROWS, ROWS - 1, 0, ROWS), start=1):
        model.carried[:rows] = selection(pattern.source_of(start), rows, mark)
        with prefill(model, prefill_batch(rows, mark)), graphs.replay_session():
            if rows:  # SGLang prepares nothing for an idle rank
                model.backend.init_forward_metadata(get_forward_batch())
            model.attended.fill_(-1)
            graphs.replay(KEY, None)
        for layer in range(start, end):
            expected = torch.zeros(ROWS)
            expected[:rows] = selection(pattern.source_of(layer), rows, mark).flatten()
            assert torch.equal(model.attended[layer], expected), (layer, mark)


@contextmanager
def prefill(model: PrefillModel, live: Any) -> Iterator[None]:
    """Publish what SGLang's prefill runner does around a capture or a replay."""
    rows = live.global_num_token_non_padded_cpu
    with (
        prefill_graph_scope(full_graph=False, raw_num_tokens=rows),
        forward_context(ForwardContext(attn_backend=model.backend)),
        set_forward_batch(live),
    ):
        yield
