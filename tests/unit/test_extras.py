"""Optional packages that are not there: one sentence with the extra that brings them, wherever they are missed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tierkv._extras import EXTRAS

ROOT = Path(__file__).parents[2]
WITH_VLLM = {"vllm", "vllm_ascend", "msgspec", "zmq"}
"""What vLLM itself is or brings."""


def last_word(code: str, package: str) -> str:
    """The last line that a process says in which a package cannot be imported."""
    code = f"import sys\nsys.modules[{package!r}] = None\n{code}"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode in (1, 2)
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "package", "extra"),
    [
        ("from tierkv.device import DeviceTier", "numpy", "torch"),
        ("from tierkv.device.measure import best_device", "numpy", "torch"),
        ("from tierkv.tiers.fs import FSTier", "xxhash", "fs"),
        ("from tierkv.tiers.fs import FSTier", "aiofiles", "fs"),
        ("from tierkv.testing import check_tier", "hypothesis", "testing"),
        ("from tierkv.metrics import CacheCollector; CacheCollector({})", "prometheus_client", "metrics"),
        ("from tierkv.tiers.parse import parse_tier; parse_tier('tier', 'fs(/x)')", "xxhash", "fs"),
        ("from tierkv.device import open_runtime; open_runtime('cuda:0')", "torch", "torch"),
        ("from tierkv.device import open_runtime; open_runtime('npu:0')", "torch", "torch"),
    ],
)
def test_an_import_says_which_extra_is_missing(code: str, package: str, extra: str) -> None:
    """One line, also where the import is somewhere inside: what needs what, and what to install."""
    assert re.fullmatch(
        rf".* {package}, which is not installed: the extra {extra} brings it .*", last_word(code, package)
    )


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        ("bench device --quick", "numpy", "torch"),
        ("bench device --quick --device cuda:0", "torch", "torch"),
        ("bench device --quick", "rich", "cli"),
        ("bench fs .", "aiofiles", "fs"),
        ("du .", "rich", "cli"),
        ("du .", "xxhash", "fs"),
        ("demo", "xxhash", "fs"),
        ("tune none.jsonl", "rich", "cli"),
    ],
)
def test_a_command_says_which_extra_is_missing(words: str, package: str, extra: str) -> None:
    """The one that brings the package, and no other that it does not take."""
    said = last_word(f"from tierkv.cli import main\nsys.exit(main({words.split()}))", package)
    assert said.startswith("tierkv ")
    assert re.findall(r"the extra (\w+)", said) == [extra]


def test_what_a_package_itself_misses_is_its_own_error(tmp_path: Path) -> None:
    """A package that is there and broken is not called missing."""
    (tmp_path / "xxhash.py").write_text("import no_such_part_of_it")
    code = f"sys.modules.pop('xxhash')\nsys.path.insert(0, {str(tmp_path)!r})\nimport tierkv.tiers.fs"
    assert last_word(code, "xxhash") == "ModuleNotFoundError: No module named 'no_such_part_of_it'"


def test_every_package_that_is_imported_has_an_extra() -> None:
    """What any module of ours imports is the standard library's, ours, vLLM's, or in an extra of that name."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = set()
    for path in (ROOT / "tierkv").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - set(sys.stdlib_module_names) - {"tierkv"} - WITH_VLLM
    assert others <= EXTRAS.keys()
    for package, extra in EXTRAS.items():
        assert any(line.startswith(package.replace("_", "-")) for line in declared[extra]), package
