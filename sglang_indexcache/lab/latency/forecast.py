"""Composed gain of a pattern on a deployment that is not rented yet (``indexcache bench plan``).

Time is linear in the number of F layers. So a table has, for each deployment and prompt length, a
forward's time with every indexer, and the time of one layer's indexer in it. Commit ea3e8b8d's
``benchmarks.expect`` composed the table from NVIDIA's measurements of single layers; no whole
forward was measured.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sglang_indexcache.checkpoint import Checkpoint, fp8_blocks, read_config, text_config
from sglang_indexcache.errors import BenchError, LibraryError
from sglang_indexcache.lab.latency.tables import Grid
from sglang_indexcache.library.lengths import format_length
from sglang_indexcache.library.resolve import Library, names_and_patterns
from sglang_indexcache.library.sizes import PRESETS, ModelShape, check_room, checkpoint_of, find_gpu
from sglang_indexcache.pattern import Pattern

TABLE = Path(__file__).parent / "composed.json"
GPUS = 8
"""Number of GPUs of every deployment in the table: on fewer the models' weights do not fit."""
EVERY, NO_RATE = "every indexer", "no rate for this"
Phase = Literal["prefill", "decode"]
Part = Literal["prefill", "row split", "decode"]
"""Parts of a table; a row split is a prefill whose rows are divided among the ranks."""
Cost = tuple[float, float, float]
"""Milliseconds of a forward with every indexer, milliseconds of one layer's indexer in it, and the
share by which the forward may be off."""
Patterns = Sequence[tuple[str, Pattern]]


@dataclass(frozen=True)
class MeasuredModel:
    """A model whose layers were measured.

    Attributes:
        shape: a name in :data:`~sglang_indexcache.library.sizes.PRESETS`.
        shared: the model whose rows stand for S layers, which was trained to share.
        weights: format of the weights, as named in the rows.
    """

    shape: str
    shared: str
    weights: str

    def weight_bytes(self, gpus: int, dp: int) -> float:
        """Return the bytes of weights on one of ``gpus`` GPUs, with ``dp`` attention ranks."""
        item_bytes = 1 if "fp8" in self.weights else 2
        return PRESETS[self.shape].weight_bytes(gpus, dp, item_bytes)


MODELS = {
    "GLM-5-FP8": MeasuredModel("glm-5", "zai-org/GLM-5.2-FP8", "fp8_block"),
    "GLM-5": MeasuredModel("glm-5", "zai-org/GLM-5.2", "bfloat16"),
    "DeepSeek-V3.2": MeasuredModel("deepseek-v3.2", "zai-org/GLM-5.2-FP8", "fp8_block"),
}
"""Models by the user's name for them, in any case."""


def find_model(model: str) -> str:
    """Return the name in :data:`MODELS` for a checkpoint's folder, or for a name in any case.

    Raises:
        BenchError: NVIDIA has measured no layers of the model, it shares already, or there is no
            folder.
        CheckpointError: the folder is no DSA checkpoint, or has an unknown quantisation.
    """
    if (path := Path(model)).is_dir():
        return _model_in(path)
    if model.startswith(("/", ".", "~")):
        raise BenchError(f"there is no folder {model} here")
    name_in_lower_case = model.rpartition("/")[2].lower()
    for name, measured in MODELS.items():
        if name.lower() == name_in_lower_case:
            return name
        if measured.shared.rpartition("/")[2].lower() == name_in_lower_case:
            raise _shares_already(model)
    raise _unmeasured(model)


def _model_in(folder: Path) -> str:
    """Return the name of the measured model with a checkpoint's shape and weights."""
    config = read_config(folder)
    if Checkpoint.from_config(config, str(folder)).shares_already:
        raise _shares_already(str(folder))
    shape = ModelShape.from_config(text_config(config))
    weights = "fp8_block" if fp8_blocks(folder) else "bfloat16"
    for name, measured in MODELS.items():
        if (PRESETS[measured.shape], measured.weights) == (shape, weights):
            return name
    raise _unmeasured(str(folder))


