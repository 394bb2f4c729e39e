"""The kit finds every planted fault of an order, and says which rule it breaks; the sound ones pass."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.conformance import planted_policies as planted
from tests.patience import PATIENCE_S
from tierkv.testing import ConformanceError, ManualClock, check_policy

NO_SHRINKING = settings(max_examples=200, phases=[Phase.generate], database=None, derandomize=True)

FAULTS: dict[type[planted.InOrder | planted.TakesAncestorsOfTheHeld], tuple[str, dict[str, Any]]] = {
    planted.NamesTwice: ("names a key once", {}),
    planted.LosesOne: ("names every resident key", {}),
    planted.NamesTheDead: ("names resident keys only|forgets what leaves", {}),
    planted.NamesTheHeld: ("leaves out what is held|remembers a chunk that was deleted", {}),
    planted.RemembersHolds: ("names every resident key|remembers a chunk that was deleted", {}),
    planted.Moves: ("asking for victims changes nothing|being asked for victims changes it", {}),
    planted.ByHash: ("depends on hashes", {}),
    planted.ByIdentity: ("the same calls give the same", {}),
    planted.RemembersDeletes: ("it remembers a chunk that was deleted", {}),
    planted.NeverForgets: ("remembers a bounded number", {}),
    planted.EvictsTheWrongEnd: ("takes others than victims|takes what victims\\(\\) names first", {}),
    planted.EvictsAndKeeps: ("takes others than victims|takes what victims|names resident keys only|forgets", {}),
    planted.HeadFirst: ("only after those that continue it", {"leaves": True}),
    planted.TakesAncestorsOfTheHeld: ("and not if one of them stays", {"leaves": True, "forgets": False}),
    planted.GivesAList: ("gives an iterator", {}),
    planted.MiscountsItself: ("len\\(\\) is the number", {}),
}
AGE_FAULTS: dict[type[planted.Ages], str] = {
    planted.AgesFromReservation: "ttl_s after its commit",
    planted.AgesByWallClock: "by the clock it was given",
    planted.RenewsOnUse: "expire",
    planted.ExpiredLast: "named first",
}


@pytest.mark.parametrize("order", FAULTS, ids=lambda order: order.__name__)
def test_a_planted_fault_is_found(order: type) -> None:
    """With the rule that it breaks as the message."""
    rule, options = FAULTS[order]
    with pytest.raises(ConformanceError, match=rule):
        check_policy(order, settings=NO_SHRINKING, **options)


@pytest.mark.parametrize("order", AGE_FAULTS, ids=lambda order: order.__name__)
def test_a_planted_fault_of_expiry_is_found(order: type[planted.Ages]) -> None:
    """Likewise, of orders whose chunks expire."""
    clock = ManualClock()
    with pytest.raises(ConformanceError, match=AGE_FAULTS[order]):
        check_policy(lambda: order(clock), clock=clock, ttl_s=3.0, settings=NO_SHRINKING)


def test_the_sound_ones_pass() -> None:
    """The faults are found because of what is planted, not because of what they are planted in."""
    few = settings(NO_SHRINKING, max_examples=50)
    assert "PinAware" in check_policy(planted.InOrder, settings=few).passed
    clock = ManualClock()
    report = check_policy(lambda: planted.Ages(clock), clock=clock, ttl_s=3.0, settings=few)
    assert {"Expiring", "CommitAware"} <= set(report.passed)


def test_the_kit_bites_under_python_o() -> None:
    """Nothing of the kit is an assert statement that -O removes; and no test framework is imported."""
    code = (
        "import sys\n"
        "from tests.conformance.planted_policies import NamesTwice\n"
        "from tierkv.testing import ConformanceError, check_policy\n"
        "assert False, 'removed by -O'\n"
        "from hypothesis import Phase, settings\n"
        "try: check_policy(NamesTwice, settings=settings(phases=[Phase.generate], database=None))\n"
        "except ConformanceError as error: print(error.__class__.__name__, 'pytest' in sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-O", "-c", code]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert run.stdout.split()[-2:] == ["ConformanceError", "False"], run.stderr
