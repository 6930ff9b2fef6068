"""``indexcache server show``: what running servers do, and where they differ.

Whether layers skip as the patterns say is decided by comparing a rank's counters with the patterns
that it served. A layer counts when its Python code runs, so a prefill counts and the replay of a
decode graph does not. Everything is read over HTTP, so neither torch nor SGLang is needed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from rich.console import Console

from sglang_indexcache.errors import ServerError
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.client_rules import alike, disobedient
from sglang_indexcache.serving.operating.drawing import to_terminal
from sglang_indexcache.serving.plan import BACKEND_NAME, CONFIG_KEY
from sglang_indexcache.serving.protocol import OTHERS, STATE, RankState

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
"""Fields that all ranks must agree on, and their names in the message if they do not."""

_COLOURS = {True: "green", False: "red", None: "yellow"}
"""Colours for the line that says whether layers skip; None means not known yet."""

_MOST_RANGES = 6
"""Largest number of layer ranges that are listed; more are given as a count."""


class RunningServer(Protocol):
    """Running server as it is asked here; ``lab.client.http.Client`` implements it."""

    url: str

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's ``/server_info``."""

    def states(self) -> list[RankState]:
        """Return IndexCache's report, one entry per data-parallel rank."""


@dataclass(frozen=True)
class Rank:
    """Report of one data-parallel rank, which also covers its tensor-parallel ranks and stages.

    Attributes:
        name: its server's URL, with the rank's number if there are several.
        sglang: SGLang's version; "" if it was not asked for.
    """

    name: str
    state: RankState
    sglang: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state of this rank under stable names."""
        state, verdict = self.state, judge(self.state)
        copied = {"rank", "version", "mode", "source", "adapter", "policy", "pattern", "requests"}
        copied |= {"kernel_choices"}
        return {
            "server": self.name,
            "sglang": self.sglang,
            **state.model_dump(include=copied),
            "obeyed": verdict.proven,
            "indexers": verdict.text,
            "uncounted": verdict.uncounted,
            "index_k_bytes_per_token": state.index_k_bytes_per_token,
            "index_k": describe_index_keys(state),
            "row_split": describe_row_shares(state),
            "skipped": describe_skipped_work(state),
        }

    def tell(self, console: Console) -> None:
        """Print the rank's state, with its layers last."""
        state, verdict = self.state, judge(self.state)
        _say(console, f"{state.mode} mode, {state.source}", "bold")
        _say(console, verdict.text, _COLOURS[verdict.proven])
        if verdict.uncounted:
            _say(console, verdict.uncounted)
        _say(console, f"index-K: {describe_index_keys(state)}")
        for line in filter(None, (describe_row_shares(state), describe_skipped_work(state))):
            _say(console, line)
        if state.adapter:
            _say(console, f"adapter: {state.adapter}")
        if state.policy != state.pattern:
            shortest = "below, the layers of the shortest prompts"
            _say(console, f"by prompt length: {state.policy}; {shortest}")
        for choice, count in sorted(state.kernel_choices.items()):
            _say(console, f"kernels of {choice}: {count:,} calls")
        for pattern, count in sorted(state.requests.items()):
            _say(console, f"unfinished requests under {pattern}: {count}")
        _say(console, "")
        console.print(to_terminal(Pattern(state.pattern)))


