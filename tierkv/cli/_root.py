"""``tierkv du``, ``ls`` and ``verify``: what lies in the fs tier's directory. They read, and change nothing."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tierkv.cli._amounts import parse_rate
from tierkv.cli._root_open import add_secret_arguments, opened
from tierkv.cli._words import counted
from tierkv.errors import bad_setting
from tierkv.sizes import format_size

if TYPE_CHECKING:
    from tierkv.tiers._fs.found import Found
    from tierkv.tiers._fs.inspection import Owner, Root
    from tierkv.tiers._fs.unlisted import Unlisted

DU_DESCRIPTION = """\
What a directory of the fs tier holds: by namespace and by owner, against its capacity, and what else lies there. Safe
beside running engines. It lists the tree and opens no chunk."""

LS_DESCRIPTION = """\
The chunks of a directory of the fs tier, one a line, in no order, as their headers describe them. Safe beside running
engines; memory does not grow with the number of chunks."""

VERIFY_DESCRIPTION = """\
Reads chunks whole and compares them with their checksums. Names whatever an engine would not serve; changes nothing:
the engine that meets such a file removes it. Exit code 1 if there is any. Reads take disk time from running engines:
--rate bounds them."""

NAMESPACE_LENGTH = 32
_LS_COLUMNS = "age_s nbytes namespace owner group end_token tenant parent key"


def add_du_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``du``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir")
    parser.add_argument("--json", action="store_true", help="the same as JSON")


def add_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``ls``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir")
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one; its first digits will do")
    parser.add_argument("--owner", metavar="ID", help="only chunks of this owner; its first digits will do")
    add_secret_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``verify``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir")
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one; its first digits will do")
    parser.add_argument("--sample", metavar="PART", default="1", help="part of the chunks, the same each time (0.01)")
    parser.add_argument("--rate", metavar="SIZE", help="read at most this many bytes a second (100MiB)")
    add_secret_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the last one with the counts")


def _refuse_unknown(root: Root, prefix: str) -> None:
    """A slip in a namespace's digits must not pass for a clean answer."""
    if prefix and not any(name.startswith(prefix) for name in root.namespaces()):
        raise bad_setting("--namespace", prefix, "the first digits of one that is there; tierkv du lists them")


def _refuse_unknown_owner(root: Root, prefix: str) -> None:
    """Likewise in an owner's; one whose lock file has gone is known by its chunks alone."""
    is_listed = not prefix or any(owner.id.startswith(prefix) for owner in root.owners())
    if not is_listed and next(_chunks(root, "", prefix), None) is None:
        raise bad_setting("--owner", prefix, "the first digits of one that is there; tierkv du lists them")


def digits(option: str, text: str | None, length: int) -> str:
    """What names are to begin with; empty without the option.

    An empty text is refused: in a script that is a variable that nobody has set, not a wish for all there is.
    """
    if text is None:
        return ""
    digits = text.lower()
    if not 0 < len(digits) <= length or digits.strip("0123456789abcdef"):
        raise bad_setting(option, text, f"1 to {length} hexadecimal digits")
    return digits


