"""A server's report on IndexCache, and the rules by which its answers are believed.

The server writes one :class:`RankState` for each data-parallel rank, and every client reads it. The
rules are defined only here: which servers are alike, whether layers obeyed a pattern, and whether
an answer was made under the requested pattern.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from sglang_indexcache import __version__
from sglang_indexcache.errors import ServerError, ServerUnavailableError
from sglang_indexcache.pattern import Pattern

CUSTOM = "custom_params"
"""Sampling parameter in which SGLang carries data for plugins."""

PATTERN_OF_REQUEST = "indexcache_pattern"
"""Key by which a request names its pattern, in ``custom_params`` of its sampling parameters, and by
which an answer names its pattern, in ``meta_info``, as a list of one."""

SWITCH = f"{PATTERN_OF_REQUEST}="
"""Prefix of the key with which ``/set_internal_state`` is asked for another pattern."""

STATE = "indexcache"
"""Key of a rank's report in ``/server_info``, below ``internal_states[i]``."""

OTHERS = "others"
"""Label under which a report counts all patterns after the first 100."""

ENGINE_FACTS = (
    "model_path",
    "version",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tp_size",
    "dp_size",
    "pp_size",
    "ep_size",
    "enable_dp_attention",
    "page_size",
    "chunked_prefill_size",
    "disable_radix_cache",
    "enable_deterministic_inference",
    "speculative_algorithm",
    "moe_runner_backend",
    "sampling_backend",
    "device",
)
"""Fields of SGLang's ``/server_info`` that can change answers, so compared servers must agree on
them."""


