"""What Prometheus scrapes over HTTP is what ``statistics()`` says: once, together, while the cache runs and after."""

from __future__ import annotations

import asyncio
import re
import threading
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.toys import STRIDE, ThreadTier, ToyChunker, buffers, cache_of, prompt
from tierkv import CPUTier, Level, LevelStatistics, TieredCache
from tierkv.errors import ConfigError
from tierkv.metrics import METRICS, CacheCollector, samples
from tierkv.policies import LRU
from tierkv.tiers.fs import FSTier

prometheus_client = pytest.importorskip("prometheus_client", reason="the extra metrics is not installed")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402 - comes with the extra

ROOT = Path(__file__).parents[2]
Values = dict[tuple[str, frozenset[tuple[str, str]]], float]

AGE = ("tierkv_statistics_age_seconds", frozenset[tuple[str, str]]())


class Scraped:
    """A registry behind prometheus-client's own server on loopback."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._server, self._thread = prometheus_client.start_http_server(0, addr="127.0.0.1", registry=self.registry)

    async def values(self) -> Values:
        return await asyncio.to_thread(self.values_now)

    def values_now(self) -> Values:
        url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@asynccontextmanager
async def scraped() -> AsyncIterator[Scraped]:
    server = Scraped()
    try:
        yield server
    finally:
        server.close()


def expected(statistics: Mapping[str, LevelStatistics], **more: str) -> Values:
    return {
        (sample.metric.name, frozenset({**sample.labels, **more}.items())): sample.value
        for sample in samples(statistics.values())
    }


def without_age(values: Values) -> Values:
    return {key: value for key, value in values.items() if key != AGE}


async def test_a_scrape_is_the_statistics(tmp_path: Path) -> None:
    """Over HTTP, every number of both levels with its labels, twice the same; also when the cache has been closed."""
    levels = [
        Level(CPUTier(), LRU(), capacity=2 * STRIDE),
        Level(FSTier(tmp_path, min_free=0), LRU(), capacity="1MiB"),
    ]
    cache = TieredCache(chunker=ToyChunker(), namespace=b"toy", levels=levels)
    async with scraped() as server:
        server.registry.register(CacheCollector(cache, wait_s=PATIENCE_S))
        assert without_age(await server.values()) == {}, "not open yet: no numbers, and no error"
        async with cache:
            for branch in (1, 2, 2):
                await cache.store(prompt(branch), buffers(cache.chunks(prompt(branch))))
            await cache.wait_idle()
            hit = await cache.lookup(prompt(1))
            await cache.load(hit, buffers(hit.chunks))
            await cache.wait_idle()
            values = await server.values()
            assert values[AGE] == 0.0
            assert without_age(values) == expected(cache.statistics())
            assert without_age(await server.values()) == expected(cache.statistics()), "a scrape counts nothing"
            for tier, record in zip(("0:primary", "1:fs"), cache.statistics().values(), strict=True):
                of = {name: value for (name, labels), value in values.items() if labels == {("tier", tier)}}
                assert of["tierkv_chunk_hits_total"] == record.n_hits
                assert of["tierkv_read_bytes_total"] == record.read_nbytes
                assert of["tierkv_write_bytes_total"] == record.written_nbytes
                assert of["tierkv_chunks_written_total"] == record.n_written
                assert of["tierkv_level_pinned_bytes"] == 0 < of["tierkv_level_chunks"] == record.n_chunks
        assert without_age(await server.values()) == expected(cache.statistics())


async def test_numbers_are_taken_together_while_the_cache_runs() -> None:
    """Scraped as often as can be beside a busy cache: bytes by state always add up to the capacity."""
    async with scraped() as server, cache_of(ThreadTier("lower")) as cache:
        server.registry.register(CacheCollector(cache, wait_s=PATIENCE_S))
        done = False

        async def scrape() -> int:
            n_scrapes = 0
            while not done or not n_scrapes:
                values = await server.values()
                for tier in ("0:primary", "1:lower"):
                    of = {
                        dict(labels)["state"]: value
                        for (name, labels), value in values.items()
                        if name == "tierkv_level_bytes" and ("tier", tier) in labels
                    }
                    parts = of["free"] + of["ready"] + of["pending"] + of["quarantined"]
                    assert parts == values["tierkv_level_capacity_bytes", frozenset({("tier", tier)})]
                n_scrapes += 1
            return n_scrapes

        scraping = asyncio.create_task(scrape())
        for branch in range(60):
            await cache.store(prompt(branch), buffers(cache.chunks(prompt(branch))))
            hit = await cache.lookup(prompt(branch - 3))
            await cache.load(hit, buffers(hit.chunks))
        done = True
        assert await scraping > 0


async def test_a_busy_loop_shows_old_numbers_and_their_age() -> None:
    """While the loop does not answer, a scrape returns the last numbers and says how old they are; then new ones."""
    async with scraped() as server, cache_of() as cache:
        collector = CacheCollector(cache, wait_s=PATIENCE_S)
        server.registry.register(collector)
        before = await server.values()
        await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
        found: list[Values] = []
        collector._wait_s = 0.01
        scraper = threading.Thread(target=lambda: found.append(server.values_now()))
        scraper.start()
        scraper.join()  # on the loop: it is busy with waiting for us
        collector._wait_s = PATIENCE_S
        assert found[0][AGE] > 0.0
        assert without_age(found[0]) == without_age(before)
        assert without_age(await server.values()) == expected(cache.statistics())


async def test_several_caches_have_a_name_each() -> None:
    """Two caches in one registry are told apart by the label ``cache``; a second collector is refused."""
    async with scraped() as server, cache_of(n_slots=2) as one, cache_of() as two:
        server.registry.register(CacheCollector({"chat": one, "batch": two}, wait_s=PATIENCE_S))
        await one.store(prompt(1), buffers(one.chunks(prompt(1))))
        both = expected(one.statistics(), cache="chat") | expected(two.statistics(), cache="batch")
        values = await server.values()
        assert without_age(values) == both
        refused = {("cache", "chat"), ("tier", "0:primary"), ("reason", "full")}
        assert values["tierkv_chunks_refused_total", frozenset(refused)] == 2
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            server.registry.register(CacheCollector(one))


async def test_a_loop_that_ended_is_no_trouble() -> None:
    """The cache of a loop that has been closed still has its last numbers."""
    collectors = []

    async def use() -> None:
        async with cache_of() as cache:
            await cache.store(prompt(1), buffers(cache.chunks(prompt(1))))
            collectors.append(CacheCollector(cache, wait_s=PATIENCE_S))

    await asyncio.to_thread(asyncio.run, use())
    async with scraped() as server:
        server.registry.register(collectors[0])
        values = await server.values()
        assert values["tierkv_chunks_stored_total", frozenset({("tier", "0:primary")})] == 4


def test_without_a_loop_it_says_what_is_missing() -> None:
    """Made outside of an event loop and given none: one sentence."""
    with pytest.raises(ConfigError, match="loop is None, but must be given where no event loop runs"):
        CacheCollector(cache_of())


def test_names_are_those_of_the_adapter() -> None:
    """What vLLM's page documents as kv_offload_tierkv_X or kv_offload_tiering_X is tierkv_X, with the same labels."""
    page = (ROOT / "docs" / "reference" / "vllm-metrics.md").read_text()
    rows = re.findall(r"^\| `vllm:kv_offload_(?:tierkv|tiering)_(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    theirs = {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}
    of_requests = {"promotion_allocation_failures", "chunks_hinted", "wishes_ignored", "trace_requests_dropped"}
    ours = {}
    for metric in METRICS:
        name = metric.name.removeprefix("tierkv_").removesuffix("_total")
        ours[name] = {"tier", *metric.labels} | ({"reason"} if metric.field in ("refused", "dropped") else set())
    assert theirs.keys() - of_requests <= ours.keys()
    assert {name: ours[name] for name in theirs.keys() - of_requests} == {
        name: labels for name, labels in theirs.items() if name not in of_requests
    }