def _shares_already(model: str) -> BenchError:
    return BenchError(
        f"{model} shares already, as it was trained to, so no pattern is to be planned: it is "
        "served so with or without IndexCache. Its S layers stand for GLM-5's in a plan of GLM-5."
    )


def _unmeasured(model: str) -> BenchError:
    return BenchError(
        f"nobody has published measured layers of {model}. There are rows of {', '.join(MODELS)}, "
        "by these names or as a folder of such a checkpoint; measure others with `indexcache bench "
        "latency`."
    )


@dataclass(frozen=True)
class Gain:
    """Gain of a pattern over running every indexer on every rank.

    Attributes:
        milliseconds: time of a prompt or a step with every indexer.
        gain: that time over the pattern's time.
        off: share by which either may be wrong.
    """

    milliseconds: float
    gain: float
    off: float


@dataclass(frozen=True)
class Composed:
    """Composed times of a deployment on :data:`GPUS` GPUs.

    Attributes:
        model: a name of :data:`MODELS`.
        dp: number of ranks of data-parallel attention; 1 is tensor parallelism over all GPUs.
        layers: number of layers of the model.
        contexts: rising numbers of tokens, at which ``costs`` are known.
        costs: costs by :data:`Part`; None where rows are missing, or too far off.
        sources: sentences on the sources of all parts.
    """

    model: str
    gpu: str
    dp: int
    layers: int
    title: str
    contexts: tuple[int, ...]
    costs: dict[str, list[Cost | None]]
    sources: tuple[str, ...]

    def gain(self, part: Part, pattern: Pattern, context: int) -> Gain | None:
        """Return a pattern's gain over every indexer, without a row split; None if not known."""
        every = self._cost("decode" if part == "decode" else "prefill", context)
        mine = self._cost(part, context)
        if every is None or mine is None:
            return None
        own = mine[0] - (self.layers - len(pattern.full_layers)) * mine[1]
        return Gain(every[0], every[0] / own, max(every[2], mine[2]))

    def _cost(self, part: str, context: int) -> Cost | None:
        """Return a cost, interpolated linearly between two contexts; None outside of them."""
        place = bisect_left(self.contexts, context)
        if place == len(self.contexts):
            return None
        above = self.costs[part][place]
        if above is None or self.contexts[place] == context:
            return above
        below = self.costs[part][place - 1] if place else None
        if below is None:
            return None
        start, end = self.contexts[place - 1 : place + 1]
        share = (context - start) / (end - start)
        every, indexer, off = (
            (1 - share) * a + share * b for a, b in zip(below, above, strict=True)
        )
        return every, indexer, off