@dataclass
class Survey:
    """Survey of running servers: their ranks, their problems and their differences."""

    ranks: list[Rank] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Whether there is no problem, and no layer disobeyed its pattern."""
        disobeyed = any(judge(rank.state).proven is False for rank in self.ranks)
        return not (self.problems or disobeyed)

    def to_json(self) -> dict[str, Any]:
        """Return the survey under stable names."""
        ranks = [rank.to_json() for rank in self.ranks]
        return {"fine": self.fine, "problems": self.problems, "ranks": ranks}

    def tell(self, console: Console) -> None:
        """Print the survey, with problems last."""
        for rank in self.ranks:
            if len(self.ranks) + len(self.problems) > 1:
                _say(console, rank.name, "bold")
            rank.tell(console)
        for problem in self.problems:
            _say(console, f"problem: {problem}", "red")


def _say(console: Console, line: str, style: str | None = None) -> None:
    console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)


def ask_servers(clients: Sequence[RunningServer]) -> Survey:
    """Ask servers for their state, and check that all ranks run the same plan."""
    servers = Survey()
    for client in clients:
        try:
            _ask(client, servers)
        except ServerError as error:
            servers.problems.append(str(error))
    servers.problems += _differences(servers.ranks)
    return servers


def _ask(client: RunningServer, servers: Survey) -> None:
    info = client.server_info()
    if lacking := {"internal_states", "version"} - info.keys():
        raise ServerError(
            f"{client.url} does not answer /server_info as an SGLang server (it has no "
            f"{' and '.join(sorted(lacking))}): give each server's own URL, not a router's"
        )
    launched = CONFIG_KEY in json.loads(info.get("json_model_override_args") or "{}")
    reports = [state.get(STATE) or {} for state in info["internal_states"]]
    # Ranks answer in any order; those that do not report a number get the remaining numbers.
    rest = iter({*range(len(reports))} - {report.get("rank") for report in reports})
    numbered = [(report["rank"] if "rank" in report else next(rest), report) for report in reports]
    for number, report in sorted(numbered, key=lambda rank: rank[0]):
        name = f"{client.url} rank {number}" if len(reports) > 1 else client.url
        if not report:
            servers.problems.append(_missing(name, launched=launched))
            continue
        try:
            state = RankState.from_json(report, name)
        except ServerError as error:
            servers.problems.append(str(error))
        else:
            servers.ranks.append(Rank(name, state, info["version"]))


def _missing(name: str, *, launched: bool) -> str:
    """Return why a rank reports nothing; ``launched`` says whether its launcher had a plan."""
    if not launched:
        return f"{name} does not run IndexCache. Start it with --attention-backend {BACKEND_NAME}"
    return (
        f"{name} was started with IndexCache, but its worker did not load the plugin: in live "
        "mode every layer runs its indexer there. The worker's log says why; look for an error at "
        "its start, SGLANG_PLUGINS, or another Python environment on its node"
    )


def _differences(ranks: Sequence[Rank]) -> list[str]:
    """Return a sentence for each field of :data:`ALIKE` in which ranks differ."""
    facts = {
        rank.name: {"sglang": rank.sglang, **rank.state.model_dump(include=set(ALIKE))}
        for rank in ranks
    }
    differing = alike(facts)
    sentences = []
    for fact in [fact for fact in ALIKE if fact in differing]:
        values = differing[fact].items()
        who = "; ".join(f"{value} on {', '.join(where)}" for value, where in values)
        sentences.append(f"they differ in {ALIKE[fact]} ({who})")
    return sentences


@dataclass(frozen=True)
class SkipVerdict:
    """Verdict from a rank's counters, and what they cannot see.

    Attributes:
        proven: whether every layer did what the patterns say; None while nothing was counted, or if
            the rank does not name every pattern that it served.
        text: the verdict, in a sentence.
        uncounted: forwards or layers that the counters do not see; empty if they see all.
    """

    proven: bool | None
    text: str
    uncounted: str = ""


def judge(state: RankState) -> SkipVerdict:
    """Judge whether a rank's layers did what its served patterns say."""
    runs, reuses, layers = state.indexer_selections, state.index_reuses, state.counted_layers
    counted = max((runs[layer] + reuses[layer] for layer in layers), default=0)
    if not counted:
        return SkipVerdict(None, "not known yet, for no forward was counted. Send a request.")
    if state.mode == "live" and (not state.rows or OTHERS in state.rows):
        return SkipVerdict(
            None, "not known, for the rank does not name every pattern that it served"
        )
    wrong = disobedient(_full_layers(state), runs, reuses, layers)
    kinds = sorted({runs[layer] for layer in layers}, reverse=True)
    shares = [
        f"{kind:,} of {counted:,} {'forwards ' if kind == kinds[0] else ''}in "
        f"{_layers(layer for layer in layers if runs[layer] == kind)}"
        for kind in kinds
    ]
    text = f"indexer ran {', '.join(shares)}: "
    if wrong:
        text += f"NOT OK, for {_layers(wrong)} did not do what the pattern says"
    else:
        text += "OK"
    if state.mode == "live":
        text += " (since the server started, under every pattern that it had)"
    return SkipVerdict(not wrong, text, _uncounted(state, counted))


