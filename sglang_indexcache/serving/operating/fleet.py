"""``server doctor --url``: what servers that run say of themselves, and where they differ.

It only asks over HTTP, so it needs neither torch nor SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_indexcache.errors import ServerError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.plan import BACKEND_NAME, CONFIG_KEY
from sglang_indexcache.serving.protocol import STATE, RankState, RunningServer, alike

ALIKE = {
    "sglang": "SGLang's version. Install the same one everywhere.",
    "version": "sglang-indexcache's version. Install the same one everywhere.",
    "architecture": "the model. These servers do not belong together.",
    "checkpoint_pattern": "the checkpoint's own sharing. These servers do not belong together.",
    "mode": "the mode. Start all of them with the same --indexcache-mode.",
    "policy": "the pattern. Start all of them with the same --indexcache-pattern, or in live mode "
    "give each the same with: indexcache server set. Prefill and decode nodes that differ exchange "
    "a KV cache that is wrong for one of them.",
    "adapter_digest": "the adapter. Start all of them with the same --indexcache-adapter.",
}
"""What every rank must say alike, and what it is that differs if they do not."""


@dataclass(frozen=True)
class Rank:
    """Report of one data-parallel rank, for the tensor-parallel ranks and stages behind it too.

    Attributes:
        name: its server's URL, and its number where there are several.
        role: prefill, decode or both.
        sglang: SGLang's version.
        state: IndexCache's report, or what is wrong where there is none.
    """

    name: str
    role: str
    sglang: str
    state: RankState | str

    def to_json(self) -> dict[str, Any]:
        """Return what it runs; null where it does not say."""
        names = ("version", "mode", "pattern")
        about = None if isinstance(self.state, str) else self.state
        fields = {name: getattr(about, name, None) for name in names}
        return {"name": self.name, "serves": self.role, "sglang": self.sglang, **fields}


@dataclass
class Fleet:
    """State of several servers, and where they differ."""

    ranks: list[Rank]
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, by names that stay."""
        return {
            "fine": not self.problems,
            "problems": self.problems,
            "ranks": [rank.to_json() for rank in self.ranks],
        }

    def tell(self, console: Console) -> None:
        """Print it, the problems last."""
        if self.ranks:
            console.print(_table(self.ranks))
        for problem in self.problems:
            text = f"[red]problem[/red]: {escape(problem)}"
            console.print(text, soft_wrap=True, highlight=False)
        if not self.problems:
            console.print("[green]no problem found[/green]")


def examine_servers(servers: Sequence[RunningServer]) -> Fleet:
    """Ask servers whether all their ranks run the same plan."""
    try:
        ranks = [rank for server in servers for rank in _ranks(server)]
    except ServerError as error:
        return Fleet([], [str(error)])
    problems = [rank.state for rank in ranks if isinstance(rank.state, str)]
    return Fleet(ranks, problems + _differences(ranks))


def _ranks(server: RunningServer) -> list[Rank]:
    info = server.server_info()
    states = info["internal_states"]
    launched = CONFIG_KEY in json.loads(info.get("json_model_override_args") or "{}")
    role = info.get("disaggregation_mode") or "null"
    reports = [state.get(STATE) or {} for state in states]
    # They answer in the order in which they come; those that do not say their number have the rest.
    rest = iter({*range(len(states))} - {report.get("rank") for report in reports})
    numbered = [(report["rank"] if "rank" in report else next(rest), report) for report in reports]
    ranks = []
    for number, ours in sorted(numbered, key=lambda rank: rank[0]):
        name = f"{server.url} rank {number}" if len(states) > 1 else server.url
        state: RankState | str = _missing(name, launched=launched)
        try:
            state = RankState.from_json(ours, name) if ours else state
        except ServerError as error:
            state = str(error)
        ranks.append(Rank(name, "both" if role == "null" else role, info["version"], state))
    return ranks


def _table(ranks: Sequence[Rank]) -> Table:
    table = Table("server", "serves", "SGLang", "plugin", "mode", "pattern", box=SIMPLE)
    table.columns[0].overflow = "fold"
    for rank in ranks:
        if isinstance(state := rank.state, str):
            table.add_row(rank.name, rank.role, "", "not at work", "", "")
            continue
        pattern = Pattern(state.pattern)
        about = (rank.sglang, state.version, state.mode)
        table.add_row(rank.name, rank.role, *about, f"{pattern}\n{pattern.summary()}")
    return table


def _missing(name: str, *, launched: bool) -> str:
    """Say why a rank reports nothing, whose launcher had the plugin and wanted IndexCache."""
    if not launched:
        return f"{name} does not run IndexCache. Start it with --attention-backend {BACKEND_NAME}"
    return (
        f"{name} was started with IndexCache, but its worker did not load the plugin: in live "
        "mode every layer runs its indexer there. The worker's log says why; look for an error at "
        "its start, SGLANG_PLUGINS, or another Python environment on its node"
    )


def _differences(ranks: Sequence[Rank]) -> list[str]:
    """Return a sentence for each of :data:`ALIKE` that is not the same everywhere."""
    facts = {
        rank.name: {"sglang": rank.sglang, **rank.state.model_dump(include=set(ALIKE))}
        for rank in ranks
        if isinstance(rank.state, RankState)
    }
    differing = alike(facts)
    sentences = []
    for fact in [fact for fact in ALIKE if fact in differing]:
        values = differing[fact].items()
        who = "; ".join(f"{value} on {', '.join(where)}" for value, where in values)
        sentences.append(f"they differ in {ALIKE[fact]} ({who})")
    return sentences
