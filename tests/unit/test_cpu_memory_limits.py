"""What the machine and the cgroup have left, read from planted files and from the real ones."""

from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.tiers._memory_limits import check_memory, memory_limits
from tierkv.tiers._pool import PrivatePool, SharedPool

MIB = 1 << 20
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"
V1 = "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
HYBRID = V1 + "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
V1_NO_LIMIT = "9223372036854771712"


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(available_nbytes: int) -> dict[str, str]:
    kib = available_nbytes // 1024
    return {"proc/meminfo": f"MemTotal:       99999999 kB\nMemFree:         1 kB\nMemAvailable:   {kib} kB\n"}


def group(path: str, limit: object, usage: object, inactive: int = 0) -> dict[str, str]:
    """A cgroup v2 directory."""
    at = f"sys/fs/cgroup{path}"
    return {
        f"{at}/memory.max": f"{limit}\n", f"{at}/memory.current": f"{usage}\n",
        f"{at}/memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file 7\n",
    }  # fmt: skip


def group_v1(path: str, limit: object, usage: object, inactive: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{path}"
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n", f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }  # fmt: skip


def me(cgroup: str, mounts: str) -> dict[str, str]:
    return {"proc/self/cgroup": cgroup, "proc/self/mounts": f"proc /proc proc rw 0 0\n{mounts}"}


def test_the_machine_alone(tmp_path):
    """Without cgroups MemAvailable is the limit, in bytes."""
    root = plant(tmp_path, machine(512 * MIB))
    assert [limit.free_nbytes for limit in memory_limits(root)] == [512 * MIB]


def test_nothing_known_is_no_limit(tmp_path):
    """A kernel that tells nothing refuses nothing."""
    assert memory_limits(tmp_path) == []
    check_memory("capacity", 1 << 60, root=tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "mounts", "files"),
    [
        ("0::/job\n", V2, group("/job", 100 * MIB, 30 * MIB)),
        ("0::/\n", V2, group("", 100 * MIB, 30 * MIB)),
        ("0::/job\n", V2, group("/job", 100 * MIB, 50 * MIB, inactive=20 * MIB)),
        ("0::/job/child\n", V2, group("/job", 100 * MIB, 30 * MIB) | group("/job/child", "max", MIB)),
        ("0::/job/child\n", V2, group("/job", 100 * MIB, 30 * MIB) | group("/job/child", 90 * MIB, MIB)),
        ("0::/host/only/path\n", V2, group("", 100 * MIB, 30 * MIB)),
        ("4:cpu:/x\n3:memory:/job\n0::/\n", V1, group_v1("/job", 100 * MIB, 30 * MIB)),
        ("3:cpu,memory:/job\n", HYBRID, group_v1("/job", 100 * MIB, 50 * MIB, inactive=20 * MIB)),
        ("3:memory:/job/child\n", V1, group_v1("/job", 100 * MIB, 30 * MIB) | group_v1("/job/child", V1_NO_LIMIT, 1)),
        ("3:memory:/docker/0a1b\n", V1, group_v1("", 100 * MIB, 30 * MIB)),
    ],
    ids=[
        "v2", "v2-root", "v2-page-cache", "v2-parent-binds", "v2-child-above-parent", "v2-path-of-the-host",
        "v1", "hybrid-page-cache", "v1-parent-binds", "v1-path-of-the-host",
    ],
)  # fmt: skip
def test_the_tightest_cgroup_counts(tmp_path, cgroup, mounts, files):
    """Limit less usage plus idle page cache of the tightest group on the way up, under either version."""
    root = plant(tmp_path, machine(512 * MIB) | me(cgroup, mounts) | files)
    assert memory_limits(root)[0].free_nbytes == 70 * MIB
    check_memory("capacity", 70 * MIB, root=root)
    with pytest.raises(ConfigError, match=rf"capacity is {70 * MIB + 1}, .* {70 * MIB} bytes .*sys/fs/cgroup"):
        check_memory("capacity", 70 * MIB + 1, root=root)


@pytest.mark.parametrize(
    "files",
    [
        me("0::/job\n", V2) | group("/job", "max", MIB),
        me("3:memory:/job\n", V1) | group_v1("/job", V1_NO_LIMIT, MIB),
        me("0::/job\n", V1),
        me("0::/job\n", V2) | {"sys/fs/cgroup/job/memory.max": "nonsense\n"},
    ],
    ids=["v2-max", "v1-no-limit", "no-memory-controller", "unreadable"],
)
def test_no_cgroup_limit_leaves_the_machines(tmp_path, files):
    """Unlimited, absent and garbled limits are no limits."""
    root = plant(tmp_path, machine(512 * MIB) | files)
    assert [limit.free_nbytes for limit in memory_limits(root)] == [512 * MIB]


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    """Usage can exceed a limit that was lowered: that is 0 bytes, not a negative number."""
    root = plant(tmp_path, machine(512 * MIB) | me("0::/job\n", V2) | group("/job", 10 * MIB, 30 * MIB))
    assert memory_limits(root)[0].free_nbytes == 0


def test_the_refusal_names_all_numbers(tmp_path):
    """Option, value, what is left and where that stands, and the nearest size in whole slots."""
    root = plant(tmp_path, machine(10 * MIB))
    with pytest.raises(ConfigError) as refused:
        check_memory("cpu.capacity", 20 * MIB, 3 * MIB, root)
    assert str(refused.value) == (
        f"cpu.capacity is {20 * MIB}, but must be at most the {10 * MIB} bytes that are available now "
        f"(MemAvailable of /proc/meminfo); nearest valid value: {9 * MIB}"
    )


@pytest.mark.parametrize("make", [PrivatePool, lambda *size: SharedPool.create("too-large", *size)])
def test_a_pool_larger_than_this_machine_is_refused(make):
    """64 TiB are refused by both kinds before anything is made; a memfd of that size could be made and mapped."""
    with pytest.raises(ConfigError, match=r"capacity is 70368744177664, .* available now"):
        make(1 << 34, 4096)


def test_the_real_files_of_this_machine_are_read():
    """The tightest real limit is positive and not above the machine's memory."""
    total_kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    limits = memory_limits()
    assert 0 < limits[0].free_nbytes <= total_kib * 1024
