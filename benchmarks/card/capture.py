"""Check 5: ``IndexCacheBackend`` in SGLang's own decode graphs.

SGLang begins a captured forward once and runs its layers three times: two warm-ups and the capture.
What a layer takes from a warm-up is dead memory in every replay, so that memory is overwritten here
before the replays.
"""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.card.claims import Report, expect, need
from benchmarks.card.device import sglang_on
from benchmarks.card.stage import (
    KEYS,
    TOLERANCE,
    TOPK,
    Stage,
    runner_backend,
    select,
    stub_kernels,
)

ROWS = 6
SPLIT = ((0, 2), (2, ROWS))
CASES: dict[str, tuple[tuple[str, int, int, int], ...]] = {
    # pattern, first layer, end, first layer on sub-batches
    "a stage that starts on F": (("FSSFSS", 0, 6, 6), ("FSSFSS", 3, 6, 6)),
    "a stage that starts on S": (("FSSFSS", 1, 6, 6), ("FSSFSS", 4, 6, 6)),
    "sub-batches that start on S": (("FSSFSS", 0, 6, 1), ("FSSSSF", 0, 6, 2)),
}


def forward(stage: Stage) -> torch.Tensor:
    """The layers as SGLang's model runs them; what it carries, it carries here."""
    hidden, previous = stage.hidden.clone(), stage.carried.clone()
    whole = [layer for layer in stage.layers if layer < stage.first_overlapped]
    hidden, _ = layers(stage, stage.whole, whole, hidden, previous, None)
    rest = [layer for layer in stage.layers if layer >= stage.first_overlapped]
    if not rest:
        return hidden
    # Between sub-batches SGLang carries nothing.
    parts = [
        layers(stage, backend, rest, hidden[low:high], None, (low, high))[0]
        for backend, (low, high) in zip(stage.parts, SPLIT, strict=True)
    ]
    return torch.cat(parts)


