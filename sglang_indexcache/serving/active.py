"""The pattern of requests that name none, and what the layers did so far.

One :class:`ActivePattern` per process: all attention backends read it, and in live mode its policy
can be replaced for the requests to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from sglang_indexcache import __version__
from sglang_indexcache.ask.protocol import OTHERS, Overlaps, RankState
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.settings import Plan
from sglang_indexcache.serving.traffic import LENGTHS, Served, Traffic, apart, phase_of, served_in

_MOST_APART = 200
"""Different sets of patterns that are counted each by itself. Requests may name any
pattern, and the report that holds them is read again and again."""


@dataclass
class Counters:
    """How often each pattern position did what since the start. They never go back to 0.

    CUDA graph replays are forwards, but run no layer's Python, so layers do not count them.

    Attributes:
        forwards: forwards begun.
        mixed_forwards: those with requests of several patterns.
        forwards_under: forwards by the patterns in them, sorted and joined by "+"; what comes after
            so many different ones is counted together, as ``OTHERS``.
        selections: times the layer's indexer scored keys and selected.
        reuses: times the layer took another layer's indices.
        key_writes: times the layer stored index keys without scoring (live mode, S layers).
        graphs: replays of decode graphs, by label, where there are several of a batch size.
        indexer_seconds: in indexers, by phase and clock ("prefill", "decode", and each with
            "_processor" for this thread's processor time). The CPU platform only: a GPU's kernels
            run behind the clock.
    """

    forwards: int = 0
    mixed_forwards: int = 0
    forwards_under: Counter[str] = field(default_factory=Counter)
    selections: list[int] = field(default_factory=list)
    reuses: list[int] = field(default_factory=list)
    key_writes: list[int] = field(default_factory=list)
    graphs: Counter[str] = field(default_factory=Counter)
    indexer_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("prefill", "prefill_processor", "decode", "decode_processor"), 0.0
        )
    )

    @classmethod
    def for_layers(cls, count: int) -> Counters:
        """Zeros for ``count`` pattern positions."""
        return cls(selections=[0] * count, reuses=[0] * count, key_writes=[0] * count)


class ActivePattern:
    """The plan of this process with its current policy.

    Attributes:
        policy: the pattern for each prompt length.
        source: who asked for it.
        is_counting: not while a decode graph is captured, which serves nobody.
        traffic: what the forwards were, by lengths.
        shadow: what a sample of them says of the overlap of lists.
    """

    def __init__(self, plan: Plan) -> None:
        from sglang_indexcache.serving.shadow import Shadow  # torch: only workers need it

        self.plan = plan
        self.policy = plan.policy
        self.source = plan.source
        self.adapted = bool(plan.adapter)
        self.is_counting = True
        self.switches = 0
        self.last_rejection = ""
        self.counters = Counters.for_layers(len(plan.pattern))
        self.traffic = Traffic()
        self.shadow = Shadow(plan)
        self._positions = {layer: i for i, layer in enumerate(plan.layer_ids)}

    @property
    def reference(self) -> tuple[float | None, ...]:
        """By layer, the overlap beyond chance that the pattern in effect was found with, or ().

        Only of the layers that a shadow compares in this mode.
        """
        plan = self.plan
        if self.policy.patterns != (plan.pattern,):
            return ()
        compared = plan.pattern.full_layers if plan.mode == "static" else plan.pattern.shared_layers
        return tuple(
            share if layer in compared and plan.own.is_full(layer) else None
            for layer, share in enumerate(plan.overlap)
        )

    @property
    def pattern(self) -> Pattern:
        """The policy's pattern; that of the shortest prompts, where length decides."""
        return self.policy.patterns[0]

    def position(self, layer: int) -> int:
        """Pattern position of the model's layer ``layer``."""
        return self._positions[layer]

    def count_batch(self, batch: Any) -> None:
        """A forward of SGLang's ``batch``, which is whole, has begun."""
        live = self.plan.mode == "live" and batch.rids
        served = served_in(batch, batch.rids.patterns if live else (), self.pattern)
        self.count_forward(phase_of(batch), served)
        is_plain = self.is_counting and getattr(batch, "spec_info", None) is None
        self.shadow.begin(served if is_plain else (), self.policy.patterns, self.traffic.topk)

    def count_forward(self, phase: str, served: Sequence[Served]) -> None:
        """A forward of these requests has begun, in ``phase``; an idle rank has none."""
        if not self.is_counting:
            return
        counters, names = self.counters, sorted({str(pattern) for pattern, *_ in served})
        counters.forwards += 1
        if names:
            counters.mixed_forwards += len(names) > 1
            under = counters.forwards_under
            under[apart("+".join(names), under, _MOST_APART, OTHERS)] += 1
        self.traffic.count(phase, served)

    def count_selection(self, layer: int) -> None:
        """The indexer of ``layer`` scored keys and selected."""
        self.counters.selections[self.position(layer)] += self.is_counting

    def count_reuse(self, layer: int) -> None:
        """``layer`` attended to another layer's indices."""
        self.counters.reuses[self.position(layer)] += self.is_counting

    def count_key_write(self, layer: int) -> None:
        """``layer`` stored index keys without scoring any."""
        self.counters.key_writes[self.position(layer)] += self.is_counting

    def count_graph(self, label: str) -> None:
        """A batch replays the decode graph ``label``."""
        self.counters.graphs[label] += 1

    def count_indexer_time(self, phase: str, wall: float, processor: float) -> None:
        """An indexer took so many seconds in ``phase`` (prefill or decode), whatever it did."""
        self.counters.indexer_seconds[phase] += wall
        self.counters.indexer_seconds[f"{phase}_processor"] += processor

    def replace(self, policy: Policy, source: str, *, adapted: bool = False) -> None:
        """Let ``policy`` decide for the requests to come; its patterns have been checked.

        Args:
            policy: the new one.
            source: where it came from, in words.
            adapted: whether the adapter's indexers are in effect, not the checkpoint's.
        """
        self.policy, self.source, self.adapted = policy, source, adapted
        self.switches += 1

    def overlaps(self) -> Overlaps:
        """What the shadow saw since the policy was set."""
        shadow = self.shadow
        sums, _, leasts = shadow.read()
        cells = {
            f"{layer} {length}": sums[layer][place] + leasts[layer][place]
            for layer in range(len(sums))
            for place, length in enumerate(LENGTHS)
            if sums[layer][place][0] and shadow.patterns == self.policy.patterns
        }
        return Overlaps(
            one_in=shadow.one_in, forwards=shadow.forwards, cells=cells, reference=self.reference
        )

    def report(
        self,
        *,
        rank: int = 0,
        requests: Mapping[str, int] | None = None,
        stage: tuple[int, int] | None = None,
        index_k_bytes_per_token: int = 0,
        indexer_weight_bytes: Mapping[str, int] | None = None,
    ) -> RankState:
        """What ``/server_info`` says of this rank.

        Args:
            rank: its number among the data-parallel ranks.
            requests: unfinished ones by pattern.
            stage: the pattern positions of this process, from and to below; by default all.
            index_k_bytes_per_token: as allocated.
            indexer_weight_bytes: by layer number.
        """
        counters = self.counters
        return RankState(
            version=__version__,
            rank=rank,
            pattern=str(self.pattern),
            policy=str(self.policy),
            source=self.source,
            mode=self.plan.mode,
            architecture=self.plan.architecture,
            checkpoint_pattern=str(self.plan.own),
            adapter=self.plan.adapter,
            adapter_digest=self.plan.adapter_digest,
            adapter_in_effect=self.adapted,
            switches=self.switches,
            last_rejection=self.last_rejection,
            requests=dict(requests or {}),
            stage=stage,
            forwards=counters.forwards,
            mixed_forwards=counters.mixed_forwards,
            forwards_under=dict(counters.forwards_under),
            indexer_selections=list(counters.selections),
            index_reuses=list(counters.reuses),
            index_key_writes=list(counters.key_writes),
            graph_replays=dict(counters.graphs),
            **self.traffic.report(),
            overlap=self.overlaps(),
            indexer_seconds=dict(counters.indexer_seconds),
            index_k_bytes_per_token=index_k_bytes_per_token,
            indexer_weight_bytes=dict(indexer_weight_bytes or {}),
        )


_active: ActivePattern | None = None


def activate(plan: Plan) -> ActivePattern:
    """Make ``plan`` the one of this process; the same plan again returns the same object."""
    global _active
    if _active is None or _active.plan != plan:
        _active = ActivePattern(plan)
    return _active


def current() -> ActivePattern | None:
    """This process's active pattern, or None where no backend was created."""
    return _active


def published_plan() -> Plan | None:
    """The plan in this process's resolved configuration, before any backend exists."""
    from sglang.srt.runtime_context import get_model

    return _plan(get_model().json_model_override_args)


_plan = lru_cache(maxsize=1)(Plan.from_overrides)
"""Read once: the HTTP process asks at every request."""
