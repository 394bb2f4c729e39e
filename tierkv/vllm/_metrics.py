"""What is reported to vLLM: its own names where it has one, and ours for what it lacks.

vLLM asks every step, so everything here is arithmetic over counters that the ledgers keep anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from tierkv._hierarchy import Hierarchy
from tierkv._level import LevelBooks
from tierkv.recorder import TraceRecorder
from tierkv.vllm import _compat

_CPU = "vllm:kv_offload_cpu_"
_TIERING = "vllm:kv_offload_tiering_"
_OURS = "vllm:kv_offload_tierkv_"

USAGE = _CPU + "cache_usage_perc"
WRITE_USAGE = _CPU + "cache_write_usage_perc"
READ_USAGE = _CPU + "cache_read_usage_perc"
ALLOCATION_SIZE = _CPU + "allocation_size"
STORES_SKIPPED = "vllm:kv_offload_stores_skipped"

CHUNK_HITS = _TIERING + "chunk_hits"
READ_BYTES = _TIERING + "read_bytes"
WRITE_BYTES = _TIERING + "write_bytes"
PROMOTION_FAILURES = _TIERING + "promotion_allocation_failures"

OFFERED = _OURS + "chunks_offered"
STORED = _OURS + "chunks_stored"
PRESENT = _OURS + "chunks_present"
EVICTED = _OURS + "chunks_evicted"
REFUSED = _OURS + "chunks_refused"
DROPPED = _OURS + "chunks_dropped"
HINTED = _OURS + "chunks_hinted"
WISHES_IGNORED = _OURS + "wishes_ignored"
TRACE_DROPPED = _OURS + "trace_requests_dropped"
LEVEL_BYTES = _OURS + "level_bytes"
CAPACITY = _OURS + "level_capacity_bytes"
BROKEN = _OURS + "level_broken"

_TIER = ("tier",)
_COUNTERS = {
    "hits": (CHUNK_HITS, "Chunks of loaded prefixes that a tier answered, labeled by tier."),
    "read_nbytes": (READ_BYTES, "Total bytes read from lower tiers into the primary tier, labeled by tier."),
    "written_nbytes": (WRITE_BYTES, "Total bytes written to lower tiers, labeled by tier."),
    "offered": (OFFERED, "Chunks offered to a tier: stored + present + refused + those under way, labeled by tier."),
    "stored": (STORED, "Chunks that became readable in a tier after an offer, labeled by tier."),
    "present": (PRESENT, "Chunks offered to a tier that held them already, labeled by tier."),
    "evicted": (EVICTED, "Chunks that left a tier by its eviction policy, labeled by tier."),
}
_REASONS = {
    "refused": (REFUSED, "Chunks that a tier did not take, labeled by tier and reason."),
    "dropped": (DROPPED, "Chunks that left a tier other than by eviction, labeled by tier and reason."),
}


def definitions(*, store_threshold: int = 0) -> dict[str, OffloadingMetricMetadata]:
    """Every name that :meth:`Metrics.take` may use: vLLM's front end asserts that it knows each."""
    found: dict[str, OffloadingMetricMetadata] = {
        USAGE: OffloadingGaugeMetadata(documentation="Fraction of the primary that transfers hold now (0.0 to 1.0)."),
        WRITE_USAGE: OffloadingGaugeMetadata(documentation="Fraction of the primary that is being written now."),
        READ_USAGE: OffloadingGaugeMetadata(documentation="Fraction of the primary that is pinned for reading now."),
        ALLOCATION_SIZE: OffloadingHistogramMetadata(
            documentation="Chunks given room by one prepare_store call.",
            buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144),
        ),
        PROMOTION_FAILURES: OffloadingCounterMetadata(
            documentation="Promotions not begun because the primary had no slot that stores could spare."
        ),
        HINTED: OffloadingCounterMetadata(
            documentation="Chunks that finished requests gave a hint, labeled by hint.", labelnames=("hint",)
        ),
        WISHES_IGNORED: OffloadingCounterMetadata(
            documentation="Parts of requests' kv_transfer_params['tierkv'] that were not right and were ignored."
        ),
        TRACE_DROPPED: OffloadingCounterMetadata(
            documentation="Requests that record_trace did not write: too many waited, or the file failed."
        ),
        LEVEL_BYTES: OffloadingGaugeMetadata(
            documentation="Bytes of a tier by state, labeled by tier and state.", labelnames=("tier", "state")
        ),
        CAPACITY: OffloadingGaugeMetadata(
            documentation="Bytes that a tier may hold, labeled by tier.", labelnames=_TIER
        ),
        BROKEN: OffloadingGaugeMetadata(
            documentation="1 while a tier is closed or its breaker open.", labelnames=_TIER
        ),
    }
    for name, text in _COUNTERS.values():
        found[name] = OffloadingCounterMetadata(documentation=text, labelnames=_TIER)
    for name, text in _REASONS.values():
        found[name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier", "reason"))
    if store_threshold >= 2:
        found[STORES_SKIPPED] = OffloadingCounterMetadata(
            documentation="Chunks not stored because they had not been offered often enough."
        )
    return found


def level_definitions() -> dict[str, OffloadingMetricMetadata]:
    """The names that :meth:`Metrics.take_level` may use: ours alone, since vLLM's manager reports its own."""
    return {name: metric for name, metric in definitions().items() if name.startswith(_OURS)}


class Metrics:
    """Counters of the manager, and the last values told, so that only what changed is told."""

    def __init__(self, *, store_threshold: int = 0) -> None:
        self.allocations: list[int] = []
        self.promotion_refused = 0
        self.hinted: Counter[str] = Counter()
        self.n_wishes_ignored = 0
        self.recorder: TraceRecorder | None = None
        self._store_threshold = store_threshold
        self._told: Counter[tuple[str, ...]] = Counter()

    def take(self, hierarchy: Hierarchy) -> Any:
        """What happened since the last call, as vLLM's ``OffloadingConnectorStats``."""
        stats = _compat.OffloadingConnectorStats()
        self._primary(stats, hierarchy.levels[0])
        for level in hierarchy.levels:
            label = f"{level.index}:{'primary' if not level.index else level.name}"
            self._level(stats, level, label)
        return stats

    def take_level(self, level: LevelBooks, label: str) -> Any:
        """What happened at one level since the last call, in our names only."""
        stats = _compat.OffloadingConnectorStats()
        self._level(stats, level, label, prefix=_OURS)
        return stats

    def _primary(self, stats: Any, primary: LevelBooks) -> None:
        ledger = primary.ledger
        n_slots = max(1, ledger.capacity_nbytes // primary.plan.slot_nbytes)
        stats.set_gauge(USAGE, min(1.0, (ledger.n_pending + ledger.n_held + ledger.n_gone) / n_slots))
        stats.set_gauge(WRITE_USAGE, ledger.n_pending / n_slots)
        stats.set_gauge(READ_USAGE, ledger.n_held / n_slots)
        for size in self.allocations:
            stats.observe_histogram(ALLOCATION_SIZE, size)
        self.allocations.clear()
        self._count(stats, PROMOTION_FAILURES, self.promotion_refused)
        self._count(stats, WISHES_IGNORED, self.n_wishes_ignored)
        if self.recorder is not None:
            self._count(stats, TRACE_DROPPED, self.recorder.n_dropped)
        for hint, n_chunks in self.hinted.items():
            self._count(stats, HINTED, n_chunks, (hint,))
        if self._store_threshold >= 2:
            self._count(stats, STORES_SKIPPED, primary.counts.refused["not_admitted"])

    def _level(self, stats: Any, level: LevelBooks, label: str, prefix: str = "") -> None:
        ledger, counts = level.ledger, level.counts
        for attribute, (name, _) in _COUNTERS.items():
            if name.startswith(prefix):
                self._count(stats, name, getattr(counts, attribute), (label,))
        for attribute, (name, _) in _REASONS.items():
            for reason, count in getattr(counts, attribute).items():
                self._count(stats, name, count, (label, reason))
        states: Sequence[tuple[str, int]] = (
            ("ready", ledger.ready_nbytes),
            ("pending", ledger.pending_nbytes),
            ("quarantined", ledger.quarantined_nbytes),
            ("foreign", ledger.foreign_nbytes),
            ("free", ledger.free_nbytes),
        )
        for state, nbytes in states:
            stats.set_gauge(LEVEL_BYTES, nbytes, (label, state))
        stats.set_gauge(CAPACITY, ledger.capacity_nbytes, (label,))
        stats.set_gauge(BROKEN, int(not level.serves), (label,))

    def _count(self, stats: Any, name: str, total: int, labels: tuple[str, ...] = ()) -> None:
        known = self._told[(name, *labels)]
        if total != known:
            stats.increase_counter(name, total - known, labels)
            self._told[(name, *labels)] = total
