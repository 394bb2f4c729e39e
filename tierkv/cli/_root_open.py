"""The directory that a command was given, opened, with the engine's secret if it reads chunks."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.tiers._fs.inspection import Root


def add_secret_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the checksum key is, for commands that read chunks. Never the key itself: others can see arguments."""
    parser.add_argument(
        "--checksum-key-file", metavar="FILE", help="the engine's, to read chunks that were proven by it"
    )
    parser.add_argument("--checksum-key-env", metavar="NAME", help="the variable that has it instead")


@contextlib.contextmanager
def opened(arguments: argparse.Namespace) -> Iterator[Root]:
    """Raises ConfigError: it cannot be read, or the secret cannot."""
    from tierkv.tiers._fs.inspection import Root  # noqa: PLC0415 - needs the extra fs
    from tierkv.tiers._fs.secret import SecretSource  # noqa: PLC0415

    source = SecretSource(getattr(arguments, "checksum_key_file", None), getattr(arguments, "checksum_key_env", None))
    secret = source.read("--checksum-key-file", "--checksum-key-env")
    with contextlib.closing(Root("ROOT", arguments.root, secret)) as root:
        is_used = root.is_used()
        yield root
    if not is_used:  # a slip in a path must not pass for an empty root
        said = f"nothing in {arguments.root} is tierkv's: no engine has used this directory, or it was wiped"
        print(f"{arguments.prog}: {said}", file=sys.stderr)
