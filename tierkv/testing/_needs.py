"""Comes before the checks, which are Hypothesis's, and says which extra brings it."""

from tierkv._extras import require

require("tierkv.testing", "hypothesis")
