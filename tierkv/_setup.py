"""From the levels that a user writes down to what the hierarchy must know of them; wrong settings end here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tierkv._answers import Answers
from tierkv._level import LevelPlan, Writes
from tierkv._mover import MoverLimits
from tierkv.errors import ConfigError, TierKVError, bad_setting, closest
from tierkv.protocols import (
    Admission,
    Bounded,
    Charging,
    Chunker,
    EvictionPolicy,
    HostTier,
    Owning,
    Port,
    ScanTier,
    Tier,
)
from tierkv.settings import parse_count, parse_seconds
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
        breaker_cooldown_s: how long a tier that fails is left alone before something is tried, and again after each
            trial that failed; None takes the limits' (5 s). Reads and writes are left alone each by itself.
    """

    tier: Tier
    policy: EvictionPolicy
    capacity: int | str | None = None
    admission: Admission | None = None
    writes: Writes = Writes.CASCADE
    queue: int | str = "1GiB"
    breaker_cooldown_s: float | None = None


def plan_of(level: Level, index: int, capacity_nbytes: int, stride_nbytes: int) -> LevelPlan:
    """What the hierarchy is told of a level whose tier is open."""
    tier = level.tier
    answers = Answers(tier, capacity_nbytes)
    share = answers.share_nbytes if index and isinstance(tier, Bounded) else None
    more: dict[str, Any] = {}
    if not index:
        assert isinstance(tier, HostTier), "checked before it was opened"
        more |= {"n_slots": tier.n_slots, "slot_nbytes": stride_nbytes}
    if isinstance(tier, ScanTier):
        more |= {"settled": answers.settled, "writable": answers.writable, "scans": True}
    if isinstance(tier, Owning):
        more["owns"] = answers.owns
    return LevelPlan(
        name=tier.name,
        capacity_nbytes=share() if share is not None else capacity_nbytes,
        policy=level.policy,
        admission=level.admission,
        writes=level.writes,
        charge=answers.charge_nbytes if isinstance(tier, Charging) else None,
        queue_nbytes=parse_size(f"{tier.name}.queue", level.queue),
        share=share,
        **more,
    )


def chunk_nbytes_of(given: int | str | None, chunker: Chunker, device: Port | None) -> int:
    """The slots' payload: what was given, else the device's or the chunker's. Raises ConfigError."""
    needed = getattr(device, "chunk_nbytes", None) or getattr(chunker, "chunk_nbytes", None)
    if given is None and needed is None:
        raise bad_setting("chunk_nbytes", None, "the payload of one chunk in bytes, where the chunker does not say it")
    nbytes = parse_size("chunk_nbytes", needed if given is None else given)
    if needed is not None and nbytes < needed:
        raise bad_setting("chunk_nbytes", given, f"at least the {needed} bytes that a chunk has", needed)
    return nbytes


def namespace_of(given: object, chunker: Chunker) -> bytes:
    """Canonical bytes of what keys mean anything under. Raises ConfigError."""
    if given is None:
        namespace = getattr(chunker, "namespace", None)
        if namespace is None:
            raise ConfigError("namespace is missing: give TieredCache one, or a chunker that has one")
        return bytes(namespace.to_bytes())
    if not isinstance(given, bytes) or not given:
        raise bad_setting("namespace", given, "bytes that only one model has", example="Namespace(...).to_bytes()")
    return given


def capacities_of(levels: object, chunk_nbytes: int) -> list[int]:
    """Capacities in bytes, 0 for a tier's own default. Raises ConfigError before anything is opened."""
    if isinstance(levels, Level) or not isinstance(levels, (list, tuple)) or not levels:
        raise bad_setting(
            "levels", levels, "a list of at least one tierkv.Level, fastest first", example="[Level(...)]"
        )
    for i, level in enumerate(levels):
        _check_level(i, level)
    names = [level.tier.name for level in levels]
    policies = [id(level.policy) for level in levels]
    for level, name in zip(levels, names, strict=True):
        if names.count(name) > 1:
            raise bad_setting("tier name", name, "different for each level", f"{name}2")
        if policies.count(id(level.policy)) > 1:
            nearest = f"a second {type(level.policy).__name__}()"
            raise bad_setting(f"{name}.policy", level.policy, "an order of this level alone", nearest)
    return [_capacity_of(level, chunk_nbytes) for level in levels]


