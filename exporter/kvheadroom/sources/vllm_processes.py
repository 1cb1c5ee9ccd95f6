"""The kernel's `/proc` -> the vLLM servers that run on this machine: where each answers, and how it was started.

Nothing of a command line but what `ServerSettings` takes out of it is kept, and no sentence here quotes one.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvheadroom.capacity.local_server import FolderTree, LocalServer
from kvheadroom.sources.folder_trees import seen_from_here
from kvheadroom.sources.hub_environment import CACHE_VARIABLES, hub_cache
from kvheadroom.sources.patient_looks import PatientLooks
from kvheadroom.sources.proc_files import link_of, text_of
from kvheadroom.sources.process_list import (
    Process,
    ProcessList,
    list_processes,
    read_environment,
    still_runs,
)
from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE
from kvheadroom.sources.server_places import NOT_SEEN, Left, ServerPlaces
from kvheadroom.sources.vllm_arguments.command_line import VARIABLES, ServerSettings, read_command_line
from kvheadroom.sources.vllm_arguments.config_yaml import (
    MAX_CONFIG_BYTES,
    ConfigWords,
    is_config_name,
    read_config_yaml,
)
from kvheadroom.sources.vllm_arguments.flag_words import named_config
from kvheadroom.sources.vllm_builds import is_cpu_build
from kvheadroom.sources.vllm_launches import Launch, is_engine, launch_of

LOOK_SECONDS = 1.0
_FOLDER_VARIABLES = CACHE_VARIABLES | {"HOME", "VLLM_USE_MODELSCOPE"}
_CLOCK_DOUBT_SECONDS = 5.0
"""The kernel tells its start in whole seconds, and a clock may have been set since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A server that answers, and where.

    Attributes:
        unix_socket: its path here, where it answers at one.
    """

    server: LocalServer
    settings: ServerSettings
    base_url: str
    unix_socket: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessScan:
    """One look at all processes.

    Attributes:
        left_out: a sentence for each server that runs and cannot be watched.
        quiet: a sentence for each that has no page, or none yet.
        engines_alone: engines of vLLM that no server here has started.
        hidden: processes whose command line may not be read.
        others_hidden: processes of other users do not even show up.
        partly_hidden: servers of which only the command line may be read.
        own_numbers: only processes of kvheadroom's own container show up.
    """

    found: tuple[FoundServer, ...]
    left_out: tuple[str, ...]
    quiet: tuple[str, ...]
    engines_alone: int
    processes: int
    hidden: int
    others_hidden: bool
    partly_hidden: int
    own_numbers: bool


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one server's process shows."""

    found: tuple[FoundServer, ...] = ()
    left: tuple[Left, ...] = ()
    is_partly_hidden: bool = False
    is_cpu_build: bool | None = None


_Looks = PatientLooks[tuple[int, int], _Seen]
_STUCK = _Seen(left=(Left("its folders did not answer yet; does a disk of it hang?"),))


class VllmProcesses:
    """Finds servers. To be used from one thread only.

    Args:
        proc: `/proc`.
    """

    def __init__(self, proc: Path = Path("/proc"), *, wait_seconds: float = LOOK_SECONDS) -> None:
        self._proc = proc
        self._looks: _Looks = PatientLooks(wait_seconds)

    def scan(self) -> ProcessScan:
        """All servers that there are now."""
        return _Look(self._proc, list_processes(self._proc), self._looks).scan()


