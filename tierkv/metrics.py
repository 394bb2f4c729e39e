"""Names under which the statistics of levels are exported: records only, for whatever client a server uses.

Each level's :class:`~tierkv.LevelStatistics` becomes samples with the label ``tier``. Sizes are in bytes. Counters
never fall during a cache's life.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from tierkv.types import LevelStatistics


class MetricKind(StrEnum):
    """Prometheus type."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Metric(NamedTuple):
    """One metric: its Prometheus name (a counter's ends in ``_total``), what it means, and where it is read."""

    name: str
    kind: MetricKind
    help: str
    field: str
    """Attribute of LevelStatistics; for ``refused`` and ``dropped`` a mapping with one sample a reason."""


class Sample(NamedTuple):
    """One value of one metric."""

    metric: Metric
    labels: Mapping[str, str]
    value: float


_GAUGES = (
    ("capacity_bytes", "bytes that the level may hold", "capacity_nbytes"),
    ("free_bytes", "bytes not taken; negative while a shared root's share is exceeded", "free_nbytes"),
    ("ready_bytes", "bytes of chunks that can be read", "ready_nbytes"),
    ("pending_bytes", "bytes of chunks on their way in", "pending_nbytes"),
    ("quarantined_bytes", "bytes of removed chunks that a copy still touches", "quarantined_nbytes"),
    ("foreign_bytes", "bytes of readable chunks that another process owns", "foreign_nbytes"),
    ("pinned_bytes", "bytes that leases and copies keep from eviction", "pinned_nbytes"),
    ("chunks", "chunks that can be read", "n_chunks"),
    ("broken", "1 while the level's breaker is open", "broken"),
)
_COUNTERS = (
    ("hits_total", "chunks of prefix hits that the level answered", "n_hits"),
    ("offered_total", "chunks offered: stored + present + refused + pending", "n_offered"),
    ("stored_total", "chunks that became readable by a store, cascade or demotion", "n_stored"),
    ("present_total", "chunks offered that were there already", "n_present"),
    ("evicted_total", "chunks that left by policy", "n_evicted"),
    ("read_total", "chunks read for promotion", "n_read"),
    ("written_total", "chunks written", "n_written"),
    ("read_bytes_total", "payload bytes read for promotion", "read_nbytes"),
    ("written_bytes_total", "payload bytes written", "written_nbytes"),
    ("refused_total", "chunks not taken, by reason", "refused"),
    ("dropped_total", "chunks lost other than by eviction, by reason", "dropped"),
)

METRICS = tuple(Metric(f"tierkv_{name}", MetricKind.GAUGE, told, field) for name, told, field in _GAUGES) + tuple(
    Metric(f"tierkv_{name}", MetricKind.COUNTER, told, field) for name, told, field in _COUNTERS
)


def samples(statistics: Iterable[LevelStatistics]) -> Iterator[Sample]:
    """Every metric of every level; those with a mapping once for each reason that has occurred."""
    for record in statistics:
        labels = {"tier": record.name}
        for metric in METRICS:
            value = getattr(record, metric.field)
            if isinstance(value, Mapping):
                for reason, count in value.items():
                    yield Sample(metric, {**labels, "reason": str(reason)}, float(count))
            else:
                yield Sample(metric, labels, float(value))
