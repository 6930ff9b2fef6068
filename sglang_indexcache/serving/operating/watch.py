"""``indexcache server watch``: what sharing does on a running server, now and since its start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import ceil
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_indexcache.serving.protocol import RankState, RunningServer

BLOCKS = " ▁▂▃▄▅▆▇█"
"""From never to always."""

MARGIN = 39
"""Columns before those of layers."""


def watch(
    server: RunningServer, seconds: float, console: Console, times: int | None = None
) -> None:
    """Show a server until the user interrupts, or ``times`` times, every so many seconds.

    Raises:
        ServerError: it does not answer, or cannot say what it does.
    """
    before, then = server.states(), time.monotonic()
    with Live(frame(before, before, 0.0), console=console, auto_refresh=False) as live:
        for _ in count() if times is None else range(times):
            time.sleep(seconds)
            after, now = server.states(), time.monotonic()
            live.update(frame(before, after, now - then), refresh=True)
            before, then = after, now


def frame(
    before: Sequence[RankState], after: Sequence[RankState], seconds: float
) -> RenderableType:
    """Draw all ranks together, from their states now and so many seconds before."""
    state = after[0]
    pairs, rows = _sum(rank.pairs for rank in after), _sum(rank.rows for rank in after)
    new_pairs, new_rows = pairs - _sum(r.pairs for r in before), rows - _sum(r.rows for r in before)
    switches = sum(rank.switches for rank in after)
    refused = _sum(rank.rejections for rank in after)
    return Group(
        Text(f"{state.mode} mode, {len(after)} rank{'s' * (len(after) > 1)}: {state.policy}"),
        Text(f"from {state.source}", style="dim"),
        Text(
            f"switched {switches} times, refused "
            + (", ".join(f"{n} by {who}" for who, n in sorted(refused.items())) or "nothing")
        ),
        _work(new_pairs, pairs),
        _patterns(new_rows, rows, _sum(r.requests for r in after), seconds),
        *_layers(before, after),
    )


def _work(since: Counter[str], total: Counter[str]) -> Table:
    """Show the share of query-key pairs that were skipped, for each phase and bin of lengths."""
    table = Table("indexer work skipped", "now", "since the start", box=SIMPLE)
    bins = dict.fromkeys(name.rpartition(" ")[0] for name in total)
    for name in bins:
        phase, _, length = name.partition(" ")
        up_to = "longer" if length == "more" else f"up to {length} tokens"
        table.add_row(f"{phase}, {up_to}", _skipped(since, [name]), _skipped(total, [name]))
    table.add_row("all", _skipped(since, bins), _skipped(total, bins), style="bold")
    return table


def _skipped(pairs: Counter[str], names: Iterable[str]) -> str:
    scored, skipped = (sum(pairs[f"{n} {kind}"] for n in names) for kind in ("scored", "skipped"))
    return f"{skipped / (scored + skipped):.1%}" if scored + skipped else "-"


def _patterns(
    since: Counter[str], total: Counter[str], requests: Counter[str], seconds: float
) -> Table:
    table = Table("pattern", "tokens a second", "tokens", "unfinished requests", box=SIMPLE)
    for pattern in dict.fromkeys([*total, *requests]):
        rate = f"{since[pattern] / seconds:,.0f}" if seconds else "-"
        table.add_row(pattern, rate, f"{total[pattern]:,}", str(requests[pattern]))
    return table


def _layers(before: Sequence[RankState], after: Sequence[RankState]) -> Iterator[Text]:
    """Show each layer's letter, and a block for how often its indexer ran outside of graphs."""
    yield Text(f"{'pattern by layer':<{MARGIN}}{after[0].pattern}")
    for name, earlier in (("now", before), ("since the start", ())):
        ran, reused = (
            _sum(dict(enumerate(getattr(rank, counter))) for rank in after)
            - _sum(dict(enumerate(getattr(rank, counter))) for rank in earlier)
            for counter in ("indexer_selections", "index_reuses")
        )
        shares = {layer: ran[layer] / times for layer, times in (ran + reused).items()}
        yield Text(f"{f'indexer runs by layer, {name}':<{MARGIN}}{_blocks(shares, after[0])}")


def _blocks(shares: Mapping[int, float], state: RankState) -> str:
    """Draw a block for each layer, a dot where nothing is known."""
    layers = range(len(state.index_reuses))
    return "".join(BLOCKS[ceil(8 * shares[n])] if n in shares else "\N{MIDDLE DOT}" for n in layers)


def _sum(counters: Iterable[Mapping[Any, int]]) -> Counter[Any]:
    """Add counters.

    In the difference of two such sums what has fallen is left out: the server was restarted.
    """
    total: Counter[Any] = Counter()
    for counter in counters:
        total.update(counter)
    return total
