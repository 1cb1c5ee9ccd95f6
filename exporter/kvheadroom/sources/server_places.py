"""Where a server that runs on this machine answers: proved by the sockets that it holds, in the network that it sees."""

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from kvheadroom.capacity.local_server import FolderTree
from kvheadroom.sources.folder_trees import seen_from_here
from kvheadroom.sources.networks import LOOPBACKS, Address, Network, read_network, sockets_of
from kvheadroom.sources.proc_files import link_of, text_of
from kvheadroom.sources.process_list import Process, ProcessList
from kvheadroom.sources.vllm_arguments.command_line import ServerSettings

NOT_SEEN = "may not be seen by this user"
_ALL: tuple[Address, ...] = (IPv4Address(0), IPv6Address(0))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server answers.

    Attributes:
        urls: each leads there from here; the first is to be called.
        unix_socket: its path here, where it answers at one; the URL then only names it.
    """

    urls: tuple[str, ...]
    unix_socket: str | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """Why a server is not watched; `quiet` where that is as it should be."""

    why: str
    quiet: bool = False


class ServerPlaces:
    """Finds the places of servers in one look at `/proc`: what many share is read once."""

    def __init__(self, proc: Path, listing: ProcessList) -> None:
        self._proc = proc
        self._children = listing.children()
        self._networks: dict[str, Network] = {}
        self._here = link_of(proc / "self" / "ns" / "net")

    def find(self, process: Process, settings: ServerSettings, folders: FolderTree) -> Iterator[Place | Left]:
        """One place, or one for each data-parallel rank."""
        if settings.silent_because:
            yield Left(settings.silent_because, quiet=True)
            return
        scheme = "https" if settings.has_tls else "http"
        if settings.unix_socket is not None:
            socket = _socket(settings.unix_socket, folders)
            yield socket if isinstance(socket, Left) else Place((f"{scheme}://localhost",), socket)
            return
        if not settings.ports:
            yield Left("its port is not clear from its command line; name it with `url`")
        for port in settings.ports:
            hosts = self._hosts(process, port)
            if isinstance(hosts, Left):
                yield hosts
            else:
                yield Place(tuple(f"{scheme}://{host}:{port}" for host in hosts))

    def _hosts(self, process: Process, port: int) -> list[str] | Left:
        """What leads there from here, in a URL's words; the address to be called first."""
        folder = self._proc / str(process.pid)
        home = link_of(folder / "ns" / "net")
        ours = self._network(self._here, self._proc)
        is_ours = home in ("", self._here)
        network = ours if is_ours else self._network(home, folder)
        mine = _listening(network, port, self._held(process), process.uid)
        if not mine:
            return Left(f"it does not listen at port {port} yet; it is watched once it does", quiet=True)
        own = {one.address for one in network.listeners if one.socket in mine} | network.addresses
        candidates = sorted(
            (address for address in own if not _is_special(address)),
            key=lambda address: (not address.is_loopback, address.version, int(address)),
        )
        if is_ours:
            candidates = [*LOOPBACKS, *(one for one in candidates if one not in LOOPBACKS)]
        else:
            candidates = [one for one in candidates if not one.is_loopback and one not in ours.addresses]
        reached = [one for one in candidates if not network.answering(port, one).isdisjoint(mine)]
        if reached:
            names = self._names(network, port, mine) if is_ours else ()
            return [*(f"[{one}]" if isinstance(one, IPv6Address) else str(one) for one in reached), *names]
        return Left(
            f"it listens at port {port} in a network of its own, at no address that leads there from here; start it with "
            "`--host 0.0.0.0`, or run kvheadroom in its network"
        )

    def _names(self, network: Network, port: int, mine: frozenset[str]) -> Iterator[str]:
        """The names of this machine that lead to nobody else. A name stands for several addresses."""
        answering = [network.answering(port, address) for address in LOOPBACKS]
        if all(sockets <= mine for sockets in answering):
            yield "localhost"
        if not mine.isdisjoint(frozenset[str]().union(*(network.at(port, address) for address in _ALL))):
            yield text_of(self._proc / "sys" / "kernel" / "hostname").strip()

    def _network(self, name: str, folder: Path) -> Network:
        if name not in self._networks:
            self._networks[name] = read_network(folder / "net")
        return self._networks[name]

    def _held(self, process: Process) -> frozenset[str] | None:
        """The sockets of a server and of all that it started; None where they may not be seen."""
        held: set[str] = set()
        family = {process.pid}
        left = [process.pid]
        while left:
            pid = left.pop()
            children = self._children.get(pid, ())
            left += [child for child in children if child not in family]
            family.update(children)
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


def _socket(path: str, folders: FolderTree) -> str | Left:
    if folders.hidden_because:
        return Left(f"its unix socket {NOT_SEEN}; name it with `unix_socket`")
    try:
        here = seen_from_here(folders.root, path if path.startswith("/") else f"{folders.working}/{path}")
        if stat.S_ISSOCK(here.stat().st_mode):
            return str(here)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        return Left("its unix socket cannot be reached from here; name it with `unix_socket`")
    return Left("its unix socket is not there yet; it is watched once it is", quiet=True)
