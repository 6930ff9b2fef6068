"""The attention path of a model's decoder layers at real dimensions, without a server.

Random weights; layers of one kind cost the same, so a stack of F layers and the same layers as S
layers, which take the slots that were selected before, give the cost of each kind, and any
pattern's time follows. Both take turns (A B A B). Left out: the embedding, the output projection,
rotary embeddings (and DeepSeek-V3.2's Hadamard rotation), sampling, communication between GPUs.

Experts are evenly loaded: token by token they take turns. Hidden states follow an AR(1) process
along the sequence, so that neighbouring queries select similar tokens as in a trained model; how
similar is measured and reported, because the cost of the gather depends on it. Several requests of
a decode step share nothing: the first decodes behind its prefill, the others over random keys.

On a GPU the host queues its launches ahead, so the figures are the device's: decode is a CUDA graph
anyway, in prefill a server's host may add to short prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.kernels.timing import event, gpu_seconds, queue_ahead
from benchmarks.stack.ops import Geometry, Ops
from sglang_indexcache.bench.environment import environment
from sglang_indexcache.bench.layer_stack import STAGES, LayerStackResult, Phase, Row
from sglang_indexcache.bench.shapes import ModelShape
from sglang_indexcache.errors import BenchError
from sglang_indexcache.kernels.indexer.quantization import PAGE_TOKENS

CORRELATION = 0.9
"""Of neighbouring hidden states."""
_DECODE_STEPS = 20
"""In a row, for one measurement: a step is over in milliseconds, the first finds cold caches."""
_FILL_ROWS = 1 << 16
_AHEAD_CYCLES = 20_000_000
"""About 10 ms in which a GPU waits while the host queues work behind."""


class Stopwatch:
    """Seconds by stage.

    On a GPU the stream is timed with events, read only at the end; on a CPU this process's
    processor time counts, so that other work on the machine does not.
    """

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._spent: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a block."""
        if self._on_gpu:
            start, end = event(), event()
            start.record()
            yield
            end.record()
            self._pending.append((name, start, end))
        else:
            started = time.process_time()
            yield
            self._spent[name] += time.process_time() - started

    def read(self) -> dict[str, float]:
        """Everything so far."""
        if self._pending:
            torch.cuda.synchronize()
        for name, start, end in self._pending:
            self._spent[name] += start.elapsed_time(end) / 1000
        self._pending.clear()
        return dict(self._spent)


class NoStopwatch:
    """Times nothing: for totals, and inside a CUDA graph."""

    @contextmanager
    def stage(self, _name: str) -> Iterator[None]:
        """Do nothing around a block."""
        yield


def correlated(noise: torch.Tensor, block: int = 256) -> torch.Tensor:
    """``x[0] = noise[0]``, ``x[t] = c x[t - 1] + sqrt(1 - c^2) noise[t]``, ``c`` the correlation.

    Args:
        noise: ``[T, D]`` float32, independent and normal.
        block: rows that one matrix product does.
    """
    steps = torch.arange(block + 1, device=noise.device)
    decay = CORRELATION ** steps.float()
    age = (steps[1:, None] - steps[None, 1:]).clamp_min(0)
    fresh = (1 - CORRELATION**2) ** 0.5
    mix = (fresh * decay[age]).tril()
    result = torch.empty_like(noise)
    last = (1 - fresh) / CORRELATION * noise[:1]  # so that the first row is its noise
    for low in range(0, noise.shape[0], block):
        part = noise[low : low + block]
        rows = part.shape[0]
        result[low : low + rows] = mix[:rows, :rows] @ part + decay[1 : rows + 1, None] * last
        last = result[low + rows - 1 : low + rows]
    return result


