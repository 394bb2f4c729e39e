"""``python -m tests.faults MODULE:FUNCTION JSON``: see :func:`tests.faults.in_child`."""

import sys

from tests.faults import run_here

run_here(*sys.argv[1:])
