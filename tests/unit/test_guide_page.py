"""Pages that name tests, files and commands as evidence name such as exist."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest

from tierkv.cli._main import _parser

ROOT = Path(__file__).parents[2]
PAGES = {
    name: (ROOT / "docs" / name).read_text() for name in ("how-to/vllm-ascend-guide.md", "explanation/security.md")
}
_EVIDENCE = re.compile(r"(?<![\w./-])((?:tests|tierkv|docs|examples)/[\w./-]*\w)((?:::\w+)*)")
_COMMAND = re.compile(r"(?:`|^)tierkv ((?:[a-z]+ ?)+)((?:[^`\n])*)", re.MULTILINE)


def missing_evidence(text: str) -> list[str]:
    """What a text names as ``tests/...::test_name`` or as a file of ours, and is not there."""
    return [path + name for path, name in _EVIDENCE.findall(text) if not _exists(ROOT / path, name.split("::")[1:])]


def _exists(path: Path, names: list[str]) -> bool:
    if not names:
        return path.exists()
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for name in names:
        found = [
            node
            for node in body
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ]
        if not found:
            return False
        body = found[-1].body
    return names[-1].startswith("test_")


def missing_commands(text: str) -> list[str]:
    """What a text gives as a command or an option of ``tierkv`` and the command line does not take."""
    return [f"{words}{rest}" for words, rest in _COMMAND.findall(text) if not _is_taken(words.split(), rest)]


def _is_taken(words: list[str], rest: str) -> bool:
    parser: argparse.ArgumentParser = _parser()
    for word in words:
        choices = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
        if choices is None:
            break  # the rest are arguments
        if word not in choices:
            return False
        parser = choices[word]
    known = {option for action in parser._actions for option in action.option_strings}
    return parser.prog != "tierkv" and set(re.findall(r"--[\w-]+", rest)) <= known


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    """Each test, file and command; and there are some."""
    assert missing_evidence(PAGES[page]) == []
    assert missing_commands(PAGES[page]) == []
    assert len(_EVIDENCE.findall(PAGES[page])) > 20
    assert _COMMAND.findall(PAGES[page])


def test_what_does_not_exist_is_found() -> None:
    """A test, a class, a file, a command and an option that are not there; none of those that are."""
    here = "tests/unit/test_guide_page.py"
    wrong = [
        f"{here}::test_nothing", f"{here}::_exists", "tests/unit/test_none.py", "tests/unit/test_none.py::test_a",
        "tests/vllm/test_engine_inprocess.py::test_cpu_only",
    ]  # fmt: skip
    right = [f"{here}::test_what_does_not_exist_is_found", here]
    right.append("tests/vllm/test_engine_inprocess.py::TestGuide::test_cpu_only")
    assert missing_evidence(", ".join(f"`{each}`" for each in wrong + right)) == wrong
    text = "`tierkv bench tape`, `tierkv bench fs DIR --quick`\ntierkv bench fs /x --nothing\n`tierkv frob`"
    assert missing_commands(text) == ["bench tape", "bench fs /x --nothing", "frob"]
