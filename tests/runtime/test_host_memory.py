"""Host memory from kernel files: machine, container of either interface, nested groups, and none of them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from deepinfer.hooks.devices.host_memory import keep_freed_memory, memory_info, reset_peak, share_one_arena

KB, GB = 1 << 10, 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    lines = ("MemTotal:  16777216 kB", "MemFree: 1024 kB", "MemAvailable:  8388608 kB", "HugePages: 0")
    write(tmp_path, "proc/meminfo", "\n".join(lines))
    write(tmp_path, "proc/self/status", "Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_machine_without_container(root: Path) -> None:
    info = memory_info(root)
    assert (info.total, info.free, info.allocated, info.peak) == (16 * GB, 8 * GB, 1024 * KB, 2048 * KB)


def test_container_limit_counts_and_file_cache_does_not(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{4 * GB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{3 * GB}\n")
    write(root, "sys/fs/cgroup/memory.stat", f"anon 5\ninactive_file {GB}\n")
    info = memory_info(root)
    assert (info.total, info.free) == (4 * GB, 2 * GB)


def test_strictest_of_nested_groups(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/user.slice/job\n")
    for folder, limit, used in (("user.slice/job", 6 * GB, GB), ("user.slice", 8 * GB, 7 * GB)):
        write(root, f"sys/fs/cgroup/{folder}/memory.max", str(limit))
        write(root, f"sys/fs/cgroup/{folder}/memory.current", str(used))
    info = memory_info(root)
    assert (info.total, info.free) == (6 * GB, GB)


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096)])
def test_no_limit_is_the_machine(root: Path, limit: str) -> None:
    write(root, "proc/self/cgroup", "0::/\n4:memory:/docker/abc\n")
    write(root, "sys/fs/cgroup/memory.max", limit)
    write(root, "sys/fs/cgroup/memory.current", "1")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", limit)
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", "1")
    assert memory_info(root).total == 16 * GB


def test_old_interface_seen_from_inside_a_container(root: Path) -> None:
    write(root, "proc/self/cgroup", "9:cpu,memory:/docker/abc\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GB))
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", str(3 * GB))
    info = memory_info(root)
    assert (info.total, info.free) == (2 * GB, 0)


def test_without_kernel_files_the_standard_library_answers(tmp_path: Path) -> None:
    info = memory_info(tmp_path)
    assert info.total >= info.free > 0 and info.peak >= info.allocated > 0
    assert reset_peak(tmp_path) is False


def test_this_process() -> None:
    info = memory_info()
    assert info.total > 0 and info.allocated > 10 << 20


def test_the_allocator_takes_orders_where_it_is_glibcs():
    has_options = platform.libc_ver()[0] == "glibc"
    assert (keep_freed_memory(), share_one_arena()) == (has_options, has_options)
