"""What shows that a server was at the feature that it rehearses, and not only had its flag."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from sglang_indexcache.ask.client import Client
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.search.calibration import Calibration
from sglang_indexcache.search.evaluators.hf import TransformersEvaluator
from sglang_indexcache.search.overlap import OverlapCounter
from tests.rehearsal.checkpoint import MERGED
from tests.rehearsal.questions import LENGTHS, QUARTER, parameters, prompt

Evidence = Callable[[Client, Path], None]


def argument(name: str, value: Any) -> Evidence:
    """SGLang resolved an argument to ``value``."""

    def check(client: Client, _: Path) -> None:
        assert client.server_info()[name] == value

    return check


def adapter_served(client: Client, _: Path) -> None:
    """The server has one, without which its answers would be the checkpoint's."""
    assert all(state["adapter"] for state in _states(client))


def mixed_forwards(client: Client, _: Path) -> None:
    """Requests of several patterns were in one forward."""
    assert any(state["mixed_forwards"] for state in _states(client))


def chosen_graphs(client: Client, _: Path) -> None:
    """Decode replayed graphs that ``--indexcache-graphs`` asked for."""
    assert any(sum(state["graph_replays"].values()) for state in _states(client))


def replays(mode: str) -> Evidence:
    """SGLang's metrics count replays of ``mode``."""

    def check(client: Client, _: Path) -> None:
        metrics = httpx.get(f"{client.url}/metrics").text
        counted = re.findall(rf'cuda_graph_passes_total{{.*mode="{mode}".*}} (\S+)', metrics)
        assert sum(map(float, counted)) > 0, metrics

    return check


def accepted_drafts(client: Client, _: Path) -> None:
    """The target agreed with some drafts, and not with all."""
    said = [_ask(client, length, tokens=16) for length in LENGTHS]
    right, all_ = (
        sum(one["meta_info"][f"spec_num_{name}_drafts"] for one in said)
        for name in ("correct", "proposed")
    )
    assert 0 < right < all_


def overlaps(client: Client, model: Path) -> None:
    """The shadow tells of each layer the overlap that transformers has, on the prompts.

    In live mode S layers are compared with their F layer, in static mode F layers with the one
    before.
    """
    pattern = Pattern(QUARTER)
    is_live = _states(client)[0]["mode"] == "live"
    others = {
        layer: pattern.source_of(layer if is_live else layer - 1)
        for layer in range(1, len(pattern))
        if pattern.is_full(layer) != is_live
    }

    def seen() -> dict[int, tuple[float, float]]:
        cells = _states(client)[0]["overlap"]["cells"]
        return {layer: tuple(cells.get(f"{layer} 2Ki", (0.0, 0.0))[:2]) for layer in others}

    client.flush_cache()
    before = seen()
    for length in LENGTHS:
        _ask(client, length, QUARTER if is_live else None, tokens=1)
    sequences = tuple(tuple(prompt(length)) for length in LENGTHS)
    merged = model / MERGED
    evaluator = TransformersEvaluator(
        merged if merged.exists() else model, Calibration(sequences, 1, "rehearsal")
    )
    counter = OverlapCounter(len(pattern), evaluator.topk)
    for ids in sequences:
        counter.add(evaluator.selected(ids, pattern))
    matrix = counter.matrix()
    for layer, (rows, shared) in seen().items():
        rows, shared = rows - before[layer][0], shared - before[layer][1]
        assert abs(shared / rows - float(matrix[others[layer], layer])) < 0.05


def _states(client: Client) -> list[dict[str, Any]]:
    """What IndexCache tells of each rank."""
    return [state["indexcache"] for state in client.server_info()["internal_states"]]


def _ask(
    client: Client, length: int, pattern: str | None = None, tokens: int = 6
) -> dict[str, Any]:
    reply: dict[str, Any] = client.generate(
        input_ids=prompt(length), sampling_params=parameters(pattern, tokens)
    )
    return reply
