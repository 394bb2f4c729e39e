"""The checkout itself: an idea per file, nothing of one machine in it, and CI that runs what it says."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "tierkv").rglob("*.py"))
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 40
# A bracket in each, so that this file does not match itself.
HOSTS = r"[p]ypi\.org|python[h]osted|[d]eb\.debian\.org|npm[j]s\.(org|com)"
LOCAL = r"(?<![\w.])/[w]ork/|/[r]oot/|/opt/[w]heels|\.\./[s]hared"


def _tracked() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def _n_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    first = function.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_one_idea(path: Path) -> None:
    """No module over 400 lines, no function over 40 (docstring not counted)."""
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_MODULE_LINES
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{node.name}: {_n_lines(node)}" for node in functions if _n_lines(node) > MAX_FUNCTION_LINES]
    assert not long


def test_nothing_of_one_machine_is_tracked() -> None:
    """No package index's host and no path of a developer's machine stands in a tracked file; CI may name its input."""
    found = []
    for path in _tracked():
        if path.suffix in {".png", ".pt"}:
            continue
        pattern = HOSTS if path.relative_to(ROOT).parts[0] == ".ci" else f"{HOSTS}|{LOCAL}"
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if re.search(pattern, line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found


def test_ci_runs_the_command_that_the_readme_gives() -> None:
    """The README's test command stands in CI letter for letter, so that a new user and CI do the same."""
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("python3 -m venv")]
    test_commands = [line for line in commands if "nox" in line]
    assert len(test_commands) == 1
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert test_commands[0] in script
    assert "set -euo pipefail" in script
    assert script.index(test_commands[0]) < script.index(".venv/bin/nox -s vllm")


def test_every_module_has_a_room() -> None:
    """The table in CONTRIBUTING names each module and package of ours once, and none that is not there."""
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Rooms", 1)[1].split("\n## ", 1)[0]
    rooms = [
        name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]
    there = [path.name + "/" * path.is_dir() for path in (ROOT / "tierkv").iterdir() if path.name[:2] != "__"]
    assert sorted(name.removeprefix("tierkv/") for name in rooms) == sorted(set(there) - {"py.typed"})


def test_no_page_refers_to_a_document_that_a_reader_does_not_have() -> None:
    """Numbers of sections, and marks that some other page explains."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = [(page.name, re.findall(r"\[ran\]|\b[Ss]ection \d+", page.read_text())) for page in pages]
    assert not [each for each in found if each[1]]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link of a page at the root names a file that is there."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / page).read_text())
    assert [target for target in targets if not (ROOT / target).exists()] == []
