"""Bugs planted one at a time in the fs tier, to see that a test dies of each.

Run by hand before a release::

    python -m tests.unit.fs_mutants [word ...]

Each bug is a textual patch to a copy of the repository; one that no longer applies is an error, so the list stays true.
Words choose the bugs whose names contain one of them. Takes about five minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SLOW = "test_a_root_of_100_000_chunks_answers_at_once_while_the_scan_is_held"


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = [
    Mutant(
        "two listings of a directory share their place in it",
        "_fs/dirs.py",
        'fd = open_directory(".", dir_fd)\n    try:\n        with os.scandir(fd)',
        "fd = os.dup(dir_fd)\n    try:\n        with os.scandir(fd)",
        "unit/test_fs_dirs.py",
    ),
    Mutant(
        "payload checksum unread",
        "_fs/file_io.py",
        "if not hmac.compare_digest(its_sum, header.checksum):",
        "if False:",
        "unit/test_fs_hostile.py property/test_fs_machine.py",
    ),
    Mutant(
        "old bytes in the padding",
        "_fs/pieces.py",
        "zero(tail, tail_nbytes)",
        "pass",
        "unit/test_fs_tier.py unit/test_fs_slab.py",
    ),
    Mutant(
        "no zeros behind a chunk",
        "_fs/file_io.py",
        "        zero(buffer, nbytes)\n",
        "",
        "unit/test_fs_tier.py property/test_fs_machine.py",
    ),
    Mutant(
        "key unchecked",
        "_fs/format.py",
        "if header.chunk.key != key or header.namespace_digest != digest:",
        "if header.namespace_digest != digest:",
        "unit/test_fs_hostile.py property/test_fs_machine.py",
    ),
    Mutant(
        "namespace unchecked",
        "_fs/format.py",
        "header.chunk.key != key or header.namespace_digest != digest:",
        "header.chunk.key != key:",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "length unchecked",
        "_fs/format.py",
        "    if charge_nbytes(header.chunk.nbytes) != file_nbytes:\n        raise",
        "    if False:\n        raise",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "links followed",
        "_fs/file_io.py",
        "O_NOFOLLOW | os.O_NONBLOCK",
        "O_NONBLOCK",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "unfinished file left behind",
        "_fs/file_io.py",
        "            if not unlink_first(names, leaf_fd) and isinstance(error, OSError):\n",
        "            if False:\n",
        "unit/test_fs_tier.py",
    ),
    Mutant(
        "capacity 20 KB too generous",
        "_fs/books.py",
        "if self.used_nbytes + nbytes > self.limit_nbytes:",
        "if self.used_nbytes + nbytes > self.limit_nbytes + 20000:",
        "unit/test_fs_hostile.py unit/test_fs_scan.py unit/test_fs_sharing.py property/test_fs_machine.py",
    ),
    Mutant(
        "rewriting counts twice",
        "_fs/books.py",
        "            replaced = self._drop(key)\n            self._writing_nbytes",
        "            replaced = None\n            self._writing_nbytes",
        "unit/test_fs_tier.py property/test_fs_machine.py",
    ),
    Mutant(
        "deleted while scanned comes back",
        "_fs/books.py",
        "        if self._gone and (key, owner) in self._gone:\n            return None\n",
        "",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "a late probe enters what was removed",
        "_fs/lookup.py",
        "                if held is None:\n                    now",
        "                if True:\n                    now",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "a late probe forgets what was written again",
        "_fs/books.py",
        "serial = self._n_added & _SERIAL_MASK",
        "serial = 0",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "a probe that outlasts the scan enters what was removed",
        "_fs/books.py",
        "            if seen != self.n_forgotten and key not in self._records:",
        "            if False:",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "slab: a probe takes a slot that is being given up for nobody's",
        "_fs/slabs.py",
        "        if not slab.reclaim(held.at):\n            return False\n",
        "        if not slab.reclaim(held.at):\n            return True\n",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "slab: a deletion that finds no row loses the slot",
        "_fs/ops.py",
        'self._lookups.forget(key, owner, held, "vanished")\n            elif',
        'self._books.drop(key, owner, held)\n                self._tally.add("vanished")\n            elif',
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "what a probe enters beside the trim counts twice",
        "_fs/settle.py",
        "return self._without(listed, moved), counted_nbytes",
        "return listed, counted_nbytes",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "what is deleted beside the trim counts all the same",
        "_fs/settle.py",
        "if held is None and not self._books.is_gone(item.key, item.owner):",
        "if held is None:",
        "unit/test_fs_late.py",
    ),
    Mutant(
        "trim takes what a probe announced",
        "_fs/settle.py",
        "            if excess > 0 and self._books.claim(item.key, item.owner):",
        "            if excess > 0:",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "never writable",
        "_fs/scan.py",
        "            self._settlement.writable = True",
        "            pass",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "writable before the trim",
        "_fs/settle.py",
        "        self.writable = False",
        "        self.writable = True",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "unfinished files not swept",
        "_fs/listing.py",
        '                what = "unfinished" if parsed.is_part else damage(found)',
        "                if parsed.is_part:\n                    continue\n                what = damage(found)",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "living owners' files taken",
        "_fs/listing.py",
        "                if parsed.owner not in self._owners:",
        "                if False:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "others' reservations ignored",
        "_fs/owners.py",
        "self._others_reserved_nbytes = sum(o.reserved_nbytes for o in left)",
        "self._others_reserved_nbytes = 0",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "reservation only what is used",
        "_fs/own_pages.py",
        "reserved_nbytes=max(limit_nbytes, used_nbytes)",
        "reserved_nbytes=used_nbytes",
        "unit/test_fs_sharing.py crash/test_fs_kill.py",
    ),
    Mutant(
        "adopted bytes not reserved",
        "_fs/owners.py",
        "            self._books.adopting_nbytes += other.reserved_nbytes",
        "            pass",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "fresh owner waits for a minute",
        "_fs/owners.py",
        "if now - died < ADOPT_AFTER_S and not (is_fresh and mine):",
        "if now - died < ADOPT_AFTER_S:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "dead ids adopted at once",
        "_fs/owners.py",
        "if now - died < ADOPT_AFTER_S and not (is_fresh and mine):",
        "if False:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "half-dead process taken for dead",
        "_fs/locks.py",
        "if is_alive and other.fd is not None:",
        "if False:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "corrupt foreign chunk offered again",
        "_fs/lookup.py",
        "if self._shunned.get((key, owner)) != found.identity:",
        "if True:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "absence not remembered",
        "_fs/lookup.py",
        "self._absent[key] = now + ABSENT_FOR_S",
        "self._absent[key] = now",
        "unit/test_fs_scan.py unit/test_fs_sharing.py",
    ),
    Mutant(
        "full disk not noticed",
        "_fs/ops.py",
        "        if self._spare_nbytes() < charge:",
        "        if False:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "index over the capacity",
        "_fs/mount.py",
        "(more_nbytes > 0 and not books.start_write(more_nbytes))",
        "False",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "index believed though files changed (leaf)",
        "_fs/scan.py",
        "all(i.leaf_times_ns[leaf] == os.fstat(leaf_fd).st_mtime_ns for i in indexes)",
        "True",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "asked leaf not listed first",
        "_fs/scan.py",
        "self._front.popleft() if gated and self._front else next(iter(left))",
        "next(iter(left))",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "second copies kept",
        "_fs/settle.py",
        "                self.put_away(item)\n        return fresh",
        "                pass\n        return fresh",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "old file of an adopted chunk kept",
        "_fs/ops.py",
        "        elsewhere = (old.number, old.at) != now_at\n",
        "        elsewhere = False\n",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "umask wins",
        "_fs/file_io.py",
        "if os.fstat(fd).st_mode & 0o777 != 0o600:",
        "if False:",
        "unit/test_fs_tier.py",
    ),
    Mutant(
        "header checksum unread",
        "_fs/format.py",
        "    if not hmac.compare_digest(page[_SUM_AT:], sums.of_header(page)):",
        "    if False:",
        "unit/test_fs_format.py",
    ),
    Mutant(
        "index survives its reading",
        "_fs/index.py",
        "        os.close(fd)\n        if remove:\n            unlink_quietly(name, root_fd)\n",
        "        os.close(fd)\n",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "what was removed meanwhile enters with its index",
        "_fs/books.py",
        "not new.isdisjoint(self._moved) or ",
        "",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "what was found meanwhile enters again with its index",
        "_fs/unchanged.py",
        "in zip(items, its_numbers, strict=True) if item.key not in books]",
        "in zip(items, its_numbers, strict=True)]",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "an index enters whatever else there is",
        "_fs/scan.py",
        " - leavers_nbytes - self._books.counted_nbytes",
        " - self._books.counted_nbytes",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "an index enters though it is over the capacity",
        "_fs/scan.py",
        "if match is None or match.nbytes > most_nbytes - leavers_nbytes - self._books.counted_nbytes:",
        "if match is None:",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "an index enters though a slot is gone",
        "_fs/unchanged.py",
        "return None if None in ats else ats",
        "return ats",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "a catalogue is believed as the index has it though it changed",
        "_fs/catalogue.py",
        "found.st_size, found.st_mtime_ns, _boot()",
        "found.st_size, 0, _boot()",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "a slot gets another's row from the index",
        "_fs/slab.py",
        "self._lines[slot] = row\n",
        "self._lines[slot] = rows[0]\n",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "an index enters though there are slots besides",
        "_fs/unchanged.py",
        " if n_in_slab == self._n_rows else None",
        "",
        "unit/test_fs_unchanged.py",
    ),
    Mutant(
        "index believed though files changed (all)",
        "_fs/unchanged.py",
        "indexes[0].leaf_times_ns == leaf_times_ns(namespace_fd)",
        "True",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "scan results unsorted",
        "_fs/listing.py",
        "pieces = [sorted(listed[at : at + BATCH])",
        "pieces = [list(listed[at : at + BATCH])",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "probe leaves broken files uncounted",
        "_fs/lookup.py",
        "                self._remove_damaged(key, owner, held, found, found.damage)",
        "                pass",
        "unit/test_fs_hostile.py property/test_fs_machine.py",
    ),
    Mutant(
        "probe believes a changed length",
        "_fs/lookup.py",
        "if now is not None and now.nbytes == found.nbytes:",
        "if now is not None:",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "two writes of a key share a file",
        "_fs/file_io.py",
        "part = part_name(name, scratch.worker)",
        "part = part_name(name, 0)",
        "unit/test_fs_tier.py",
    ),
    Mutant(
        "readable dead owner taken by a stranger",
        "_fs/owners.py",
        "other.namespace == self._namespace or other.namespace not in read_by_others",
        "True",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "lock pages uncounted",
        "_fs/own_pages.py",
        "                self._books.fixed_nbytes += PAGE_NBYTES\n",
        "",
        "unit/test_fs_sharing.py unit/test_fs_settings.py",
    ),
    Mutant(
        "lock page written without room",
        "_fs/own_pages.py",
        "if self._books.used_nbytes + PAGE_NBYTES > most_nbytes:",
        "if False:",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "lock page written in the room of what is held",
        "_fs/own_pages.py",
        "if self._books.used_nbytes + PAGE_NBYTES > most_nbytes:",
        "if PAGE_NBYTES > most_nbytes:",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "new lock page claims nothing",
        "_fs/own_pages.py",
        "replace(self.page(owner), reserved_nbytes=PAGE_NBYTES).pack()",
        "self.page(owner).pack()",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "speaker written last",
        "_fs/own_pages.py",
        "for owner in (speaker, *(self._written - {speaker})):",
        "for owner in (*(self._written - {speaker}), speaker):",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "newcomer takes one id of a dead process",
        "_fs/owners.py",
        "            for other in ids:\n                self._take(other)\n",
        "            for other in [speaker] if is_fresh else ids:\n                self._take(other)\n",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "heirs by each id's own namespace",
        "_fs/owners.py",
        "dead = by_process(o for o in others if o.fd is not None)",
        "dead = [[o] for o in others if o.fd is not None]",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "last word in a page that goes",
        "_fs/own_pages.py",
        "if owner in kept & self._written), self.speaker)",
        "if owner in self._written), self.speaker)",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "last word after pages have gone",
        "_fs/owners.py",
        "speaker = self._pages.say_last(kept) if kept else self._pages.speaker",
        "speaker = self._pages.speaker",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "speaker's page goes first",
        "_fs/owners.py",
        "key=speaker.__eq__",
        "key=speaker.__ne__",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "handed back in any order",
        "_fs/owners.py",
        "key=lambda item: nbytes_of.get(item[0], 0) < item[1].reserved_nbytes",
        "key=lambda item: nbytes_of.get(item[0], 0) >= item[1].reserved_nbytes",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "holders not followed",
        "_fs/page.py",
        "together.setdefault(last(owner), [])",
        "together.setdefault(holder_of[owner], [])",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "gc settles each id by itself",
        "_fs/sweep.py",
        "for ids in processes({owner.id: owner.holder for owner in owners}):",
        "for ids in ([owner.id] for owner in owners):",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "gc lowers first",
        "_fs/sweep.py",
        "key=lambda word: word[0], reverse=True",
        "key=lambda word: word[0]",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "index beyond its room is not claimed",
        "_fs/mount.py",
        "(more_nbytes > 0 and not books.start_write(more_nbytes))",
        "more_nbytes > books.limit_nbytes - books.used_nbytes",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "what a scan has yet to count is no part of the share",
        "_fs/owners.py",
        "self._books.used_nbytes + self._spare_nbytes()",
        "self._books.counted_nbytes + self._spare_nbytes()",
        "unit/test_fs_scarce.py",
    ),
    Mutant(
        "index of an owner without a page",
        "_fs/mount.py",
        "if not self._ownership.has_page or ",
        "if ",
        "unit/test_fs_reserved.py",
    ),
    Mutant(
        "min_free ignored",
        "_fs/wishes.py",
        "if self.min_free_nbytes is None:",
        "if True:",
        "unit/test_fs_sharing.py",
    ),
    Mutant(
        "other namespaces never leave for room",
        "_fs/ops.py",
        "            if not self.make_room():\n                return Reason.FULL\n",
        "            return Reason.FULL\n",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "failed write stays charged",
        "_fs/ops.py",
        "            self._books.abort_write(charge)\n            return self.failed_write",
        "            return self.failed_write",
        "unit/test_fs_tier.py",
    ),
    Mutant(
        "corrupt file stays charged",
        "_fs/lookup.py",
        "            if removed and held is not None:\n                self._books.drop(key, owner, held)",
        "            if removed and held is not None:\n                pass",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "moved file kept",
        "_fs/listing.py",
        "            if leaf_of(parsed.key) != leaf:",
        "            if False:",
        "unit/test_fs_hostile.py",
    ),
    Mutant(
        "files without owner ignored",
        "_fs/listing.py",
        "self._adopt_orphans and parsed.owner not in self._known",
        "False",
        "unit/test_fs_scan.py",
    ),
    Mutant(
        "slab: a row before its slot is whole",
        "_fs/batch.py",
        "            self._slab_io.write(slab, slots, chunks, scratch)\n"
        "            errors = self._slab_io.commit(slab, slots, keys)\n",
        "            errors = self._slab_io.commit(slab, slots, keys)\n"
        "            self._slab_io.write(slab, slots, chunks, scratch)\n",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: a deletion leaves the row",
        "_fs/slab.py",
        "            self.catalogue.clear(self._lines[slot])\n            self._lines[slot] = _NO_ROW\n",
        "            self._lines[slot] = _NO_ROW\n",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: key of a slot unchecked",
        "_fs/format.py",
        "            and its_key[:n_key] == key\n",
        "",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: payload checksum unread in a run",
        "_fs/slab_io.py",
        "if not hmac.compare_digest(self._sums.of(payload), payload_sum):",
        "if False:",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: grows over the capacity",
        "_fs/books.py",
        "n_slots = max(0, min(n_slots, (self.limit_nbytes - self.used_nbytes) // slot_nbytes))",
        "n_slots = max(0, n_slots)",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: a smaller share gives nothing back",
        "_fs/mount.py",
        "            self._slabs.give_back(excess)",
        "            pass",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: holes pass for idle slots after a kill",
        "_fs/slab.py",
        "        whole = found.st_blocks * 512 >= self.n_slots * self.slot_nbytes\n",
        "        whole = True\n",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: min_free ignored by growth",
        "_fs/slabs.py",
        "allowed = min(n, self._spare_nbytes() // self._slot_nbytes)",
        "allowed = n",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: a failed write loses its slot",
        "_fs/slabs.py",
        "        self._books.abort_write(slab.slot_nbytes)\n        slab.release(slot)\n",
        "        self._books.abort_write(slab.slot_nbytes)\n",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: the earlier copy of a rewritten key stays",
        "_fs/store.py",
        "            return self._slabs.free(berth, key, keep_slot=keep_slot)\n",
        "            return True\n",
        "unit/test_fs_slab.py unit/test_fs_tier.py",
    ),
    Mutant(
        "slab: a stale reader calls it corrupt",
        "_fs/store.py",
        "            if again is None or again.identity != berth.identity:",
        "            if False:",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: rows of the dead before their slots are synced",
        "_fs/slab_io.py",
        "        if self._durable:\n            slab.sync()\n",
        "",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "slab: an unread row is never renewed",
        "_fs/slab.py",
        "                self.catalogue.put_at(line, key, slot)\n                self._used",
        "                self._used",
        "unit/test_fs_slab.py",
    ),
    Mutant(
        "the last piece of a long chunk is not summed up",
        "_fs/pieces.py",
        "        hasher.update(buffer[at:end])\n",
        "        if end < nbytes:\n            hasher.update(buffer[at:end])\n",
        "unit/test_fs_pieces.py",
    ),
    Mutant(
        "slab: a buffer that is too short for a long chunk costs the chunk",
        "_fs/slab_io.py",
        "if len(buffer) >= slab.slot_nbytes - HEADER_NBYTES > LONG_NBYTES:",
        "if slab.slot_nbytes - HEADER_NBYTES > LONG_NBYTES:",
        "unit/test_attacks_pieces.py",
    ),
    Mutant(
        "slab: a long chunk is never synced",
        "_fs/slab_io.py",
        "        if self._durable:\n            slab.sync()\n",
        "        if self._durable and items[0][0].nbytes <= LONG_NBYTES:\n            slab.sync()\n",
        "unit/test_attacks_pieces.py",
    ),
    Mutant(
        "slab: a chunk that came back between two pieces is corrupt",
        "_fs/store.py",
        "                if not is_fresh or (not n_left and known[1] is not None):\n",
        "                if True:\n",
        "unit/test_attacks_pieces.py",
    ),
    Mutant(
        "who comes while a batch is planned finds nothing to do",
        "../_threads.py",
        "        with self._lock:\n            if self._items is None:\n",
        "        if True:\n            if self._items is None:\n",
        "unit/test_fs_threads.py",
    ),
]


def survives(mutant: Mutant, copy: Path) -> bool:
    path = copy / "tierkv" / "tiers" / mutant.file
    original = path.read_text()
    if original.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: applies {original.count(mutant.old)} times to {mutant.file}")
    path.write_text(original.replace(mutant.old, mutant.new))
    tests = [f"tests/{name}" for name in mutant.tests.split()]
    command = [sys.executable, "-B", "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-k", f"not {SLOW}", *tests]
    try:
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    finally:
        path.write_text(original)
    return done.returncode == 0


def main(words: list[str]) -> int:
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="tierkv-mutants-") as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
        for mutant in chosen:
            started = time.monotonic()
            alive = survives(mutant, copy)
            survivors += alive
            print(f"{'SURVIVED' if alive else 'died'} {time.monotonic() - started:5.1f} s  {mutant.name}", flush=True)
    print(f"{len(chosen)} planted, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
