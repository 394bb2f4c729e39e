"""Guarded behaviours, taken away one at a time: at least one case turns red of each. Run by :mod:`tests.mutants`."""

from __future__ import annotations

from typing import Final

FLOW: Final = "tierkv/_flow.py"
HIERARCHY: Final = "tierkv/_hierarchy.py"
LEASE: Final = "tierkv/_lease.py"
LEVEL: Final = "tierkv/_level.py"
MOVES: Final = "tierkv/_moves.py"
ROOM: Final = "tierkv/_room.py"
MOVER: Final = "tierkv/_mover.py"
BOOKS: Final = "tierkv/tiers/_fs/books.py"
FORMAT: Final = "tierkv/tiers/_fs/format.py"
IO: Final = "tierkv/tiers/_fs/file_io.py"
LIST: Final = "tierkv/tiers/_fs/listing.py"
OPS: Final = "tierkv/tiers/_fs/ops.py"
SETTLE: Final = "tierkv/tiers/_fs/settle.py"
NAMESPACE: Final = "tierkv/namespace.py"


def _hunt(file: str, case: str) -> str:
    return f"pytest tests/cases/test_{file}.py -k test_{case}_"


GUARDED: Final = [
    (
        "only frequent chunks are victims",
        "tierkv/policies/_queues.py",
        "        yield from young\n",
        "",
        _hunt("eviction", "a01"),
    ),
    (
        "a parent is not linked to its chunk",
        "tierkv/policies/lru.py",
        "                    before.n_children += 1\n",
        "                    pass\n",
        _hunt("eviction", "a02"),
    ),
    (
        "a rewrite is charged beside what it replaces",
        BOOKS,
        "            replaced = self._drop(key)\n            self._writing_nbytes",
        "            replaced = self.get(key)\n            self._writing_nbytes",
        _hunt("eviction", "a03"),
    ),
    (
        "what did not come stays pinned",
        LEASE,
        "        self.unpin(entries[n_ready:])\n",
        "",
        _hunt("sharing_room", "a04"),
    ),
    (
        "a key twice in one offer takes two slots",
        "tierkv/_ledger.py",
        "return len(keys) == n_keys and ",
        "return ",
        _hunt("sharing_room", "a05"),
    ),
    (
        "what has vanished is still believed to be there",
        FLOW,
        "            source.stored = False\n            self._leave(level, source, reason_of(outcome))\n",
        "            source.stored = True\n",
        _hunt("flow", "a06"),
    ),
    (
        "a read that failed is tried again for its asker",
        LEASE,
        "                if failed or self._driver",
        "                if self._driver",
        _hunt("disk", "a14"),
    ),
    (
        "waiting requests may take every slot",
        LEASE,
        "return max(0, n_slots - reserve - ledger",
        "return max(0, n_slots - ledger",
        _hunt("flow", "a11"),
    ),
    (
        "a queue has no end",
        FLOW,
        "        if level.queued_nbytes + charge > level.plan.queue_nbytes:\n",
        "        if False:\n",
        _hunt("flow", "a12"),
    ),
    (
        "a restart does not trim",
        SETTLE,
        "        if excess <= 0:\n            return listed, excess\n",
        "        return listed, excess\n",
        _hunt("disk", "a13"),
    ),
    (
        "an unreadable file is put away",
        OPS,
        'self._tally.add("failed_reads")\n',
        'self._tally.add("failed_reads")\n                self._try_to_remove(key, owner, held, None)\n',
        _hunt("disk", "a46"),
    ),
    (
        "a short read is the file's fault",
        IO,
        "            if os.fstat(fd).st_size == found.st_size:",
        "            if False:",
        _hunt("disk", "a14"),
    ),
    (
        "memory that is not aligned cannot be written",
        IO,
        "        if error.errno != errno.EINVAL:\n            raise error\n",
        "        if error.errno:\n            raise error\n",
        _hunt("disk", "a15"),
    ),
    (
        "a file that is gone cannot be deleted",
        IO,
        "            unlink(name, leaf_fd)\n        except FileNotFoundError:\n            return False\n",
        "            unlink(name, leaf_fd)\n        except IsADirectoryError:\n            return False\n",
        _hunt("disk", "a17"),
    ),
    (
        "unfinished files of the living are swept",
        LIST,
        "                    orphan = self._adopt_orphans and parsed.owner not in self._known\n",
        "                    orphan = parsed.is_part and unlink_quietly(name, leaf_fd)\n",
        _hunt("restart", "a18"),
    ),
    (
        "unfinished files of the dead stay",
        LIST,
        "                if not unlink_first((name,), leaf_fd) and stat.S_ISREG(found.st_mode):",
        "                if False:",
        _hunt("restart", "a18"),
    ),
    (
        "payloads are not checked",
        IO,
        "        if not hmac.compare_digest(its_sum, header.checksum):\n",
        "        if False:\n",
        _hunt("restart", "a19"),
    ),
    (
        "a header may be another chunk's",
        FORMAT,
        "    if header.chunk.key != key or header.namespace_digest != digest:\n",
        "    if False:\n",
        _hunt("restart", "a19"),
    ),
    (
        "names are folded to lower case",
        NAMESPACE,
        'value.encode("utf-8", "surrogatepass")',
        'value.lower().encode("utf-8", "surrogatepass")',
        _hunt("keys", "a24"),
    ),
    (
        "an adapter is no part of the first key",
        "tierkv/chunkers.py",
        "        key = self._seed(extra)\n",
        '        key = self._seed(b"")\n',
        _hunt("keys", "a23"),
    ),
    (
        "an eviction is not announced",
        MOVES,
        "self._emit_all(level, EventKind.REMOVED, gone, Reason.EVICTED)",
        "self._emit_all(level, EventKind.REMOVED, gone[:0], Reason.EVICTED)",
        _hunt("telling", "a31"),
    ),
    (
        "a refused write is not counted",
        FLOW,
        "            level.counts.refuse(reason)\n        return reason is None\n",
        "            pass\n        return reason is None\n",
        _hunt("telling", "a32"),
    ),
    (
        "the slot of a store that a reset overtook is lost",
        HIERARCHY,
        "                    self._writer_ended(level, entry)\n        self.primary.commit(stored)\n",
        "                    pass\n        self.primary.commit(stored)\n",
        _hunt("telling", "a33"),
    ),
    (
        "a reset leaves what the scan has yet to find",
        HIERARCHY,
        "                level.purging, level.n_quiet = True, 0\n",
        "                level.n_quiet = 0\n",
        _hunt("keys", "a34"),
    ),
    ("links are followed", IO, "_SAFE: Final = os.O_NOFOLLOW | ", "_SAFE: Final = ", _hunt("security", "a40")),
    (
        "a umask decides who may read",
        IO,
        "                os.fchmod(fd, 0o600)\n",
        "                pass\n",
        _hunt("security", "a37"),
    ),
    (
        "a full disk closes the tier",
        MOVER,
        "    return outcome.status is not Status.FAILED\n",
        "    return outcome.status is not Status.FAILED and outcome.reason is not Reason.NO_SPACE\n",
        _hunt("disk", "a41"),
    ),
    (
        "a failed write leaves what it wrote",
        IO,
        "            if not unlink_first(names, leaf_fd) and isinstance(error, OSError):\n",
        "            if False:\n",
        _hunt("disk", "a41"),
    ),
    (
        "a reserve smaller than a chunk costs one",
        LEVEL,
        "            high = low = 0\n",
        "            pass\n",
        _hunt("settings", "a44"),
    ),
    (
        "a yes is a number of threads",
        "tierkv/settings.py",
        "    if isinstance(value, bool) or not",
        "    if not",
        _hunt("settings", "a45"),
    ),
]
"""Name, file, what stands there, what is planted, and the case that must turn red."""

CI: Final = (
    "payloads are not checked",
    "only frequent chunks are victims",
    "waiting requests may take every slot",
    "a refused write is not counted",
)
"""The quick ones among those that would hurt most."""
