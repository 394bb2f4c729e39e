"""What commands with tables and bars write to."""

from __future__ import annotations

import rich.console


class Console(rich.console.Console):
    """Rich's, which ends the process itself, as if it had failed, when its reader has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
