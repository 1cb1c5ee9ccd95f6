"""Small files and links of the kernel's `/proc`. What cannot be read is empty: processes end while they are looked at."""

from pathlib import Path

STARTED_TICKS = 19
"""Of the fields of `stat` from the state on: when the process began, in clock ticks since the machine's start
(proc_pid_stat(5), field 22)."""


def text_of(path: Path) -> str:
    """A small file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def link_of(path: Path) -> str:
    """Where a link leads; empty where it cannot be read."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


def stat_fields(folder: Path) -> list[str]:
    """The fields of a process's `stat` from its state on (proc_pid_stat(5), field 3); empty once it has ended."""
    # The name stands in brackets and may hold anything, brackets too.
    _, bracket, rest = text_of(folder / "stat").rpartition(")")
    return rest.split() if bracket else []
