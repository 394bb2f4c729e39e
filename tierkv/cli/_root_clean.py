"""``tierkv gc`` and ``tierkv wipe``: take files out of the fs tier's directory, also beside running engines."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tierkv.cli._amounts import parse_age, parse_capacity
from tierkv.cli._output import OutputError
from tierkv.cli._root import NAMESPACE_LENGTH, digits, visible
from tierkv.cli._root_open import opened
from tierkv.cli._words import counted
from tierkv.errors import ConfigError, TierError, bad_setting
from tierkv.sizes import format_size

if TYPE_CHECKING:
    from tierkv.tiers._fs.found import Found
    from tierkv.tiers._fs.inspection import Owner, Root
    from tierkv.tiers._fs.sweep import Census, Swept

GC_DESCRIPTION = """\
Removes from a directory of the fs tier what no engine can ever serve: what dead engines were writing, files that are
cut, misplaced or no files, lock files of engines that left nothing. Without options no chunk leaves. --unread-for and
--capacity remove chunks, too. Safe beside running engines: what a living one owns is never touched. --dry-run says
the same and changes nothing."""

WIPE_DESCRIPTION = """\
Removes everything that tierkv has in a directory, or in one namespace of it; what is not tierkv's stays, and so does
the directory. Refuses while an engine uses it. Asks on a terminal; elsewhere --yes is needed."""

WIPED: Final = "wiped"
MOST_NAMED: Final = 20
"""Files that could not be removed and are named; the others are counted."""


def add_gc_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``gc``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir")
    parser.add_argument("--dry-run", action="store_true", help="say what would leave and why; change nothing")
    parser.add_argument(
        "--unread-for", metavar="AGE",
        help="also namespaces that no living engine reads and that were last used this long ago (7d, 12h)",
    )  # fmt: skip
    parser.add_argument(
        "--capacity", metavar="SIZE",
        help="also the coldest that no living engine owns, each slab as a whole, down to this size (500GiB)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the last one with the counts")


def add_wipe_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``wipe``."""
    parser.add_argument("root", metavar="ROOT", help="the tier's root_dir")
    parser.add_argument("--namespace", metavar="DIGEST", help="only this one; its first digits will do")
    parser.add_argument("--dry-run", action="store_true", help="say what would leave; change nothing")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--in-use", action="store_true", help="also under running engines, to which each file is a miss from then on"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with the counts")


@dataclass
class Tale:
    """What a command did, for people and for programs."""

    dry_run: bool
    as_json: bool
    n: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)
    n_stay: int = 0
    n_spared: int = 0
    unsaid: OutputError | None = None
    """Why nothing more can be printed."""

    def tell(self, swept: Swept) -> None:
        """Count one file; print it where every file is a line."""
        from tierkv.tiers._fs.sweep import Fate  # noqa: PLC0415 - needs the extra fs

        place = visible(swept.found.place)
        match swept.fate:
            case Fate.REMOVED:
                self.n[swept.why] += 1
                self.nbytes[swept.why] += swept.found.charge_nbytes
                if self.as_json and swept.why != WIPED:
                    self._say({"place": place, "why": swept.why, "nbytes": swept.found.charge_nbytes})
            case Fate.STAYS:
                self.n_stay += 1
                because = "" if swept.error is None else swept.error.strerror
                if self.n_stay <= MOST_NAMED:
                    print(f"{place} stays: {because}", file=sys.stderr)
            case Fate.SPARED:
                self.n_spared += 1

    def _say(self, row: dict[str, object]) -> None:
        """Room is made all the same: the output may well go to the disk that is full."""
        if self.unsaid is None:
            try:
                print(json.dumps(row))
            except OutputError as error:
                self.unsaid = error

    def counts(self, **more: object) -> dict[str, Any]:
        """As JSON."""
        return {
            "dry_run": self.dry_run,
            "n_removed": self.n.total(),
            "nbytes": self.nbytes.total(),
            "n_stay": self.n_stay,
            "n_spared": self.n_spared,
            **more,
        }

    def sum(self) -> str:
        """One sentence's beginning."""
        verb = "would remove" if self.dry_run else "removed"
        more = f"; {self.n_stay:,} could not be removed" if self.n_stay else ""
        return f"{verb} {counted(self.n.total(), 'file')}, {format_size(self.nbytes.total())}{more}"


# -- gc ---------------------------------------------------------------------------------------------------------


def run_gc(arguments: argparse.Namespace) -> int:
    """Print what left and why; 1 if something could not be removed."""
    from tierkv.tiers._fs.garbage import WHY, Garbage, Wish  # noqa: PLC0415 - needs the extra fs

    age, size = arguments.unread_for, arguments.capacity
    wish = Wish(
        None if age is None else parse_age("--unread-for", age),
        None if size is None else parse_capacity("--capacity", size),
    )
    tale = Tale(arguments.dry_run, arguments.json)
    with opened(arguments) as root:
        garbage = Garbage(root, wish)
        for swept in garbage.collect(dry_run=arguments.dry_run):
            tale.tell(swept)
    if tale.unsaid is not None:
        raise tale.unsaid
    if arguments.json:
        by_reason = {why: {"n": tale.n[why], "nbytes": tale.nbytes[why]} for why in WHY if tale.n[why]}
        over = {"n_owners": garbage.n_ended, "left_over_nbytes": garbage.left_over_nbytes}
        print(json.dumps(tale.counts(**over, by_reason=by_reason)))
        return int(tale.n_stay > 0)
    for why, because in WHY.items():
        if tale.n[why]:
            print(f"{why}: {tale.n[why]:,}, {format_size(tale.nbytes[why])}: {because}")
    ended = f", and the lock files of {counted(garbage.n_ended, 'owner')} that left nothing" if garbage.n_ended else ""
    print(tale.sum() + ended)
    if garbage.left_over_nbytes:
        because = "living engines own the rest" if garbage.has_living else "not all of it could be removed"
        print(f"still {format_size(garbage.left_over_nbytes)} over --capacity: {because}")
    return int(tale.n_stay > 0)


