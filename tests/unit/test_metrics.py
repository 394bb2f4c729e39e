"""Metric records cover the statistics, whole and once."""

from __future__ import annotations

from tests.toys import STRIDE, buffers, cache_of, prompt
from tierkv import LevelStatistics
from tierkv.metrics import METRICS, MetricKind, samples

NOT_EXPORTED = {"name", "n_pending", "n_pinned", "n_quarantined", "n_foreign"}
"""Counts whose bytes are exported, and the label."""


def test_every_field_is_exported_or_excused() -> None:
    """A field added to the statistics must get a name here."""
    fields = set(LevelStatistics._fields)
    assert {metric.field for metric in METRICS} == fields - NOT_EXPORTED
    assert len({(metric.name, *metric.labels.items()) for metric in METRICS}) == len(METRICS)
    assert all(metric.name.endswith("_total") == (metric.kind is MetricKind.COUNTER) for metric in METRICS)


async def test_samples_carry_tier_and_reason() -> None:
    """A refusal shows under its reason, a size under its tier."""
    async with cache_of(n_slots=2) as cache:
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        found = {(s.metric.name, *sorted(s.labels.values())): s.value for s in samples(cache.statistics().values())}
    assert found["tierkv_chunks_refused_total", "0:primary", "full"] == 2
    assert found["tierkv_level_chunks", "0:primary"] == 2
    assert found["tierkv_level_bytes", "0:primary", "ready"] == 2 * STRIDE
