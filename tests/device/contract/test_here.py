"""What the contract cannot be run on here, said once."""

from __future__ import annotations

import pytest

from tests.device.contract.conftest import why_not


@pytest.mark.parametrize(
    "kind", [pytest.param("npu", marks=pytest.mark.npu), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def test_the_contract_has_its_device(kind):
    """Skips, with the reason, where the tests of this folder leave a kind of device out."""
    reason = why_not(kind)
    if reason is not None:
        pytest.skip(f"the contract does not run on {kind} here: {reason}")
