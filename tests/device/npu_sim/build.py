"""Builds the stand-in: ``python -m tests.device.npu_sim.build``.

``--package DIR`` names the folder ``torch_npu`` of an unpacked wheel instead of the installed one. It ends by naming
the functions that the wheel links to and that would fail if they were called: a release that needs more shows there.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.device.npu_sim.symbols import Needs, defined, read_needs

SOURCES = Path(__file__).parent / "src"
MAIN = "libascendcl.so"
"""All that is simulated is in this one; the other libraries only bear the names."""

KERNELS = "libopapi.so"
_FLAGS = ("-O1", "-g", "-std=c++17", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror")
_REFUSAL = """\
// Generated: what the wheel links to and the stand-in does not simulate. Called, it says so and fails.
#include <cstdio>
#define REFUSED(name) \\
    extern "C" int name() { std::fputs("npu_sim: " #name " is not simulated\\n", stderr); return 207000; }
"""


@dataclass(frozen=True)
class StandInFiles:
    """A built stand-in: load the libraries in this order, all of them global."""

    libraries: tuple[Path, ...]
    refused: frozenset[str]
    """What the wheel links to and only an error stands behind."""


class CannotBuildError(Exception):
    """Why there is no stand-in here, in one line."""


class RealCannError(CannotBuildError):
    """The real CANN is installed, so there is nothing to stand in for."""


def torch_npu_package() -> Path:
    """The installed wheel's folder, found without importing it.

    Raises:
        CannotBuildError: it is not installed.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise CannotBuildError("torch-npu is not installed")
    return Path(spec.origin).parent


def build(package: Path, into: Path | None = None) -> StandInFiles:
    """Build the stand-in for a wheel, or find it built.

    Args:
        package: folder ``torch_npu`` of the wheel; its ACL headers declare what we define.
        into: where to build. Default: a folder of the user's cache, named by all that goes into it.

    Raises:
        CannotBuildError: a tool is missing, or the compiler refused.
    """
    for tool in ("g++", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise CannotBuildError(f"{tool} is missing (Debian: apt-get install g++)")
    needs = read_needs(package)
    if into is not None:
        into.mkdir(parents=True, exist_ok=True)
        return _build(package, needs, into)
    folder = _cache() / _digest(package, needs)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as fresh:
            _build(package, needs, Path(fresh) / "lib")
            try:
                (Path(fresh) / "lib").rename(folder)
            except OSError:
                if not folder.exists():  # else somebody else was faster, with the same
                    raise
    return _files(folder, needs)


def _build(package: Path, needs: Needs, into: Path) -> StandInFiles:
    into.mkdir(parents=True, exist_ok=True)
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.stem != "opapi"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, package, into), sources))
    _link(into / MAIN, objects)
    refused = needs.symbols - defined([into / MAIN])
    generated = into / "refused.cpp"
    generated.write_text(_REFUSAL + "".join(f"REFUSED({name})\n" for name in sorted(refused)))
    _link(into / MAIN, [*objects, _compile(generated, package, into)])
    _link(into / KERNELS, [SOURCES / "opapi.cpp"])
    empty = into / "empty.cpp"
    empty.write_text("")
    for name in needs.libraries - {MAIN}:
        # torch_npu looks some functions up in these by handle, which searches what the library depends on, too.
        _link(into / name, [empty], "-Wl,--no-as-needed", f"-L{into}", f"-l:{MAIN}")
    return _files(into, needs)


def _files(folder: Path, needs: Needs) -> StandInFiles:
    refused = [line[8:-1] for line in (folder / "refused.cpp").read_text().splitlines() if line.startswith("REFUSED(")]
    names = [MAIN, *sorted(needs.libraries - {MAIN}), KERNELS]
    return StandInFiles(tuple(folder / name for name in names), frozenset(refused))


def _compile(source: Path, package: Path, into: Path) -> Path:
    target = into / f"{source.stem}.o"
    _run("g++", *_FLAGS, f"-isystem{package / 'include'}", "-c", str(source), "-o", str(target))
    return target


def _link(target: Path, inputs: Iterable[Path], *flags: str) -> None:
    _run("g++", *_FLAGS, "-shared", f"-Wl,-soname,{target.name}", "-o", str(target), *map(str, inputs), *flags)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuildError(f"{' '.join(command)} failed:\n{done.stderr}")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tierkv" / "npu-sim"


def _digest(package: Path, needs: Needs) -> str:
    digest = hashlib.sha256()
    headers = (package / "include" / "acl").rglob("*.h")
    for path in (Path(__file__), *sorted(SOURCES.iterdir()), *sorted(headers)):
        digest.update(path.read_bytes())
    for name in (*sorted(needs.libraries), *sorted(needs.symbols)):
        digest.update(name.encode() + b"\0")
    return digest.hexdigest()[:16]


def main() -> int:
    """Command line; 1 if the stand-in cannot be built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, help="folder torch_npu of an unpacked wheel")
    parser.add_argument("--into", type=Path, help="where to build")
    arguments = parser.parse_args()
    try:
        package = arguments.package or torch_npu_package()
        files = build(package, arguments.into)
    except CannotBuildError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{files.libraries[0].parent}: {len(files.libraries)} libraries")
    print(f"refused when called: {', '.join(sorted(files.refused)) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