# -- wipe -------------------------------------------------------------------------------------------------------


def run_wipe(arguments: argparse.Namespace) -> int:
    """Print what left; 1 if somebody uses it, it was not wanted after all, or something could not be removed."""
    from tierkv.tiers._fs.sweep import Census, orphans_of  # noqa: PLC0415 - needs the extra fs

    prefix = digits("--namespace", arguments.namespace, NAMESPACE_LENGTH)
    with opened(arguments) as root:
        namespace = _one_namespace(root, prefix) if prefix else None
        there, by_owner = _survey(root, namespace)
        orphans = orphans_of(root, by_owner)
        before = root.owners()
        _refuse_in_use(arguments, Census(before), namespace)
        if not arguments.dry_run and not arguments.yes and not _agreed(arguments.root, namespace, there):
            print("nothing was removed", file=sys.stderr)
            return 1
        tale = _wipe(arguments, root, namespace, orphans=orphans, before=before, left=by_owner)
    if arguments.json:
        print(json.dumps(tale.counts(n_foreign=there["foreign"])))
    else:
        spared = f"; {tale.n_spared:,} that a living engine is writing stay" if tale.n_spared else ""
        foreign = f"; not tierkv's, so left: {counted(there['foreign'], 'thing')}" if there["foreign"] else ""
        print(tale.sum() + spared + foreign)
    return int(tale.n_stay > 0)


def _wipe(
    arguments: argparse.Namespace,
    root: Root,
    namespace: str | None,
    *,
    orphans: frozenset[str],
    before: list[Owner],
    left: Counter[str],
) -> Tale:
    """Everything but the question. ``left``: bytes by owner, as they were."""
    from tierkv.tiers._fs.sweep import Broom, Fate, Swept, remove_directories, settle  # noqa: PLC0415 - extra fs

    def may(census: Census, found: Found) -> bool:
        _refuse_in_use(arguments, census, namespace)
        return _is_wiped(census, found)

    tale = Tale(arguments.dry_run, arguments.json)
    items = ((found, WIPED) for found in root.files(namespace=namespace) if found.name is not None)
    if arguments.dry_run:
        for found, why in items:
            tale.tell(Swept(found, why, Fate.REMOVED))
        return tale
    for swept in Broom(root, may, changed_too=True, orphans=orphans).sweep(items):
        tale.tell(swept)
        if swept.fate in (Fate.REMOVED, Fate.GONE) and swept.found.name is not None:
            left[swept.found.name.owner] -= swept.found.charge_nbytes
    settle(root, {owner: nbytes for owner, nbytes in left.items() if nbytes > 0}, before)
    remove_directories(root, namespace)
    return tale


def _one_namespace(root: Root, prefix: str) -> str:
    names = sorted(name for name in root.namespaces() if name.startswith(prefix))
    if len(names) != 1:
        which = f"several: {', '.join(names)}" if names else "none that is there; tierkv du lists them"
        raise bad_setting("--namespace", prefix, f"the first digits of one namespace, not of {which}")
    return names[0]


def _survey(root: Root, namespace: str | None) -> tuple[Counter[str], Counter[str]]:
    """(what will leave, in numbers; bytes by owner, in all of the root)."""
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs

    there: Counter[str] = Counter()
    by_owner: Counter[str] = Counter()
    for found in root.files():
        if found.name is not None:
            by_owner[found.name.owner] += found.charge_nbytes
        if namespace in (None, found.namespace):
            there["foreign" if found.kind is Kind.FOREIGN else "files"] += 1
            there["nbytes"] += found.charge_nbytes
    return there, by_owner


def _is_wiped(census: Census, found: Found) -> bool:
    """All but what a living engine is writing at this moment: taken from under it, that would be a failed write."""
    from tierkv.tiers._fs.found import Kind  # noqa: PLC0415 - needs the extra fs

    assert found.name is not None
    return found.kind is not Kind.UNFINISHED or census.is_dead(found.name.owner)


def _refuse_in_use(arguments: argparse.Namespace, census: Census, namespace: str | None) -> None:
    users = census.users(namespace)
    if users and not arguments.in_use and not arguments.dry_run:
        more = f" and {len(users) - 1} more" if len(users) > 1 else ""
        what = arguments.root if namespace is None else f"namespace {namespace[:8]}"
        raise TierError(
            what,
            f"in use by {_who(users[0])}{more}: stop it first, or say --in-use, and it misses from then on what is "
            "removed",
        )


def _who(owner: Owner) -> str:
    page = owner.page
    if page is None:
        return f"an engine that starts (owner {owner.id})"
    heard_s = max(0.0, time.time() - page.heartbeat_s)
    return f"pid {page.pid} on {visible(page.host) or 'an unnamed host'} (owner {owner.id}, heard {heard_s:,.0f} s ago)"


def _agreed(path: str, namespace: str | None, there: Counter[str]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("--yes is missing, but must be given where there is no terminal to ask on")
    where = path if namespace is None else f"namespace {namespace} of {path}"
    question = f"Remove {counted(there['files'], 'file')}, {format_size(there['nbytes'])}, from {where}? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
