"""The public surface: small, documented, and in the words of the glossary."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tierkv

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
# vLLM's words stay vLLM's; they are translated at its door and go no further.
MODULES = sorted(path for path in (ROOT / "tierkv").rglob("*.py") if "vllm" not in path.parts)
BANNED_WORDS = {"spill", "spilled", "flush", "flushed", "budget", "l1", "l2", "l3", "refcnt", "refcount"}
BANNED_PAIRS = {"ref_cnt", "ref_count", "block_size", "chunk_id", "block_hash_id"}
ALLOWED = {"WriteBudget"}  # a budget of writes a day; the word is banned for a capacity
BANNED_UNITS = re.compile(r"(^|_)(bytes|sec|secs|seconds|ms|millis)$|^num_")


def test_all_is_a_short_tuple_and_says_the_truth() -> None:
    """``__all__`` is a tuple of at most 30 names, sorted, and equals what the package really offers."""
    assert isinstance(tierkv.__all__, tuple)
    assert len(tierkv.__all__) <= 30
    assert sorted(set(tierkv.__all__)) == sorted(tierkv.__all__)
    offered = {
        name
        for name, value in vars(tierkv).items()
        if not name.startswith("_") and not isinstance(value, ModuleType) and name != "annotations"
    }
    assert offered == set(tierkv.__all__)


@pytest.mark.parametrize("name", getattr(tierkv, "__all__", ()))
def test_every_public_name_is_documented(name: str) -> None:
    """Each name of ``__all__`` has a docstring and an entry of its own in the reference."""
    assert (getattr(tierkv, name).__doc__ or "").strip()
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    assert re.search(rf"auto\w+:: tierkv\.{name}\b", pages), f"docs/reference has no entry for tierkv.{name}"


def _public_names(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """Yield classes, functions, parameters and attributes, each with its line and whether it may be a quantity."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name != "__init__":
                continue
            yield node.name, node.lineno, False
            if isinstance(node, ast.ClassDef):
                yield from _public_names(node)
            else:
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                yield from ((argument.arg, argument.lineno, True) for argument in arguments)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.lineno, True


def _complaint(name: str, *, quantity: bool) -> str | None:
    if name in ALLOWED:
        return None
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = set(snake.split("_"))
    if words & BANNED_WORDS or any(re.search(rf"(^|_){pair}($|_)", snake) for pair in BANNED_PAIRS):
        return "is a banned word of the glossary"
    if quantity and BANNED_UNITS.search(snake):
        return "has its unit wrong: bytes end in _nbytes, seconds in _s, counts start with n_"
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_use_the_words_of_the_glossary(path: Path) -> None:
    """No public class, function, parameter or attribute outside the vLLM adapter uses a banned word or unit."""
    names = _public_names(ast.parse(path.read_text()))
    found = [
        f"{path.name}:{line} {name} {bad}"
        for name, line, quantity in names
        if (bad := _complaint(name, quantity=quantity))
    ]
    assert not found


@pytest.mark.parametrize("name", ["spill_to_disk", "budget", "L2Cache", "num_chunks", "timeout_seconds", "block_size"])
def test_the_glossary_gate_bites(name: str) -> None:
    """The gate above does complain about the names it exists for."""
    assert _complaint(name, quantity=True)
