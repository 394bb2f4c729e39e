"""Commands, their options, and how a wrong one ends: one sentence and exit code 2."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable, Sequence

from tierkv._extras import missing
from tierkv.cli import _bench, _bench_device, _demo, _doctor, _root, _root_clean, _tune, _tune_plan
from tierkv.cli._output import OutputError, output
from tierkv.cli._parser import USAGE, Parser
from tierkv.errors import ConfigError, TierKVError

WRONG, INTERRUPTED = 1, 130
UNREAD = 128 + signal.SIGPIPE
"""What a shell reports of a program whose reader has gone. Not 1, which says that something is wrong with the root."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        Its exit code: 0 all is well, 1 it is not, 2 it could not start, 130 interrupted, 141 nobody reads on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both ways to stop clean up after themselves
    try:
        with output():
            return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        _abandon_output()
        return UNREAD
    except OutputError as error:
        print(f"tierkv: {error}", file=sys.stderr)
        _abandon_output()
        return WRONG


def _run(argv: Sequence[str]) -> int:
    arguments = _parser().parse(argv)
    try:
        code = int(arguments.run(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # while the command's name is known
        return code
    except TierKVError as error:
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else WRONG
    except ImportError as error:
        said = str(error) if "the extra" in str(error) else f"needs {missing(error)}"
        print(f"{arguments.prog}: {said}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        _abandon_output()
        return WRONG
    except KeyboardInterrupt:
        print(f"{arguments.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _abandon_output() -> None:
    """Where nothing can be written any more the interpreter would try once more at its end, and complain."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())
    os.close(null)


def _parser() -> Parser:
    parser = Parser(prog="tierkv", description="Tiered storage for the KV cache of language-model servers.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    told = "serve a chat workload from host memory and disk, kill the worker, and go on from disk"
    _add(commands, "demo", told, (_demo.DESCRIPTION, _demo.add_arguments, _demo.run))
    told = "measure this machine's disk or device, and end in the values to set"
    bench = commands.add_parser("bench", help=told)
    kinds = bench.add_subparsers(title="what to measure", required=True, metavar="KIND", parser_class=Parser)
    told = "a directory, through the fs tier"
    _add(kinds, "fs", told, (_bench.FS_DESCRIPTION, _bench.add_fs_arguments, _bench.run_fs))
    told = "copies between a device and host memory"
    _add(kinds, "device", told, (_bench_device.DESCRIPTION, _bench_device.add_arguments, _bench_device.run))
    told = "replay a trace of requests: how big, which policy?"
    _add(commands, "tune", told, (_tune.DESCRIPTION, _tune_plan.add_tune_arguments, _tune.run))
    told = "what a tier's directory holds, by namespace and owner"
    _add(commands, "du", told, (_root.DU_DESCRIPTION, _root.add_du_arguments, _root.run_du))
    _add(commands, "ls", "its chunks, one a line", (_root.LS_DESCRIPTION, _root.add_ls_arguments, _root.run_ls))
    told = "read its chunks and compare checksums"
    _add(commands, "verify", told, (_root.VERIFY_DESCRIPTION, _root.add_verify_arguments, _root.run_verify))
    told = "remove from it what no engine can serve"
    _add(commands, "gc", told, (_root_clean.GC_DESCRIPTION, _root_clean.add_gc_arguments, _root_clean.run_gc))
    told = "remove all that is tierkv's in it, or one namespace"
    _add(commands, "wipe", told, (_root_clean.WIPE_DESCRIPTION, _root_clean.add_wipe_arguments, _root_clean.run_wipe))
    told = "why does it stay empty, or slow?"
    _add(commands, "doctor", told, (_doctor.DESCRIPTION, _doctor.add_arguments, _doctor.run))
    return parser


def _add(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    told: str,
    page: tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]],
) -> None:
    """One command: its line in the list; its description, its options and what it does."""
    description, add_arguments, run = page
    parser = commands.add_parser(name, help=told, description=description)
    add_arguments(parser)
    parser.set_defaults(run=run, prog=parser.prog)


def _version() -> str:
    try:
        return f"tierkv {importlib.metadata.version('tierkv-cache')}"
    except importlib.metadata.PackageNotFoundError:
        return "tierkv, from a checkout that is not installed"
