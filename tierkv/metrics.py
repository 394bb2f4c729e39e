"""Names under which the statistics of levels are exported, and a collector that serves them to prometheus-client.

Each level's :class:`~tierkv.LevelStatistics` becomes samples with the label ``tier``, which is ``0:primary`` for the
first level and ``1:fs`` (position and tier name) for one below. What the adapter tells vLLM as
``vllm:kv_offload_tierkv_X`` or ``vllm:kv_offload_tiering_X`` is ``tierkv_X`` here, with the same labels and units.
Sizes are in bytes. Counters never fall during a cache's life.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol

from tierkv._extras import require
from tierkv.errors import ClosedError, bad_setting
from tierkv.settings import parse_seconds
from tierkv.types import LevelStatistics

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class MetricKind(StrEnum):
    """Prometheus type."""

    GAUGE = "gauge"
    COUNTER = "counter"


class Metric(NamedTuple):
    """One value of the statistics: its Prometheus name (a counter's ends in ``_total``) and where it is read."""

    name: str
    """Several fields may share one, told apart by ``labels``."""
    kind: MetricKind
    help: str
    field: str
    """Attribute of LevelStatistics; for ``refused`` and ``dropped`` a mapping with one sample a reason."""
    labels: Mapping[str, str] = _NOTHING
    """Labels beside ``tier``, and ``reason`` where ``field`` is a mapping."""


class Sample(NamedTuple):
    """One value of one metric."""

    metric: Metric
    labels: Mapping[str, str]
    value: float


_STATES = ("ready", "pending", "quarantined", "foreign", "free")
_GAUGES = (
    ("level_capacity_bytes", "bytes that the level may hold now", "capacity_nbytes"),
    ("level_pinned_bytes", "bytes that leases and copies keep from eviction", "pinned_nbytes"),
    ("level_chunks", "chunks that can be read", "n_chunks"),
    ("level_broken", "1 while a breaker of the level is open: it answers misses or takes no writes", "broken"),
)
_COUNTERS = (
    ("chunk_hits", "chunks of prefix hits that the level answered", "n_hits"),
    ("chunks_offered", "chunks offered: stored + present + refused + those under way", "n_offered"),
    ("chunks_stored", "chunks that became readable after an offer", "n_stored"),
    ("chunks_present", "chunks offered that were there already", "n_present"),
    ("chunks_refused", "chunks not taken, by reason", "refused"),
    ("chunks_evicted", "chunks that left by the eviction order", "n_evicted"),
    ("chunks_dropped", "chunks that left otherwise, by reason", "dropped"),
    ("chunks_read", "chunks read for promotion", "n_read"),
    ("chunks_written", "chunks written", "n_written"),
    ("read_bytes", "payload bytes read for promotion", "read_nbytes"),
    ("write_bytes", "payload bytes written", "written_nbytes"),
)

METRICS = (
    *(
        Metric("tierkv_level_bytes", MetricKind.GAUGE, "bytes now, by state", f"{state}_nbytes", {"state": state})
        for state in _STATES
    ),
    *(Metric(f"tierkv_{name}", MetricKind.GAUGE, told, field) for name, told, field in _GAUGES),
    *(Metric(f"tierkv_{name}_total", MetricKind.COUNTER, told, field) for name, told, field in _COUNTERS),
)


def samples(statistics: Iterable[LevelStatistics]) -> Iterator[Sample]:
    """Every metric of every level, fastest level first; those with a mapping once for each reason that has occurred."""
    for index, record in enumerate(statistics):
        tier = {"tier": f"{index}:{record.name if index else 'primary'}"}
        for metric in METRICS:
            value = getattr(record, metric.field)
            if isinstance(value, Mapping):
                for reason, count in value.items():
                    yield Sample(metric, {**tier, "reason": str(reason)}, float(count))
            else:
                yield Sample(metric, {**tier, **metric.labels}, float(value))


class HasStatistics(Protocol):
    """A :class:`~tierkv.TieredCache`, or what answers like one."""

    def statistics(self) -> Mapping[str, LevelStatistics]: ...


class CacheCollector:
    """A collector for prometheus-client: each scrape is one look at the statistics of caches; it counts nothing itself.

    ``registry.register(CacheCollector(cache))`` is all there is to it; ``registry.unregister`` ends it.
    prometheus-client is the extra ``metrics``.

    Args:
        caches: one cache, or several by name; the name is then the label ``cache``.
        loop: the event loop that the caches belong to; by default the running one.
        wait_s: how long a scrape waits for a busy loop.

    Raises:
        ConfigError: no loop runs and none was given, or a setting is wrong.
        ImportError: prometheus-client is not installed.

    Concurrency: :meth:`collect` from any thread. The numbers of a cache are taken together, on its loop, so they add
    up. If the loop does not come to it within ``wait_s`` the scrape shows the last numbers, whose age is
    ``tierkv_statistics_age_seconds``. A cache that is not open yet shows nothing, one that is closed its last numbers.
    """

    def __init__(
        self,
        caches: HasStatistics | Mapping[str, HasStatistics],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        wait_s: float = 1.0,
    ) -> None:
        require("CacheCollector", "prometheus_client")
        import prometheus_client.core  # noqa: PLC0415 - the extra metrics

        self._core = prometheus_client.core
        named = isinstance(caches, Mapping)
        self._caches: list[tuple[dict[str, str], HasStatistics]] = (
            [({"cache": name}, cache) for name, cache in caches.items()]
            if isinstance(caches, Mapping)
            else [({}, caches)]
        )
        self._label_names = ("cache",) if named else ()
        self._wait_s = parse_seconds("wait_s", wait_s)
        self._loop = loop or _running_loop()
        if self._loop is None:
            raise bad_setting("loop", loop, "given where no event loop runs: the one that the cache is used on")
        self._last: list[list[LevelStatistics]] = [[] for _ in self._caches]
        self._last_s = time.monotonic()

    def describe(self) -> Iterable[Any]:
        """The names, for the registry to find doubles; looks at no cache."""
        return self._families().values()

    def collect(self) -> Iterable[Any]:
        """One snapshot as metric families."""
        statistics, age_s = self._snapshot()
        families = self._families()
        for (labels, _), records in zip(self._caches, statistics, strict=True):
            for sample in samples(records):
                names = (*self._label_names, *_label_names(sample.metric))
                values = {**labels, **sample.labels}
                families[sample.metric.name].add_metric([values[name] for name in names], sample.value)
        families["age"].add_metric([], age_s)
        return families.values()

    def _families(self) -> dict[str, Any]:
        core = self._core
        families: dict[str, Any] = {}
        for metric in METRICS:
            if metric.name not in families:
                family = core.GaugeMetricFamily if metric.kind is MetricKind.GAUGE else core.CounterMetricFamily
                labels = (*self._label_names, *_label_names(metric))
                families[metric.name] = family(metric.name, metric.help, labels=labels)
        families["age"] = core.GaugeMetricFamily(
            "tierkv_statistics_age_seconds", "age of these numbers; over 0 while the event loop is busy", labels=()
        )
        return families

    def _snapshot(self) -> tuple[list[list[LevelStatistics]], float]:
        """The statistics of each cache, and how old they are in seconds."""
        loop = self._loop
        assert loop is not None
        if loop is _running_loop() or not loop.is_running():
            return self._look(), 0.0
        answer: Future[list[list[LevelStatistics]]] = Future()
        try:
            loop.call_soon_threadsafe(self._answer, answer)
        except RuntimeError:  # closed since we asked
            return self._look(), 0.0
        try:
            return answer.result(self._wait_s), 0.0
        except TimeoutError:
            answer.cancel()
            return self._last, time.monotonic() - self._last_s

    def _answer(self, answer: Future[list[list[LevelStatistics]]]) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(self._look())
        except Exception as error:  # noqa: BLE001 - the scrape that asked shall see it
            answer.set_exception(error)

    def _look(self) -> list[list[LevelStatistics]]:
        self._last = [_records(cache) for _, cache in self._caches]
        self._last_s = time.monotonic()
        return self._last


def _records(cache: HasStatistics) -> list[LevelStatistics]:
    try:
        return list(cache.statistics().values())
    except ClosedError:  # not open yet
        return []


def _label_names(metric: Metric) -> tuple[str, ...]:
    if metric.field in ("refused", "dropped"):
        return ("tier", "reason")
    return ("tier", *metric.labels)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