def layers(
    stage: Stage, backend: Any, numbers: list[int], hidden: Any, previous: Any, rows: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Some layers on one batch."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(tbo_parent_token_range=rows, forward_mode=ForwardMode.DECODE)
    for number in numbers:
        if stage.pattern.is_full(number):
            previous = select(hidden, stage.keys[number])
        layer = SimpleNamespace(layer_id=number)
        # In sub-batches the indices of the layer before are dropped, F or S.
        given = previous if rows is None or stage.pattern.is_full(number) else None
        hidden = hidden + backend.forward_decode(
            hidden, None, None, layer, batch, topk_indices=given
        )
    return hidden, previous


def decode_graphs(device: Any) -> Any:
    """SGLang's keeper of decode graphs, without a runner."""
    from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import (
        FullCudaGraphBackend,
    )

    return runner_backend(
        FullCudaGraphBackend,
        device,
        device.Stream(),
        _reuse_output_buffer=False,
        _output_buffer=None,
    )


def replays(case: tuple[str, int, int, int], report: Report) -> dict[str, Any]:
    """Capture a stage once, replay it with three batches.

    Raises:
        RefutedError: an eager pass or a replay is not what the pattern says.
    """
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    text, start, end, first = case
    key = ShapeKey(ROWS)
    errors = []
    with stub_kernels(), sglang_on(report.dry) as device:
        stage = Stage(text, start, end, ROWS, report.device, first)
        backends = (stage.whole, *stage.parts)
        graphs = decode_graphs(device)
        stage.fill(0)
        for backend in backends:
            backend.init_forward_metadata(None)
        errors.append(stage.check(forward(stage), "the eager forward"))
        for backend in backends:
            backend.init_forward_metadata_out_graph(None, in_capture=True)
        graphs.capture_one(key, lambda: forward(stage))
        overwritten = overwrite_freed_memory(report.device)
        for seed in (1, 2, 1):
            stage.fill(seed)
            for backend in backends:
                backend.init_forward_metadata_out_graph(None)
            output = graphs.replay(key, None)
            device.synchronize()
            errors.append(stage.check(output, f"the replay with batch {seed}"))
        del overwritten
    return {"largest errors": errors}


MIXES = (("FSSFSS", "FFSSSF"), ("FSSSSS",), ("FFFFFF", "FSSSSS", "FSFSFS"))
"""Patterns of the rows of three batches, one after the other; the last one is repeated."""


def mixed_replays(report: Report) -> dict[str, Any]:
    """Capture live mode's graph of mixed batches once, replay it with other patterns each time.

    Raises:
        RefutedError: a row got what its own pattern does not say.
    """
    from sglang.srt.model_executor.runner.shape_key import ShapeKey

    from sglang_indexcache.pattern import Pattern
    from sglang_indexcache.serving.cuda.graph_variants import MIXED, GraphVariants
    from sglang_indexcache.serving.rows import RequestIds

    key, errors = ShapeKey(ROWS, attention_variant=MIXED), {}
    with stub_kernels(), sglang_on(report.dry) as device:
        stage = Stage("FFFFFF", 0, 6, ROWS, report.device, 6, mode="live")
        variants = GraphVariants(stage.whole.active, (), TOPK)
        graphs = decode_graphs(device)
        stage.whole.index_buffer.begin(variants.rows(MIXED, ROWS, stage.hidden.device))
        graphs.capture_one(key, lambda: mixed_forward(stage))
        overwritten = overwrite_freed_memory(report.device)
        for seed, texts in enumerate((*MIXES, MIXES[0])):
            mine = [Pattern((texts * ROWS)[row]) for row in range(ROWS)]
            asked: Any = [SimpleNamespace(rid="", indexcache_pattern=pattern) for pattern in mine]
            batch: Any = SimpleNamespace(rids=RequestIds(asked))
            expect(variants.select(batch) == MIXED, "another graph was chosen")
            stage.fill(seed)
            output = graphs.replay(key, None)
            device.synchronize()
            for row, pattern in enumerate(mine):
                stage.pattern = pattern
                got, wanted = output[row].double().cpu(), stage.expected()[row]
                error = float((got - wanted).abs().max())
                expect(error <= TOLERANCE, f"row {row} of {pattern} errs by {error:.3g}")
                errors[f"batch {seed}, row {row}, {pattern}"] = error
        del overwritten
    return {"largest error": max(errors.values())}


def mixed_forward(stage: Stage) -> torch.Tensor:
    """As SGLang's model runs live mode: each layer's indexer, then its attention."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = SimpleNamespace(tbo_parent_token_range=None, forward_mode=ForwardMode.DECODE)
    hidden = stage.hidden.clone()
    for number in stage.layers:
        used = stage.whole.index_buffer.select(number, select(hidden, stage.keys[number]))
        layer = SimpleNamespace(layer_id=number)
        hidden = hidden + stage.whole.forward_decode(
            hidden, None, None, layer, batch, topk_indices=used
        )
    return hidden


def overwrite_freed_memory(device: str) -> list[torch.Tensor]:
    """Take what the warm-ups freed, and write indices there that nobody selected."""
    shapes = [(rows, TOPK) for rows in (ROWS, *(high - low for low, high in SPLIT))]
    return [
        torch.full(shape, KEYS - 1, dtype=torch.int32, device=device)
        for shape in shapes
        for _ in range(64)
    ]


def run(report: Report) -> None:
    """One claim for each kind of start, and one for rows that differ."""
    *starts, mixed = report.claims
    for name, (kind, cases) in zip(starts, CASES.items(), strict=True):
        assert name.endswith(kind)
        with report.claim(name) as evidence:
            need("sglang.srt.model_executor.runner_backend.full_cuda_graph_backend")
            need("sglang_indexcache.serving.cuda.backend")
            for case in cases:
                evidence[f"{case[0]}, layers {case[1]} to {case[2] - 1}"] = replays(case, report)
    with report.claim(mixed) as evidence:
        need("sglang_indexcache.serving.cuda.graph_variants")
        evidence |= mixed_replays(report)