def visible(text: str) -> str:
    """Text of unknown origin for a terminal: nothing in it moves the cursor."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


# -- du ---------------------------------------------------------------------------------------------------------


@dataclass
class Sum:
    """Chunks of one namespace or one owner."""

    n_chunks: int = 0
    charge_nbytes: int = 0
    newest_s: float = 0.0
    oldest_s: float = math.inf

    def add(self, found: Found) -> None:
        self.n_chunks += 1
        self.charge_nbytes += found.charge_nbytes
        self.newest_s = max(self.newest_s, found.mtime_s)
        self.oldest_s = min(self.oldest_s, found.mtime_s)

    def record(self, now_s: float) -> dict[str, Any]:
        sums: dict[str, Any] = {"n_chunks": self.n_chunks, "nbytes": self.charge_nbytes}
        if self.n_chunks:
            sums["newest_age_s"], sums["oldest_age_s"] = round(now_s - self.newest_s), round(now_s - self.oldest_s)
        return sums


@dataclass
class Usage:
    """What a root holds."""

    owners: list[Owner]
    by_namespace: defaultdict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    by_owner: defaultdict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    n_other: Counter[str] = field(default_factory=Counter)
    other_nbytes: Counter[str] = field(default_factory=Counter)
    total_nbytes: int = 0
    """Everything that counts against the capacity."""

    @property
    def capacity_nbytes(self) -> int | None:
        """The root's: the least of the living owners'; None without one."""
        return min((o.page.capacity_nbytes for o in self.owners if o.alive and o.page is not None), default=None)

    def count(self, found: Found) -> None:
        from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs

        self.total_nbytes += found.charge_nbytes
        if found.kind is Kind.CHUNK and found.name is not None:
            self.by_namespace[found.namespace].add(found)
            self.by_owner[found.name.owner].add(found)
        else:
            self.n_other[found.kind.value] += 1
            self.other_nbytes[found.kind.value] += found.nbytes

    def record(self, free_nbytes: int, now_s: float) -> dict[str, Any]:
        """As JSON; sizes in bytes as they count against the capacity, of foreign things as they are."""
        return {
            "nbytes": self.total_nbytes,
            "capacity_nbytes": self.capacity_nbytes,
            "free_nbytes": free_nbytes,
            "lock_and_index_nbytes": sum(owner.charge_nbytes for owner in self.owners),
            "n_chunks": sum(part.n_chunks for part in self.by_namespace.values()),
            "namespaces": {digest: part.record(now_s) for digest, part in sorted(self.by_namespace.items())},
            "owners": {owner.id: self._of(owner, now_s) for owner in self.owners}
            | {
                owner: {"state": "without lock file", **part.record(now_s)}
                for owner, part in sorted(self.by_owner.items())
                if owner not in {known.id for known in self.owners}
            },
            "other": {what: {"n": n, "nbytes": self.other_nbytes[what]} for what, n in sorted(self.n_other.items())},
        }

    def _of(self, owner: Owner, now_s: float) -> dict[str, Any]:
        page = owner.page
        says: dict[str, Any] = {}
        if page is not None:
            says = {
                "pid": page.pid,
                "heartbeat_age_s": round(now_s - page.heartbeat_s) if math.isfinite(page.heartbeat_s) else None,
                "capacity_nbytes": page.capacity_nbytes,
                "reserved_nbytes": page.reserved_nbytes,
                "namespace": page.namespace,
                "holder": page.holder,
            }
        state = {"state": "alive" if owner.alive else "dead"}
        return state | says | self.by_owner[owner.id].record(now_s)


def run_du(arguments: argparse.Namespace) -> int:
    """Print the sums; always 0."""
    from tierkv.tiers._fs.unlisted import unlisted_slabs  # noqa: PLC0415 - needs the extra fs

    with opened(arguments) as root:
        usage = Usage(root.owners())
        usage.total_nbytes = sum(owner.charge_nbytes for owner in usage.owners)
        for found in root.files(slots=True):
            usage.count(found)
        record = usage.record(root.free_nbytes(), time.time())
        record["unlisted"] = [
            {"place": visible(slab.place), "why": slab.text, "n_slots": slab.n_slots} for slab in unlisted_slabs(root)
        ]
    if arguments.json:
        print(json.dumps(record, indent=2))
    else:
        from tierkv.cli._root_view import show_usage  # noqa: PLC0415 - rich is an extra

        show_usage(arguments.root, record)
    return 0


# -- ls ---------------------------------------------------------------------------------------------------------


def _chunks(root: Root, namespace: str, owner: str = "") -> Iterator[Found]:
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs

    for found in root.files(namespace=namespace, slots=True):
        if found.kind is Kind.CHUNK and found.name is not None and found.name.owner.startswith(owner):
            yield found


def run_ls(arguments: argparse.Namespace) -> int:
    """Print a line a chunk; 1 if there were chunks whose header could not be read, or slabs without a catalogue."""
    from tierkv.tiers._fs.format import BadHeaderError  # noqa: PLC0415 - needs the extra fs
    from tierkv.tiers._fs.unlisted import unlisted_slabs  # noqa: PLC0415

    namespace = digits("--namespace", arguments.namespace, NAMESPACE_LENGTH)
    owner = digits("--owner", arguments.owner, 16)
    n_unreadable, now_s = 0, time.time()
    with opened(arguments) as root:
        _refuse_unknown(root, namespace)
        _refuse_unknown_owner(root, owner)
        if not arguments.json:
            print("\t".join(_LS_COLUMNS.split()))
        for found in _chunks(root, namespace, owner):
            try:
                chunk = root.header(found).chunk
            except FileNotFoundError:
                continue
            except (BadHeaderError, OSError):
                n_unreadable += 1
                continue
            assert found.name is not None
            row = {
                "age_s": round(now_s - found.mtime_s), "nbytes": chunk.nbytes, "namespace": found.namespace,
                "owner": found.name.owner, "group": chunk.group, "end_token": chunk.end_token, "tenant": chunk.tenant,
                "parent": None if chunk.parent is None else chunk.parent.hex(), "key": chunk.key.hex(),
            }  # fmt: skip
            if arguments.json:
                print(json.dumps(row))
            else:
                print("\t".join("-" if value in (None, "") else visible(str(value)) for value in row.values()))
        unlisted = [slab for slab in unlisted_slabs(root, namespace) if slab.owner.startswith(owner)]
    return _unreadable(n_unreadable, unlisted)


def _unreadable(n_chunks: int, unlisted: Sequence[Unlisted]) -> int:
    if n_chunks:
        print(f"{counted(n_chunks, 'chunk')} could not be read; tierkv verify says why", file=sys.stderr)
    for slab in unlisted:
        print(f"{visible(slab.place)}: {slab.text}", file=sys.stderr)
    return int(bool(n_chunks or unlisted))


# -- verify -----------------------------------------------------------------------------------------------------


class Pace:
    """Sleeps so that no more than ``nbytes_per_s`` are read; None does not bound them."""

    def __init__(
        self,
        nbytes_per_s: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._due_s = clock()

    def __call__(self, nbytes: int) -> None:
        if self._nbytes_per_s is not None:
            now_s = self._clock()
            # What was not read while nobody asked is not made up for.
            self._due_s = max(self._due_s, now_s) + nbytes / self._nbytes_per_s
            self._sleep(self._due_s - now_s)


def sampled(key: bytes, part: float) -> bool:
    """Whether a key is in the sample: the same ones each time, spread evenly."""
    return zlib.crc32(key) < part * 2**32


def _part(option: str, text: str) -> float:
    try:
        part = float(text)
    except ValueError:
        part = math.nan
    if not 0 < part <= 1:
        raise bad_setting(option, text, "a number over 0, and 1 at most", 1 if part > 1 else None, example="0.01")
    return part


def run_verify(arguments: argparse.Namespace) -> int:
    """Print what is wrong, and the counts; 1 if something is."""
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs
    from tierkv.tiers._fs.unlisted import unlisted_slabs  # noqa: PLC0415

    namespace = digits("--namespace", arguments.namespace, NAMESPACE_LENGTH)
    part = _part("--sample", arguments.sample)
    pace = Pace(None if arguments.rate is None else parse_rate("--rate", arguments.rate))
    counts: Counter[str] = Counter(verified=0, wrong=0, unlisted=0, unfinished=0, foreign=0, passed_over=0, nbytes=0)
    with opened(arguments) as root:
        _refuse_unknown(root, namespace)
        for found in root.files(namespace=namespace or None, slots=True):
            if found.kind is Kind.SLAB:
                continue
            if found.kind in (Kind.FOREIGN, Kind.UNFINISHED):
                counts[found.kind.value] += 1
                continue
            assert found.name is not None
            if found.kind is Kind.CHUNK and not sampled(found.name.key, part):
                counts["passed_over"] += 1
                continue
            why = _why_not(root, found, pace)
            if why is None:
                continue
            counts["wrong" if why else "verified"] += 1
            counts["nbytes"] += 0 if why else found.nbytes
            if why:
                _tell_wrong(found.place, why, as_json=arguments.json)
        for slab in unlisted_slabs(root, namespace):
            counts["unlisted"] += 1
            _tell_wrong(slab.place, slab.text, as_json=arguments.json)
    print(json.dumps(counts) if arguments.json else _verdict(counts))
    return int(counts["wrong"] + counts["unlisted"] > 0)


def _tell_wrong(place: str, why: str, *, as_json: bool) -> None:
    place = visible(place)
    print(json.dumps({"place": place, "why": why}) if as_json else f"{place}: {why}")


def _verdict(counts: Counter[str]) -> str:
    right = (
        f"right: {counted(counts['verified'], 'chunk')}, {format_size(counts['nbytes'])}; wrong: {counts['wrong']:,}"
    )
    unlisted = f"; unread, for want of a catalogue: {counted(counts['unlisted'], 'slab')}" if counts["unlisted"] else ""
    rest = f"; unfinished: {counts['unfinished']:,}; foreign: {counts['foreign']:,}"
    passed_over = f"; not in the sample: {counts['passed_over']:,}" if counts["passed_over"] else ""
    return right + unlisted + rest + passed_over


def _why_not(root: Root, found: Found, pace: Pace) -> str | None:
    """Why an engine would not serve this; empty if it would, None if it has gone meanwhile."""
    from tierkv.tiers._fs.format import BadHeaderError  # noqa: PLC0415 - needs the extra fs
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415

    if found.kind is not Kind.CHUNK:
        return {
            Kind.DAMAGED: f"{found.nbytes} bytes are no whole chunk",
            Kind.MISPLACED: "in a directory where no lookup finds it",
            Kind.NOT_REGULAR: "not a regular file",
        }[found.kind]
    try:
        root.verify(found, pace)
    except FileNotFoundError:
        return None
    except BadHeaderError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return ""
