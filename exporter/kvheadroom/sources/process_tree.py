"""The kernel's `/proc` -> which processes are the vLLM server that listens at an address of this machine."""

import os
import sys
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from kvheadroom.capacity.gpus import ServerProcesses

Address = IPv4Address | IPv6Address

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the machine's processes (PROC_PID_INIT_INO). NVML tells the PIDs of these."""

_CONTAINER = (
    "kvheadroom runs in a container with process numbers of its own, while the driver tells the machine's; start it "
    "with `--pid=host` (Kubernetes: `hostPID: true`)"
)
_LISTENS = "0A"
_INIT = 1
_PORTS = {"http": 80, "https": 443}
_LOOPBACKS: tuple[Address, ...] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))


@dataclass(frozen=True, slots=True)
class _Listener:
    address: Address
    port: int
    socket: str


@dataclass(frozen=True, slots=True)
class _Processes:
    """Who holds which socket, and who started whom.

    Attributes:
        hidden: processes whose sockets may not be seen.
    """

    holders: dict[str, set[int]]
    parents: dict[int, int]
    hidden: int


class ProcessTree:
    """Finds servers by who listens. What it reads may block, so it is for a thread that may hang, one at a time.

    On a machine with many processes it is the look at all of their descriptors that takes long, so it remembers who holds a
    socket and looks again only when nobody of them does.

    Args:
        proc: `/proc`.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._held: dict[str, set[tuple[int, str]]] = {}

    def find(self, urls: tuple[str, ...]) -> tuple[ServerProcesses, ...]:
        """The processes of the server at each URL: those that listen there, and all that they started."""
        if _link(str(self._proc / "self" / "ns" / "pid")) != INITIAL_PID_NAMESPACE:
            return tuple(ServerProcesses(url=url, unknown=_CONTAINER) for url in urls)
        listeners = self._listeners()
        sockets = {url: self._sockets(url, listeners) for url in urls}
        wanted = {socket for found in sockets.values() if isinstance(found, frozenset) for socket in found}
        processes = self._processes(wanted) if wanted else _Processes({}, {}, 0)
        return tuple(_server(url, found, processes) for url, found in sockets.items())

    def _sockets(self, url: str, listeners: tuple[_Listener, ...]) -> frozenset[str] | str:
        """Who is called by a URL, or why that is not known."""
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS[parts.scheme]
        at_port = tuple(listener for listener in listeners if listener.port == port)
        if host == "localhost" or host.endswith(".localhost"):
            each = {found for found in (_called(at_port, address) for address in _LOOPBACKS) if found}
            if len(each) > 1:
                return f"two sockets, maybe of two servers, listen at {host}:{port}; write 127.0.0.1 or [::1] in its url"
            sockets = next(iter(each), frozenset())
        elif (address := _address(host)) is not None:
            if not address.is_loopback and address not in self._own_addresses():
                return f"{host} is no address of this machine, as far as kvheadroom's network shows"
            sockets = _called(at_port, address)
        elif host.lower() == _text(self._proc / "sys" / "kernel" / "hostname").strip().lower():
            # The name may be any of the machine's addresses, so only who listens at all of them is surely called.
            sockets = frozenset(one.socket for one in at_port if one.address.is_unspecified)
        else:
            return f"{host} is not known to be this machine; write its address in digits where it is"
        if not sockets:
            return (
                f"nothing listens at {host}:{port} in kvheadroom's network; a server in a container of its own may do so "
                "behind a forwarded port"
            )
        return sockets

    def _listeners(self) -> tuple[_Listener, ...]:
        found = []
        for name in ("tcp", "tcp6"):
            for line in _text(self._proc / "net" / name).splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTENS:
                    address, port = fields[1].split(":")
                    found.append(_Listener(_unhex(address), int(port, 16), f"socket:[{fields[9]}]"))
        return tuple(found)

    def _own_addresses(self) -> frozenset[Address]:
        own: set[Address] = set()
        last = ""
        for line in _text(self._proc / "net" / "fib_trie").splitlines():
            words = line.split()
            if "host" in words and "LOCAL" in words:
                own.add(IPv4Address(last))
            last = words[-1] if words else ""
        for line in _text(self._proc / "net" / "if_inet6").splitlines():
            own.add(IPv6Address(bytes.fromhex(line.split()[0])))
        return frozenset(own)

    def _processes(self, wanted: set[str]) -> _Processes:
        self._held = {socket: self._still_held(socket) for socket in wanted}
        hidden = 0
        if not all(self._held.values()):
            hidden = self._look_for_holders()
        parents = {}
        for pid in self._pids():
            # The name stands in brackets and may hold anything, brackets too.
            _, bracket, rest = _text(self._proc / pid / "stat").rpartition(")")
            if bracket:
                parents[int(pid)] = int(rest.split()[1])
        holders = {socket: {pid for pid, _ in held} for socket, held in self._held.items()}
        return _Processes(holders, parents, hidden)

    def _still_held(self, socket: str) -> set[tuple[int, str]]:
        """Who held it at the last look and does now; those who came to it since were started by one of them."""
        return {(pid, path) for pid, path in self._held.get(socket, ()) if _link(path) == socket}

    def _look_for_holders(self) -> int:
        """Look at every descriptor of every process, and give the number of processes that do not show theirs."""
        hidden = 0
        for pid in self._pids():
            try:
                descriptors = list(os.scandir(self._proc / pid / "fd"))
            except PermissionError:
                hidden += 1
                continue
            except OSError:
                # It has ended.
                continue
            for descriptor in descriptors:
                held = self._held.get(_link(descriptor.path))
                # What systemd opened for a server it holds too, and everything is its child.
                if held is not None and int(pid) != _INIT:
                    held.add((int(pid), descriptor.path))
        return hidden

    def _pids(self) -> list[str]:
        return [entry.name for entry in self._proc.iterdir() if entry.name.isdigit()]


def _server(url: str, sockets: frozenset[str] | str, processes: _Processes) -> ServerProcesses:
    if isinstance(sockets, str):
        return ServerProcesses(url=url, unknown=sockets)
    pids = {pid for socket in sockets for pid in processes.holders[socket]}
    if not pids:
        why = f"the process that listens at {urlsplit(url).netloc} is none of those that kvheadroom can see"
        if processes.hidden:
            why = (
                f"which process listens at {urlsplit(url).netloc} may not be seen; run kvheadroom as the server's user, or "
                "as root"
            )
        return ServerProcesses(url=url, unknown=why)
    children: dict[int, list[int]] = {}
    for child, parent in processes.parents.items():
        children.setdefault(parent, []).append(child)
    ahead = list(pids)
    while ahead:
        new = [child for child in children.get(ahead.pop(), ()) if child not in pids]
        pids.update(new)
        ahead += new
    return ServerProcesses(url=url, pids=frozenset(pids))


def _called(listeners: tuple[_Listener, ...], address: Address) -> frozenset[str]:
    """Who answers at an address: who listens there, else at all of its kind, else at all of both kinds."""
    for wanted in (address, type(address)(0), IPv6Address(0)):
        found = frozenset(listener.socket for listener in listeners if listener.address == wanted)
        if found:
            return found
    return frozenset()


def _address(host: str) -> Address | None:
    try:
        return _plain(ip_address(host.partition("%")[0]))
    except ValueError:
        return None


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6, as itself."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _unhex(digits: str) -> Address:
    """The kernel prints each four bytes as a number of the machine's own byte order."""
    raw = bytes.fromhex(digits)
    words = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4))
    return _plain(ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))


def _text(path: Path) -> str:
    """A small file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115  a Path for each of many thousand takes longer than the kernel
    except OSError:
        return ""
