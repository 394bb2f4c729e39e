"""The command line: ``tierkv demo``."""

from tierkv.cli._main import main

__all__ = ("main",)
