"""What a torch-npu wheel wants from CANN: read from its libraries, so that a new release tells by itself what is new.

The check by symbols of a release that is not installed: ``python -m tests.device.npu_sim.build --package DIR``.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_OF_CANN = re.compile(r"(acl|rt[A-Z]|Msprof|Hccl|_ZNK?\d*(ge|hccl|domi)\d)")
"""Plain names with CANN's prefixes, and C++ names in its namespaces."""

_OF_TORCH = ("libtorch", "libc10")


@dataclass(frozen=True)
class Needs:
    """What must be there before ``import torch_npu`` can succeed."""

    libraries: frozenset[str]
    """File names that the dynamic linker looks for."""
    symbols: frozenset[str]
    """Functions that these libraries must define: the wheel is linked with BIND_NOW, so each of them counts."""


def read_needs(package: Path) -> Needs:
    """What the libraries behind ``torch_npu._C`` want and neither the wheel, torch nor the system has.

    Args:
        package: folder ``torch_npu`` of an installed or unpacked wheel.

    Raises:
        FileNotFoundError: no such library in it, or no binutils.
    """
    start = next(iter(sorted(package.glob("_C.*.so"))), None)
    if start is None:
        raise FileNotFoundError(f"{package} has no _C.*.so: not a torch_npu package")
    files, missing = {start}, set()
    to_read = [start]
    while to_read:
        for name in _needed(to_read.pop()):
            file = package / "lib" / name
            if file.is_file():
                to_read += [file] if file not in files else []
                files.add(file)
            elif name.endswith(".so") and not name.startswith(_OF_TORCH):  # the system's have a version behind .so
                missing.add(name)
    wanted = _names(files, "--undefined-only") - _names(files, "--defined-only")
    return Needs(frozenset(missing), frozenset(name for name in wanted if _OF_CANN.match(name)))


def defined(libraries: Iterable[Path]) -> set[str]:
    """Names that these libraries define."""
    return _names(libraries, "--defined-only")


def _needed(file: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "--dynamic", "--wide", str(file)))


def _names(files: Iterable[Path], which: str) -> set[str]:
    output = _output("nm", "--dynamic", "--format=posix", which, *map(str, files))
    names = (line.split(maxsplit=1)[0] for line in output.splitlines() if line and not line.endswith(":"))
    return {name for name in names if "@" not in name}  # a version after @: libc and its kin


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
