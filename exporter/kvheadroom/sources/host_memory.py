"""The kernel's `/proc/meminfo` -> the memory of this machine."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What the kernel says of the machine's memory; a container sees the whole machine's.

    Attributes:
        total_bytes: MemTotal.
        available_bytes: MemAvailable: what can be had without swapping, page cache included; vLLM takes the same figure
            as free on such GPUs (`MemorySnapshot.measure`, utils/mem_utils.py, 0.33.0).
        shared_bytes: Shmem: files of `/dev/shm` and pinned memory, whoever uses them; None where the kernel does not tell it.
    """

    total_bytes: int
    available_bytes: int
    shared_bytes: int | None = None


def read_host_memory(proc: Path) -> HostMemory | str:
    """The host's memory, or why it is not known.

    Args:
        proc: `/proc`.
    """
    path = proc / "meminfo"
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        return f"{path}: {getattr(error, 'strerror', None) or 'it is no text'}"
    # The kernel writes kB and means KiB.
    kib = {
        name: int(value) for name, value in re.findall(r"^(Mem\w+|Shmem):\s+(\d+) kB$", text, re.MULTILINE)
    }
    total, available = kib.get("MemTotal"), kib.get("MemAvailable")
    if total is None or available is None or not 0 <= available <= total or total == 0:
        return f"{path} has no MemTotal and MemAvailable that make sense"
    shared = kib.get("Shmem")
    return HostMemory(
        total_bytes=total * 1024,
        available_bytes=available * 1024,
        shared_bytes=None if shared is None else shared * 1024,
    )