@cache
def composed() -> tuple[Composed, ...]:
    """Read the table of composed times."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    contexts = tuple(table["contexts"])
    return tuple(Composed(contexts=contexts, **row) for row in table["deployments"])


def find_composed(model: str, gpu: str, gpus: int, dp: int) -> Composed:
    """Return the deployment of a model by its name or folder.

    Raises:
        BenchError: as for :func:`find_model`; or the weights do not fit, or the deployment is not
            in the table.
        CheckpointError: see :func:`find_model`.
    """
    name, card = find_model(model), find_gpu(gpu)
    if gpus != GPUS:
        raise BenchError(
            f"forwards were composed for {GPUS} GPUs, not for {gpus}. Measure {gpus} with "
            "`indexcache bench latency`."
        )
    check_room(name, MODELS[name].weight_bytes(GPUS, dp), GPUS, dp, card.name, card.memory)
    for row in composed():
        if (row.model, row.gpu, row.dp) == (name, gpu.lower(), dp):
            return row
    ranks = ", ".join(sorted({str(row.dp) for row in composed() if row.model == name}))
    raise BenchError(
        f"NVIDIA measured no layers of {name} as --dp {dp} splits them over {GPUS} GPUs. Take one "
        f"of --dp {ranks}."
    )


def choose_patterns(values: Sequence[str], shape: str) -> tuple[Patterns, tuple[str, ...]]:
    """Return patterns by the user's names, and notes on them.

    A ratio stands for the library's pattern for this model. If there is none, it stands for as many
    F layers, evenly spaced, because time depends only on their number. ``shape`` is one of
    :data:`~sglang_indexcache.library.sizes.PRESETS`.

    Raises:
        IndexCacheError: a pattern does not fit the model.
    """
    checkpoint = checkpoint_of(shape)
    patterns, notes = [], []
    for name, value in names_and_patterns(values):
        try:
            pattern = Library.default().resolve(value, checkpoint).pattern
        except LibraryError:
            if re.fullmatch("1/[0-9]+", value) is None:
                raise
            pattern = Library.default().resolve(f"uniform:{value}", checkpoint).pattern
            notes.append(
                f"No {value} pattern of {shape} is known: evenly spaced layers stand for it. "
                "They take as long; what they lose in quality is another question."
            )
        patterns.append((name, pattern))
    return patterns, tuple(notes)


@dataclass(frozen=True)
class PlannedRow:
    """Gains of a pattern by context."""

    part: Part
    name: str
    pattern: Pattern
    gains: tuple[Gain | None, ...]


def planned_rows(
    deployment: Composed, patterns: Patterns, contexts: Sequence[int]
) -> Iterator[PlannedRow]:
    """Yield the gains over every indexer, which is itself the first pattern of each part."""
    every: Patterns = [(EVERY, Pattern.full(deployment.layers)), *patterns]
    parts: tuple[Part, ...] = ("prefill", "row split", "decode")
    for part in parts if deployment.dp < GPUS else ("prefill", "decode"):
        for name, pattern in every:
            gains = tuple(deployment.gain(part, pattern, n) for n in contexts)
            yield PlannedRow(part, name, pattern, gains)


def plan_grid(deployment: Composed, patterns: Patterns, contexts: Sequence[int]) -> Grid:
    """Return the gains over every indexer, laid out as the paper's Table 1."""
    heads = {"prefill": "Prefill of one prompt a rank", "decode": "Decode, one request a rank"}
    rows: list[tuple[str, ...]] = []
    for row in planned_rows(deployment, patterns, contexts):
        if row.part == "row split":
            rows.append((f"{row.name}, row split", *map(_cell, row.gains)))
        elif row.name == EVERY:
            scale, unit = (1e3, "s") if row.part == "prefill" else (1, "ms a step")
            times = (f"{g.milliseconds / scale:.1f}" if g else NO_RATE for g in row.gains)
            rows += [(heads[row.part],), (f"{EVERY}, {unit}", *times)]
        else:
            letters = f"{len(row.pattern.full_layers)} of {len(row.pattern)} F"
            rows.append((f"{row.name} ({letters})", *map(_cell, row.gains)))
    header = ("", *map(format_length, contexts))
    title = f"composed speed-up over every indexer, not measured as a whole: {deployment.title}"
    return Grid(title, header, tuple(rows))


def plan_to_json(
    deployment: Composed, patterns: Patterns, contexts: Sequence[int]
) -> dict[str, Any]:
    """Return the same gains for programs.

    ``every_indexer_ms`` is the time of a prompt, or of a step, with every indexer. This time and
    ``speedup`` are null where nothing is known, and either may be wrong by the share ``off``.
    """
    gains = [
        {
            "metric": row.part,
            "name": row.name,
            "full_layers": len(row.pattern.full_layers),
            "layers": len(row.pattern),
            "context": context,
            "speedup": gain and gain.gain,
            "every_indexer_ms": gain and gain.milliseconds,
            "off": gain and gain.off,
        }
        for row in planned_rows(deployment, patterns, contexts)
        for context, gain in zip(contexts, row.gains, strict=True)
    ]
    return {"deployment": deployment.title, "gains": gains}


def _cell(gain: Gain | None) -> str:
    return NO_RATE if gain is None else f"{gain.gain:.2f}x"
