"""Sphinx settings. The build runs with -W -n: a warning or a dangling reference is an error."""

from __future__ import annotations

import tomllib
from pathlib import Path

from docutils.nodes import Element, TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

_PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "tierkv"
author = _PROJECT["authors"][0]["name"]
release = _PROJECT["version"]
copyright = f"2026, {author}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"tierkv {release}"

myst_enable_extensions = ["deflist", "colon_fence", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "undoc-members": True}
# What a tier's own file imports is the tier's business; the page about it must build without.
autodoc_mock_imports = ["numpy", "torch", "torch_npu", "vllm", "prometheus_client"]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# The standard library's inventory lives on the network, and a build must not need one.
nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|contextlib|dataclasses|enum|os|pathlib|typing|types|time)\..*"),
    ("py:.*", r"tierkv\.(.*\.)?_.*"),  # private types: said, not linked
    ("py:.*", r"hypothesis\..*|Settings"),
    ("py:.*", r"torch\..*"),
    ("py:attr", r"[a-z_]+"),  # an attribute of the class at hand
    ("py:.*", r"(Path|Self|Sequence|Mapping|Iterable|Iterator|AsyncIterator|Callable|Any|Exception|Enum|StrEnum)"),
]


_IMPORTED_FROM = (
    "tierkv",
    "tierkv.protocols",
    "tierkv.types",
    "tierkv.errors",
    "tierkv.policies",
    "tierkv.chunkers",
    "tierkv.tiers.fs.FSTier",
)
_ATTRIBUTES: dict[str, list[str]] = {}


def _keep_attribute(_app: Sphinx, what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    """Remember an attribute's docstring before napoleon takes "Full: nothing left" for a type and a description."""
    if what in {"attribute", "data", "property"}:
        _ATTRIBUTES[name] = list(lines)


def _restore_attribute(_app: Sphinx, _what: str, name: str, _obj: object, _options: object, lines: list[str]) -> None:
    lines[:] = _ATTRIBUTES.pop(name, lines)


def _where_it_is_documented(
    _app: Sphinx, env: BuildEnvironment, node: pending_xref, content: TextElement
) -> Element | None:
    """Resolve a name by the module in which it is defined to the one from which users import it."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    name = str(node["reftarget"]).rpartition(".")[2]
    for module in _IMPORTED_FROM:
        entry = domain.data["objects"].get(f"{module}.{name}")
        if entry is not None:
            builder = env.app.builder
            return make_refnode(builder, node["refdoc"], entry.docname, entry.node_id, content)
    return None


def setup(app: Sphinx) -> None:
    """Connect the hooks above; napoleon's own has priority 500."""
    app.connect("autodoc-process-docstring", _keep_attribute, priority=400)
    app.connect("autodoc-process-docstring", _restore_attribute, priority=600)
    app.connect("missing-reference", _where_it_is_documented)
