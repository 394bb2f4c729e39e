"""Commands, their options, and how a wrong one ends: one sentence and exit code 2."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tierkv.cli import _bench, _bench_device, _doctor, _root, _tune, _tune_plan
from tierkv.cli._demo import DESCRIPTION, add_arguments, run
from tierkv.errors import ConfigError, TierKVError

WRONG, USAGE, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """An argument parser that refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 0 all is well, 1 it is not, 2 it could not start, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both ways to stop clean up after themselves
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()  # a full disk behind it, or a reader that has gone, shows here and not after us
        return code
    except TierKVError as error:
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else WRONG
    except ImportError as error:
        print(
            f"{arguments.prog}: {error.name} is not installed; the extras cli, fs and torch bring it", file=sys.stderr
        )
        return USAGE
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes into it once more
        return WRONG
    except OSError as error:
        print(f"{arguments.prog}: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(f"{arguments.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _parser() -> Parser:
    parser = Parser(prog="tierkv", description="Tiered storage for the KV cache of language-model servers.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    demo = commands.add_parser(
        "demo",
        help="serve a chat workload from host memory and disk, kill the worker, and go on from disk",
        description=DESCRIPTION,
    )
    add_arguments(demo)
    demo.set_defaults(run=run, prog=demo.prog)
    bench = commands.add_parser("bench", help="measure this machine's disk or device, and end in the values to set")
    kinds = bench.add_subparsers(title="what to measure", required=True, metavar="WHAT", parser_class=Parser)
    fs = kinds.add_parser("fs", help="a directory, through the fs tier", description=_bench.FS_DESCRIPTION)
    _bench.add_fs_arguments(fs)
    fs.set_defaults(run=_bench.run_fs, prog=fs.prog)
    device = kinds.add_parser(
        "device", help="copies between a device and host memory", description=_bench_device.DESCRIPTION
    )
    _bench_device.add_arguments(device)
    device.set_defaults(run=_bench_device.run, prog=device.prog)
    tune = commands.add_parser(
        "tune", help="replay a trace of requests: how big, which policy?", description=_tune.DESCRIPTION
    )
    _tune_plan.add_tune_arguments(tune)
    tune.set_defaults(run=_tune.run, prog=tune.prog)
    _add_root_commands(commands)
    return parser


def _add_root_commands(commands: argparse._SubParsersAction[Parser]) -> None:
    """Those that look into a directory of the fs tier."""
    du = commands.add_parser(
        "du", help="what a tier's directory holds, by namespace and owner", description=_root.DU_DESCRIPTION
    )
    _root.add_du_arguments(du)
    du.set_defaults(run=_root.run_du, prog=du.prog)
    ls = commands.add_parser("ls", help="its chunks, one a line", description=_root.LS_DESCRIPTION)
    _root.add_ls_arguments(ls)
    ls.set_defaults(run=_root.run_ls, prog=ls.prog)
    verify = commands.add_parser(
        "verify", help="read its chunks and compare checksums", description=_root.VERIFY_DESCRIPTION
    )
    _root.add_verify_arguments(verify)
    verify.set_defaults(run=_root.run_verify, prog=verify.prog)
    doctor = commands.add_parser("doctor", help="why does it stay empty, or slow?", description=_doctor.DESCRIPTION)
    _doctor.add_arguments(doctor)
    doctor.set_defaults(run=_doctor.run, prog=doctor.prog)


def _version() -> str:
    try:
        return f"tierkv {importlib.metadata.version('tierkv-cache')}"
    except importlib.metadata.PackageNotFoundError:
        return "tierkv, from a checkout that is not installed"
