"""What the pages show can be typed in: Python compiles, imports exist, configurations are accepted by the parser."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from tierkv.vllm.options import parse_options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDS = {"torch": "tierkv.device", "prometheus_client": "prometheus_client"}
ELSEWHERE = {"vllm"} | {module for needs, module in NEEDS.items() if importlib.util.find_spec(needs) is None}


def _blocks(language: str) -> list[tuple[str, str]]:
    """(page and position, code) of every fenced block in a language."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            found.append((f"{page.relative_to(ROOT)}:{line}", match.group(1)))
    return found


def _parametrize(language: str) -> pytest.MarkDecorator:
    blocks = _blocks(language)
    return pytest.mark.parametrize("code", [code for _, code in blocks], ids=[where for where, _ in blocks])


@_parametrize("python")
def test_python_compiles_and_its_imports_exist(code: str) -> None:
    """Each block is Python as a coroutine's body may have it, and what it imports from us is there."""
    tree = compile(code, "page", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not _is_elsewhere(node.module):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, name.name) for name in node.names)


def _is_elsewhere(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in ELSEWHERE)


@_parametrize("json")
def test_json_is_accepted(code: str) -> None:
    """Each block is JSON that the adapter takes as its configuration, without a warning."""
    assert not parse_options(json.loads(code)).warnings


@_parametrize("bash")
def test_transfer_configurations_are_accepted(code: str) -> None:
    """What stands behind --kv-transfer-config is JSON, and its inner part is accepted without a warning."""
    match = re.search(r"--kv-transfer-config '(.*?)'", code, flags=re.DOTALL)
    if match is not None:
        config = json.loads(match.group(1))
        assert config["kv_connector"] == "OffloadingConnector"
        assert not parse_options(config["kv_connector_extra_config"]).warnings


def test_the_pages_do_show_something() -> None:
    """The patterns above find blocks of each kind."""
    assert _blocks("python")
    assert _blocks("json")
    assert any("--kv-transfer-config" in code for _, code in _blocks("bash"))