class RankState(BaseModel):
    """Report of one data-parallel rank, on behalf of its tensor-parallel ranks and pipeline stages.

    Counters only rise while a server runs. They count when a layer's Python code runs, which a
    replay of a decode graph does not do.

    Attributes:
        rank: its number among the data-parallel ranks, which answer in any order.
        pattern: the pattern for requests that name none; if prompt length decides, that of the
            shortest prompts.
        policy: the pattern for each prompt length, as ``--indexcache-pattern`` takes it.
        source: who asked for the policy.
        mode: "static", or "live", where every layer keeps its indexer.
        checkpoint_pattern: which layers of the checkpoint have an indexer.
        adapter: the adapter's folder; "" without one.
        adapter_digest: SHA-256 of its weights.
        switches: how often the policy was replaced.
        last_rejection: why the last switch was refused; "" if it was not.
        requests: number of unfinished requests, running or queued, by pattern.
        stage: range of the pattern positions whose layers are counted, without its end. These are
            the layers of the first pipeline stage, the only one that reports. None, from an older
            server, stands for all layers.
        forwards: number of forwards with requests that have begun.
        mixed_forwards: number of these forwards whose requests had several patterns.
        idle_forwards: number of forwards without a request, in which a rank keeps step with others
            under dp_attention. The work of layers in these is not counted.
        indexer_selections: how often each layer's indexer scored keys and selected.
        index_reuses: how often each layer took another layer's indices.
        index_key_writes: how often each layer stored index keys without scoring.
        graph_replays: replays of decode graphs, all under "decode".
        kernel_choices: calls under ``--indexcache-kernels auto`` by operation, kernels and the
            measured row that decided. Calls in a decode graph count when it is captured, as often
            as the capture runs the layers; replays do not count.
        tokens: number of rows forwarded, by phase and pattern, as in "prefill FSSS".
        pairs: number of query-key pairs that indexers scored, or skipped because a layer shared, by
            phase and the bin of the request's length, as in "decode 32Ki skipped".
        scored_rows: number of prefill rows that indexers scored, counted once per layer, by the
            rank of attention's tensor parallelism; () if these ranks do not split rows.
        selected_rows: number of rows for which each of these ranks got lists from the same
            selections.
        rejections: number of refused patterns, of a "switch" or of a "request".
        indexer_seconds: seconds in indexers, by phase and clock ("prefill", "decode", each also
            with "_processor"). Measured only on a CPU, because a GPU's kernels run asynchronously.
        index_k_bytes_per_token: size of the allocated index-K buffers of this process's layers, per
            token.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: str
    rank: int = 0
    pattern: str
    policy: str
    source: str
    mode: Literal["static", "live"]
    architecture: str
    checkpoint_pattern: str
    adapter: str = ""
    adapter_digest: str = ""
    switches: int = 0
    last_rejection: str = ""
    requests: dict[str, int] = {}
    stage: tuple[int, int] | None = None
    forwards: int = 0
    mixed_forwards: int = 0
    idle_forwards: int = 0
    indexer_selections: list[int]
    index_reuses: list[int]
    index_key_writes: list[int]
    graph_replays: dict[str, int] = {}
    kernel_choices: dict[str, int] = {}
    tokens: dict[str, int] = {}
    pairs: dict[str, int] = {}
    scored_rows: tuple[int, ...] = ()
    selected_rows: int = 0
    rejections: dict[str, int] = {}
    indexer_seconds: dict[str, float] = {}
    index_k_bytes_per_token: int = 0

    @computed_field  # type: ignore[prop-decorator]
    @property
    def full_layers(self) -> int:
        """Layers that run their indexer under the pattern."""
        return len(Pattern(self.pattern).full_layers)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shared_layers(self) -> int:
        """Layers that reuse another layer's indices under the pattern."""
        return self.pattern.count("S")

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows (tokens) forwarded so far, by pattern."""
        counts: Counter[str] = Counter()
        for name, count in self.tokens.items():
            counts[name.partition(" ")[2]] += count
        return dict(counts)

    @property
    def counted_layers(self) -> range:
        """Pattern positions that the counters of layers cover."""
        return range(*(self.stage or (0, len(Pattern(self.pattern)))))

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Architecture, and which layers have an indexer: facts that no restart may change."""
        return self.architecture, self.checkpoint_pattern

    @classmethod
    def from_json(cls, data: Mapping[str, Any], server: str) -> RankState:
        """Read a rank's report under :data:`STATE`; refuse an error report or another version's."""
        if "error" in data:
            raise ServerError(
                f"{server} cannot say what IndexCache does: {data['error']}. Its log has the "
                "details."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            fields = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
            raise ServerError(
                f"{server} reports a state that this version cannot read ({fields}): it runs "
                f"sglang-indexcache {data.get('version', 'of unknown version')}, this is "
                f"{__version__}. Install the same on both sides."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return the report as numbers, strings, lists and dictionaries for ``/server_info``."""
        return self.model_dump(mode="json")


class RunningServer(Protocol):
    """Interface of a running server for its clients; ``lab.client.http.Client`` implements it."""

    url: str

    def server_info(self) -> dict[str, Any]:
        """Return SGLang's ``/server_info``."""

    def states(self) -> list[RankState]:
        """Return IndexCache's report, one entry per data-parallel rank."""


def states_of(info: Mapping[str, Any], server: str) -> list[RankState]:
    """Return the reports of all data-parallel ranks that run IndexCache, ordered by rank number."""
    reports = [rank[STATE] for rank in info.get("internal_states", []) if STATE in rank]
    states = [RankState.from_json(state, server) for state in reports]
    return sorted(states, key=lambda state: state.rank)


def named(pattern: str) -> dict[str, Any]:
    """Return the sampling parameters by which a request names its pattern."""
    return {CUSTOM: {PATTERN_OF_REQUEST: pattern}}


def check_answered_under(info: Mapping[str, Any], pattern: str, server: str) -> None:
    """Refuse an answer that was not made under the requested pattern, or does not name its pattern.

    Args:
        info: the answer's ``meta_info``.
        pattern: the F/S string that the request named.
    """
    if (reported := info.get(PATTERN_OF_REQUEST)) == [pattern]:
        return
    claim = f"under {reported[0]}" if reported else "without saying under which pattern"
    raise ServerError(
        f"{server} was asked for pattern {pattern} and answered {claim}. Does it run another "
        "version of sglang-indexcache? Install the same on both sides; `indexcache server show` "
        "says what is wrong with its plugin."
    )


def check_obeyed(
    before: Sequence[RankState],
    after: Sequence[RankState],
    patterns: Iterable[str],
    server: str,
    *,
    alone: bool = False,
) -> None:
    """Refuse a server whose layers did not do what its requests' patterns say.

    A layer that is F in some of the patterns must have run its indexer, and a layer that is S in
    all of them must have reused indices. Only layers of a stage that reports are judged. Prefills
    are counted and replays of decode graphs are not, so a request must have been prefilled between
    the two states.

    Args:
        patterns: F/S strings of all requests between the two states.
        alone: whether nobody else used the server and every rank was asked. If so, each rank is
            judged by itself, and no layer that is S in all patterns may have run its indexer.

    Raises:
        ServerUnavailableError: the server was restarted in between; ask again.
        ServerError: names the layers that disobeyed.
    """
    names = sorted(set(patterns))
    full = {layer for name in names for layer in Pattern(name).full_layers}
    then = {state.rank: state for state in before}
    if then.keys() != {state.rank for state in after} or any(
        state.forwards < then[state.rank].forwards for state in after
    ):
        raise ServerUnavailableError(f"{server} was restarted meanwhile: it counts anew")
    pairs = [(then[state.rank], state) for state in after]
    ran = [_risen(old.indexer_selections, new.indexer_selections) for old, new in pairs]
    reused = [_risen(old.index_reuses, new.index_reuses) for old, new in pairs]
    if not alone:  # a rank may have had requests of only one of the patterns
        ran, reused = [_total(ran)], [_total(reused)]
    for runs, reuses in zip(ran, reused, strict=True):
        if wrong := disobedient(full, runs, reuses, after[0].counted_layers, alone=alone):
            hint = ", or others use the server" if alone else ""
            raise ServerError(
                f"{server} ignores the pattern: asked for {' and '.join(names)}, its layers "
                f"{', '.join(map(str, wrong))} did not do what that says (indexer runs by layer: "
                f"{runs}; reuses: {reuses}){hint}. Ask `indexcache server show` what is "
                "wrong with its plugin."
            )


def disobedient(
    full: Set[int],
    runs: Sequence[int],
    reuses: Sequence[int],
    layers: Iterable[int],
    *,
    alone: bool = True,
) -> list[int]:
    """Return the counted ``layers`` that did not do what the requests' patterns say.

    Args:
        full: layers that are F for some request; all others are S for every request.
        runs: how often each layer's indexer ran; ``reuses`` is how often it reused indices.
        alone: whether nobody else was served. If so, an S layer's indexer must not have run.
    """
    return [
        layer
        for layer in layers
        if (not runs[layer] if layer in full else not reuses[layer] or (alone and runs[layer]))
    ]


def _risen(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [new - old for old, new in zip(before, after, strict=True)]


def _total(ranks: Sequence[Sequence[int]]) -> list[int]:
    return [sum(layer) for layer in zip(*ranks, strict=True)]


def facts(info: Mapping[str, Any], server: str) -> dict[str, Any]:
    """Return the facts about a server that must be the same on all servers of a comparison."""
    values = {name: info[name] for name in ENGINE_FACTS if info.get(name) is not None}
    for state in states_of(info, server)[:1]:
        values |= {
            name: getattr(state, name) for name in ("architecture", "checkpoint_pattern", "mode")
        }
        values["indexcache"] = state.version
    return values


def alike(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return the facts that differ, each with the servers that report each of its values."""
    differing: dict[str, dict[str, list[str]]] = {}
    for fact in sorted({fact for reported in servers.values() for fact in reported}):
        names: dict[str, list[str]] = {}
        for name, reported in servers.items():
            names.setdefault(str(reported.get(fact, "")), []).append(name)
        if len(names) > 1:
            differing[fact] = names
    return differing
