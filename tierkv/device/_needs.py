"""Comes before the modules that work on numpy's arrays, all of them, and says which extra brings it."""

from tierkv._extras import require

require("tierkv.device", "numpy")
