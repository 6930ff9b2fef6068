"""State of a serving process: the default pattern, and counts of its layers' work.

There is one :class:`ServingProcess` per process. All attention backends read it, and in live mode
its policy can be replaced for future requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sglang_indexcache import __version__
from sglang_indexcache.pattern import Pattern
from sglang_indexcache.serving.plan import Plan
from sglang_indexcache.serving.policy import Policy
from sglang_indexcache.serving.protocol import RankState
from sglang_indexcache.serving.traffic import Served, Traffic, is_idle, phase_of, served_in

if TYPE_CHECKING:
    from sglang_indexcache.serving.row_split import RowSplitter


class Counters:
    """Counters for ``count`` pattern positions, named as in :class:`RankState`."""

    def __init__(self, count: int) -> None:
        self.forwards = self.mixed_forwards = self.idle_forwards = 0
        self.indexer_selections, self.index_reuses = [0] * count, [0] * count
        self.index_key_writes = [0] * count
        self.graph_replays: Counter[str] = Counter()
        self.kernel_choices: Counter[str] = Counter()
        self.indexer_seconds = dict.fromkeys(
            ("prefill", "prefill_processor", "decode", "decode_processor"), 0.0
        )


class ServingProcess:
    """The plan of this process, its current policy and the source of that policy.

    ``is_counting`` is false only while a decode graph is captured, which serves no request.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.policy = plan.policy
        self.source = plan.source
        self.is_counting = True
        self._is_idle = False
        self.switches = 0
        self.last_rejection = ""
        self.counters = Counters(len(plan.pattern))
        self.traffic = Traffic()
        self.splitter: RowSplitter | None = None
        self._positions = {layer: i for i, layer in enumerate(plan.layer_ids)}

    @property
    def pattern(self) -> Pattern:
        """The policy's pattern; if prompt length decides, that of the shortest prompts."""
        return self.policy.patterns[0]

    def position(self, layer: int) -> int:
        """Return the pattern position of the model layer ``layer``."""
        return self._positions[layer]

    @property
    def _counts_layers(self) -> bool:
        return self.is_counting and not self._is_idle

    def count_batch(self, batch: Any) -> None:
        """Count the beginning of a forward of SGLang's whole ``batch``."""
        live = self.plan.mode == "live" and batch.rids
        served = served_in(batch, batch.rids.patterns if live else (), self.pattern)
        self.count_forward(phase_of(batch), served, idle=is_idle(batch))

    def count_forward(self, phase: str, served: Sequence[Served], *, idle: bool = False) -> None:
        """Count the beginning of a forward of these requests, in ``phase``.

        An ``idle`` rank has no requests: the work of its layers to keep step is not counted.
        """
        self._is_idle = idle
        if not self.is_counting:
            return
        if idle:
            self.counters.idle_forwards += 1
            return
        self.counters.forwards += 1
        self.counters.mixed_forwards += len({pattern for pattern, *_ in served}) > 1
        self.traffic.count(phase, served)

    def count_layer(self, layer: int, *, is_full: bool) -> None:
        """Count that ``layer`` attends to its own indexer's selection, or to another layer's."""
        did = self.counters.indexer_selections if is_full else self.counters.index_reuses
        did[self.position(layer)] += self._counts_layers

    def count_key_write(self, layer: int) -> None:
        """Count that ``layer`` stored index keys without scoring any."""
        self.counters.index_key_writes[self.position(layer)] += self._counts_layers

    def count_graph(self, label: str) -> None:
        """Count that the current forward is a replay of the decode graph ``label``."""
        if self._counts_layers:
            self.counters.graph_replays[label] += 1

    def count_indexer_time(self, phase: str, wall: float, processor: float) -> None:
        """Add an indexer's seconds in ``phase`` (prefill or decode), whether it selected or not."""
        self.counters.indexer_seconds[phase] += wall
        self.counters.indexer_seconds[f"{phase}_processor"] += processor

    def replace(self, policy: Policy, source: str) -> None:
        """Make ``policy`` decide for future requests; its patterns must have been checked."""
        self.policy, self.source = policy, source
        self.switches += 1

    def report(self, **of_process: Any) -> RankState:
        """Return this rank's report for ``/server_info``, with fields of the caller added."""
        plan = self.plan
        return RankState(
            version=__version__,
            pattern=str(self.pattern),
            policy=str(self.policy),
            source=self.source,
            mode=plan.mode,
            architecture=plan.architecture,
            checkpoint_pattern=str(plan.own),
            adapter=plan.adapter,
            adapter_digest=plan.adapter_digest,
            switches=self.switches,
            last_rejection=self.last_rejection,
            **vars(self.counters),
            **self.traffic.report(),
            **(self.splitter.report() if self.splitter else {}),
            **of_process,
        )


_process: ServingProcess | None = None


def activate(plan: Plan) -> ServingProcess:
    """Make ``plan`` this process's plan; the same plan again returns the same object."""
    global _process
    if _process is None or _process.plan != plan:
        _process = ServingProcess(plan)
    return _process


def current() -> ServingProcess | None:
    """Return the serving state of this process, or None if no backend was created."""
    return _process


def published_plan() -> Plan | None:
    """Return the plan in this process's resolved configuration, before any backend exists."""
    from sglang.srt.runtime_context import get_model

    return _plan(get_model().json_model_override_args)


_plan = lru_cache(maxsize=1)(Plan.from_overrides)
"""Cached parser of the plan, because the HTTP process asks at every request."""
