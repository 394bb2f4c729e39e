"""The kit finds every planted fault of a tier, and says which rule it breaks; the sound ones pass."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import Phase, settings

from tests.conformance import planted_tiers as planted
from tierkv.testing import ConformanceError, check_tier, no_leaks
from tierkv.testing import _tier_bench as bench

pytestmark = pytest.mark.timeout(600)
NO_SHRINKING = settings(max_examples=20, phases=[Phase.generate], database=None, derandomize=True)

FAULTS: dict[type[planted.Dict], str] = {
    planted.DropsLastByte: "whole",
    planted.StoresTheSlot: "the medium holds the payload, and no more|bytes behind the chunk are zeroed|answers",
    planted.LeavesPadding: "bytes behind the chunk are zeroed",
    planted.AnswersOutOfOrder: "in the order of the keys",
    planted.AnswersHitsOnly: "answers for every key",
    planted.KeepsTheBuffer: "whole",
    planted.LendsItsMemory: "leaves the caller's buffer alone",
    planted.ServesAfterDelete: "what is gone",
    planted.WritesInTwoSteps: "whole",
    planted.NeverReplaces: "whole",
    planted.FoldsKeys: "whole",
    planted.CutsKeys: "every key of a batch is read|whole",
    planted.KeepsTheEndsOfKeys: "every key of a batch is read|whole",
    planted.ReadsPastTheBuffer: "a read ends where its buffer ends",
    planted.ServesWhenClosed: "a closed tier raises",
    planted.BlocksTheLoop: "another thread: .time.sleep",
    planted.BlocksTheLoopWithFiles: "another thread: .open",
    planted.WorksInTheConstructor: "constructors do no I/O",
    planted.LeaksADescriptor: "leaves nothing behind: 'descriptor",
    planted.LeaksATask: "leaves no task running",
    planted.OverItsBound: "no more than its share",
    planted.FailsWhenFull: "a full tier refuses",
    planted.EvictsByItself: "what was written is read",
}
FILE_FAULTS: dict[type[planted.Files], str] = {
    planted.NoChecksum: "damage is not served",
    planted.AcceptsTruncated: "damage is not served",
    planted.KeyNotChecked: "damage is not served",
    planted.KeepsTheDamaged: "what is gone is not contained",
    planted.RaisesOnDamage: "damage is CORRUPT or MISSING",
    planted.SharesNamespaces: "what is gone is not contained",
    planted.ScansTwice: "each once",
    planted.ScanNeverEnds: "ends when its tier closes",
    planted.ProbesHitsOnly: "a probe answers per key",
    planted.LosesAtClose: "announces every chunk",
    planted.OwnsForEver: "says what is there",
    planted.OwnsWhatItWrote: "says what is there",
    planted.StartsWithWhatLies: "cannot be scanned starts empty",
    planted.ClearsAtClose: "cannot be scanned starts empty",
    planted.ForgetsWhatLies: "cannot be scanned starts empty, and so does its medium",
}


WAITED_FOR = {planted.ScanNeverEnds, planted.LosesAtClose}
"""What these owe never comes."""


@pytest.fixture(autouse=True)
def impatient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What never comes, or never ends, is not waited for as long as on a busy disk; what was leaked is closed."""
    tier = request.node.callspec.params["tier"] if hasattr(request.node, "callspec") else None
    if tier in WAITED_FOR:
        monkeypatch.setattr(bench, "_PATIENCE_S", 4.0)
    if tier is planted.LeaksADescriptor:
        monkeypatch.setattr(bench, "no_leaks", partial(no_leaks, grace_s=0.0))
    yield
    while planted.LeaksADescriptor.opened_fds:
        os.close(planted.LeaksADescriptor.opened_fds.pop())


@pytest.mark.parametrize("tier", FAULTS, ids=lambda tier: tier.__name__)
def test_a_planted_fault_is_found(tier: type[planted.Dict]) -> None:
    """With the rule that it breaks as the message."""
    with pytest.raises(ConformanceError, match=FAULTS[tier]):
        check_tier(tier, raw=planted.DictDoor, settings=NO_SHRINKING)


@pytest.mark.parametrize("tier", FILE_FAULTS, ids=lambda tier: tier.__name__)
def test_a_planted_fault_of_persistence_is_found(tier: type[planted.Files]) -> None:
    """Likewise, of tiers that outlive their process and verify what they find."""
    with pytest.raises(ConformanceError, match=FILE_FAULTS[tier]):
        check_tier(tier, raw=planted.FilesDoor, settings=NO_SHRINKING)


@pytest.mark.parametrize("tier", [planted.FailsOnAbsentDeletes, planted.FailsToCloseTwice], ids=lambda t: t.__name__)
def test_an_exception_of_the_tier_comes_through(tier: type[planted.Dict]) -> None:
    """Where a tier raises what it must not, its own exception says more than a rule would."""
    with pytest.raises((KeyError, RuntimeError)):
        check_tier(tier, raw=planted.DictDoor, settings=NO_SHRINKING)


def test_the_sound_ones_pass() -> None:
    """The faults are found because of what is planted, not because of what they are planted in."""
    assert "a bound is kept" in check_tier(planted.Bounded, raw=planted.DictDoor, settings=NO_SHRINKING).passed
    report = check_tier(planted.Files, raw=planted.FilesDoor, settings=NO_SHRINKING)
    assert {"damage is never served", "namespaces are apart"} <= set(report.passed)
    report = check_tier(planted.Unlisted, raw=planted.FilesDoor, verifies=True, settings=NO_SHRINKING)
    assert {"damage is never served", "what cannot be scanned starts empty"} <= set(report.passed)


def test_without_a_side_door_the_kit_says_what_it_skipped() -> None:
    """A tier that stores the whole slot and cuts it when it reads agrees with itself: only the door can tell."""

    class AgreesWithItself(planted.Dict):
        async def write_one(self, chunk, buffer):
            self.chunks[chunk.key] = bytes(buffer[: chunk.nbytes])[::-1]

        def read_one(self, key, buffer):
            outcome = super().read_one(key, buffer)
            n = len(self.chunks.get(key, b""))
            buffer[:n] = bytes(buffer[:n])[::-1]
            return outcome

    report = check_tier(AgreesWithItself, settings=NO_SHRINKING)
    assert "the medium holds what was written" in report.skipped
    with pytest.raises(ConformanceError, match=r"the medium holds the payload|a later write replaces the bytes"):
        check_tier(AgreesWithItself, raw=planted.DictDoor, settings=NO_SHRINKING)
