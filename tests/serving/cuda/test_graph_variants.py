"""Several decode graphs of a batch size: captured under each label, replayed with other batches.

Layers run as SGLang runs them, the indexer and then the attention of each; SGLang's own capture
and replay run on a recording. What is expected is computed row by row from the patterns.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
from sglang.srt.layers.attention.graph_variants import DsaGraphVariants
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner import decode_cuda_graph_runner
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_utils import capture_mode

from sglang_indexcache.errors import StaleIndexError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.active import ActivePattern
from sglang_indexcache.serving.cuda import indexer as indexer_cuda
from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
from sglang_indexcache.serving.cuda.graph_variants import MIXED, GraphVariants
from tests.serving.cuda.graphs import runner_backend, sglang_graphs
from tests.serving.cuda.test_backend import runner
from tests.serving.plans import plan, requests

TOPK, ROWS, EVERYTHING = 8, 4, -100


def batch(patterns: Sequence[str] = (), longest: int | None = TOPK + 1) -> Any:
    """Return a decode batch as the scheduler hands it on."""
    lengths = None if longest is None else torch.full((len(patterns) or 1,), longest)
    return SimpleNamespace(
        rids=requests(patterns),
        seq_lens_cpu=lengths,
        seq_lens=torch.zeros(ROWS),
        batch_size=ROWS,
        forward_mode=ForwardMode.DECODE,
        tbo_parent_token_range=None,
    )


def variants(text: str, mode: str, *graphs: str, starts: Sequence[int] = ()) -> GraphVariants:
    return GraphVariants(ActivePattern(plan(text, mode=mode, graphs=graphs)), starts, TOPK)


# -- which graph a batch replays ---------------------------------------------------------------


@pytest.mark.parametrize(("longest", "label"), [(TOPK, "dense"), (TOPK + 1, "sparse")])
def test_short_batches_end_where_a_request_has_more_than_k_tokens(longest: int, label: str) -> None:
    assert variants("FSF", "static", "short").select(batch(["FSF"], longest)) == label


def test_the_longest_request_decides() -> None:
    lengths = SimpleNamespace(**vars(batch(["FSF"] * 2)) | {"seq_lens_cpu": torch.tensor([1, 9])})
    assert variants("FSF", "static", "short").select(lengths) == "sparse"


@pytest.mark.parametrize("lengths", [None, torch.zeros(0)])
def test_without_lengths_the_graph_that_is_always_right(lengths: torch.Tensor | None) -> None:
    unknown = SimpleNamespace(**vars(batch(["FSF"])) | {"seq_lens_cpu": lengths})
    assert variants("FSF", "static", "short").select(unknown) == "sparse"
    assert variants("FSF", "live", "short").select(unknown) == MIXED


def test_live_batches_of_one_declared_pattern_have_their_own() -> None:
    live = variants("FSS", "live", "short", "FSF", "FFF")
    assert live.capture_labels == ("dense", "FSF", "FFF", MIXED)
    assert live.select(batch(["FSF", "FSF"])) == "FSF"
    assert live.select(batch(["FSF", "FFF"])) == MIXED
    assert live.select(batch(["FSS"])) == MIXED  # the default, but not declared
    assert live.select(batch(["FSS", "FSF"], TOPK)) == "dense"
    assert live.select(batch()) == MIXED  # an idle rank


def test_live_batches_without_patterns_are_an_error() -> None:
    unknown = SimpleNamespace(**vars(batch()) | {"rids": ["1"]})
    with pytest.raises(StaleIndexError, match="without the patterns"):
        variants("FS", "live", "FS").select(unknown)


def test_sglang_calls_it_as_it_calls_its_own() -> None:
    """The protocol's members, and the label under which SGLang's indexer only stores keys."""
    ours = variants("FS", "static", "short")
    theirs = DsaGraphVariants(TOPK)
    assert ours.capture_labels == theirs.capture_labels
    for longest in (1, TOPK, TOPK + 1):
        assert ours.select(batch(["FS"], longest)) == theirs.select(batch(["FS"], longest))
    skips = inspect.getsource(Indexer._should_skip_logits_computation)
    assert "get_capture_attention_variant() == DSA_DENSE" in skips


def test_sglang_asks_at_every_replay_for_the_batch_of_now() -> None:
    source = textwrap.dedent(inspect.getsource(decode_cuda_graph_runner.DecodeCudaGraphRunner))
    calls = [
        ast.unparse(node.args[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self._resolve_attention_variant"
    ]
    assert len(calls) == 3
    assert set(calls) == {"forward_batch"}


# -- what a captured graph does ----------------------------------------------------------------


class Model:
    """A stage of layers around a real backend; each layer has an indexer where its weights say so.

    An indexer selects ``[rows, 1]`` numbers that tell the layer, the row and what the batch holds,
    or, where SGLang skips the logits, one number that stands for every token.
    """

    def __init__(self, graphs: GraphVariants, indexers: Sequence[bool]) -> None:
        self.active = graphs._active
        self.indexers = indexers
        self.batch = torch.zeros(ROWS, 1, dtype=torch.int64)  # written in place for each forward
        self.attended = torch.full((len(indexers), ROWS), -1)
        self.scored: list[int] = []
        self.stored: list[int] = []
        self.backend = IndexCacheBackend(runner(0), self.active)
        self.backend.use_mha = False
        self.backend.graphs = graphs
        self.backend._runner.attn_backend = self.backend

    def forward(self) -> torch.Tensor:
        self.scored.clear()
        self.stored.clear()
        carried = None
        for number, has_indexer in enumerate(self.indexers):
            if has_indexer:
                carried = indexer_cuda.indexer_forward(
                    self._select, self, None, None, None, batch(), number
                )  # type: ignore[arg-type]
            noting = SimpleNamespace(layer_id=number, attended=self.attended)
            self.backend.forward_decode(
                self.batch, None, None, noting, batch(), topk_indices=carried
            )
        return self.attended

    def _select(self, *call: Any) -> torch.Tensor:
        number = call[5]
        self.stored.append(number)
        if capture_mode.get_capture_attention_variant() == "dense":
            return torch.full_like(self.batch, EVERYTHING)
        self.scored.append(number)
        return self.batch * 1000 + number

    def _forward_cuda_k_only(self, *call: Any, **_options: Any) -> None:
        self.stored.append(call[3])

    def expected(self, patterns: Sequence[str]) -> torch.Tensor:
        """Select by the definition of a pattern, for the rows of the batch as it is."""
        sources = [
            [Pattern(p).source_of(layer) for p in patterns] for layer in range(len(patterns[0]))
        ]
        return self.batch[: len(patterns), 0] * 1000 + torch.tensor(sources)


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's kernels, and a recording for the device's graphs."""
    replace_kernels(monkeypatch)
    with sglang_graphs():
        yield
    capture_mode._set_capture_attention_variant(None)


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put in an attention that notes the indices it reads."""

    def attend(self: Any, q: Any, k: Any, v: Any, layer: Any, *_: Any, **call: Any) -> None:
        layer.attended[layer.layer_id].copy_(call["topk_indices"].flatten())

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        monkeypatch.setattr(DeepseekSparseAttnBackend, name, lambda self, *_, **__: None)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "__init__", lambda self, runner: None)
    monkeypatch.setattr(DeepseekSparseAttnBackend, "forward_decode", attend)
    monkeypatch.setattr(
        DeepseekSparseAttnBackend, "get_indexer_metadata", lambda self, *_: None, raising=False
    )
    monkeypatch.setattr(indexer_cuda, "maybe_capture_indexer_topk", lambda _layer, indices: indices)


def captured(model: Model, monkeypatch: pytest.MonkeyPatch) -> FullCudaGraphBackend:
    """Return one graph under each label, in SGLang's order and with its begin and warm-ups."""
    monkeypatch.setattr(indexer_cuda.kernels_cuda, "current_backend", lambda: model.backend)
    graphs = runner_backend(FullCudaGraphBackend, _reuse_output_buffer=False, _output_buffer=None)
    assert model.backend.graphs is not None
    for label in model.backend.graphs.capture_labels:
        capture_mode._set_capture_attention_variant(label)
        model.backend.init_forward_metadata_out_graph(batch(), in_capture=True)
        graphs.capture_one(ShapeKey(ROWS, attention_variant=label), model.forward)
    capture_mode._set_capture_attention_variant(None)
    return graphs


