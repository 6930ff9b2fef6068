"""NVIDIA's measured latencies of SGLang's layers, read from the wheel ``aiconfigurator-core``.

The wheel (Apache-2.0, from PyPI) holds tables of single operations, timed by NVIDIA on real cards:
the DSA attention module of one layer with its indexer and without, experts, products, all-reduce.
Nothing is copied from it: the tables are read where pip put them. A row is one operation, in
milliseconds; a :class:`Series` is the rows that differ in one number only, such as the prefix.

A row contradicts the others if one of the same series with a longer prefix took less time, or if
the layer without an indexer took longer than the one with it: such rows are left out. And each row
is predicted from its two neighbours, as if it had not been measured: how far off that was
is the error of what lies beside it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any, Literal, Protocol

from sglang_indexcache.errors import BenchError

WHEEL = "aiconfigurator-core"
ENGINE = "sglang/0.5.14"
"""The engine of the rows; where a table also has other versions of it, they are not read."""
CARDS = {"h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm"}
"""Folders of the wheel's data by the names of :data:`sglang_indexcache.library.sizes.GPUS`."""
TOLERANCE = 0.1
"""How much faster a longer prefix may be: repeated rows of one card differ by 1 to 3 %."""

Kind = Literal["F", "S"]
KINDS: tuple[Kind, Kind] = ("F", "S")
Measured = defaultdict[tuple[Kind, int], defaultdict[float, list[float]]]
"""Milliseconds of repeated rows, by kind and size, then by what a series runs along."""


@dataclass(frozen=True)
class LatencyEstimate:
    """Milliseconds between rows.

    ``off`` is how far off its neighbours were when predicted from theirs, as a part; 0 on a row.
    """

    value: float
    off: float = 0.0

    def __mul__(self, count: int) -> LatencyEstimate:
        return LatencyEstimate(count * self.value, self.off)

    def __add__(self, other: LatencyEstimate) -> LatencyEstimate:
        value = self.value + other.value
        wrong = self.value * self.off + other.value * other.off
        return LatencyEstimate(value, wrong / value if value else 0.0)


@dataclass
class Series:
    """Milliseconds of rows that differ in one number; lines between them, nothing beyond them."""

    points: dict[float, float]
    _keys: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._keys = sorted(self.points)

    def at(self, x: float) -> LatencyEstimate | None:
        """Return the latency at ``x``; None outside the rows."""
        if x in self.points:
            return LatencyEstimate(self.points[x])
        place = bisect_right(self._keys, x)
        if not 0 < place < len(self._keys):
            return None
        below, above = self._keys[place - 1 : place + 1]
        off = max(abs(self.held_out(end) or 0.0) for end in (below, above))
        return LatencyEstimate(_line(self.points, below, above, x), off)

    def held_out(self, x: float) -> float | None:
        """Return the relative error of the row at ``x``, predicted from its neighbours, or None."""
        place = self._keys.index(x)
        if not 0 < place < len(self._keys) - 1:
            return None
        ends = self._keys[place - 1], self._keys[place + 1]
        return _line(self.points, *ends, x) / self.points[x] - 1

    def errors(self) -> Iterator[tuple[float, float]]:
        """Yield each inner row and its :meth:`held_out` error."""
        for x in self._keys[1:-1]:
            yield x, self.held_out(x) or 0.0


def _line(points: Mapping[float, float], a: float, b: float, x: float) -> float:
    share = (x - a) / (b - a)
    return (1 - share) * points[a] + share * points[b]


@dataclass
class Layers:
    """One layer's attention on one card, for one number of heads and one cache format.

    Attributes:
        source: of the rows, in words.
        prefill: by kind and tokens of the chunk: milliseconds by tokens of prefix.
        decode: by kind and requests: milliseconds by tokens of context.
        left_out: number of rows that contradict others.
    """

    source: str
    prefill: dict[tuple[Kind, int], Series]
    decode: dict[tuple[Kind, int], Series]
    left_out: int = 0

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer for a chunk behind a prefix; None where no rows are."""
        return _between(self.prefill, kind, tokens, prefix)

    def step(self, kind: Kind, requests: int, context: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer for one decode step; None where no rows are."""
        return _between(self.decode, kind, requests, context)