def describe_index_keys(state: RankState) -> str:
    """Return a line with the index-K bytes per token, beside those of plain DSA.

    In live mode both are the same, because every layer stores its keys.
    """
    pattern, plain = Pattern(state.pattern), Pattern(state.checkpoint_pattern)
    if state.mode == "live":
        pattern = plain
    here = state.counted_layers
    layers, all_layers = (sum(map(each.is_full, here)) for each in (pattern, plain))
    stored = state.index_k_bytes_per_token
    text = f"{stored:,} bytes per token"
    if layers:
        text += f"; plain DSA: {stored * all_layers // layers:,}"
    return text + (" (in the layers of one pipeline stage)" if len(here) < len(plain) else "")


def describe_row_shares(state: RankState) -> str:
    """Return a line with the share of rows that this rank scored; "" without a row split."""
    if not state.scored_rows:
        return ""
    ranks = len(state.scored_rows)
    if not state.selected_rows:
        return f"row split over {ranks} ranks: no prefill was scored yet"
    shares = ", ".join(f"{rows / state.selected_rows:.0%}" for rows in state.scored_rows)
    return f"row split over {ranks} ranks: their indexers scored {shares} of the prefills' rows"


def describe_skipped_work(state: RankState) -> str:
    """Return a line with the share of query-key pairs that sharing skipped; "" before any pairs."""
    pairs: Counter[str] = Counter()
    for name, count in state.pairs.items():
        pairs[name.rpartition(" ")[2]] += count
    if not pairs.total():
        return ""
    return f"skipped {pairs['skipped'] / pairs.total():.1%} of the indexers' work so far"


def _full_layers(state: RankState) -> set[int]:
    """Return the layers that are F in some pattern that was served; static mode has only one."""
    every = state.rows or {state.pattern}
    return {layer for pattern in every for layer in Pattern(pattern).full_layers}


def _uncounted(state: RankState, counted: int) -> str:
    if len(state.counted_layers) < len(Pattern(state.pattern)):
        return "the other layers are in pipeline stages that do not report"
    if missing := max(0, state.forwards - counted):
        replayed = min(missing, sum(state.graph_replays.values()))
        why = {
            "replayed CUDA graphs": replayed,
            "attended densely, as short prompts do on GPUs": missing - replayed,
        }
        text = " and ".join(f"{times:,} {what}" for what, times in why.items() if times)
        return f"of {state.forwards:,} forwards {text}, in which layers cannot be counted"
    if counted > state.forwards:
        return (
            "more than the forwards were counted: captures of prefill graphs and the halves of an "
            "overlapped batch count too"
        )
    return ""


def _layers(layers: Iterable[int]) -> str:
    """Return text such as ``layers 0-2 and 5``, or a count if there are many ranges."""
    numbers: Sequence[int] = sorted(layers)
    pieces = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    ]
    if len(pieces) > _MOST_RANGES:
        return f"{len(numbers)} layers"
    ranges = [f"{piece[0]}-{piece[-1]}" if len(piece) > 1 else str(piece[0]) for piece in pieces]
    text = " and ".join([", ".join(ranges[:-1]), ranges[-1]] if len(ranges) > 1 else ranges)
    return f"layer {text}" if len(numbers) == 1 else f"layers {text}"
