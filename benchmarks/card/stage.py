"""One pipeline stage around a real ``IndexCacheBackend``, small enough to be computed by hand.

SGLang's kernels, not its logic, are replaced: an F layer selects the best keys of its own, an
attention is a softmax over the selected ones, and both are plain torch on the card.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch

from benchmarks.card.claims import expect
from sglang_indexcache.pattern import Pattern

WIDTH, KEYS, TOPK = 32, 96, 8
TOLERANCE = 1e-3
"""Against float64; indices of another layer or batch change the output by a hundred times that."""


@contextmanager
def stub_kernels() -> Iterator[None]:
    """SGLang's DSA backend without a runner behind it and with attention in torch."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend as Base

    def forward(
        backend: Any, q: Any, _k: Any, _v: Any, layer: Any, *_rest: Any, **call: Any
    ) -> Any:
        return attend(q, backend.keys[layer.layer_id], call["topk_indices"])

    nothing = dict.fromkeys(
        ("__init__", "init_forward_metadata", "init_forward_metadata_out_graph"),
        lambda *_, **__: None,
    )
    with ExitStack() as patches:
        for name, stub in {**nothing, "forward_decode": forward, "forward_extend": forward}.items():
            patches.enter_context(mock.patch.object(Base, name, stub))
        yield


def attend(q: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Attention of ``q[T, WIDTH]`` to the rows of ``keys`` that each row of ``indices`` names."""
    chosen = keys[indices.long()]
    weights = torch.einsum("td,tkd->tk", q, chosen).softmax(-1)
    return torch.einsum("tk,tkd->td", weights, chosen)


def select(hidden: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """``[T, TOPK]`` int32: the indexer of an F layer."""
    return (hidden @ keys.T).topk(TOPK).indices.int()


class Stage:
    """Layers ``start`` up to ``end`` of a model with ``pattern``.

    Attributes:
        hidden: ``[rows, WIDTH]``, what the stage gets; written in place for each forward.
        carried: ``[rows, TOPK]`` int32, the indices that the stage before selected; likewise.
        first_overlapped: layers from here on run on sub-batches, if there are any.
    """

    def __init__(
        self,
        text: str,
        start: int,
        end: int,
        rows: int,
        device: str,
        first_overlapped: int,
        mode: Literal["static", "live"] = "static",
    ) -> None:
        from sglang.srt.layers.attention.tbo_backend import TboAttnBackend

        from sglang_indexcache.serving.active import ActivePattern
        from sglang_indexcache.serving.cuda.backend import IndexCacheBackend
        from sglang_indexcache.serving.settings import Plan

        self.pattern, self.layers = Pattern(text), range(start, end)
        self.first_overlapped = first_overlapped
        generator = torch.Generator().manual_seed(len(text) * 100 + start)
        self.keys = torch.randn(len(text), KEYS, WIDTH, generator=generator).to(device)
        self.hidden = torch.zeros(rows, WIDTH, device=device)
        self.carried = torch.zeros(rows, TOPK, dtype=torch.int32, device=device)
        plan = Plan(
            pattern=self.pattern,
            source="card",
            mode=mode,
            own=Pattern.full(len(text)),
            layer_ids=tuple(range(len(text))),
            architecture="GlmMoeDsaForCausalLM",
        )
        config = SimpleNamespace(first_k_dense_replace=first_overlapped)
        runner: Any = SimpleNamespace(
            layer_info=SimpleNamespace(start_layer=start),
            model_config=SimpleNamespace(hf_config=config),
        )
        active = ActivePattern(plan)
        backends: list[Any] = [IndexCacheBackend(runner, active) for _ in range(3)]
        for backend in backends:
            backend.use_mha, backend.keys = False, self.keys
        self.whole, *self.parts = backends
        runner.attn_backend = TboAttnBackend.__new__(TboAttnBackend)
        vars(runner.attn_backend).update(primary=self.whole, children=self.parts)

    def fill(self, seed: int) -> None:
        """Another batch, in place; indices that name the last keys, or others after ``seed``."""
        generator = torch.Generator().manual_seed(seed)
        self.hidden.copy_(torch.randn(self.hidden.shape, generator=generator))
        self.carried.copy_(torch.randint(KEYS, self.carried.shape, generator=generator).int())

    def expected(self, rows: int | None = None) -> torch.Tensor:
        """``[rows, WIDTH]`` float64 on the CPU: the stage by the definition of a pattern."""
        keys = self.keys.double().cpu()
        hidden = self.hidden[:rows].double().cpu()
        selected = {-1: self.carried[:rows].cpu()}
        for layer in self.layers:
            source = self.pattern.source_of(layer)
            if source == layer:
                selected[layer] = select(hidden, keys[layer])
            indices = selected[source if source in self.layers else -1]
            hidden = hidden + attend(hidden, keys[layer], indices)
        return hidden

    def check(self, output: torch.Tensor, what: str) -> float:
        """Refute unless ``output`` is what is expected; the largest error."""
        wanted = self.expected(len(output))
        error = float((output.double().cpu() - wanted).abs().max()) if len(output) else 0.0
        expect(error <= TOLERANCE, f"{what} errs by {error:.3g}")
        return error


def runner_backend(cls: type, device: Any, stream: Any, **fields: Any) -> Any:
    """One of SGLang's graph backends without the runner that would build it."""
    made: Any = cls.__new__(cls)
    runner = SimpleNamespace(
        cuda_graph_output_capacity_rows=lambda _: None,
        cuda_graph_output_rows=lambda _: None,
    )
    vars(made).update(
        _graphs={},
        _outputs={},
        _pool=device.graph_pool_handle(),
        _capture_stream=stream,
        _device_module=device,
        _precarve=SimpleNamespace(measure=nullcontext, mint=lambda: None),
        _cuda_graph_runner=runner,
        _tp_group=SimpleNamespace(barrier=lambda: None),
        _memory_saver_adapter=None,
        **fields,
    )
    return made
