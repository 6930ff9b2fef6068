"""What kernels and sharing gain together, of a whole model: arithmetic on shares of the time.

The indexer's share of a forward follows from the paper's own table, which gives the time with and
without sharing: what was saved is that share times the layers that lost their indexer. In prefill
the attention's share is the indexer's times the ratio of the engine's kernel times in the forecast;
in decode of one request those times explain a part of the published ones only, so there attention
is left out, and kernels are counted for the indexer alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sglang_indexcache.bench.tables import Grid

Phase: TypeAlias = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Model:
    """A model whose speed with a quarter of the indexers is published.

    Attributes:
        layers, full: all, and those that keep their indexer.
        heads: of attention.
        gains: published speed-up at about 200K tokens, by phase.
        source: of it.
    """

    name: str
    layers: int
    full: int
    heads: int
    gains: Mapping[Phase, float]
    source: str

    def indexer_share(self, phase: Phase) -> float:
        """Of the time without sharing."""
        return (1 - 1 / self.gains[phase]) / (1 - self.full / self.layers)


MODELS = (
    Model("30B, 47 layers", 47, 12, 20, {"prefill": 19.5 / 10.7, "decode": 86 / 58}, "table 1"),
    Model("GLM-5, 78 layers", 78, 22, 64, {"prefill": 1.3, "decode": 1.3}, "at least 1.3x"),
)
"""The IndexCache paper: 30B on H100s with dp_attention; for GLM-5 it says no more than a bound."""


@dataclass(frozen=True)
class Times:
    """Kernel times of one layer over a phase, in any unit, by the forecast.

    Attributes:
        indexer, indexer_ours: the engine's, and ours or the engine's where that is faster.
        attention: the engine's; 0 where it is left out.
        attention_full, attention_shared: ours in a layer with an indexer and in one without, or the
            engine's where that is faster.
    """

    indexer: float
    indexer_ours: float
    attention: float = 0.0
    attention_full: float = 0.0
    attention_shared: float = 0.0


def speedups(model: Model, phase: Phase, times: Times) -> dict[str, float]:
    """Of sharing, of our kernels, of both; and without any indexer at all."""
    share = model.indexer_share(phase)
    attention = share * times.attention / times.indexer
    kept = model.full / model.layers
    indexer = times.indexer_ours / times.indexer
    full = attention * times.attention_full / times.attention if attention else 0.0
    shared = attention * times.attention_shared / times.attention if attention else 0.0
    rest = 1 - share - attention
    return {
        "sharing": 1 / (1 - share * (1 - kept)),
        "kernels": 1 / (rest + share * indexer + full),
        "both": 1 / (rest + share * indexer * kept + full * kept + shared * (1 - kept)),
        "ceiling": 1 / (1 - share),
    }


def rows(times: Mapping[tuple[str, Phase], Sequence[Times]]) -> list[dict[str, Any]]:
    """A row a model and phase.

    Args:
        times: by model and phase; the first are the central ones, the others make the range.
    """
    found = []
    for model in MODELS:
        for phase in model.gains:
            central, *others = (speedups(model, phase, one) for one in times[model.name, phase])
            every = [one["both"] for one in (central, *others)]
            found.append(
                {
                    "model": model.name,
                    "phase": phase,
                    "full": model.full,
                    "indexer_share": round(model.indexer_share(phase), 3),
                    **{name: round(value, 2) for name, value in central.items()},
                    "low": round(min(every), 2),
                    "high": round(max(every), 2),
                    "source": model.source,
                }
            )
    return found


def table(found: Sequence[Mapping[str, Any]]) -> Grid:
    """For people."""
    header = (
        "model", "200K", "indexer's share", "sharing", "kernels", "both", "range",
        "no indexer at all",
    )  # fmt: skip
    cells = tuple(
        (
            f"{one['model']}, {one['full']} F",
            one["phase"],
            f"{one['indexer_share']:.0%} ({one['source']})",
            f"{one['sharing']:.2f}x",
            f"{one['kernels']:.2f}x",
            f"{one['both']:.2f}x",
            f"{one['low']:.2f} to {one['high']:.2f}",
            f"{one['ceiling']:.2f}x",
        )
        for one in found
    )
    return Grid("Whole forwards at 200K tokens: arithmetic on published shares", header, cells)
