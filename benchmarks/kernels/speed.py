"""Time ours beside the engine's kernels, one workload after the other.

    python -m benchmarks.kernels.speed --out FILE [--seconds 240] [--among NAME ...] [WORKLOAD ...]

``benchmarks/card/phases.py`` runs it on a card. The engine's kernel and ours take turns within the
same seconds (``timing.py``); the card's clocks are logged before and after. Before ours is timed,
some rows of what it computes on the timed inputs are compared with the reference.
"""

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks import engine_kernels as anchors
from benchmarks.kernels.machine import clocks
from benchmarks.kernels.timing import interleaved, replay_of, summary
from benchmarks.kernels.workloads import (
    AttentionTensors,
    Family,
    Workload,
    attention_tensors,
    gpu_of_driver,
    indexer_tensors,
    workloads,
)
from sglang_indexcache.kernels import dispatch
from sglang_indexcache.kernels.contract import IndexerBatch, OpName
from sglang_indexcache.kernels.indexer import reference as indexer_reference
from sglang_indexcache.kernels.sparse_mla import reference as mla_reference
from sglang_indexcache.kernels.sparse_mla.reference import dequantize_latent, mla_tolerance
from sglang_indexcache.library.writing import write_json

SECONDS_EACH = 1.5
ROWS_CHECKED = 16
LISTS_KEPT = "cuda, lists kept"
"""Ours in an S layer, which finds what its F layer derived from the same list."""
OPS: dict[Family, OpName] = {
    "select_prefill": "select",
    "select_decode": "select",
    "mla_prefill": "sparse_mla",
    "mla_decode": "sparse_mla",
}
"""The op of ours that a family times."""
Maker = Callable[[], Callable[[], Any]]


def drawn(work: Workload, device: torch.device) -> tuple[Any, ...]:
    """Draw the arguments of the operation that ``work`` times."""
    if work.family.startswith("select"):
        return indexer_tensors(work, device), work.topk
    attention = attention_tensors(work, device)
    return attention.q, attention.cache, attention.slots, attention.scale


def contenders(
    work: Workload, machine: dispatch.Machine, arguments: tuple[Any, ...]
) -> dict[str, Maker]:
    """Return makers of the calls that do ``work``, by name; ours are named by implementation.

    Args:
        arguments: of :func:`drawn`.
    """
    makers: dict[str, Maker]
    if work.family.startswith("select"):
        makers = dict(anchors.select_anchors(work, arguments[0]))
    else:
        makers = dict(anchors.mla_anchors(work, AttentionTensors(*arguments)))
    op = OPS[work.family]

    def maker(implementation: dispatch.Implementation, **more: Any) -> Maker:
        def make() -> Callable[[], Any]:
            function = implementation.check(machine).load(op)
            return lambda: function(*arguments, **more)

        return make

    if work.family == "mla_prefill":
        makers[LISTS_KEPT] = maker(dispatch.named("cuda"), kept={})
    ours = {
        implementation.name: maker(implementation) for implementation in dispatch.IMPLEMENTATIONS
    }
    if machine.capability is not None:
        # It loops over rows; on a GPU timing it would only take the others' time.
        del ours["reference"]
    return ours | makers


def measure(
    work: Workload, machine: dispatch.Machine, among: Collection[str] = ()
) -> dict[str, Any]:
    """Time every contender that runs; say why others do not, and the least that is possible.

    Args:
        among: names of the contenders; empty for all.

    Returns:
        ``times``: name -> median, least and most microseconds, and, where the card's data sheet is
        known, the share of its bound; ``missing``: name -> reason; ``wrong``: what is wrong with
        ours on these inputs, empty if nothing; ``replayed``: whether replays of CUDA graphs were
        timed, as a server decodes; ``clocks``: before and after.
    """
    device = machine.device
    arguments = drawn(work, device)
    ready, missing = prepared(work, machine, arguments, among)
    wrong = complaints(work, arguments, dispatch.named("cuda").load) if "cuda" in ready else []
    replays = device.type == "cuda" and not work.is_prefill
    if replays:
        ready, missing = as_replays(ready, missing)
    before = clocks()
    times = {
        name: summary(seconds_each)
        for name, seconds_each in interleaved(ready, device, SECONDS_EACH).items()
    }
    card = gpu_of_driver(machine.name)
    if card is not None:
        seconds, by = work.bound(card)
        for timing in times.values():
            timing["of_bound"] = seconds * 1e6 / timing["median_us"]
        missing["bound"] = f"{seconds * 1e6:.1f} us by {by}"
    result = {"times": times, "missing": missing, "wrong": wrong, "replayed": replays}
    return {**result, "clocks": [before, clocks()]}


