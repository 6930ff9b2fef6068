"""``indexcache server watch``: what sharing does on a running server, now and since its start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import ceil
from statistics import fmean

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import RECENT, RankState

WORST = 10
"""Layers that are shown with their numbers."""

BLOCKS = " ▁▂▃▄▅▆▇█"
"""From never to always."""


def watch(client: Client, seconds: float, console: Console, times: int | None = None) -> None:
    """Show a server until the user interrupts.

    Args:
        client: of the server.
        seconds: between two looks.
        console: where to draw.
        times: looks after which to end; None for no end.

    Raises:
        ServerError: it does not answer, or cannot say what it does.
    """
    before, then = client.states(), time.monotonic()
    with Live(frame(before, before, 0.0), console=console, auto_refresh=False) as live:
        for _ in count() if times is None else range(times):
            time.sleep(seconds)
            after, now = client.states(), time.monotonic()
            live.update(frame(before, after, now - then), refresh=True)
            before, then = after, now


def frame(
    before: Sequence[RankState], after: Sequence[RankState], seconds: float
) -> RenderableType:
    """One picture: all ranks together.

    Args:
        before: their states at the last look.
        after: their states now. A server that was restarted counts from 0 again.
        seconds: between the two.
    """
    state = after[0]
    total = {name: _sum(getattr(rank, name) for rank in after) for name in ("pairs", "rows")}
    since = {
        name: _risen(_sum(getattr(rank, name) for rank in before), now)
        for name, now in total.items()
    }
    switches = sum(rank.switches for rank in after)
    refused = _sum(rank.rejections for rank in after)
    lines: list[RenderableType] = [
        Text(f"{state.mode} mode, {len(after)} rank{'s' * (len(after) > 1)}: {state.policy}"),
        Text(f"from {state.source}", style="dim"),
        Text(
            f"switched {switches} times, refused "
            + (", ".join(f"{n} by {who}" for who, n in sorted(refused.items())) or "nothing")
        ),
        _work(since["pairs"], total["pairs"]),
        _patterns(since["rows"], total["rows"], _sum(r.requests for r in after), seconds),
        *_layers(before, after),
        *_overlaps(after),
    ]
    return Group(*lines)


def _work(since: Mapping[str, int], total: Mapping[str, int]) -> Table:
    """The share of query-key pairs that were skipped, for each phase and bin of lengths."""
    table = Table("indexer work skipped", "now", "since the start", box=SIMPLE)
    bins = dict.fromkeys(name.rpartition(" ")[0] for name in total)
    for name in bins:
        phase, _, length = name.partition(" ")
        up_to = "longer" if length == "more" else f"up to {length} tokens"
        table.add_row(f"{phase}, {up_to}", _skipped(since, [name]), _skipped(total, [name]))
    table.add_row("all", _skipped(since, bins), _skipped(total, bins), style="bold")
    return table


def _skipped(pairs: Mapping[str, int], names: Iterable[str]) -> str:
    scored, skipped = (
        sum(pairs.get(f"{name} {kind}", 0) for name in names) for kind in ("scored", "skipped")
    )
    return f"{skipped / (scored + skipped):.1%}" if scored + skipped else "-"


def _patterns(
    since: Mapping[str, int], total: Mapping[str, int], requests: Mapping[str, int], seconds: float
) -> Table:
    table = Table("pattern", "tokens a second", "tokens", "unfinished requests", box=SIMPLE)
    for pattern in dict.fromkeys([*total, *requests]):
        rate = f"{since.get(pattern, 0) / seconds:,.0f}" if seconds else "-"
        table.add_row(pattern, rate, f"{total.get(pattern, 0):,}", str(requests.get(pattern, 0)))
    return table


def _layers(before: Sequence[RankState], after: Sequence[RankState]) -> list[RenderableType]:
    """A block for each layer: how often its indexer ran; replayed graphs are not in it."""
    said: list[RenderableType] = []
    for name, earlier in (("now", before), ("since the start", [])):
        ran, reused = (
            _difference(earlier, after, counter)
            for counter in ("indexer_selections", "index_reuses")
        )
        blocks = "".join(
            BLOCKS[-(-8 * runs // (runs + others))] if runs + others > 0 else "\N{MIDDLE DOT}"
            for runs, others in zip(ran, reused, strict=True)
        )
        said.append(Text(f"indexer runs by layer, {name:<16}{blocks}"))
    return said


def _overlaps(ranks: Sequence[RankState]) -> list[RenderableType]:
    """What the ranks' shadows saw since the pattern was set: all layers, and the worst ten."""
    first = ranks[0]
    if not first.overlap.one_in:
        return []
    found = overlaps(ranks)
    blocks = "".join(
        BLOCKS[ceil(8 * found[layer][0])] if layer in found else "\N{MIDDLE DOT}"
        for layer in range(len(first.index_reuses))
    )
    said: list[RenderableType] = [Text(told_overlap(ranks)), Text(f"overlap by layer: {blocks}")]
    table = Table("worst layers", "overlap", "by score mass", "least", "found with", box=SIMPLE)
    known = dict(enumerate(first.overlap.reference))
    for layer, shares in sorted(found.items(), key=lambda pair: pair[1][0])[:WORST]:
        recall = shares[1] if first.mode == "live" else None
        told = (shares[0], recall, shares[-1], known.get(layer))
        table.add_row(str(layer), *("-" if one is None else f"{one:.1%}" for one in told))
    return [*said, table] if found else said


def overlaps(ranks: Sequence[RankState]) -> dict[int, list[float]]:
    """By layer, over all ranks and lengths: the means of a cell's shares, and the least overlap."""
    cells: dict[int, list[list[float]]] = {}
    for rank in ranks:
        for name, cell in rank.overlap.cells.items():
            cells.setdefault(int(name.partition(" ")[0]), []).append(cell)
    found = {}
    for layer in sorted(cells):
        rows, *sums = (sum(column) for column in list(zip(*cells[layer], strict=True))[:-2])
        found[layer] = [*(each / rows for each in sums), min(cell[-2] for cell in cells[layer])]
    return found


def told_overlap(ranks: Sequence[RankState]) -> str:
    """A sentence on all layers together."""
    found, first = overlaps(ranks), ranks[0]
    if not found:
        return "overlap: no row with more than index_topk tokens was sampled yet"
    overlap, _, *recent, _ = (fmean(column) for column in zip(*found.values(), strict=True))
    held = ", ".join(f"{share:.0%}" for share in recent)
    who, given = "S", "the list they are given"
    if first.mode == "static":
        who, given = "F", "the list of the F layer before"
    known = [share for share in first.overlap.reference if share is not None]
    return (
        f"overlap: {who} layers have {overlap:.0%} of their own selection in common with {given}"
        f"{f', found with {fmean(known):.0%}' if known else ''}; it holds {held} of the last "
        f"{', '.join(map(str, RECENT))} tokens "
        f"({sum(rank.overlap.forwards for rank in ranks):,} forwards sampled)"
    )


def _difference(before: Sequence[RankState], after: Sequence[RankState], counter: str) -> list[int]:
    """By how much a counter of layers has risen over all ranks."""
    then, now = (
        [sum(layer) for layer in zip(*(getattr(one, counter) for one in ranks), strict=True)]
        for ranks in (before, after)
    )
    return [max(0, new - old) for new, old in zip(now, then or [0] * len(now), strict=True)]


def _sum(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: Counter[str] = Counter()
    for counter in counters:
        found.update(counter)
    return dict(found)


def _risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: max(0, number - before.get(name, 0)) for name, number in after.items()}
