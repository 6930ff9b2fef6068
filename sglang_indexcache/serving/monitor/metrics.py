"""Metrics of sharing among SGLang's own: with ``--enable-metrics``, at ``/metrics``.

SGLang makes its collectors from the classes that ``ServerArgs.stat_loggers`` names. Ours are its
own with more in them: whenever a scheduler logs its statistics, or its pattern is switched, it also
exports what this process has counted since. The labels are SGLang's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang.srt.observability.metrics_collector import (
    STAT_LOGGER_ROLE_SCHEDULER,
    STAT_LOGGER_ROLE_TOKENIZER,
    SchedulerMetricsCollector,
    TokenizerMetricsCollector,
)

from sglang_indexcache import __version__
from sglang_indexcache.ask.protocol import OTHERS
from sglang_indexcache.serving import front, live, requests
from sglang_indexcache.serving.active import ActivePattern, current
from sglang_indexcache.serving.monitor.traffic import MAX_LABELS, label_for

logger = logging.getLogger(__name__)

PREFIX = "sglang_indexcache_"
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokens": ("Rows forwarded.", ("phase", "pattern")),
    "pairs": (
        "Query-key pairs: scored, or skipped by sharing.",
        ("phase", "length", "kind"),
    ),
    "flops_saved": ("Operations of indexers that sharing saved, on each GPU.", ()),
    "forwards": ("Forwards, by whether requests of several patterns were in them.", ("mixed",)),
    "idle_forwards": ("Forwards without a request of the rank's own, in dp_attention.", ()),
    "layer_runs": ("Indexers that ran, and reuses of another's indices.", ("layer", "did")),
    "switches": ("Replacements of the server's pattern.", ()),
    "rejections": ("Patterns refused.", ("by",)),
}
"""Name, what it counts, and labels beside SGLang's. Layers count as in ``/server_info``: no replay
of a CUDA graph."""

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "info": ("1 for what is in effect.", ("pattern", "mode", "source", "version")),
    "requests": ("Unfinished requests.", ("pattern",)),
    "index_k_bytes": ("Bytes of index keys a token.", ()),
}

REFUSED: tuple[str, tuple[str, ...]] = ("Requests refused for the pattern that they name.", ())
"""Of the processes that take requests: ``refused``."""

Values = dict[tuple[str, ...], float]


class SchedulerCollector(SchedulerMetricsCollector):
    """SGLang's collector of a scheduler, and what IndexCache counts there."""

    def __init__(self, labels: dict[str, str], **options: Any) -> None:
        super().__init__(labels=labels, **options)
        self._sharing: Exporter | None = Exporter(labels)
        live.on_switch.append(self._export)

    def log_stats(self, stats: Any) -> None:
        """Log as SGLang does, and export our metrics."""
        super().log_stats(stats)
        if (active := current()) is not None:
            self._export(active)

    def _export(self, active: ActivePattern) -> None:
        """Export; what goes wrong with ours is logged once and stops ours alone."""
        if self._sharing is None:
            return
        try:
            self._sharing.export(active)
        except Exception:  # in the scheduler's loop: it would end the server
            logger.exception("IndexCache: its metrics stop here")
            self._sharing = None


class TokenizerCollector(TokenizerMetricsCollector):
    """SGLang's collector of a process that takes requests, and the patterns refused there."""

    def __init__(self, labels: dict[str, str], **options: Any) -> None:
        super().__init__(labels=labels, **options)
        import prometheus_client

        about, more = REFUSED
        refused = prometheus_client.Counter(f"{PREFIX}refused_total", about, (*labels, *more))
        front.on_refusal.append(refused.labels(**labels).inc)  # a series from now on, at 0


class Exporter:
    """Our metrics of one process, with SGLang's labels, in Prometheus' registry."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # Only now: SGLang says by a variable, late, that several processes write.
        import prometheus_client

        self._labels = {name: str(value) for name, value in labels.items()}
        self._metrics: dict[str, Any] = {
            name: prometheus_client.Counter(f"{PREFIX}{name}_total", about, (*labels, *more))
            for name, (about, more) in COUNTERS.items()
        }
        self._metrics |= {
            name: prometheus_client.Gauge(
                PREFIX + name, about, (*labels, *more), multiprocess_mode="mostrecent"
            )
            for name, (about, more) in GAUGES.items()
        }
        self._told: dict[str, Values] = {name: {} for name in self._metrics}

    def export(self, active: ActivePattern) -> None:
        """Write what changed since the last time."""
        for name, values in _counter_values(active).items():
            for key, value in values.items():
                self._child(name, key).inc(value - self._told[name].get(key, 0))
            self._told[name] = values
        for name, values in _gauge_values(active).items():
            # What is no more is 0: between processes no series can be taken back.
            now: Values = dict.fromkeys(self._told[name], 0)
            for key, value in values.items():
                label = label_for(key, self._told[name], MAX_LABELS, (OTHERS,) * len(key))
                now[label] = now.get(label, 0) + value
            for key, value in now.items():
                self._child(name, key).set(value)
            self._told[name] = now

    def _child(self, name: str, key: tuple[str, ...]) -> Any:
        more = (COUNTERS | GAUGES)[name][1]
        return self._metrics[name].labels(**self._labels, **dict(zip(more, key, strict=True)))


def _counter_values(active: ActivePattern) -> dict[str, Values]:
    """Return every counter's value now, by its own labels."""
    counters, traffic = active.counters, active.traffic
    layers = active.plan.layer_ids
    did = {"ran": counters.indexer_selections, "reused": counters.index_reuses}
    return {
        "tokens": {**traffic.tokens},
        "pairs": {**traffic.pairs},
        "flops_saved": {(): traffic.flops_saved},
        "forwards": {
            ("1",): counters.mixed_forwards,
            ("0",): counters.forwards - counters.mixed_forwards,
        },
        "idle_forwards": {(): counters.idle_forwards},
        "layer_runs": {
            (str(layers[position]), what): times[position]
            for what, times in did.items()
            for position in traffic.here
        },
        "switches": {(): active.switches},
        "rejections": {(by,): traffic.rejections[by] for by in ("request", "switch")},
    }


def _gauge_values(active: ActivePattern) -> dict[str, Values]:
    """Return every gauge's value now."""
    return {
        "info": {(str(active.policy), active.plan.mode, active.source, __version__): 1},
        "requests": {(pattern,): count for pattern, count in requests.in_hand().items()},
        "index_k_bytes": {(): active.traffic.index_k_bytes},
    }


def collectors(others: Mapping[str, type] | None) -> dict[str, type]:
    """Return ``ServerArgs.stat_loggers`` with ours in it; ``others`` keep their roles."""
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