def prepared(
    work: Workload,
    machine: dispatch.Machine,
    arguments: tuple[Any, ...],
    among: Collection[str] = (),
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Call every contender once, which compiles it; return those that run, and why others do not.

    Raises:
        RuntimeError: the card's context is gone.
    """
    device = machine.device
    ready: dict[str, Callable[[], Any]] = {}
    missing: dict[str, str] = {}
    for name, make in contenders(work, machine, arguments).items():
        if among and name not in among:
            continue
        try:
            call = make()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # the context is gone
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            continue
        ready[name] = call
    return ready, missing


def as_replays(
    ready: Mapping[str, Callable[[], Any]], missing: Mapping[str, str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """Return replays of what the calls launch, and why some cannot be captured.

    Raises:
        RuntimeError: the card's context is gone.
    """
    replays: dict[str, Callable[[], Any]] = {}
    problems = dict(missing)
    for name, call in ready.items():
        try:
            replays[name] = replay_of(call)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            problems[name] = f"not captured: {str(error).splitlines()[0][:300]}"
    return replays, problems


def complaints(
    work: Workload, arguments: tuple[Any, ...], load: Callable[[OpName], Callable[..., Any]]
) -> list[str]:
    """Compare :data:`ROWS_CHECKED` rows of the timed call with the reference; say what differs.

    A selection must be the top-k of the same implementation's own logits, bit for bit (what those
    may be is the grid's to check); attention may differ from float64 by the contract's bound.

    Args:
        arguments: of :func:`drawn`.
        load: returns an operation of the implementation.
    """
    last = work.rows * work.verified - 1
    rows = sorted({row * last // (ROWS_CHECKED - 1) for row in range(ROWS_CHECKED)})
    if work.family.startswith("select"):
        batch, k = arguments
        picks = load("select")(batch, k)[rows]
        part = _rows_of(batch, rows)
        scores = load("logits")(part, work.context)
        return _differing(rows, picks, indexer_reference.topk(scores, part.visible, k))
    q, cache, slots, scale = arguments
    out = load("sparse_mla")(q, cache, slots, scale)[0]
    wrong = []
    for row in rows:
        chosen = cache[slots[row].long()]
        latent = dequantize_latent(chosen) if work.fp8 else chosen
        places = torch.arange(len(latent), device=q.device, dtype=torch.int32)[None]
        exact = mla_reference.sparse_mla(q[row, None].double(), latent, places, scale)[0][0]
        bound = mla_tolerance(q[row], latent, scale)[0]
        if not ((out[row].double() - exact).abs() <= bound).all():
            wrong.append(f"row {row} is not within the bound of float64")
    return wrong


def _rows_of(batch: IndexerBatch, rows: list[int]) -> IndexerBatch:
    """Return some rows of a prefill of one request, or of a decode, each as its own request."""
    decode = batch.query_starts is None
    starts = None if decode else batch.visible.new_tensor([0, len(rows)])
    requests = [row // batch.rows_per_request for row in rows]
    table = batch.block_table[requests] if decode else batch.block_table
    arguments = batch.q[rows], batch.weights[rows], batch.pages, table, batch.visible[rows]
    return IndexerBatch(*arguments, starts)


def _differing(rows: list[int], selected: torch.Tensor, expected: torch.Tensor) -> list[str]:
    differ = (selected != expected).any(-1).tolist()
    return [
        f"row {row} selects otherwise"
        for row, is_wrong in zip(rows, differ, strict=True)
        if is_wrong
    ]


def in_turns(works: Iterator[Workload]) -> Iterator[Workload]:
    """Yield one workload of each family, then the next of each: a run cut short has some of all."""
    by_family = sorted(works, key=lambda work: work.family)
    families = [list(group) for _, group in groupby(by_family, key=lambda work: work.family)]
    for turn in zip_longest(*families):
        yield from (work for work in turn if work is not None)


def main() -> None:
    """Time one workload after the other; write the file after each; leave out what is in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON to write and to add to")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin none after so many")
    parser.add_argument("--compile-only", action="store_true", help="call each once, time nothing")
    parser.add_argument("--among", nargs="+", default=(), help="contenders; default: all")
    parser.add_argument("workloads", nargs="*", help="names; default: all, the families in turns")
    options = parser.parse_args()
    ends = time.monotonic() + options.seconds
    by_name = {str(work): work for work in in_turns(workloads())}
    machine = dispatch.Machine.here()
    results: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in options.workloads or by_name:
        if name in results or time.monotonic() > ends:
            continue
        # Whoever reads the file after a crash finds who was at work.
        results[name] = {"times": {}, "missing": {"all": "the process ended in it"}, "wrong": []}
        write_json(options.out, results)
        began = time.monotonic()
        if options.compile_only:
            inputs = drawn(by_name[name], machine.device)
            _, missing = prepared(by_name[name], machine, inputs, options.among)
            results[name] = {"times": {}, "missing": missing, "wrong": []}
        else:
            results[name] = measure(by_name[name], machine, options.among)
        results[name]["seconds"] = round(time.monotonic() - began, 1)
        write_json(options.out, results)
        print(name, line_of(results[name]), flush=True)


def line_of(row: dict[str, Any]) -> str:
    """Return what :func:`measure` found as one line: microseconds by name, and what is wrong."""
    times = ", ".join(f"{name} {timing['median_us']:.1f}" for name, timing in row["times"].items())
    return " | ".join([times, *row["wrong"][:2]])


if __name__ == "__main__":
    main()