class Layer:
    """One decoder layer with random weights and its own KV and index caches.

    Args:
        shape: dimensions.
        ops: kernels.
        slots: of its caches.
        dtype: of weights.
        device: of everything.
        generator: of the weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        ops: Ops,
        slots: int,
        dtype: torch.dtype,
        device: str,
        generator: torch.Generator,
    ) -> None:
        def weight(*size: int) -> torch.Tensor:
            values = torch.empty(*size, dtype=dtype, device=device)
            return values.normal_(0.0, size[-1] ** -0.5, generator=generator)

        s = shape
        self.shape, self.ops = shape, ops
        self.down = weight(s.q_lora + s.latent, s.hidden)
        self.q_up = weight(s.heads * (s.nope + s.rope), s.q_lora)
        self.k_absorb = weight(s.heads, s.nope, s.kv_lora)
        self.v_absorb = weight(s.heads, s.kv_lora, s.v)
        self.out = weight(s.hidden, s.heads * s.v)
        self.index_q = weight(s.index_heads * s.index_dim, s.q_lora)
        self.index_k = weight(s.index_dim, s.hidden)
        self.gates = weight(s.index_heads, s.hidden)
        self.router = weight(s.experts, s.hidden)
        self.expert_in = weight(s.experts, s.hidden, 2 * s.expert_width)
        self.expert_out = weight(s.experts, s.expert_width, s.hidden)
        width = s.shared_experts * s.expert_width
        self.shared_in = weight(2 * width, s.hidden) if width else None
        self.shared_out = weight(s.hidden, width) if width else None
        self.latent = ops.latent_cache(slots, s.latent, dtype)
        self.index_keys = ops.index_cache(slots, s.index_dim, dtype)
        for low in range(0, slots, _FILL_ROWS):
            where = torch.arange(low, min(low + _FILL_ROWS, slots), device=device)
            ops.store_latent(self.latent, where, weight(len(where), s.latent) * s.latent**0.5)
            ops.store_keys(self.index_keys, where, weight(len(where), s.index_dim))

    def forward(
        self,
        x: torch.Tensor,
        geometry: Geometry,
        shared: torch.Tensor | None,
        watch: Stopwatch | NoStopwatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            x: ``[T, hidden]``.
            geometry: of the batch.
            shared: ``[T, k]`` slots from the F layer; None if this is one.

        Returns:
            ``[T, hidden]`` and the slots attended to.
        """
        s = self.shape
        with watch.stage("projections"):
            normed = rms_norm(x, (s.hidden,))
            low = linear(normed, self.down)
            q_low = rms_norm(low[:, : s.q_lora], (s.q_lora,))
            self.ops.store_latent(self.latent, geometry.new_slots, low[:, s.q_lora :])
        slots = shared
        if slots is None:
            with watch.stage("index projections"):
                queries = linear(q_low, self.index_q).view(-1, s.index_heads, s.index_dim)
                gates = linear(normed, self.gates).float() * s.index_heads**-0.5
                keys = rms_norm(linear(normed, self.index_k), (s.index_dim,))
                self.ops.store_keys(self.index_keys, geometry.new_slots, keys)
            with watch.stage("score and select"):
                slots = self.ops.select(queries, gates, self.index_keys, geometry, s.topk)
        with watch.stage("projections"):
            q = linear(q_low, self.q_up).view(-1, s.heads, s.nope + s.rope)
            absorbed = torch.bmm(q[..., : s.nope].transpose(0, 1), self.k_absorb).transpose(0, 1)
            q = torch.cat([absorbed, q[..., s.nope :]], dim=-1).contiguous()
        with watch.stage("attention"):
            scale = (s.nope + s.rope) ** -0.5
            values = self.ops.attend(q, self.latent, slots, scale, s.kv_lora)
        with watch.stage("projections"):
            heads = torch.bmm(values.transpose(0, 1), self.v_absorb).transpose(0, 1)
            x = x + linear(heads.reshape(-1, s.heads * s.v), self.out)
        with watch.stage("mlp"):
            x = x + self._experts(rms_norm(x, (s.hidden,)))
        return x, slots

    def _experts(self, x: torch.Tensor) -> torch.Tensor:
        """Evenly loaded experts: the same products as after any balanced routing."""
        s = self.shape
        tokens = x.shape[0]
        scores = torch.sigmoid(linear(x, self.router)).topk(s.active_experts, dim=-1).values
        rows = x.repeat_interleave(s.active_experts, dim=0)
        used = min(s.experts, rows.shape[0])
        each = -(-rows.shape[0] // used)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, used * each - rows.shape[0]))
        gate, up = torch.bmm(padded.view(used, each, -1), self.expert_in[:used]).chunk(2, dim=-1)
        done = torch.bmm(silu(gate) * up, self.expert_out[:used]).view(used * each, -1)
        done = done[: rows.shape[0]].view(tokens, s.active_experts, -1)
        result = (done * scores.unsqueeze(-1)).sum(1)
        if self.shared_in is not None and self.shared_out is not None:
            gate, up = linear(x, self.shared_in).chunk(2, dim=-1)
            result = result + linear(silu(gate) * up, self.shared_out)
        return result


class Stack:
    """Some layers of a model.

    Args:
        shape: dimensions.
        layers: how many.
        ops: kernels.
        slots: tokens that its caches hold.
        dtype: of weights and activations.
        device: of everything.
        seed: of weights and inputs.
    """

    def __init__(
        self,
        shape: ModelShape,
        layers: int,
        ops: Ops,
        slots: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self.room = slots
        self.generator = torch.Generator(device).manual_seed(seed)
        self.layers = [
            Layer(shape, ops, slots, dtype, device, self.generator) for _ in range(layers)
        ]

    def inputs(self, tokens: int) -> torch.Tensor:
        """``[tokens, hidden]`` states whose neighbours correlate by :data:`CORRELATION`."""
        noise = torch.empty(tokens, self.shape.hidden, dtype=torch.float32, device=self.device)
        return correlated(noise.normal_(generator=self.generator)).to(self.dtype)

    def forward(
        self,
        x: torch.Tensor,
        geometry: Geometry,
        shared: torch.Tensor | None,
        watch: Stopwatch | NoStopwatch,
    ) -> torch.Tensor:
        """All layers, as F or as S layers; returns the last selection.

        Args:
            x: ``[T, hidden]``.
            geometry: of the batch.
            shared: ``[T, k]`` slots that every layer takes; None if every layer selects.
            watch: times the stages.
        """
        slots = shared
        for layer in self.layers:
            x, slots = layer.forward(x, geometry, shared, watch)
        assert slots is not None
        return slots


def prefill(stack: Stack, length: int, chunk: int, repeats: int) -> Row:
    """A prompt of ``length`` tokens, ``chunk`` at a time."""
    inputs = stack.inputs(length)
    steps = []
    for start in range(0, length, chunk):
        x = inputs[start : start + chunk]
        geometry = Geometry(1, x.shape[0], start + x.shape[0], stack.room, stack.device)
        steps.append((x, geometry))
    return _row(stack, "prefill", length, 1, steps, repeats, graph=False)


def decode(stack: Stack, length: int, requests: int, repeats: int, *, graph: bool) -> Row:
    """One step of ``requests`` requests of ``length`` tokens each."""
    room = stack.room // requests // PAGE_TOKENS * PAGE_TOKENS
    if length > room:
        raise BenchError(f"{requests} requests of {length} tokens do not fit {stack.room} slots")
    step = (stack.inputs(requests), Geometry(requests, 1, length, room, stack.device))
    steps = [step] * _DECODE_STEPS
    return _row(stack, "decode", length, requests, steps, repeats, graph=graph, times=len(steps))


Steps = list[tuple[torch.Tensor, Geometry]]
Selected = Sequence[torch.Tensor | None]


def _row(
    stack: Stack,
    phase: Phase,
    length: int,
    requests: int,
    steps: Steps,
    repeats: int,
    *,
    graph: bool,
    times: int = 1,
) -> Row:
    """Measure ``steps`` as F and as S layers; they do the same ``times`` times."""

    def run(selected: Selected, watch: Stopwatch | NoStopwatch) -> Selected:
        pairs = zip(steps, selected, strict=True)
        return [stack.forward(x, geometry, shared, watch) for (x, geometry), shared in pairs]

    def stages(selected: Selected) -> dict[str, float]:
        watch = Stopwatch(stack.device)
        if stack.device != "cpu":
            queue_ahead(_AHEAD_CYCLES)
        run(selected, watch)
        return watch.read()

    nothing: Selected = [None] * len(steps)
    inputs = {"F": nothing, "S": run(nothing, NoStopwatch())}  # also warms up
    whole: dict[str, Callable[[], Any]] = {
        kind: partial(run, selected, NoStopwatch()) for kind, selected in inputs.items()
    }
    whole["S"]()
    if graph:
        whole = {kind: _captured(work) for kind, work in whole.items()}
    totals: dict[str, list[float]] = {kind: [] for kind in inputs}
    parts: dict[str, list[dict[str, float]]] = {kind: [] for kind in inputs}
    for _ in range(repeats):
        for kind in inputs:
            totals[kind].append(_seconds(whole[kind], stack.device))
        for kind, selected in inputs.items():
            parts[kind].append(stages(selected))
    count = len(stack.layers) * times

    def by_stage(kind: str) -> dict[str, float]:
        return {name: median(part[name] for part in parts[kind]) / count for name in STAGES}

    last = inputs["S"][-1]
    assert last is not None
    return Row(
        phase=phase,
        length=length,
        requests=requests,
        full_layer=by_stage("F"),
        shared_layer=by_stage("S"),
        full_total=median(totals["F"]) / count,
        shared_total=median(totals["S"]) / count,
        neighbour_overlap=_overlap(last) if phase == "prefill" else None,
    )


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as a CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run()

    def replay() -> Any:
        graph.replay()
        return output  # keeps the graph's memory alive

    return replay


def _seconds(run: Callable[[], Any], device: str) -> float:
    """How long ``run`` takes: the device's seconds on a GPU, the processor's on a CPU."""
    if device == "cpu":
        started = time.process_time()
        run()
        return time.process_time() - started
    return gpu_seconds(run, _AHEAD_CYCLES)


def _overlap(slots: torch.Tensor, rows: int = 64) -> float | None:
    """Mean part of a row's slots that the next row has too, over the last rows."""
    last = slots[-rows:]
    shares = [
        float(torch.isin(one[one >= 0], other[other >= 0]).float().mean())
        for one, other in pairwise(last)
    ]
    return sum(shares) / len(shares) if shares else None


def run(
    shape: ModelShape,
    ops: Ops,
    lengths: tuple[int, ...],
    *,
    layers: int,
    chunk: int,
    repeats: int,
    requests: tuple[int, ...] = (1,),
    cache_tokens: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    report: Callable[[LayerStackResult], None] = lambda _: None,
) -> LayerStackResult:
    """Measure prefill and decode at every length.

    Args:
        shape: of the model.
        ops: kernels.
        lengths: prompt tokens.
        layers: to run.
        chunk: tokens of a prefill chunk.
        repeats: of everything.
        requests: batch sizes of decode.
        cache_tokens: if given, decode also runs as many requests as a KV cache of so many tokens
            holds (the paper's third metric; its GPUs held about 800K).
        device: "cpu" or "cuda".
        dtype: of weights and activations.
        report: told the result so far after every row.

    Raises:
        BenchError: nothing to measure.
    """
    if not lengths or min(chunk, repeats, *lengths, *(requests or (0,))) < 1:
        raise BenchError("give lengths, batch sizes, a chunk and repeats of at least 1")
    if not 1 <= layers <= shape.layers:
        raise BenchError(f"{shape.name} has {shape.layers} layers, {layers} cannot be run")
    batches = {length: _batches(length, requests, cache_tokens) for length in lengths}
    machine = environment()
    with torch.inference_mode():
        stack = Stack(shape, layers, ops, _slots(batches), dtype, device)
        name = str(dtype).removeprefix("torch.")
        result = LayerStackResult(
            environment=machine,
            device=device if device == "cpu" else torch.cuda.get_device_name(),
            kernels=ops.name,
            shape=shape,
            layers=layers,
            dtype=name,
            kv="fp8" if stack.layers[0].latent.dtype == torch.uint8 else name,
            chunk=chunk,
            repeats=repeats,
            cuda_graph=device != "cpu",
            rows=(),
        )
        for row in _rows(stack, batches, chunk, repeats):
            result = result.model_copy(update={"rows": (*result.rows, row)})
            report(result)
    return result


def _batches(length: int, requests: Sequence[int], cache_tokens: int) -> list[int]:
    """Batch sizes of decode at one length, the full KV cache's among them."""
    if not cache_tokens:
        return sorted(set(requests))
    if length > cache_tokens:
        raise BenchError(f"a KV cache of {cache_tokens} tokens holds no request of {length}")
    return sorted({*requests, cache_tokens // length})


def _slots(batches: Mapping[int, Sequence[int]]) -> int:
    """That the caches need; every request owns whole pages."""
    return max(
        -(-length // PAGE_TOKENS) * PAGE_TOKENS * max(counts) for length, counts in batches.items()
    )


def _rows(
    stack: Stack, batches: Mapping[int, Sequence[int]], chunk: int, repeats: int
) -> Iterator[Row]:
    for length, counts in batches.items():
        yield prefill(stack, length, chunk, repeats)
        for count in counts:
            yield decode(stack, length, count, repeats, graph=stack.device != "cpu")
