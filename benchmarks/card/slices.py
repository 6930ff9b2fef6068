"""Measure slices of a few layers side by side, asked in turns, and what a layer costs by them.

For a card that a whole model does not serve (plan B), and for GLM-5, which no card holds: its
slice has the widths of one of eight ranks. All patterns are up at once and alternate request by
request, so nothing drifts between them. The time of a prefill is a constant and what each F and
each S layer adds, by least squares; one slice has half the layers, else the constant could not be
told from the layers. How far the servers are from that sum stands beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.card.servers import HeldServer
from benchmarks.card.shapes import write_config
from benchmarks.card.table_1 import Evidence, Run, arguments, causes, line_of
from sglang_indexcache.errors import IndexCacheError
from sglang_indexcache.lab.client.http import Client
from sglang_indexcache.pattern import Pattern

ROUNDS = 5
ALL_REDUCE_SECONDS, ALL_REDUCES = 0.4e-3, 2
"""An all-reduce of a chunk of 8,192 rows over NVLink (100 MB; assumed, not measured), and how many
a layer has: what a slice of one rank lacks, the same under every pattern."""
CHUNK = 8192
SECONDS_NEEDED = 60.0
SLICES = {"slices of the 30B": (47, 12, 1), "slices of GLM-5": (78, 22, 8)}
"""Steps, and the whole that each stands for: layers, F layers at 1/4, ranks."""


def patterns_of(layers: int) -> list[str]:
    """Return the patterns of the slices: all F, 1/2, 1/4, one F, and 1/2 of half the layers."""
    spaced = [str(Pattern.uniform(layers, every)) for every in (1, 2, 4)]
    return [*dict.fromkeys([*spaced, "F" + "S" * (layers - 1)]), spaced[1][: layers // 2]]


def fit(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the constant, an F and an S layer's seconds, and the largest relative residual.

    Args:
        seconds: pattern -> of a prefill.
    """
    patterns, times = list(seconds), np.array(list(seconds.values()))
    rows = np.array([(1, pattern.count("F"), pattern.count("S")) for pattern in patterns])
    costs = np.linalg.lstsq(rows, times, rcond=None)[0]
    residual = np.abs(rows @ costs - times) / times
    names = ("constant", "F", "S")
    return {**dict(zip(names, map(float, costs), strict=True)), "residual": float(residual.max())}


def whole(costs: Mapping[str, float], layers: int, full: int, length: int, ranks: int) -> float:
    """Return the seconds of a prefill by the whole model, from the costs of its layers.

    Args:
        costs: of :func:`fit`.
        full: F layers of ``layers``.
        length: prompt tokens.
        ranks: of tensor parallelism; what more than one tell each other is a constant.
    """
    talk = 0.0 if ranks == 1 else layers * ALL_REDUCES * ALL_REDUCE_SECONDS * length / CHUNK
    return costs["constant"] + full * costs["F"] + (layers - full) * costs["S"] + talk


def measure(run: Run) -> None:
    """Measure the slices of the model, then those of GLM-5."""
    shapes = (run.scale.model, run.scale.glm_5)
    for name, shape, layers in zip(SLICES, shapes, run.scale.slices, strict=True):
        if not run.report.has_passed(name):
            _measure(run, name, shape, layers)


def _measure(run: Run, name: str, shape: Mapping[str, Any], layers: int) -> None:
    began = time.monotonic()
    if run.skips(name, SECONDS_NEEDED):
        return
    evidence = Evidence(run.report, name)
    servers = {}
    for pattern in patterns_of(layers):
        folder = run.scratch / f"{name}-{pattern}".replace(" ", "-")
        config = write_config(folder / "model", shape, len(pattern))
        servers[pattern] = HeldServer(
            arguments(run.scale, config, pattern, "single", (*run.products, *run.more)), folder
        )
    try:
        for server in servers.values():
            server.start()
            server.begin()
        clients = {pattern: run.ready(server, evidence) for pattern, server in servers.items()}
        _ask_in_turns(run, clients, evidence)
        samples = evidence.content["samples"]
        evidence.add(costs={length: fit(medians(samples, length)) for length in run.scale.lengths})
        run.finish(name, 0, began, line_of(samples[-len(clients) :]), evidence)
    except IndexCacheError as error:
        tails = "\n".join(server.log_tail() for server in servers.values())
        run.finish(name, 1, began, causes(error, tails), evidence)
    finally:
        for server in servers.values():
            server.stop(grace=0)
            run.report.keep_logs(name, server.folder)


def _ask_in_turns(run: Run, clients: Mapping[str, Client], evidence: Evidence) -> None:
    """Ask every slice for every length, round by round, as long as there is time for a round."""
    for client in clients.values():
        run.ask(client, run.scale.lengths[0], 1, "warm-up")
    for number in range(ROUNDS):
        began = time.monotonic()
        for length in run.scale.lengths:
            for pattern, client in clients.items():
                (answer,) = run.ask(client, length, 1, number)
                first, rate = round(answer.first_token, 4), round(answer.decode_rate, 2)
                evidence.sample(pattern=pattern, length=length, prefill=first, decode=rate)
        if run.ends - time.monotonic() < 1.5 * (time.monotonic() - began):
            return


def medians(samples: Sequence[Mapping[str, Any]], length: int) -> dict[str, float]:
    """Return pattern -> median seconds of a prefill of ``length`` tokens."""
    by_pattern: dict[str, list[float]] = {}
    for sample in samples:
        if sample["length"] == length:
            by_pattern.setdefault(sample["pattern"], []).append(sample["prefill"])
    return {pattern: float(np.median(times)) for pattern, times in by_pattern.items()}