def _between(
    series: Mapping[tuple[Kind, int], Series], kind: Kind, size: int, x: float
) -> LatencyEstimate | None:
    """Interpolate along each series, then between the series of the two nearest sizes."""
    sizes = sorted(n for k, n in series if k == kind)
    if size in sizes:
        return series[kind, size].at(x)
    place = bisect_right(sizes, size)
    if not 0 < place < len(sizes):
        return None
    small, large = sizes[place - 1 : place + 1]
    ends = series[kind, small].at(x), series[kind, large].at(x)
    if ends[0] is None or ends[1] is None:
        return None
    value = _line({small: ends[0].value, large: ends[1].value}, small, large, size)
    return LatencyEstimate(value, max(ends[0].off, ends[1].off))


class Chunks(Protocol):
    """Layers whose time for a chunk of a prompt is known."""

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds; None where no rows are."""


@dataclass(frozen=True)
class RowSplitLayers:
    """Layers of which each rank's indexer scores a share of the rows, and gets all lists.

    Attributes:
        layers: as every rank runs them by itself.
        list_bytes: of one row.
        projected: milliseconds of a chunk's index queries, which every rank still makes for all
            rows, by tokens.
    """

    layers: Layers
    ranks: int
    gather: Series
    list_bytes: int
    projected: Callable[[int], float]

    def chunk(self, kind: Kind, tokens: int, prefix: int) -> LatencyEstimate | None:
        """Return milliseconds of one layer; as unsplit where a split does not pay."""
        plain, shared = (self.layers.chunk(k, tokens, prefix) for k in (kind, "S"))
        if kind == "S" or plain is None or shared is None:
            return plain
        share, before = share_of(tokens, prefix, self.ranks)
        full, bare = (self.layers.chunk(k, share, before) for k in ("F", "S"))
        gathered = self.gather.at(tokens * self.list_bytes)
        if full is None or bare is None or gathered is None:
            return None
        again = LatencyEstimate(self.projected(tokens) - self.projected(share))
        paid = shared + full + gathered + again
        value = paid.value - bare.value
        wrong = paid.value * paid.off + bare.value * bare.off
        return min(plain, LatencyEstimate(value, wrong / value), key=lambda time: time.value)


def share_of(tokens: int, prefix: int, ranks: int) -> tuple[int, int]:
    """Return a rank's rows of a chunk, and a prefix at which they see what a share does."""
    rows = max(1, tokens // ranks)
    return rows, prefix + (tokens - rows) // 2


class Wheel:
    """The tables of one card.

    Raises:
        BenchError: no rows of this card, or the wheel is not installed.
    """

    def __init__(self, card: str, data: Path | None = None) -> None:
        if card not in CARDS:
            raise BenchError(
                f"no measured rows are read for {card!r}; there are {', '.join(CARDS)}"
            )
        self._folder = (data or _installed()) / CARDS[card]
        self.card = card

    def rows(self, table: str, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Read a table's rows whose columns have the values of ``columns`` (a list: any of them).

        Raises:
            BenchError: the wheel has no such table, or in another form.
        """
        import pyarrow.parquet as parquet

        tests = [
            (name, "in" if isinstance(value, list) else "=", value)
            for name, value in columns.items()
        ]
        path = self._folder / f"{table}.parquet"
        try:
            rows: list[dict[str, Any]] = parquet.read_table(path, filters=tests).to_pylist()
        except (OSError, KeyError, ValueError) as error:
            raise BenchError(
                f"cannot read {path}: {error}. This version reads the tables of {WHEEL} 0.12.0: "
                f"pip install '{WHEEL}==0.12.0'"
            ) from error
        return rows

    def layers(self, model: str, bare: str, heads: int, gemm: str, kv: str) -> Layers:
        """Read attention layers: F ones of ``model``, S ones of ``bare``, by the rows' names.

        ``heads`` are MLA's on one rank; ``gemm`` and ``kv`` are formats of the weights and the
        cache, as the rows name them.

        Raises:
            BenchError: see :meth:`rows`; or there are no rows of these.
        """
        about = {"num_heads": heads, "gemm_type": gemm, "kv_cache_dtype": kv}
        prefill, left_out = self._phase("context", {**about, "batch_size": 1}, model, bare)
        decode, more = self._phase("generation", about, model, bare)
        if not (prefill and decode):
            table = f"sparse_attention/{ENGINE}/dsa_context_module_perf"
            counts = {row["num_heads"] for row in self.rows(table, {"model": model})}
            raise BenchError(
                f"NVIDIA measured no layers of {model} with {heads} heads on a GPU; there are "
                f"{', '.join(map(str, sorted(counts))) or 'none'}"
            )
        engine = ENGINE.replace("sglang/", "SGLang ")
        source = (
            f"NVIDIA's rows of {engine} on {self.card.upper()} ({WHEEL}): F layers of {model}, "
            f"S layers of {bare}"
        )
        return Layers(source, prefill, decode, left_out + more)

    def _phase(
        self, phase: str, about: Mapping[str, Any], model: str, bare: str
    ) -> tuple[dict[tuple[Kind, int], Series], int]:
        """Return the series of one phase by kind and size, and how many rows were left out."""
        latencies: Measured = defaultdict(lambda: defaultdict(list))
        dense: Measured = defaultdict(lambda: defaultdict(list))  # contexts within top-k
        table = f"sparse_attention/{ENGINE}/dsa_{phase}_module_perf"
        for row in self.rows(table, {**about, "model": [model, bare]}):
            kind: Kind = "S" if row["op_name"].endswith("skip_indexer") else "F"
            if row["model"] != {"F": model, "S": bare}[kind]:
                continue
            # A prompt's rows count what is before the chunk, a step's the token itself too.
            x = row["step"] + (row["isl"] if phase == "generation" else 0)
            size = row["isl" if phase == "context" else "batch_size"]
            points = dense if "dense" in row["kernel_source"] else latencies
            points[kind, size][x].append(row["latency"])
        series = consistent(latencies)
        left_out = sum(map(len, latencies.values())) - sum(len(s.points) for s in series.values())
        for key, rows in dense.items():  # other kernels: they contradict nothing
            series[key] = Series(
                {x: mean(ys) for x, ys in rows.items()}
                | (series[key].points if key in series else {})
            )
        return series, left_out

    def series(self, table: str, by: str, columns: Mapping[str, Any]) -> Series:
        """Read one operation's rows by one column; repeated rows count as their mean.

        Raises:
            BenchError: there are none.
        """
        points: dict[float, list[float]] = defaultdict(list)
        for row in self.rows(table, columns):
            points[row[by]].append(row["latency"])
        if not points:
            about = ", ".join(f"{name} {value}" for name, value in columns.items())
            raise BenchError(
                f"the rows of {WHEEL} have no {table.rpartition('/')[2]} with {about}. Ask for "
                "2, 4 or 8 GPUs."
            )
        return Series({x: mean(values) for x, values in points.items()})


def consistent(
    latencies: Mapping[tuple[Kind, int], Mapping[float, Iterable[float]]],
) -> dict[tuple[Kind, int], Series]:
    """Return series without the rows that contradict others."""
    means = {key: {x: mean(ys) for x, ys in rows.items()} for key, rows in latencies.items()}
    series: dict[tuple[Kind, int], Series] = {}
    for (kind, size), rows in means.items():
        with_indexer = means.get(("F", size), {}) if kind == "S" else {}
        points = {}
        least = float("inf")
        for x in sorted(rows, reverse=True):
            # A longer prefix cannot take less time, nor a layer less with its indexer.
            if rows[x] <= min(least * (1 + TOLERANCE), with_indexer.get(x, float("inf"))):
                points[x] = rows[x]
                least = min(least, rows[x])
        if points:
            series[kind, size] = Series(points)
    return series


def _installed() -> Path:
    """Find the wheel's data; importing it would load its compiled estimators."""
    spec = find_spec("aiconfigurator_core")
    if spec is None or not spec.submodule_search_locations:
        raise BenchError(
            f"measured rows are in the wheel {WHEEL}, which is not installed: "
            f"pip install '{WHEEL}==0.12.0'"
        )
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"
