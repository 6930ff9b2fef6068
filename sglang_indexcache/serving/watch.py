"""``indexcache server watch``: what sharing does on a running server, now and since its start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_indexcache.ask.client import Client
from sglang_indexcache.ask.protocol import RankState

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
    total = {name: _sum(getattr(rank, name) for rank in after) for name in ("pairs", "tokens")}
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
        _patterns(since["tokens"], total["tokens"], _sum(r.requests for r in after), seconds),
        *_layers(before, after),
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
    now, every = (_by_pattern(tokens) for tokens in (since, total))
    for pattern in dict.fromkeys([*every, *requests]):
        rate = f"{now[pattern] / seconds:,.0f}" if seconds else "-"
        table.add_row(pattern, rate, f"{every[pattern]:,}", str(requests.get(pattern, 0)))
    return table


def _by_pattern(tokens: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, number in tokens.items():
        found[name.partition(" ")[2]] += number
    return found


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