class _Look:
    """One look: what many servers share is read once."""

    def __init__(self, proc: Path, listing: ProcessList, looks: _Looks) -> None:
        self._proc = proc
        self._listing = listing
        self._looks = looks
        self._places = ServerPlaces(proc, listing)
        self._launches = {
            process.pid: launch
            for process in listing.processes.values()
            if (launch := launch_of(process.words)) is not None
        }

    def scan(self) -> ProcessScan:
        seen: dict[int, _Seen] = {}
        keys = set()
        for process in self._servers():
            key = (process.pid, process.started_ticks)
            keys.add(key)
            # What one server's config, socket and packages lie on may hang, for that server alone.
            answer = self._looks.look(key, partial(self._look_at, process, self._looks.last(key)))
            seen[process.pid] = answer or _STUCK
        self._looks.keep_only(keys)
        found, clashes = _without_clashes([server for one in seen.values() for server in one.found])
        left = [(pid, why) for pid, one in seen.items() for why in one.left] + clashes
        return ProcessScan(
            found=tuple(found),
            left_out=tuple(_sentence(pid, one) for pid, one in left if not one.quiet),
            quiet=tuple(_sentence(pid, one) for pid, one in left if one.quiet),
            engines_alone=sum(
                is_engine(process.words)
                and not any(above.pid in self._launches for above in self._listing.ancestors(process))
                for process in self._listing.processes.values()
            ),
            processes=len(self._listing.processes),
            hidden=self._listing.hidden,
            others_hidden=self._listing.others_hidden,
            partly_hidden=sum(one.is_partly_hidden for one in seen.values()),
            own_numbers=link_of(self._proc / "self" / "ns" / "pid") != INITIAL_PID_NAMESPACE,
        )

    def _look_at(self, process: Process, before: _Seen | None) -> _Seen:
        try:
            return self._see(process, None if before is None else before.is_cpu_build)
        except Exception as error:  # noqa: BLE001  whatever one server does to us, the others are found
            # Without its words: they may be of a command line.
            return _Seen(left=(Left(f"a fault of kvheadroom ({type(error).__name__}), please report it"),))

    def _see(self, process: Process, built: bool | None) -> _Seen:  # noqa: FBT001  what is known of a build
        server, settings = self._server(process, self._launches[process.pid])
        folders = server.folders
        found: list[FoundServer] = []
        left: list[Left] = []
        for place in self._places.find(process, settings, folders):
            if isinstance(place, Left):
                left.append(place)
                continue
            if built is None and not folders.hidden_because:
                # Once, and not before it listens: the list of what it has loaded is long, and grows until then.
                built = is_cpu_build(self._proc / str(process.pid), folders.root)
            found.append(
                FoundServer(
                    server=replace(server, is_cpu_build=built or False, urls=frozenset(place.urls)),
                    settings=settings,
                    base_url=place.urls[0],
                    unix_socket=place.unix_socket,
                )
            )
        if not still_runs(self._proc, process.pid, process.started_ticks):
            # Some of it may be another process's.
            return _Seen()
        return _Seen(tuple(found), tuple(left), bool(folders.hidden_because), built)

    def _servers(self) -> Iterator[Process]:
        for pid in sorted(self._launches):
            process = self._listing.processes[pid]
            # Up to 0.10.0 a forked engine has the very words of its server.
            if not any(
                above.pid in self._launches and above.words == process.words
                for above in self._listing.ancestors(process)
            ):
                yield process

    def _server(self, process: Process, launch: Launch) -> tuple[LocalServer, ServerSettings]:
        folder = self._proc / str(process.pid)
        environment = read_environment(folder, VARIABLES | _FOLDER_VARIABLES)
        folders = self._folders(folder, environment)
        settings = read_command_line(
            launch.words,
            is_serve=launch.is_serve,
            config=self._config(process, launch, folders),
            environment=environment,
        )
        server = LocalServer(
            pid=process.pid,
            started_ticks=process.started_ticks,
            command_line=settings.command_line,
            model=settings.model,
            revision=settings.revision,
            folders=folders,
        )
        return server, settings

    def _folders(self, folder: Path, environment: dict[str, str] | None) -> FolderTree:
        mounts, working, root = (link_of(folder / name) for name in ("ns/mnt", "cwd", "root"))
        if not (mounts and working and root):
            return FolderTree(hidden_because=f"the folders of its process {NOT_SEEN}")
        ours = self._proc / "self"
        is_ours = (mounts, root) == (link_of(ours / "ns" / "mnt"), link_of(ours / "root"))
        if root != "/" and f"{working}/".startswith(f"{root}/"):
            working = working[len(root) :] or "/"
        cache = None
        known = environment or {}
        if known.get("HOME") and known.get("VLLM_USE_MODELSCOPE", "").strip().lower() not in ("1", "true"):
            cache = os.path.join(working, hub_cache(known, Path(known["HOME"])))  # noqa: PTH118  a text
        return FolderTree(root="" if is_ours else str(folder / "root"), working=working, hub_cache=cache)

    def _config(self, process: Process, launch: Launch, folders: FolderTree) -> ConfigWords | str | None:
        name = named_config(launch.words)
        if name is None:
            return None
        if not is_config_name(name):
            return "has no name that vLLM takes"
        if folders.hidden_because:
            return NOT_SEEN
        try:
            path = seen_from_here(folders.root, name if name.startswith("/") else f"{folders.working}/{name}")
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                return "is no regular file"
            if info.st_size > MAX_CONFIG_BYTES:
                return f"is larger than {MAX_CONFIG_BYTES // 1024} KiB"
            # Who puts another file in its place may keep the time of its content (`mv`, `cp -p`), not that of its entry.
            if max(info.st_mtime, info.st_ctime) > self._started_at(process) + _CLOCK_DOUBT_SECONDS:
                return "was changed after the server had started"
            return read_config_yaml(path.read_bytes().decode())
        except UnicodeDecodeError:
            return "is no UTF-8 text"
        except (OSError, ValueError):
            return "cannot be read"

    def _started_at(self, process: Process) -> float:
        """Unix seconds."""
        lines = text_of(self._proc / "stat").splitlines()
        booted = next((float(line.split()[1]) for line in lines if line.startswith("btime ")), 0.0)
        return booted + process.started_ticks / os.sysconf("SC_CLK_TCK")


def _without_clashes(found: list[FoundServer]) -> tuple[list[FoundServer], list[tuple[int, Left]]]:
    """Where several servers may be the one that answers, nobody knows whose numbers come."""
    times = Counter((one.base_url, one.unix_socket) for one in found)
    clear = [one for one in found if times[one.base_url, one.unix_socket] == 1]
    clashes = [
        (
            one.server.pid,
            Left(f"another server may be the one that answers at {one.unix_socket or one.base_url}"),
        )
        for one in found
        if times[one.base_url, one.unix_socket] > 1
    ]
    return clear, clashes


def _sentence(pid: int, left: Left) -> str:
    return f"vLLM server with PID {pid}: {left.why}"