def _check_level(i: int, level: object) -> None:
    """Raise ConfigError for what is no level, or has parts that are none."""
    if not isinstance(level, Level):
        raise bad_setting(f"levels[{i}]", level, "a tierkv.Level", example="Level(tier, policy=LRU(), capacity=...)")
    tier, policy, admission = level.tier, level.policy, level.admission
    if not _offers(tier, "open", "contains", "read", "write", "delete", "aclose"):
        raise bad_setting(f"levels[{i}].tier", tier, "a tier", example="CPUTier()")
    if not _is_text(tier.name):
        raise bad_setting(f"levels[{i}].tier.name", tier.name, "text", example="cpu")
    if i == 0 and not isinstance(tier, HostTier):
        raise bad_setting("levels[0].tier", tier, "a tier in host memory (CPUTier, MemoryTier)", example="CPUTier()")
    if not _offers(policy, "on_insert", "on_access", "on_remove", "victims"):
        raise bad_setting(f"{tier.name}.policy", policy, "an order of tierkv.policies", example="LRU()")
    if admission is not None and not _offers(admission, "admits"):
        raise bad_setting(f"{tier.name}.admission", admission, "a rule of tierkv.admission, or None")
    if not isinstance(level.writes, Writes):
        nearest = closest(str(level.writes), [each.name for each in Writes])
        known = " or ".join(map(str, Writes))
        raise bad_setting(f"{tier.name}.writes", level.writes, known, nearest and f"Writes.{nearest}")


def _capacity_of(level: Level, chunk_nbytes: int) -> int:
    name = level.tier.name
    queue_nbytes, least_nbytes = parse_size(f"{name}.queue", level.queue), _charge_of(level.tier, chunk_nbytes)
    if queue_nbytes < least_nbytes:
        allowed = f"at least one chunk, which takes {least_nbytes} bytes"
        raise bad_setting(f"{name}.queue", level.queue, allowed, least_nbytes)
    if level.capacity is not None:
        return parse_size(f"{name}.capacity", level.capacity)
    if not isinstance(level.tier, Bounded):
        raise bad_setting(f"{name}.capacity", None, 'bytes, as an integer or "8GiB"')
    return 0


def check_rest(
    *, chunker: object, device: object, on_event: object, limits: MoverLimits | None, clock: object
) -> MoverLimits:
    """The limits, once everything that is neither size nor level has been found right. Raises ConfigError."""
    if not _offers(chunker, "chunks"):
        raise bad_setting("chunker", chunker, "a chunker", example="PrefixChunker(namespace=Namespace(...))")
    if device is not None and not _offers(device, "attach", "check", "store_chunks", "load_chunks", "close"):
        raise bad_setting("device", device, "a device tier, or None")
    if on_event is not None and not callable(on_event):
        raise bad_setting("on_event", on_event, "a function of one event, or None")
    if not callable(clock):
        raise bad_setting("clock", clock, "a function that gives seconds", example="time.monotonic")
    limits = MoverLimits() if limits is None else limits
    if not isinstance(limits, MoverLimits):
        raise bad_setting("limits", limits, "a tierkv.MoverLimits, or None", example="MoverLimits()")
    return MoverLimits(
        deadline_s=parse_seconds("limits.deadline_s", limits.deadline_s, 0.001),
        n_batches=parse_count("limits.n_batches", limits.n_batches, 1, 1_024),
        batch_nbytes=parse_size("limits.batch_nbytes", limits.batch_nbytes),
        breaker_failures=parse_count("limits.breaker_failures", limits.breaker_failures, 1, 1_000_000),
        breaker_cooldown_s=parse_seconds("limits.breaker_cooldown_s", limits.breaker_cooldown_s),
    )


def cooldowns_of(levels: Sequence[Level], limits: MoverLimits) -> list[float]:
    """Each level's pause of its breakers in seconds. Raises ConfigError."""
    return [
        limits.breaker_cooldown_s
        if level.breaker_cooldown_s is None
        else parse_seconds(f"{level.tier.name}.breaker_cooldown_s", level.breaker_cooldown_s)
        for level in levels
    ]


def _offers(value: object, *names: str) -> bool:
    """Whether it is an object, not a class, with all these methods."""
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _charge_of(tier: Tier, chunk_nbytes: int) -> int:
    try:
        return tier.charge_nbytes(chunk_nbytes) if isinstance(tier, Charging) else chunk_nbytes
    except TierKVError:  # it can tell once it is open
        return chunk_nbytes
