"""The kernel's `/proc` -> the vLLM servers that run on this machine: where each answers, and how it was started.

Nothing of a command line but what `ServerSettings` takes out of it is kept, and no sentence here quotes one.
"""

import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from kvheadroom.capacity.local_server import FolderTree, LocalServer
from kvheadroom.sources.folder_trees import seen_from_here
from kvheadroom.sources.hub_environment import CACHE_VARIABLES, hub_cache
from kvheadroom.sources.networks import Address, Network, read_network, sockets_of
from kvheadroom.sources.proc_files import link_of, text_of
from kvheadroom.sources.process_list import (
    Process,
    ProcessList,
    list_processes,
    read_environment,
)
from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE
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

_FOLDER_VARIABLES = CACHE_VARIABLES | {"HOME", "VLLM_USE_MODELSCOPE"}
_NOT_SEEN = "may not be seen by this user"
_CLOCK_DOUBT_SECONDS = 5.0
"""The kernel tells its start in whole seconds, and a clock may have been set since."""
_LOOPBACKS: tuple[Address, ...] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


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
class _Left:
    """Why a server is not watched; `quiet` where that is as it should be."""

    why: str
    quiet: bool = False


class VllmProcesses:
    """Finds servers. What it reads may block, so it is for a thread that may hang.

    Args:
        proc: `/proc`.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cpu_builds: dict[tuple[int, int], bool] = {}

    def scan(self) -> ProcessScan:
        """All servers that there are now."""
        look = _Look(self._proc, list_processes(self._proc), self._cpu_builds)
        scan = look.scan()
        self._cpu_builds = look.cpu_builds
        return scan


class _Look:
    """One look: what many servers share is read once."""

    def __init__(self, proc: Path, listing: ProcessList, cpu_builds: Mapping[tuple[int, int], bool]) -> None:
        self._known_builds = cpu_builds
        self.cpu_builds: dict[tuple[int, int], bool] = {}
        self._proc = proc
        self._listing = listing
        self._networks: dict[str, Network] = {}
        self._launches = {
            process.pid: launch
            for process in listing.processes.values()
            if (launch := launch_of(process.words)) is not None
        }

    def scan(self) -> ProcessScan:
        found: list[FoundServer] = []
        left: list[tuple[int, _Left]] = []
        partly_hidden = 0
        for process in self._servers():
            server, settings = self._server(process, self._launches[process.pid])
            partly_hidden += bool(server.folders.hidden_because)
            for place in self._places(process, server, settings):
                if isinstance(place, _Left):
                    left.append((process.pid, place))
                else:
                    is_cpu_build = self._is_cpu_build(process, server.folders)
                    found.append(replace(place, server=replace(server, is_cpu_build=is_cpu_build)))
        clear, clashes = _without_clashes(found)
        left += clashes
        return ProcessScan(
            found=tuple(clear),
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
            partly_hidden=partly_hidden,
            own_numbers=link_of(self._proc / "self" / "ns" / "pid") != INITIAL_PID_NAMESPACE,
        )

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

    def _is_cpu_build(self, process: Process, folders: FolderTree) -> bool:
        """Asked once of each server that listens: the list of what it has loaded is long, and grows until then."""
        name = (process.pid, process.started_ticks)
        if name in self._known_builds:
            self.cpu_builds[name] = self._known_builds[name]
        elif not folders.hidden_because:
            self.cpu_builds[name] = is_cpu_build(self._proc / str(process.pid), folders.root)
        return self.cpu_builds.get(name, False)

    def _folders(self, folder: Path, environment: dict[str, str] | None) -> FolderTree:
        mounts, working, root = (link_of(folder / name) for name in ("ns/mnt", "cwd", "root"))
        if not (mounts and working and root):
            return FolderTree(hidden_because=f"the folders of its process {_NOT_SEEN}")
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
            return _NOT_SEEN
        try:
            path = seen_from_here(folders.root, name if name.startswith("/") else f"{folders.working}/{name}")
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                return "is no regular file"
            if info.st_size > MAX_CONFIG_BYTES:
                return f"is larger than {MAX_CONFIG_BYTES // 1024**2} MiB"
            if info.st_mtime > self._started_at(process) + _CLOCK_DOUBT_SECONDS:
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

    def _places(
        self, process: Process, server: LocalServer, settings: ServerSettings
    ) -> Iterator[FoundServer | _Left]:
        """Where it answers: one place, or one for each data-parallel rank."""
        if settings.silent_because:
            yield _Left(settings.silent_because, quiet=True)
            return
        scheme = "https" if settings.has_tls else "http"
        if settings.unix_socket is not None:
            socket = _socket(settings.unix_socket, server.folders)
            if isinstance(socket, _Left):
                yield socket
            else:
                yield FoundServer(
                    server=server, settings=settings, base_url=f"{scheme}://localhost", unix_socket=socket
                )
            return
        if not settings.ports:
            yield _Left("its host and port are not clear from its command line; name it with `url`")
        for port in settings.ports:
            address = self._address(process, port)
            if isinstance(address, _Left):
                yield address
            else:
                host = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
                yield FoundServer(server=server, settings=settings, base_url=f"{scheme}://{host}:{port}")

    def _address(self, process: Process, port: int) -> Address | _Left:
        """An address of it that leads there from here."""
        folder = self._proc / str(process.pid)
        home, here = link_of(folder / "ns" / "net"), link_of(self._proc / "self" / "ns" / "net")
        ours = self._network(here, self._proc)
        is_ours = home in ("", here)
        network = ours if is_ours else self._network(home, folder)
        mine = _listening(network, port, self._held(process), process.uid)
        if not mine:
            return _Left(f"it does not listen at port {port} yet; it is watched once it does", quiet=True)
        own = {one.address for one in network.listeners if one.socket in mine} | network.addresses
        candidates = [address for address in own if not _is_special(address)]
        candidates.sort(key=lambda address: (address.version, int(address)))
        if is_ours:
            candidates = [*_LOOPBACKS, *candidates]
        else:
            candidates = [one for one in candidates if not one.is_loopback and one not in ours.addresses]
        for address in candidates:
            if not network.answering(port, address).isdisjoint(mine):
                return address
        return _Left(
            f"it listens at port {port} in a network of its own, at no address that leads there from here; start it with "
            "`--host 0.0.0.0`, or run kvheadroom in its network"
        )

    def _network(self, name: str, folder: Path) -> Network:
        if name not in self._networks:
            self._networks[name] = read_network(folder / "net")
        return self._networks[name]

    def _held(self, process: Process) -> frozenset[str] | None:
        """The sockets of a server and of all that it started; None where they may not be seen."""
        family = [process.pid]
        family += [
            one.pid
            for one in self._listing.processes.values()
            if any(above.pid == process.pid for above in self._listing.ancestors(one))
        ]
        held: set[str] = set()
        for pid in family:
            sockets = sockets_of(self._proc / str(pid))
            if sockets is None:
                return None
            held |= sockets
        return frozenset(held)


def _listening(network: Network, port: int, held: frozenset[str] | None, uid: int) -> frozenset[str]:
    """Its own sockets at a port; where it may not be seen which they are, those of its user."""
    return frozenset(
        one.socket
        for one in network.listeners
        if one.port == port and (one.socket in held if held is not None else one.uid == uid)
    )


def _is_special(address: Address) -> bool:
    return address.is_unspecified or address.is_link_local or address.is_multicast


def _socket(path: str, folders: FolderTree) -> str | _Left:
    if folders.hidden_because:
        return _Left(f"its unix socket {_NOT_SEEN}; name it with `unix_socket`")
    try:
        here = seen_from_here(folders.root, path if path.startswith("/") else f"{folders.working}/{path}")
        if stat.S_ISSOCK(here.stat().st_mode):
            return str(here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return _Left("its unix socket cannot be reached from here; name it with `unix_socket`")
    return _Left("its unix socket is not there yet; it is watched once it is", quiet=True)


def _without_clashes(found: list[FoundServer]) -> tuple[list[FoundServer], list[tuple[int, _Left]]]:
    """Where several servers may be the one that answers, nobody knows whose numbers come."""
    times = Counter((one.base_url, one.unix_socket) for one in found)
    clear = [one for one in found if times[one.base_url, one.unix_socket] == 1]
    clashes = [
        (
            one.server.pid,
            _Left(f"another server may be the one that answers at {one.unix_socket or one.base_url}"),
        )
        for one in found
        if times[one.base_url, one.unix_socket] > 1
    ]
    return clear, clashes


def _sentence(pid: int, left: _Left) -> str:
    return f"vLLM server with PID {pid}: {left.why}"
