"""Report of a server on IndexCache, and the rules by which its answers are believed.

The server writes one :class:`RankState` for each data-parallel rank, and everybody who asks it
reads that. The rules are here once: which servers are alike, whether the layers obeyed a pattern,
and whether an answer was made under the pattern that was asked for.
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
"""The sampling parameter in which SGLang carries what a plugin is told."""

PATTERN_OF_REQUEST = "indexcache_pattern"
"""Where a request to a server names its pattern, in ``custom_params`` of its sampling parameters,
and where an answer says under which it was made, in ``meta_info``, as a list of one."""

SWITCH = f"{PATTERN_OF_REQUEST}="
"""What begins the key by which ``/set_internal_state`` is asked for another pattern."""

STATE = "indexcache"
"""The key of a rank's report in ``/server_info``, below ``internal_states[i]``."""

OTHERS = "others"
"""What comes after the first 100 different patterns of a report's counters, together."""

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
"""What of SGLang's ``/server_info`` can change answers: alike on servers that are compared."""


class RankState(BaseModel):
    """Report of one data-parallel rank, which answers for the ranks and stages behind it.

    Counters only rise while a server runs. They see what a layer's Python does: replays of decode
    graphs do not run it.

    Attributes:
        rank: its number among the data-parallel ranks, which answer in any order.
        pattern: what requests get that name none; that of the shortest prompts, where the prompt's
            length decides.
        policy: the pattern for each prompt length, as ``--indexcache-pattern`` takes it.
        source: who asked for the policy.
        mode: "static", or "live", where every layer keeps its indexer.
        checkpoint_pattern: which layers of the checkpoint have an indexer.
        adapter: the adapter's folder; "" without one.
        adapter_digest: SHA-256 of its weights.
        switches: how often the policy was replaced.
        last_rejection: why the last switch was refused; "" if it was not.
        requests: unfinished requests, running or queued, by pattern.
        stage: the pattern positions whose layers are counted, from and to below: those of the first
            pipeline stage, the only one that reports. None, of an older server, is all.
        forwards: begun so far, of requests.
        mixed_forwards: those of them with requests of several patterns.
        idle_forwards: forwards without a request, in which a rank keeps step with others under
            dp_attention. What layers do in them is not counted.
        indexer_selections: how often each layer's indexer scored keys and selected.
        index_reuses: how often each layer took another layer's indices.
        index_key_writes: how often each layer stored index keys without scoring.
        graph_replays: replays of decode graphs, all under "decode".
        kernel_choices: calls under ``--indexcache-kernels auto`` by operation, kernels and the
            measured row that decided. A decode graph's count while it is captured, as often as
            the capture runs the layers; replays do not.
        tokens: rows forwarded, by phase and pattern, as "prefill FSSS".
        pairs: query-key pairs that indexers scored, or did not because a layer shared, by phase and
            the longest length of the bin of requests, as "decode 32Ki skipped".
        scored_rows: rows of prefills that indexers scored, once a layer, by the rank of attention's
            tensor parallelism; () where these ranks do not split rows.
        selected_rows: rows for which each of these ranks has lists from the same selections.
        rejections: patterns refused so far, as "switch" of the server's or by a "request".
        indexer_seconds: in indexers, by phase and clock ("prefill", "decode", each also with
            "_processor"). On a CPU only: a GPU's kernels run behind the clock.
        index_k_bytes_per_token: of the allocated buffers over this process's layers.
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
        """Layers that run their indexer."""
        return len(Pattern(self.pattern).full_layers)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def shared_layers(self) -> int:
        """Layers that reuse another's indices."""
        return self.pattern.count("S")

    @property
    def rows(self) -> dict[str, int]:
        """Rows (tokens) forwarded so far, by pattern."""
        counts: Counter[str] = Counter()
        for name, count in self.tokens.items():
            counts[name.partition(" ")[2]] += count
        return dict(counts)

    @property
    def counted_layers(self) -> range:
        """The pattern positions that the counters of layers speak of."""
        return range(*(self.stage or (0, len(Pattern(self.pattern)))))

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Architecture, and which layers have an indexer: what no restart may change."""
        return self.architecture, self.checkpoint_pattern

    @classmethod
    def from_json(cls, data: Mapping[str, Any], server: str) -> RankState:
        """Read a rank's report under :data:`STATE`, if it could make one and runs this version."""
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
        """Return numbers, strings, lists and dictionaries, as ``/server_info`` carries them."""
        return self.model_dump(mode="json")


class RunningServer(Protocol):
    """A server as those who watch it see it; ``lab.client.http.Client`` is one."""

    url: str

    def server_info(self) -> dict[str, Any]:
        """Ask for SGLang's ``/server_info``."""

    def states(self) -> list[RankState]:
        """Return IndexCache's report, one entry per data-parallel rank."""


def states_of(info: Mapping[str, Any], server: str) -> list[RankState]:
    """Return the report of every data-parallel rank that runs IndexCache, by their numbers."""
    reports = [rank[STATE] for rank in info.get("internal_states", []) if STATE in rank]
    states = [RankState.from_json(state, server) for state in reports]
    return sorted(states, key=lambda state: state.rank)


def named(pattern: str) -> dict[str, Any]:
    """Return the sampling parameters in which a request names its pattern."""
    return {CUSTOM: {PATTERN_OF_REQUEST: pattern}}


def check_answered_under(info: Mapping[str, Any], pattern: str, server: str) -> None:
    """Refuse an answer that was not made under the pattern asked for, or does not say so.

    Args:
        info: the answer's ``meta_info``.
        pattern: F/S, as the request named it.
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
    """Refuse a server whose layers did not do what the patterns of its requests say.

    A layer that is F for some of the patterns must have run its indexer, and a layer that is S for
    all of them must have reused indices, as far as the layers are in a stage that reports. Prefills
    are counted, replays of decode graphs are not, so some request in between must have been
    prefilled.

    Args:
        patterns: F/S, of all requests between the states before and after.
        alone: whether nobody else used the server and every rank was asked. If so, each rank is
            judged by itself, and no layer that is S for all patterns may have run its indexer.

    Raises:
        ServerUnavailableError: it was restarted in between; ask again.
        ServerError: naming the layers.
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
    if not alone:  # a rank may have had requests of one of the patterns only
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
    """Return the counted ``layers`` that did not do what the patterns of the requests say.

    Args:
        full: layers that are F for some request; the others are S for all.
        runs: by layer, how often its indexer ran; ``reuses``, how often it took another's indices.
        alone: whether nobody else was served. If so, an indexer that ran in an S layer is wrong.
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
    """Return the facts of a server that must be the same on all servers that are compared."""
    values = {name: info[name] for name in ENGINE_FACTS if info.get(name) is not None}
    for state in states_of(info, server)[:1]:
        values |= {
            name: getattr(state, name) for name in ("architecture", "checkpoint_pattern", "mode")
        }
        values["indexcache"] = state.version
    return values


def alike(servers: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """Return each fact that differs: for each of its values, the servers that report it."""
    differing: dict[str, dict[str, list[str]]] = {}
    for fact in sorted({fact for reported in servers.values() for fact in reported}):
        names: dict[str, list[str]] = {}
        for name, reported in servers.items():
            names.setdefault(str(reported.get(fact, "")), []).append(name)
        if len(names) > 1:
            differing[fact] = names
    return differing
