"""Peak memory and CPU time of the distillation loss: all keys against the selected ones.

    python -m benchmarks.distillation_loss [--lengths 1024 2048 4096 8192] [--repeats 3]

Value and gradient, one row, one layer. ``naive`` and ``warmup`` are the dense form, everything at
once and in blocks; ``masked`` and ``gathered`` the sparse form, scoring all keys and scoring the
selected ones. Each measurement is a process of its own, as a process's peak memory never falls;
the forms take turns (A B A B). Time is the process's CPU time, which other load on the machine
disturbs less than wall time; still, only ratios mean anything. Writes distillation_loss.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.records import read_arguments
from sglang_indexcache.heal import losses
from sglang_indexcache.heal.losses import AttentionInputs, IndexInputs, distillation_loss
from sglang_indexcache.heal.packing import Layout
from sglang_indexcache.study.provenance import machine
from sglang_indexcache.support.files import write_json

QUICK = {"lengths": [1024], "repeats": 1}
INDEX_HEADS, INDEX_WIDTH, HEADS, WIDTH, BLOCK, TOPK = 8, 128, 8, 64, 256, 128
FORMS = ("naive", "warmup", "masked", "gathered")
NAIVE_UP_TO = 4096
"""Tokens; beyond it the naive form takes gigabytes."""
BORDER = (4096, (128, 256, 512))
"""Where masked and gathered are compared at several numbers of selected keys."""


def naive_loss(index: IndexInputs, target: AttentionInputs, length: int) -> torch.Tensor:
    """The same loss with every score of every head at once, as autograd would keep it."""
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        scores = target.queries @ target.keys.transpose(-1, -2) * target.scale
        p = scores.masked_fill(~causal, float("-inf")).softmax(-1).mean(1)
    per_head = torch.einsum("bthd,bsd->bhts", index.queries, index.keys).relu()
    scores = torch.einsum("bth,bhts->bts", index.weights, per_head)
    log_q = scores.masked_fill(~causal, float("-inf")).log_softmax(-1).masked_fill(~causal, 0.0)
    return (torch.xlogy(p, p) - p * log_q).sum()


def measure(form: str, length: int, topk: int) -> dict[str, float]:
    """One value and gradient; seconds of CPU time and MiB above the process without it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = ((1, length, INDEX_HEADS, INDEX_WIDTH), (1, length, INDEX_WIDTH))
    queries, keys = (torch.randn(s).mul_(0.3).requires_grad_() for s in shapes)
    weights = torch.randn(1, length, INDEX_HEADS).mul_(0.1).requires_grad_()
    attention = (torch.randn(1, HEADS, length, WIDTH) for _ in range(2))
    index = IndexInputs(queries, keys, weights)
    target = AttentionInputs(*attention, WIDTH**-0.5)
    layout = Layout(torch.zeros(1, length, dtype=torch.int64))
    selected = spread(length, topk) if form in ("masked", "gathered") else None
    before = peak_mib()
    started = time.process_time()
    if form == "naive":
        loss = naive_loss(index, target, length)
    else:
        with patch.object(losses, "GATHERED_FROM", 0 if form == "gathered" else length + 1):
            loss = distillation_loss(index, [target], layout, selected, block=BLOCK)
    loss.backward()
    seconds = time.process_time() - started
    norm = float(queries.grad.norm()) if queries.grad is not None else 0.0
    return {
        "loss": loss.item(),
        "gradient_norm": norm,
        "seconds": seconds,
        "mib": peak_mib() - before,
    }


def spread(length: int, topk: int) -> torch.Tensor:
    """A selection ``[1, length, topk]`` of keys at equal distances; all where there are fewer."""
    seen = torch.arange(1, length + 1)[:, None]
    places = torch.arange(topk).expand(length, topk)
    chosen = torch.where(seen > topk, seen * places // topk, places)
    return chosen.masked_fill(chosen >= seen, -1).int()[None]


def peak_mib() -> float:
    """The process's peak memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_a_process(form: str, length: int, topk: int) -> dict[str, float]:
    """:func:`measure`, in a process of its own."""
    with get_context("fork").Pool(1) as pool:  # torch is loaded once, by the parent
        return pool.apply(measure, (form, length, topk))


def compare(
    length: int, repeats: int, topk: int = TOPK, forms: tuple[str, ...] = FORMS
) -> dict[str, Any]:
    """The forms in turns at one length; times are also given as ratios to ``gathered``."""
    taken = [form for form in forms if form != "naive" or length <= NAIVE_UP_TO]
    runs: dict[str, list[dict[str, float]]] = {form: [] for form in taken}
    for _ in range(repeats):
        for form in taken:
            runs[form].append(in_a_process(form, length, topk))
    row: dict[str, Any] = {"length": length, "topk": topk}
    for form in taken:
        pairs = zip(runs[form], runs["gathered"], strict=True)
        row[form] = {
            "mib": max(run["mib"] for run in runs[form]),
            "seconds": statistics.median(run["seconds"] for run in runs[form]),
            "times_gathered": statistics.median(a["seconds"] / b["seconds"] for a, b in pairs),
            "loss": runs[form][0]["loss"],
            "gradient_norm": runs[form][0]["gradient_norm"],
        }
    return row


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = read_arguments(parser, "distillation_loss.json", quick=QUICK)
    rows = []
    for length in arguments.lengths:
        rows.append(compare(length, arguments.repeats))
        print(json.dumps(rows[-1]), flush=True)
    length, several = BORDER
    border = [compare(length, arguments.repeats, topk, ("masked", "gathered")) for topk in several]
    result = {
        "command": arguments.command,
        "what": "distillation loss with its gradient, one row, one layer, float32, CPU",
        "machine": machine() | {"threads": 1},
        "index_heads": INDEX_HEADS,
        "index_width": INDEX_WIDTH,
        "heads": HEADS,
        "width": WIDTH,
        "block": BLOCK,
        "repeats": arguments.repeats,
        "rows": rows,
        "border": border,
    }
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
