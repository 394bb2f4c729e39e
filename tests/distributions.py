"""A third party's distribution, made and installed as its author's would be: a wheel, pip, a directory on the path."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

_CODE = '''
from tierkv import MemoryTier


class ShelfTier(MemoryTier):
    """Somebody's tier: it takes a setting of its own, and counts what it wrote."""

    n_written = 0

    def __init__(self, *, color: str) -> None:
        super().__init__(name=f"{color} shelf")

    async def write(self, items):
        ShelfTier.n_written += len(items)
        return await super().write(items)


def no_tier(**settings):
    return object()


def explodes(**settings):
    raise RuntimeError("out of\\nshelves")
'''
_POINTS = """[tierkv.tiers]
shelf = shelves:ShelfTier
no-tier = shelves:no_tier
explodes = shelves:explodes
broken = no_such_module_of_shelves:Tier
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def install_shelves(folder: Path) -> Path:
    """Build the wheel ``shelves`` and install it below ``folder``; the directory that belongs on the path."""
    wheel, target = folder / "shelves-1.0-py3-none-any.whl", folder / "site"
    files = {
        "shelves.py": _CODE,
        "shelves-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n",
        "shelves-1.0.dist-info/WHEEL": _WHEEL,
        "shelves-1.0.dist-info/entry_points.txt": _POINTS,
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text.encode())}\n" for name, text in files.items())
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (
            files | {"shelves-1.0.dist-info/RECORD": record + "shelves-1.0.dist-info/RECORD,,\n"}
        ).items():
            archive.writestr(name, text)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True, timeout=120)
    return target


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
