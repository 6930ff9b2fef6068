"""Metrics on sharing, exported with SGLang's own at ``/metrics`` under ``--enable-metrics``.

SGLang makes its collectors from the classes that ``ServerArgs.stat_loggers`` names. Ours are
subclasses of SGLang's: whenever a scheduler logs its statistics, or its pattern is switched, they
also export what this process has counted since. The labels are SGLang's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_SCHEDULER,
    STAT_LOGGER_ROLE_TOKENIZER,
    SchedulerMetricsCollector,
    TokenizerMetricsCollector,
)

from sglang_indexcache import __version__
from sglang_indexcache.serving import http_checks, internal_state, requests
from sglang_indexcache.serving.process import ServingProcess, current
from sglang_indexcache.serving.protocol import OTHERS
from sglang_indexcache.serving.traffic import MAX_LABELS, label_for

logger = logging.getLogger(__name__)

PREFIX = "sglang_indexcache_"
Values = dict[tuple[str, ...], float]
"""Current values of a metric, by the values of its own labels."""


@dataclass(frozen=True)
class Metric:
    """A metric of a scheduler.

    Attributes:
        about: its help text.
        labels: names of its labels besides SGLang's.
        values: returns this process's values by their labels.
    """

    about: str
    labels: tuple[str, ...]
    values: Callable[[ServingProcess], Values]


def _forwards(process: ServingProcess) -> Values:
    mixed = process.counters.mixed_forwards
    return {("1",): mixed, ("0",): process.counters.forwards - mixed}


def _layer_runs(process: ServingProcess) -> Values:
    """Return indexer runs and reuses by layer, not counting replays of CUDA graphs."""
    layers, counters = process.plan.layer_ids, process.counters
    did = {"ran": counters.indexer_selections, "reused": counters.index_reuses}
    return {
        (str(layers[position]), what): times[position]
        for what, times in did.items()
        for position in process.traffic.here
    }


COUNTERS = {
    "tokens": Metric("Rows forwarded.", ("phase", "pattern"), lambda a: {**a.traffic.tokens}),
    "pairs": Metric(
        "Query-key pairs: scored, or skipped by sharing.",
        ("phase", "length", "kind"),
        lambda process: {**process.traffic.pairs},
    ),
    "flops_saved": Metric(
        "Operations of indexers that sharing saved, on each GPU.",
        (),
        lambda process: {(): process.traffic.flops_saved},
    ),
    "forwards": Metric(
        "Forwards, by whether requests of several patterns were in them.", ("mixed",), _forwards
    ),
    "idle_forwards": Metric(
        "Forwards without a request of the rank's own, in dp_attention.",
        (),
        lambda process: {(): process.counters.idle_forwards},
    ),
    "layer_runs": Metric(
        "Indexers that ran, and reuses of another's indices.", ("layer", "did"), _layer_runs
    ),
    "switches": Metric(
        "Replacements of the server's pattern.", (), lambda process: {(): process.switches}
    ),
    "rejections": Metric(
        "Patterns refused.",
        ("by",),
        lambda process: {(by,): process.traffic.rejections[by] for by in ("request", "switch")},
    ),
}
"""Counters by name. None may fall while a server runs, which Prometheus' client would refuse."""

GAUGES = {
    "info": Metric(
        "1 for what is in effect.",
        ("pattern", "mode", "source", "version"),
        lambda process: {(str(process.policy), process.plan.mode, process.source, __version__): 1},
    ),
    "requests": Metric(
        "Unfinished requests.",
        ("pattern",),
        lambda _: {(pattern,): count for pattern, count in requests.in_hand().items()},
    ),
    "index_k_bytes": Metric(
        "Bytes of index keys a token.", (), lambda process: {(): process.traffic.index_k_bytes}
    ),
}
"""Gauges by name."""


class SchedulerCollector(SchedulerMetricsCollector):
    """SGLang's collector for a scheduler, extended by IndexCache's counters."""

    def __init__(self, labels: dict[str, str], **options: Any) -> None:
        super().__init__(labels=labels, **options)
        self._sharing = Exporter(labels)
        internal_state.on_switch.append(self._sharing.export)

    def log_stats(self, stats: Any) -> None:
        """Log as SGLang does, and export our metrics."""
        super().log_stats(stats)
        if (process := current()) is not None:
            self._sharing.export(process)


class TokenizerCollector(TokenizerMetricsCollector):
    """SGLang's collector for a process that takes requests, extended by refused patterns."""

    def __init__(self, labels: dict[str, str], **options: Any) -> None:
        super().__init__(labels=labels, **options)
        import prometheus_client

        about = "Requests refused for the pattern that they name."
        refused = prometheus_client.Counter(f"{PREFIX}refused_total", about, tuple(labels))
        http_checks.on_refusal.append(refused.labels(**labels).inc)  # now at 0


class Exporter:
    """Exporter of one process's metrics to Prometheus' registry, with SGLang's labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # Imported late: SGLang sets the variable for multi-process metrics only shortly before.
        import prometheus_client

        self._labels = {name: str(value) for name, value in labels.items()}
        self._series: dict[str, Any] = {
            name: prometheus_client.Counter(
                f"{PREFIX}{name}_total", metric.about, (*labels, *metric.labels)
            )
            for name, metric in COUNTERS.items()
        }
        self._series |= {
            name: prometheus_client.Gauge(
                PREFIX + name,
                metric.about,
                (*labels, *metric.labels),
                multiprocess_mode="mostrecent",
            )
            for name, metric in GAUGES.items()
        }
        self._told: dict[str, Values] = {name: {} for name in self._series}

    def export(self, process: ServingProcess) -> None:
        """Export the changes since the last call; a metric that fails is logged and dropped."""
        for name in list(self._told):
            try:
                if name in COUNTERS:
                    self._count(name, COUNTERS[name].values(process))
                else:
                    self._show(name, GAUGES[name].values(process))
            except Exception:  # in the scheduler's loop, where it would end the server
                logger.exception("IndexCache: the metric %s%s stops here", PREFIX, name)
                del self._told[name]

    def _count(self, name: str, values: Values) -> None:
        for key, value in values.items():
            self._child(name, COUNTERS[name], key).inc(value - self._told[name].get(key, 0))
        self._told[name] = values

    def _show(self, name: str, values: Values) -> None:
        # A series that has ended is set to 0, because it cannot be removed with several processes.
        now: Values = dict.fromkeys(self._told[name], 0)
        for key, value in values.items():
            label = label_for(key, self._told[name], MAX_LABELS, (OTHERS,) * len(key))
            now[label] = now.get(label, 0) + value
        for key, value in now.items():
            self._child(name, GAUGES[name], key).set(value)
        self._told[name] = now

    def _child(self, name: str, metric: Metric, key: tuple[str, ...]) -> Any:
        labels = dict(zip(metric.labels, key, strict=True))
        return self._series[name].labels(**self._labels, **labels)


def collectors(others: Mapping[str, type] | None) -> dict[str, type]:
    """Return ``ServerArgs.stat_loggers`` with our collectors; ``others`` keep their roles."""
    ours: dict[str, type] = {
        STAT_LOGGER_ROLE_SCHEDULER: SchedulerCollector,
        STAT_LOGGER_ROLE_TOKENIZER: TokenizerCollector,
    }
    if roles := ours.keys() & (others or {}):
        logger.warning(
            "IndexCache: metrics of the %s are left out, for stat_loggers has a collector there.",
            " and the ".join(sorted(roles)),
        )
    return ours | dict(others or {})
