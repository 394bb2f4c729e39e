"""From the levels that a user writes down to what the hierarchy must know of them; wrong settings end here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tierkv._level import LevelPlan, Writes
from tierkv.errors import ConfigError, bad_setting
from tierkv.protocols import Admission, Bounded, Charging, Chunker, EvictionPolicy, HostTier, Port, ScanTier, Tier
from tierkv.sizes import parse_size


class Level(NamedTuple):
    """A tier with its order, size, entry rule and position. Five concerns, five places.

    Args:
        tier: the medium. The first level's must be a :class:`~tierkv.protocols.HostTier`.
        policy: in which order chunks leave (:mod:`tierkv.policies`).
        capacity: bytes the level may hold, as an integer or ``"8GiB"``; None leaves it to a tier with a default.
        admission: who may enter; everybody by default.
        writes: how chunks come from the level above; unused on the first.
        queue: bytes that may wait for a write to this level; what comes on top is dropped and counted.
    """

    tier: Tier
    policy: EvictionPolicy
    capacity: int | str | None = None
    admission: Admission | None = None
    writes: Writes = Writes.CASCADE
    queue: int | str = "1GiB"


def plan_of(level: Level, index: int, capacity_nbytes: int, stride_nbytes: int) -> LevelPlan:
    """What the hierarchy is told of a level whose tier is open."""
    tier = level.tier
    share = tier.share_nbytes if index and isinstance(tier, Bounded) else None
    more: dict[str, Any] = {}
    if not index:
        assert isinstance(tier, HostTier), "checked before it was opened"
        more |= {"n_slots": tier.n_slots, "slot_nbytes": stride_nbytes}
    if isinstance(tier, ScanTier):
        scan = tier
        more |= {"settled": scan.settled, "writable": lambda: scan.writable, "scans": True}
    return LevelPlan(
        name=tier.name,
        capacity_nbytes=share() if share is not None else capacity_nbytes,
        policy=level.policy,
        admission=level.admission,
        writes=level.writes,
        charge=tier.charge_nbytes if isinstance(tier, Charging) else None,
        queue_nbytes=parse_size(f"{tier.name}.queue", level.queue),
        share=share,
        **more,
    )


def chunk_nbytes_of(given: int | None, chunker: Chunker, device: Port | None) -> int:
    nbytes = given or getattr(device, "chunk_nbytes", None) or getattr(chunker, "chunk_nbytes", None)
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise bad_setting("chunk_nbytes", nbytes, "the payload of one chunk in bytes, at least 1", 1)
    return nbytes


def namespace_of(given: bytes | None, chunker: Chunker) -> bytes:
    if given is not None:
        return given
    namespace = getattr(chunker, "namespace", None)
    if namespace is None:
        raise ConfigError("namespace is missing: give TieredCache one, or a chunker that has one")
    return bytes(namespace.to_bytes())


def capacities_of(levels: Sequence[Level]) -> list[int]:
    """Capacities in bytes, 0 for a tier's own default. Raises ConfigError before anything is opened."""
    if not levels:
        raise bad_setting("levels", [], "at least one level")
    if not isinstance(levels[0].tier, HostTier):
        raise bad_setting("levels[0].tier", levels[0].tier, "a tier in host memory (CPUTier, MemoryTier)")
    names = [level.tier.name for level in levels]
    for name in names:
        if names.count(name) > 1:
            raise bad_setting("tier name", name, "different for each level", f"{name}2")
    capacities = []
    for level in levels:
        parse_size(f"{level.tier.name}.queue", level.queue)
        if level.capacity is None:
            if not isinstance(level.tier, Bounded):
                raise bad_setting(f"{level.tier.name}.capacity", None, 'bytes, as an integer or "8GiB"')
            capacities.append(0)
        else:
            capacities.append(parse_size(f"{level.tier.name}.capacity", level.capacity))
    return capacities
