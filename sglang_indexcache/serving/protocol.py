"""A server's report on IndexCache, and the keys by which requests name their patterns.

The server writes one :class:`RankState` for each data-parallel rank, and every client reads it.
``serving/client_rules.py`` has the rules by which clients believe what a server says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from sglang_indexcache import __version__
from sglang_indexcache.errors import ServerError
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


def states_of(info: Mapping[str, Any], server: str) -> list[RankState]:
    """Return the reports of all data-parallel ranks that run IndexCache, ordered by rank number."""
    reports = [rank[STATE] for rank in info.get("internal_states", []) if STATE in rank]
    states = [RankState.from_json(state, server) for state in reports]
    return sorted(states, key=lambda state: state.rank)


def named(pattern: str) -> dict[str, Any]:
    """Return the sampling parameters by which a request names its pattern."""
    return {CUSTOM: {PATTERN_OF_REQUEST: pattern}}
