"""Memory of the machine, of this process's container and of this process, read from the kernel's files.

Used by `devices.host`, because core depends on no process library. Elsewhere than on Linux the few numbers the
standard library has are used. Every function takes `root`, where the files are: "/" but for tests.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deepinfer.hooks.devices.facts import MemoryInfo

_NO_LIMIT = 1 << 60
"""A container limit of this or more means none: the old interface writes the largest page count instead of "max"."""


def memory_info(root: Path = Path("/")) -> MemoryInfo:
    """Bytes, the stricter of machine and container."""
    total, free = _machine(root)
    limit, room = _container(root)
    allocated, peak = _process(root)
    return MemoryInfo(min(total, limit), min(free, room), allocated, max(peak, allocated))


def reset_peak(root: Path = Path("/")) -> bool:
    """Start a new peak for this process; False where the kernel does not offer it."""
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def _unknown_if_missing() -> Iterator[None]:
    """Leave the block at a file that is not there, not readable or of another shape."""
    try:
        yield
    except (OSError, ValueError):
        return


def _sizes(path: Path) -> dict[str, int]:
    """Lines "Name:  123 kB" as {name: bytes}."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB":
            found[name] = int(number) * 1024
    return found


def _machine(root: Path) -> tuple[int, int]:
    """(total, available) bytes."""
    with _unknown_if_missing():
        found = _sizes(root / "proc/meminfo")
        if "MemTotal" in found:
            return found["MemTotal"], found.get("MemAvailable", found.get("MemFree", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, total


def _container(root: Path) -> tuple[int, int]:
    """(limit, room left) bytes of the strictest control group this process is in; without a limit both are huge."""
    limit = room = sys.maxsize
    for folder, limit_file, used_file in _control_groups(root):
        with _unknown_if_missing():
            allowed, used = int((folder / limit_file).read_text()), int((folder / used_file).read_text())
            if allowed < _NO_LIMIT:
                limit = min(limit, allowed)
                room = min(room, max(0, allowed - max(0, used - _reclaimable(folder))))
    return limit, room


def _control_groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """(folder, limit file, usage file) of every memory group from this process's own up to the mounted root."""
    lines: list[str] = []
    with _unknown_if_missing():
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, files = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = mount / path.lstrip("/")
        # A container may see the host's path while its own group is the mounted root; missing folders are skipped.
        for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(mount))):
            yield group, *files


def _reclaimable(group: Path) -> int:
    """File cache the kernel drops before it refuses memory."""
    with _unknown_if_missing():
        for line in (group / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    return 0


def _process(root: Path) -> tuple[int, int]:
    """(resident, peak resident) bytes."""
    with _unknown_if_missing():
        found = _sizes(root / "proc/self/status")
        if "VmRSS" in found:
            return found["VmRSS"], found.get("VmHWM", found["VmRSS"])
    import resource  # only Unix has it, and only Unix without /proc gets here

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # option numbers of mallopt(3)


def keep_freed_memory() -> bool:
    """Let the C allocator reuse freed memory instead of returning it to the system. True where it obeyed.

    Every step allocates and frees the same large tensors. By default glibc maps and unmaps each of them, and the kernel
    clears every page again: adding 1 to a tensor of 1 to 100 MB took 3 to 6 times as long (docs/performance.md).
    Allocators without `mallopt` keep their own rules.
    """
    return _mallopt(_M_MMAP_MAX, 0) and _mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def share_one_arena() -> bool:
    """Let threads started from now on allocate where the first thread does. True where the C allocator obeyed.

    The arenas glibc gives to other threads consist of pieces of 64 MB that go back to the system when they are empty,
    whatever `keep_freed_memory` says; a step on such a thread took up to 1.4 times as long.
    """
    return _mallopt(_M_ARENA_MAX, 1)


def _mallopt(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None).mallopt(option, value))
    except (OSError, AttributeError):
        return False