def replay(model: Model, graphs: FullCudaGraphBackend, now: Any, number: int) -> str:
    """Replay as ``DecodeCudaGraphRunner.load_batch`` does; return the label."""
    assert model.backend.graphs is not None
    for _ in range(number % 2 + 1):  # twice with --disable-cuda-graph-padding
        label = model.backend.graphs.select(now)
    before = model.active.counters.graph_replays[label]
    model.backend.init_forward_metadata_out_graph(view())
    model.batch.copy_(torch.arange(ROWS).view(-1, 1) + 10 * number)
    model.attended.fill_(-1)
    graphs.replay(ShapeKey(ROWS, attention_variant=label), None)
    assert model.active.counters.graph_replays[label] == before + 1
    return label


def view() -> Any:
    """Return what SGLang hands to the backend at a replay: few fields, and no requests."""
    return SimpleNamespace(batch_size=ROWS, forward_mode=ForwardMode.DECODE)


def patterns(layers: int) -> st.SearchStrategy[str]:
    return st.text("FS", min_size=layers - 1, max_size=layers - 1).map(
        lambda letters: "F" + letters
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_live_batch_gets_the_indices_of_its_own_patterns(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 9))
    text = patterns(layers)
    declared = data.draw(st.lists(text, max_size=2, unique=True))
    live = variants(data.draw(text), "live", "short", *declared)
    with pytest.MonkeyPatch.context() as patch:
        model = Model(live, [True] * layers)
        graphs = captured(model, patch)
        for number in range(1, 7):
            mine = data.draw(
                st.one_of(
                    st.lists(text, min_size=1, max_size=ROWS),
                    st.sampled_from(declared or ["F" * layers]).map(lambda p: [p] * ROWS),
                )
            )
            label = replay(model, graphs, batch(mine), number)
            assert label == (
                mine[0] if set(mine) <= set(declared) and len(set(mine)) == 1 else MIXED
            )
            assert torch.equal(model.attended[:, : len(mine)], model.expected(mine)), (label, mine)
            if data.draw(st.booleans()):
                assert replay(model, graphs, batch(mine, TOPK), number) == "dense"
                assert (model.attended == EVERYTHING).all()


