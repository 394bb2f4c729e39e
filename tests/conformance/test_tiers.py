"""Our tiers pass the conformance kit, each with a side door to its medium."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.conformance.doors import CPUDoor, FSDoor, MemoryDoor, SlabDoor
from tierkv import CPUTier, MemoryTier
from tierkv.protocols import Bounded, Charging, HostTier, Owning, ScanTier
from tierkv.testing import Does, Fault, FaultTier, Report, check_tier
from tierkv.tiers.fs import FSTier

pytestmark = pytest.mark.timeout(600)
FEW = settings(max_examples=25, stateful_step_count=30)


def fs(directory: Path, **options: str) -> FSTier:
    return FSTier(directory / "root", min_free=0, **options)  # type: ignore[arg-type]


def skipped(report: Report) -> set[str]:
    return set(report.skipped)


PERSISTENT = {
    "chunks outlive their tier",
    "a probe finds what a scan has not",
    "a scan ends with its tier",
    "namespaces are apart",
    "what is owned is there",
}
FORGETFUL = {"what cannot be scanned starts empty"}
UNVERIFIED = {"damage is never served"}


def test_memory_tier_conforms() -> None:
    """Everything but persistence and verification, which memory does not offer."""
    report = check_tier(lambda _: MemoryTier(), raw=MemoryDoor, settings=FEW)
    assert skipped(report) == PERSISTENT | UNVERIFIED


def test_cpu_tier_conforms() -> None:
    """As a private lower level; its capacity is the level's, so that it has no share of its own."""
    report = check_tier(lambda _: CPUTier(populate=False), raw=CPUDoor, settings=FEW)
    assert skipped(report) == PERSISTENT | UNVERIFIED | {"a bound is kept"}


@pytest.mark.parametrize("layout", ["files", "slab"])
@pytest.mark.parametrize("durability", ["process", "power"])
def test_fs_tier_conforms(durability: str, layout: str) -> None:
    """All of it but slots, in both durabilities and layouts."""
    raw = SlabDoor if layout == "slab" else FSDoor
    report = check_tier(lambda directory: fs(directory, durability=durability, layout=layout), raw=raw, settings=FEW)
    assert skipped(report) == {"slots are memory"} | FORGETFUL


def test_a_wrapped_tier_conforms() -> None:
    """A FaultTier without a fault that strikes is the tier that it wraps, capabilities and all."""
    never = Fault("read", Does.LIE, calls=0)
    report = check_tier(
        lambda directory: FaultTier(fs(directory), never),
        raw=lambda tier: SlabDoor(tier.inner),  # type: ignore[attr-defined]
        settings=FEW,
    )
    assert skipped(report) == {"slots are memory"} | FORGETFUL


@pytest.mark.parametrize("inner", [MemoryTier(), CPUTier(), FSTier("root")], ids=lambda tier: tier.name)
def test_a_wrapped_tier_has_the_capabilities_of_the_inner_one(inner) -> None:
    """Isinstance tells the truth about a FaultTier: it is how a level finds out what its tier can do."""
    for capability in (HostTier, Charging, Bounded, ScanTier, Owning):
        assert isinstance(FaultTier(inner), capability) == isinstance(inner, capability)
    assert isinstance(FaultTier(inner), FaultTier)
