"""What the command line does with slips, and with a reader that goes: the same for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.cli._main import _parser, main
from tierkv.cli._parser import Parser

Capture = pytest.CaptureFixture[str]


def commands(parser: Parser | None = None, *before: str) -> Iterator[tuple[str, ...]]:
    """Every command that has no further ones."""
    _, further = (parser or _parser()).commands()
    for name, each in further.items():
        yield from commands(each, *before, name)
    if not further:
        yield before


def options(command: tuple[str, ...]) -> list[str]:
    """Its long options."""
    parser = _parser()
    for name in command:
        parser = parser.commands()[1][name]
    return [name for action in parser._actions for name in action.option_strings if name.startswith("--")]


COMMANDS = list(commands())
ids = " ".join


def refusal(capsys: Capture, *words: str) -> str:
    """What is said of words that are no command; it is one line, and nothing is printed."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


def test_there_are_commands() -> None:
    """The tests below look at all of them, at those that remove files too."""
    assert {("bench", "fs"), ("tune",), ("gc",), ("wipe",)} <= set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_help_names_every_option(command: tuple[str, ...], capsys: Capture) -> None:
    """And ends well: that of ``tune`` was a traceback, as a percent sign is argparse's own."""
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr()
    hidden = {"--damage"}
    assert all(option in said.out for option in {*options(command)} - hidden) and not said.err


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_no_abbreviation_passes(command: tuple[str, ...], tmp_path: Path, capsys: Capture) -> None:
    """Each option without its last letter is refused in a sentence that names it, and the option that is meant."""
    for option in options(command):
        short = option[:-1]
        line = refusal(capsys, *command, str(tmp_path), short)
        assert line.startswith(f"tierkv {' '.join(command)}: there is no option {short!r}; there are --help, ")
        assert line.endswith(f"; nearest valid option: {option}")
        assert refusal(capsys, *command, f"{short}=1", str(tmp_path)) == line


@pytest.mark.parametrize("command", COMMANDS, ids=ids)
def test_a_slip_is_said_before_what_is_missing(command: tuple[str, ...], capsys: Capture) -> None:
    """Without a directory, too, the sentence is about the option; what is like no other has no nearest."""
    line = refusal(capsys, *command, "--xyzzy")
    assert "no option '--xyzzy'" in line
    assert "nearest" not in line


ALL = "demo, bench, tune, du, ls, verify, gc, wipe, doctor"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", f": COMMAND is missing; there are {ALL}"),
        ("dux", f": there is no command 'dux'; there are {ALL}; nearest valid command: du"),
        ("remove x", f": there is no command 'remove'; there are {ALL}"),
        ("--verson", ": there is no option '--verson'; there are --help, --version; nearest valid option: --version"),
        ("bench", " bench: KIND is missing; there are fs, device"),
        ("bench dsk", " bench: there is no kind 'dsk'; there are fs, device"),
        ("bench devise", " bench: there is no kind 'devise'; there are fs, device; nearest valid kind: device"),
        ("du a b", " du: 'b' is one argument too many"),
        ("demo 3", " demo: '3' is one argument too many"),
        ("wipe --yes=no x", " wipe: --yes takes no value, but was given 'no'"),
        ("gc x --capacity", " gc: argument --capacity: expected one argument"),
        ("gc", " gc: the following arguments are required: ROOT"),
    ],
)
def test_a_slip_is_one_sentence(words: str, said: str, capsys: Capture) -> None:
    """It has what was typed, what there is, and what was probably meant."""
    assert refusal(capsys, *words.split()) == "tierkv" + said


def test_a_value_may_begin_like_an_option(tmp_path: Path, capsys: Capture) -> None:
    """A number below zero is a value, which is refused as one, and what follows -- is no option."""
    for value in ("-5", "-5GiB", "-.5d"):
        assert main(["gc", str(tmp_path), "--capacity", value]) == 2
        assert f"--capacity is '{value}'" in capsys.readouterr().err
    assert main(["du", "--", "--no-such-root"]) == 2
    assert "ROOT is '--no-such-root'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["du", "du --json", "ls", "verify", "gc", "gc --json", "wipe --yes"])
def test_a_directory_that_no_engine_has_used_is_no_empty_root(words: str, tmp_path: Path, capsys: Capture) -> None:
    """One line says so, beside the answer, until anything of tierkv's lies there."""
    (tmp_path / "notes.txt").touch()
    command, *options = words.split()
    assert main([command, str(tmp_path), *options]) == 0
    assert capsys.readouterr().err == (
        f"tierkv {command}: nothing in {tmp_path} is tierkv's: no engine has used this directory, or it was wiped\n"
    )
    (tmp_path / "tierkv.lock").touch()
    assert main([command, str(tmp_path), *options]) == 0
    assert capsys.readouterr().err == ""


TUNE = "tune --memory 50% --capacities 100% --policies lru --jobs 1"
BENCH = "bench fs --chunks 64KiB --threads 1 --size 1MiB --rounds 1"


def ended(*words: str, stdout: int, stderr: int = subprocess.PIPE) -> tuple[int, str]:
    """(exit code, what it said) of a process that writes there."""
    command = [sys.executable, "-m", "tierkv.cli", *words]
    process = subprocess.run(command, stdout=stdout, stderr=stderr, text=True, check=False)
    return process.returncode, process.stderr or ""


@pytest.mark.parametrize("words", ["ls", "du", "verify", "doctor", "gc"])
def test_a_reader_that_goes_ends_a_command_quietly(words: str, tmp_path: Path) -> None:
    """Nothing is said, and the exit code is a shell's for SIGPIPE: 1 would say that the root is not right."""
    (tmp_path / "tierkv.lock").touch()
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(*words.split(), str(tmp_path), stdout=writing) == (141, "")
        assert ended(*words.split(), str(tmp_path), stdout=writing, stderr=writing)[0] == 141
    finally:
        os.close(writing)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["ls", "du", "verify", "doctor", "gc", TUNE, TUNE + " --json", BENCH])
def test_output_that_cannot_be_written_is_its_own_fault(
    words: str, unbuffered: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says so, and not that the root is full; not a second one from the interpreter."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    place = tmp_path / "place"
    if words.startswith("tune"):
        place.write_text('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}\n' * 3)
    else:
        place.mkdir()
        (place / "tierkv.lock").touch()
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, said = ended(*words.split(), str(place), stdout=full)
    finally:
        os.close(full)
    command = " ".join(word for word in words.split()[:2] if not word.startswith("-"))
    assert (code, said) == (1, f"tierkv {command}: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("words", ["ls", "du", "gc"])
def test_a_command_may_have_no_output_at_all(words: str, tmp_path: Path) -> None:
    """With its output closed it does its work."""
    (tmp_path / "tierkv.lock").touch()
    script = f'exec "{sys.executable}" -m tierkv.cli {words} "$0" >&-'
    process = subprocess.run(["sh", "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
