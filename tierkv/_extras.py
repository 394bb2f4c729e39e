"""Optional packages: one that is not installed is missed in one sentence, which names the extra that brings it."""

from __future__ import annotations

import importlib
from typing import Final

EXTRAS: Final = {
    "aiofiles": "fs",
    "hypothesis": "testing",
    "matplotlib": "plot",
    "numpy": "torch",
    "prometheus_client": "metrics",
    "rich": "cli",
    "torch": "torch",
    "torch_npu": "npu",
    "xxhash": "fs",
}
"""The extra of each package that some module of ours imports and ``import tierkv`` does not."""


def require(who: str, *packages: str) -> None:
    """See that they can be imported. Called where they are about to be, so nothing is loaded that was not wanted.

    Raises:
        ModuleNotFoundError: one is not installed; says what ``who`` needs and which extra brings it.
    """
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name != package:
                raise  # it is there, and misses something itself
            raise ModuleNotFoundError(f"{who} needs {missing(error)}", name=package) from None


def missing(error: ImportError) -> str:
    """What is not installed, as the end of a sentence or all of it."""
    package = (error.name or str(error)).partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return f"{package}, which is not installed"
    return f"{package}, which is not installed: the extra {extra} brings it (in a checkout: pip install '.[{extra}]')"
