"""``python -m tierkv.cli`` is ``tierkv``."""

import sys

from tierkv.cli import main

sys.exit(main())
