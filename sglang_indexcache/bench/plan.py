"""What a pattern gains on a deployment, before anybody rents one (``indexcache bench plan``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sglang_indexcache.bench.forward import MODELS, NO_RATE, Deployment, Forwards, Gain
from sglang_indexcache.bench.results import Metric
from sglang_indexcache.bench.shapes import PRESETS, checkpoint_of, shape_of
from sglang_indexcache.bench.tables import Grid
from sglang_indexcache.checkpoint import read_config
from sglang_indexcache.errors import BenchError, LibraryError, PatternError
from sglang_indexcache.library import Library
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.support.lengths import format_length

TITLES: dict[Metric, str] = {
    "prefill": "Prefill of one prompt a rank",
    "decode": "Decode, one request a rank",
    "full": "Decode, as many requests as cache and rows have (their number in brackets)",
}
Patterns = Sequence[tuple[str, Pattern]]


def find_model(model: str) -> str:
    """The name in :data:`~sglang_indexcache.bench.forward.MODELS` of what a user gave.

    Args:
        model: such a name in any case, or a checkpoint folder, known by its shape and weights.

    Raises:
        BenchError: NVIDIA has measured no layers of it.
    """
    by_name = {name.lower(): name for name in MODELS}
    folder = Path(model)
    if not folder.is_dir():
        found = by_name.get(model.rpartition("/")[2].lower())
    else:
        shape, config = shape_of(folder), read_config(folder)
        weights = "fp8_block" if config.get("quantization_config") else "bfloat16"
        found = next(
            (
                name
                for name, known in MODELS.items()
                if (PRESETS[known.shape], known.weights) == (shape, weights)
            ),
            None,
        )
    if found is None:
        raise BenchError(
            f"nobody has published measured layers of {model}. There are rows of "
            f"{', '.join(MODELS)}, by these names or a folder with their config.json; measure "
            "others with `indexcache bench latency`."
        )
    return found


def choose_patterns(values: Sequence[str], shape: str) -> tuple[Patterns, tuple[str, ...]]:
    """Patterns by the names that a user gave, and what to know about them.

    A ratio takes the library's pattern for this model. Where it has none, it takes as many F layers
    evenly spaced: time depends on their number only.

    Args:
        values: as :meth:`Library.resolve` takes them.
        shape: a name of :data:`~sglang_indexcache.bench.shapes.PRESETS`.

    Raises:
        IndexCacheError: a pattern that does not fit.
    """
    checkpoint = checkpoint_of(shape)
    found, said = [], []
    for value in values:
        try:
            pattern = Library.default().resolve(value, checkpoint).pattern
        except LibraryError:
            if re.fullmatch(r"1/\d+", value) is None:
                raise
            pattern = Library.default().resolve(f"uniform:{value}", checkpoint).pattern
            said.append(
                f"No {value} pattern of {shape} is known: evenly spaced layers stand for it. "
                "They take as long; what they lose in quality is another question."
            )
        if pattern.window:
            raise PatternError(
                f"what a recent window costs has not been measured, so no plan can be made for "
                f"{value}. Plan the pattern without it."
            )
        found.append((value, pattern))
    return found, tuple(said)


def plan_grid(forwards: Forwards, patterns: Patterns, contexts: Sequence[int]) -> Grid:
    """Gains over every indexer on, laid out as the paper's Table 1.

    Args:
        forwards: of the deployment.
        patterns: by name.
        contexts: tokens.
    """
    rows: list[tuple[str, ...]] = []
    for metric, title in TITLES.items():
        rows.append((title,))
        found = [[forwards.gain(metric, pattern, n) for n in contexts] for _, pattern in patterns]
        unit = "s" if metric == "prefill" else "ms a step"
        base = [_base(gains, metric) for gains in zip(*found, strict=True)]
        if any(base):
            rows.append((f"every indexer, {unit}", *(text or NO_RATE for text in base)))
        for (name, pattern), gains in zip(patterns, found, strict=True):
            cells = [NO_RATE if one is None else f"{one.gain:.2f}x" for one in gains]
            rows.append((f"{name} ({len(pattern.full_layers)} of {len(pattern)} F)", *cells))
    header = ("", *map(format_length, contexts))
    return Grid(f"expected speed-up over DSA: {forwards.deployment}", header, tuple(rows))


def _base(gains: Sequence[Gain | None], metric: Metric) -> str:
    """The time with every indexer, which all patterns have in common."""
    one = next((gain for gain in gains if gain is not None), None)
    if one is None:
        return ""
    if metric == "prefill":
        return f"{one.milliseconds / 1e3:.1f}"
    return f"{one.milliseconds:.1f}" + (f" ({one.requests})" if metric == "full" else "")


def plan(model: str, gpu: str, gpus: int, dp: int, kv: str, data: Path | None = None) -> Forwards:
    """The forwards of a deployment that can be.

    Args:
        model: see :func:`find_model`.
        gpu: a name of :data:`~sglang_indexcache.bench.shapes.GPUS`.
        gpus: how many.
        dp: ranks of data-parallel attention.
        kv: the cache's format, or "" for the engine's default.
        data: the wheel's data folder; where pip put it, if left out.

    Raises:
        BenchError: an unknown model or GPU, weights that do not fit, no rows, or no wheel.
    """
    deployment = Deployment(find_model(model), gpu.lower(), gpus, dp, kv)
    deployment.check()
    deployment.check_fits()
    return Forwards(deployment, data)
