"""The list of planted bugs is true, and the twelve that must never be are found; ``nox -s mutants`` runs them all."""

from __future__ import annotations

import pytest

from tests import mutants

BY_NAME = {mutant.name: mutant for mutant in mutants.everything()}


def test_names_are_apart() -> None:
    """Each bug has a name of its own, and there are at least twenty beside the core's."""
    assert len(BY_NAME) == len(mutants.everything())
    assert len(mutants.OURS) >= 20
    assert set(mutants.CI) <= BY_NAME.keys()


@pytest.mark.parametrize("name", BY_NAME)
def test_a_patch_applies(name: str) -> None:
    """Exactly once, and leaves Python behind: who changes that code changes the bug as well."""
    mutant = BY_NAME[name]
    text = (mutants.ROOT / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


@pytest.mark.timeout(mutants.TIMEOUT_S + 30)
@pytest.mark.parametrize("name", mutants.CI)
def test_a_bug_that_must_never_be_is_found(name: str) -> None:
    """Its hunt ends with a failure, and says of what."""
    assert mutants.killed_by(BY_NAME[name])