def test_a_graph_runs_the_indexers_of_its_pattern_and_stores_every_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = variants("FSFS", "live", "short", "FSSF")
    model = Model(live, [True] * 4)
    counters = model.active.counters
    monkeypatch.setattr(indexer_cuda.kernels_cuda, "current_backend", lambda: model.backend)
    for label, scorers in {"dense": [], "FSSF": [0, 3], MIXED: [0, 1, 2, 3]}.items():
        capture_mode._set_capture_attention_variant(label)
        model.backend.init_forward_metadata_out_graph(batch(), in_capture=True)
        model.forward()
        assert (model.scored, model.stored) == (scorers, [0, 1, 2, 3]), label
    # No request had them, and `server show` compares the counters with what requests had.
    assert counters.forwards == sum(counters.indexer_selections + counters.index_reuses) == 0
    assert sum(counters.index_key_writes) == 0


@pytest.mark.parametrize("text", ["FFFF", "FSFS", "FSSS"])
def test_static_graphs(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S layers have no indexer there; on a short batch F layers store keys and nothing more."""
    static = variants(text, "static", "short")
    model = Model(static, [character == "F" for character in text])
    graphs = captured(model, monkeypatch)
    full = list(Pattern(text).full_layers)
    assert (model.scored, model.stored) == (full, full)  # the last capture is the sparse one
    for number, longest in enumerate((TOPK, TOPK + 1, 1, 100), start=1):
        label = replay(model, graphs, batch([text] * ROWS, longest), number)
        if label == "dense":
            assert (model.attended == EVERYTHING).all()
        else:
            assert torch.equal(model.attended, model.expected([text] * ROWS))
    assert static._active.counters.graph_replays == {"dense": 2, "sparse": 2}


def test_a_stage_that_starts_on_f_lists_the_tokens_itself() -> None:
    def fewest(mode: str, text: str) -> str:
        built = variants(text, mode, "short", starts=(2, 4))
        return str(built.rows("dense", ROWS, torch.device("cpu")).patterns[0])

    assert (
        fewest("static", "FSFSSF") == "FSFSSS"
    )  # the stage at 4 gets its list from the one before
    assert fewest("live", "FSFSFS") == "FSFSFS"


def test_masks_that_a_replay_did_not_write_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    live = variants("FF", "live", "FF")
    model = Model(live, [True] * 2)
    graphs = captured(model, monkeypatch)
    monkeypatch.setattr(GraphVariants, "_write_masks", lambda self, patterns: None)
    replay(model, graphs, batch(["FS", "FF"]), 1)
    assert not torch.equal(model.attended[:, :2], model.expected(["FS", "FF"]))
