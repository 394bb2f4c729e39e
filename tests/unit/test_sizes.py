"""Numbers from configuration: what is taken, what is refused, and what the refusal says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import ConfigError
from tierkv.settings import parse_count, parse_seconds
from tierkv.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [
        (1, 1),
        (2**63 - 1, 2**63 - 1),
        ("4096", 4096),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("500 GB", 500 * 10**9),
        ("500gb", 500 * 10**9),
        ("64KiB", 65536),
        ("1.5GiB", 3 * 2**29),
        ("0.1MB", 100_000),
        ("0.1KiB", 102),
        (" 12 B ", 12),
        ("2TiB", 2**41),
    ],
)
def test_sizes_that_are_taken(value: object, nbytes: int) -> None:
    """Integers and text with binary or decimal units, exact, whatever the case."""
    assert parse_size("capacity", value) == nbytes


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0, "1"),
        (-5, "1"),
        (True, "1"),
        (8.0, "8"),
        (-8.0, "1"),
        (math.inf, "9223372036854775807"),
        (-math.inf, "1"),
        (2**63, "9223372036854775807"),
        ("9999999999 GiB", "9223372036854775807"),
        ("0GiB", "1"),
        ("0.1B", "1"),
        ("-8GiB", "1"),
        ("8Gi", "8GiB"),
        ("8 gigs", "8GiB"),
        ("8G", "8GB"),
        ("8 MBytes", "8MB"),
        ("8 bytes", "8B"),
        ("-8G", "1"),
        ("0.0Gi", "1"),
        ("9999999 Exa", "9223372036854775807"),
        ("0.1 bytes", "1"),
    ],
)
def test_sizes_that_are_refused(value: object, nearest: str) -> None:
    """One sentence with the option, the value, what is allowed and the nearest valid value, which is itself taken."""
    with pytest.raises(ConfigError) as refused:
        parse_size("capacity", value)
    assert str(refused.value).startswith(f"capacity is {value!r}, but must be ")
    assert str(refused.value).endswith(f"; nearest valid value: {nearest}")
    assert parse_size("capacity", nearest) > 0


@pytest.mark.parametrize(
    "value",
    [None, math.nan, "", "GiB", "half", "1e3", "1,5GiB", "\u0663GiB", "9" * 5000, "8 parsecs", "8 x", [8], b"8"],
)
def test_what_is_near_no_size_has_no_nearest(value: object) -> None:
    """A guess would send people to a value that they never meant."""
    with pytest.raises(ConfigError) as refused:
        parse_size("capacity", value)
    assert str(refused.value).startswith(f"capacity is {value!r}, but must be "[:400])
    assert str(refused.value).endswith("from 1 B to 8 EiB")


def test_zero_where_zero_means_something() -> None:
    """``low=0`` admits zero and nothing below it."""
    assert parse_size("min_free", "0", low=0) == 0
    with pytest.raises(ConfigError, match=r"nearest valid value: 0$"):
        parse_size("min_free", -1, low=0)


def test_an_integer_of_another_library_is_a_size() -> None:
    """What counts as an integer for Python counts here; a numpy scalar does."""
    numpy = pytest.importorskip("numpy")
    assert parse_size("capacity", numpy.int64(4096)) == 4096
    with pytest.raises(ConfigError):
        parse_size("capacity", numpy.float64(4096))
    with pytest.raises(ConfigError):
        parse_size("capacity", numpy.bool_(True))


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**20 - 1, "1.0 MiB"), (2**33, "8 GiB")],
)
def test_sizes_as_people_read_them(nbytes: int, text: str) -> None:
    """The largest unit that is filled; rounding never writes 1024.0 of a unit."""
    assert format_size(nbytes) == text


@given(st.integers(1, 2**63 - 1))
def test_what_is_written_reads_back_within_rounding(nbytes: int) -> None:
    """A formatted size parses to within the one decimal it was written with."""
    text = format_size(nbytes)
    unit = 1 if text.endswith(" B") else parse_size("n", "1" + text.split()[1])
    try:
        back = parse_size("n", text)
    except ConfigError:
        assert text == "8.0 EiB"
    else:
        assert abs(back - nbytes) <= unit * 0.0501 + 1


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0, 1),
        (-1, 1),
        (17, 16),
        (1_000_000, 16),
        ("8", 8),
        (2.5, 2),
        (64.0, 16),
        (-math.inf, 1),
        (10**400, 16),
        (-(10**400), 1),
        (True, 1),
    ],
)
def test_counts_that_are_refused(value: object, nearest: int) -> None:
    """Case: https://github.com/vllm-project/vllm/issues/48919 - a wrong count is named with the nearest right one."""
    with pytest.raises(ConfigError) as refused:
        parse_count("n_threads", value, 1, 16)
    assert str(refused.value).startswith(f"n_threads is {value!r}, but must be a whole number from 1 to 16; ")
    assert str(refused.value).endswith(f"nearest valid value: {nearest}")


@pytest.mark.parametrize("value", ["many", "half", "", math.nan, None, [4], {}])
def test_what_is_no_number_has_no_nearest(value: object) -> None:
    """The range is all that can be said: "nearest valid value: 1" is no help to whoever wrote "half"."""
    with pytest.raises(ConfigError, match=r" a whole number from 1 to 16$"):
        parse_count("n_threads", value, 1, 16)
    with pytest.raises(ConfigError, match=r" a number of seconds from 0\.5 to 100$"):
        parse_seconds("ttl_s", value, 0.5, 100)


def test_counts_that_are_taken() -> None:
    """Both ends of the range belong to it."""
    assert [parse_count("n", n, 1, 16) for n in (1, 9, 16)] == [1, 9, 16]


@pytest.mark.parametrize(
    ("value", "nearest"),
    [
        (0, "0.5"),
        (-(10**400), "0.5"),
        (101, "100"),
        ("8", "8"),
        (math.inf, "100"),
        (True, "1"),
    ],
)
def test_seconds_that_are_refused(value: object, nearest: str) -> None:
    """Out of range, not finite, or not a number."""
    with pytest.raises(ConfigError) as refused:
        parse_seconds("ttl_s", value, 0.5, 100)
    assert str(refused.value).startswith(f"ttl_s is {value!r}, but must be ")
    assert str(refused.value).endswith(f"nearest valid value: {nearest}")


def test_seconds_that_are_taken() -> None:
    """Whole and broken seconds, as a float."""
    taken = [parse_seconds("ttl_s", value) for value in (0, 3600, 0.25)]
    assert taken == [0.0, 3600.0, 0.25]
    assert all(type(value) is float for value in taken)


@pytest.mark.parametrize(
    "value", ["8" * 100_000 + "Gib", [[]] * 10_000, 10**10_000, -(10**10_000)], ids=["text", "list", "large", "small"]
)
def test_a_value_as_long_as_somebody_likes_is_one_short_sentence(value: object) -> None:
    """Shown as far as it tells something; an integer of more digits than Python writes is refused like any other."""
    for parse in (
        lambda: parse_size("x", value),
        lambda: parse_count("x", value, 1, 9),
        lambda: parse_seconds("x", value),
    ):
        with pytest.raises(ConfigError, match=r"^x is .{1,503}, but must be") as caught:
            parse()
        assert len(str(caught.value)) < 1500
