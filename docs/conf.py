"""Sphinx settings. The build runs with -W -n: a warning or a dangling reference is an error."""

from __future__ import annotations

import tomllib
from pathlib import Path

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
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
# What a tier's own file imports is the tier's business; the page about it must build without.
autodoc_mock_imports = ["torch", "torch_npu", "vllm", "prometheus_client"]
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# The standard library's inventory lives on the network, and a build must not need one.
nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|contextlib|dataclasses|enum|os|pathlib|typing|types|time)\..*"),
    ("py:.*", r"(Path|Self|Sequence|Mapping|Iterable|Iterator|AsyncIterator|Callable|Any|Exception|Enum|StrEnum)"),
]
