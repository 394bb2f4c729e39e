"""The command line: ``tierkv demo``, ``bench``, ``tune``, and ``du``, ``ls``, ``verify``, ``gc``, ``wipe``, ``doctor``.

One module a command or a kind of them; ``_main`` has them all, and how each of them ends.
"""

from tierkv.cli._main import main

__all__ = ("main",)
