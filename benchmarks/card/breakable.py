"""Check 6: ``IndexCacheBackend`` in SGLang's breakable prefill graphs, the default on a GPU.

Attention and indexers run eagerly between captured segments, in Python, at every replay: with the
live batch, which has fewer rows than were captured, or none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.card.claims import Report, expect, need
from benchmarks.card.device import sglang_on
from benchmarks.card.stage import TOPK, WIDTH, Stage, runner_backend, select, stub_kernels

ROWS = 24
REPLAYS = ((1, ROWS), (2, ROWS - 7), (3, 0), (4, ROWS))
"""Seeds of the batches, and their rows."""
CASES = (("FSSFSS", 0, 6), ("FSSFSS", 1, 6), ("FSSSSS", 1, 6))


class Prefill:
    """A stage's layers with SGLang's ``RadixAttention`` and an indexer that runs eagerly."""

    def __init__(self, stage: Stage) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import (
            eager_on_graph,
        )

        self.stage = stage
        self.attention = {n: RadixAttention(1, WIDTH, 1.0, 1, layer_id=n) for n in stage.layers}
        self.select_into = eager_on_graph(self._select_into)

    def _select_into(self, number: int, hidden: torch.Tensor, result: torch.Tensor) -> None:
        from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch

        rows = get_forward_batch().global_num_token_non_padded_cpu
        result[:rows] = select(hidden[:rows], self.stage.keys[number])

    def forward(self) -> torch.Tensor:
        """What is captured."""
        from sglang.srt.model_executor.runner_utils.forward_batch import get_forward_batch

        hidden, previous = self.stage.hidden.clone(), self.stage.carried.clone()
        for number, attention in self.attention.items():
            if self.stage.pattern.is_full(number):
                # Rows of padding keep this: to follow it would be to read out of bounds.
                previous = torch.full_like(previous, -(1 << 20))
                self.select_into(number, hidden, previous)
            batch = get_forward_batch()
            hidden = hidden + attention(hidden, None, None, batch, topk_indices=previous)
        return hidden


def prefill_batch(rows: int, device: str) -> Any:
    """What a prefill runner says of a batch of ``rows`` tokens in a graph of ``ROWS``."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        global_num_token_non_padded_cpu=rows,
        mha_return_lse=False,
        out_cache_loc=torch.arange(ROWS, device=device),
        positions=torch.arange(ROWS, device=device),
        _attn_output=None,
        forward_mode=ForwardMode.EXTEND,
        tbo_parent_token_range=None,
    )


@contextmanager
def published(stage: Stage, batch: Any) -> Iterator[None]:
    """What SGLang's prefill runner publishes around a capture or a replay."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.runner_utils.forward_batch import set_forward_batch
    from sglang.srt.model_executor.runner_utils.prefill_graph import prefill_graph_scope

    rows = batch.global_num_token_non_padded_cpu
    with (
        prefill_graph_scope(full_graph=False, raw_num_tokens=rows),
        forward_context(ForwardContext(attn_backend=stage.whole)),
        set_forward_batch(batch),
    ):
        yield


def replays(case: tuple[str, int, int], report: Report) -> dict[str, Any]:
    """Capture a stage once, replay it with :data:`REPLAYS`.

    Raises:
        RefutedError: a replay is not what the pattern says of its own batch.
    """
    from sglang.srt.model_executor.runner.shape_key import ShapeKey
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
        BreakableCudaGraphBackend,
    )

    key = ShapeKey(ROWS)
    errors = {}
    with stub_kernels(), sglang_on(report.dry) as device:
        stage = Stage(*case, ROWS, report.device, first_overlapped=len(case[0]))
        model = Prefill(stage)
        graphs = runner_backend(
            BreakableCudaGraphBackend,
            device,
            device.Stream(),
            _capture_inputs={},
            _shared_output_buffer=None,
            _debug_eager=False,
        )
        stage.fill(0)
        batch = prefill_batch(ROWS, report.device)
        with published(stage, batch), graphs.replay_session():
            stage.whole.init_forward_metadata(batch)
            graphs.capture_one(key, model.forward)
        for seed, rows in REPLAYS:
            stage.fill(seed)
            batch = prefill_batch(rows, report.device)
            with published(stage, batch), graphs.replay_session():
                if rows:  # SGLang prepares nothing for an idle rank
                    stage.whole.init_forward_metadata(batch)
                output = graphs.replay(key, None)
                device.synchronize()
            what = f"the replay with {rows} rows"
            errors[what] = stage.check(output[:rows], what)
            idle = torch.equal(output[rows:], stage.hidden[rows:])
            expect(idle, f"{what}: attention wrote into rows of padding")
    return errors


def run(report: Report) -> None:
    """One claim over all stages."""
    with report.claim(report.claims[0]) as evidence:
        need("sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend")
        need("sglang_indexcache.serving.cuda.backend")
        if not report.dry:
            need("sgl_kernel")  # its weak references are in every break
        for case in CASES:
            name = f"{case[0]}, layers {case[1]} to {case[2] - 1}"
            evidence[name] = {"errors": replays(case, report), "topk": TOPK}
