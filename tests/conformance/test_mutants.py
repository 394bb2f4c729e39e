"""The list of planted bugs is true, and the twelve that must never be are found; ``nox -s mutants`` runs them all."""

from __future__ import annotations

import pytest

from tests import mutants
from tests.unit import fs_mutants

BY_NAME = {mutant.name: mutant for mutant in mutants.everything()}
PATCHES = {mutant.name: (mutant.file, mutant.old, mutant.new) for mutant in mutants.everything()} | {
    f"fs: {mutant.name}": (f"tierkv/tiers/{mutant.file}", mutant.old, mutant.new) for mutant in fs_mutants.MUTANTS
}
"""Those of the fs tier are hunted by hand only."""


def test_names_are_apart() -> None:
    """Each bug has a name of its own, and there are at least twenty beside the core's."""
    assert len(BY_NAME) == len(mutants.everything())
    assert len(mutants.OURS) >= 20
    assert set(mutants.CI) <= BY_NAME.keys()


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies(name: str) -> None:
    """Exactly once, and leaves Python behind: who changes that code changes the bug as well."""
    file, old, new = PATCHES[name]
    text = (mutants.ROOT / file).read_text()
    assert text.count(old) == 1
    compile(text.replace(old, new), file, "exec")


@pytest.mark.timeout(mutants.TIMEOUT_S + 30)
@pytest.mark.parametrize("name", mutants.CI)
def test_a_bug_that_must_never_be_is_found(name: str) -> None:
    """Its hunt ends with a failure, and says of what."""
    assert mutants.killed_by(BY_NAME[name])
