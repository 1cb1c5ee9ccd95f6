"""The kernel's files -> the memory of a server of this machine: its processes', its limits, and what `/dev/shm` has."""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.sources.host_memory import HostMemory, read_host_memory
from kvheadroom.sources.proc_files import text_of
from kvheadroom.sources.process_list import ProcessList, list_processes, still_runs
from kvheadroom.sources.vllm_launches import is_engine

CGROUPS = Path("/sys/fs/cgroup")
SHM = "/dev/shm"  # noqa: S108  nothing is written there
_MOST_PROCESSES = 4096
_MOST_LEVELS = 32
_SIZES = re.compile(r"^(RssAnon|RssShmem):\s+(\d+) kB$", re.MULTILINE)

Statvfs = Callable[[str], os.statvfs_result]


def read_machine_memory(
    proc: Path = Path("/proc"), shm: str = SHM, *, statvfs: Statvfs = os.statvfs
) -> HostUse:
    """Of this machine alone, for a server that is to be started on it."""
    return _memory(read_host_memory(proc), _shm(shm, statvfs))


def read_server_memory(
    server: LocalServer,
    proc: Path = Path("/proc"),
    cgroups: Path = CGROUPS,
    *,
    statvfs: Statvfs = os.statvfs,
) -> HostUse | None:
    """Of a server that runs, and of its machine; None once it has ended. What it reads may block."""
    listing = list_processes(proc)
    family = _family(listing, server.pid)
    found = (dict(_SIZES.findall(text_of(proc / str(pid) / "status"))) for pid in family)
    sizes = [one if {"RssAnon", "RssShmem"} <= one.keys() else {} for one in found]
    told = [one for one in sizes if one]
    # With one that is there and does not tell, a sum would be too small.
    is_whole = bool(told) and all(
        one or not (proc / str(pid)).exists() for pid, one in zip(family, sizes, strict=True)
    )
    engines = sum(is_engine(listing.processes[pid].words) for pid in family)
    hidden = server.folders.hidden_because
    shm = None if hidden else _shm(server.folders.root + SHM, statvfs)
    limit = _tightest_limit(text_of(proc / str(server.pid) / "cgroup"), cgroups)
    if not still_runs(proc, server.pid, server.started_ticks):
        # Some of it may be another process's.
        return None
    return _memory(
        read_host_memory(proc),
        shm,
        limit,
        processes=len(told),
        processes_shared_bytes=_sum(told, "RssShmem") if is_whole else None,
        processes_anonymous_bytes=_sum(told, "RssAnon") if is_whole else None,
        engines=engines or None,
    )


def _memory(
    machine: HostMemory | str,
    shm: tuple[int, int] | None,
    limit: tuple[int, int | None] | None = None,
    *,
    processes: int = 0,
    processes_shared_bytes: int | None = None,
    processes_anonymous_bytes: int | None = None,
    engines: int | None = None,
) -> HostUse:
    known = None if isinstance(machine, str) else machine
    return HostUse(
        total_bytes=None if known is None else known.total_bytes,
        available_bytes=None if known is None else known.available_bytes,
        shared_bytes=None if known is None else known.shared_bytes,
        shm_total_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        limit_bytes=None if limit is None else limit[0],
        limit_used_bytes=None if limit is None else limit[1],
        processes=processes,
        processes_shared_bytes=processes_shared_bytes,
        processes_anonymous_bytes=processes_anonymous_bytes,
        engines=engines,
    )


def _family(listing: ProcessList, pid: int) -> list[int]:
    """A process and all that it started, and so on."""
    children = listing.children()
    found: list[int] = []
    waiting = [pid] if pid in listing.processes else []
    while waiting and len(found) < _MOST_PROCESSES:
        one = waiting.pop()
        found.append(one)
        waiting += [child for child in children.get(one, ()) if child not in found]
    return found


def _sum(told: list[dict[str, str]], name: str) -> int:
    # The kernel writes kB and means KiB.
    return sum(int(one[name]) for one in told) * 1024


def _shm(path: str, statvfs: Statvfs) -> tuple[int, int] | None:
    """(size, free) of a file system, as far as others than root may fill it; None where it cannot be asked."""
    try:
        found = statvfs(path)
    except (OSError, ValueError):
        return None
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return (total, free) if 0 <= free <= total and total > 0 else None


def _tightest_limit(groups: str, cgroups: Path) -> tuple[int, int | None] | None:
    """(limit, what is used of it) of the group with the smallest limit, from a process's own up; None where none has one.

    Args:
        groups: of the process, as cgroups(7) has them: `0::/path` of version 2, `4:memory:/path` of version 1.
    """
    lines = [line.split(":", 2) for line in groups.splitlines() if line.count(":") >= 2]
    first = next((path for _, names, path in lines if "memory" in names.split(",")), None)
    second = next((path for number, names, path in lines if number == "0" and not names), None)
    if first is not None:
        return _tightest(first, cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    if second is not None:
        return _tightest(second, cgroups, "memory.max", "memory.current")
    return None


def _tightest(path: str, root: Path, limit_name: str, used_name: str) -> tuple[int, int | None] | None:
    place = PurePosixPath(path)
    if not place.is_absolute() or ".." in place.parts:
        # Of a group above those that are seen here.
        return None
    found: tuple[int, int | None] | None = None
    for group in (place, *place.parents)[:_MOST_LEVELS]:
        folder = root / group.relative_to("/")
        limit = _whole(text_of(folder / limit_name))
        if limit is not None and (found is None or limit < found[0]):
            found = limit, _whole(text_of(folder / used_name))
    return found


def _whole(text: str) -> int | None:
    """`max`, and what version 1 has for no limit, are none."""
    word = text.strip()
    if not word.isdecimal() or len(word) > 20:
        return None
    number = int(word)
    return number if number < _NO_LIMIT else None


_NO_LIMIT = 2**62
