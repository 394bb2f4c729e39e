"""The code of the how-to pages runs: each page's Python blocks, one after the other, as a reader would run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tierkv.testing import Report

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def run(page: str) -> list[object]:
    """Run a page's blocks as one module; what it printed, as objects."""
    blocks = re.findall(r"^```python\n(.*?)^```", (HOW_TO / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    module = ModuleType(page.replace(".", "_").replace("-", "_"))
    printed: list[object] = []
    module.__dict__["print"] = printed.append
    sys.modules[module.__name__] = module
    try:
        exec(compile("\n".join(blocks), page, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    return printed


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("page", "passed"),
    [
        ("custom-policy.md", {"order", "leaves", "asking changes nothing"}),
        ("custom-tier.md", {"damage is never served"}),
    ],
)
def test_a_page_runs_and_its_implementation_conforms(page: str, passed: set[str]) -> None:
    """The page's last block calls the kit, which finds nothing to complain about."""
    (report,) = run(page)
    assert isinstance(report, Report)
    assert passed <= set(report.passed)
