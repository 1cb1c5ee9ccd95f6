"""The kernel's `/proc` -> every process that may be seen: who started whom, with which words."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvheadroom.sources.proc_files import STARTED_TICKS

_MOST_BYTES = 4 * 1024**2
_PIECE_BYTES = 64 * 1024
_ENDED = b"Z"
"""The state of one that has ended, and whose end its parent has not asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process.

    Attributes:
        words: of its command line, or its title in the first one. They may hold secrets.
        started_ticks: when it began, in clock ticks since the machine's start.
        uid: of the user that it runs as.
    """

    pid: int
    parent: int
    started_ticks: int
    uid: int
    words: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessList:
    """All that may be seen.

    Attributes:
        hidden: processes that are there and whose words may not be read.
        others_hidden: processes of other users do not even show up.
    """

    processes: Mapping[int, Process]
    hidden: int = 0
    others_hidden: bool = False

    def ancestors(self, process: Process) -> Iterator[Process]:
        """Who started it, and so on."""
        met = {process.pid}
        while (parent := self.processes.get(process.parent)) is not None and parent.pid not in met:
            met.add(parent.pid)
            yield parent
            process = parent

    def children(self) -> Mapping[int, tuple[int, ...]]:
        """Whom each has started, of those that are still there."""
        started: dict[int, list[int]] = {}
        for process in self.processes.values():
            started.setdefault(process.parent, []).append(process.pid)
        return {parent: tuple(children) for parent, children in started.items()}


def list_processes(proc: Path) -> ProcessList:
    """Everybody who is there now; who ends meanwhile is left out."""
    processes: dict[int, Process] = {}
    hidden = 0
    names = [entry.name for entry in os.scandir(proc) if entry.name.isdecimal()]
    for name in names:
        # Thousands of processes are asked every few seconds: texts, for a Path takes as long as the kernel.
        folder = f"{proc}/{name}"
        try:
            raw = read_file(f"{folder}/cmdline")
            fields = _after_name(read_file(f"{folder}/stat"))
            if fields[0] == _ENDED:
                # It has no words any more, and its sockets are hidden even from its own user.
                continue
            processes[int(name)] = Process(
                pid=int(name),
                parent=int(fields[1]),
                started_ticks=int(fields[STARTED_TICKS]),
                uid=os.stat(folder).st_uid,  # noqa: PTH116  as above
                words=_words(raw),
            )
        except PermissionError:
            hidden += 1
        except (OSError, IndexError):
            # It has ended.
            continue
    # Everybody sees the first process, unless /proc is mounted with hidepid=invisible or ptraceable (proc(5)).
    return ProcessList(processes=processes, hidden=hidden, others_hidden="1" not in names)


def still_runs(proc: Path, pid: int, started_ticks: int) -> bool:
    """Whether what is read under its number now is of this process, and not of another one that has its number since."""
    try:
        fields = _after_name(read_file(f"{proc}/{pid}/stat"))
        return int(fields[STARTED_TICKS]) == started_ticks
    except (OSError, IndexError):
        return False


def read_environment(folder: Path, wanted: frozenset[str]) -> dict[str, str] | None:
    """Of the environment that a process was started with, these variables alone; None where it may not be read."""
    try:
        raw = read_file(str(folder / "environ"))
    except OSError:
        return None
    if not raw.strip(b"\0"):
        # A process that has written a title over it (setproctitle).
        return None
    found: dict[str, str] = {}
    for line in raw.split(b"\0"):
        name, _, value = line.partition(b"=")
        word = name.decode("ascii", "replace")
        if word in wanted:
            found.setdefault(word, os.fsdecode(value))
    return found


def read_file(path: str) -> bytes:
    """A file of the kernel's, as far as 4 MiB.

    Raises:
        OSError: it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Long command lines come in pieces.
        raw = piece = os.read(descriptor, _PIECE_BYTES)
        while len(piece) == _PIECE_BYTES and len(raw) < _MOST_BYTES:
            piece = os.read(descriptor, _PIECE_BYTES)
            raw += piece
        return raw
    finally:
        os.close(descriptor)


def _after_name(stat: bytes) -> list[bytes]:
    """The fields of `stat` from the state on; the name before stands in brackets and may hold anything, brackets too."""
    return stat.rpartition(b")")[2].split()


def _words(raw: bytes) -> tuple[str, ...]:
    words = tuple(os.fsdecode(word) for word in raw.removesuffix(b"\0").split(b"\0"))
    # A title is padded to the length of the words that it was written over.
    return words if any(words[1:]) else tuple(word for word in words[:1] if word)
