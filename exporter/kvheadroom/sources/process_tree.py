"""The kernel's `/proc` -> which processes on GPUs belong to the vLLM server that listens at an address.

From each process on a GPU up to whoever started it, until one holds the socket that answers at the address: vLLM's workers and
engines are descendants of its API server. So only these few processes are looked at, each in the network that it sees.
"""

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
class _Network:
    """One network namespace: what listens in it, and the addresses that lead to it."""

    listeners: tuple[_Listener, ...]
    addresses: frozenset[Address]


@dataclass(frozen=True, slots=True)
class _Target:
    """What a URL calls.

    Attributes:
        address: None by the machine's name, which may be any of its addresses.
        is_ours: it leads to kvheadroom's own network, whatever that is.
    """

    port: int
    address: Address | None
    is_ours: bool


class ProcessTree:
    """Finds the processes of servers. What it reads may block, so it is for a thread that may hang.

    Args:
        proc: `/proc`.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def find(self, urls: tuple[str, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
        """For the server at each URL, those of some processes that it started, or why none is known.

        Args:
            pids: of processes on GPUs.
        """
        if _link(self._proc / "self" / "ns" / "pid") != INITIAL_PID_NAMESPACE:
            return tuple(ServerProcesses(url=url, unknown=_CONTAINER) for url in urls)
        chains = {pid: self._chain(pid) for pid in pids}
        members = {member for chain in chains.values() for member in chain}
        held = {member: self._sockets_of(member) for member in members}
        homes = {member: _link(self._proc / str(member) / "ns" / "net") for member in members}
        ours = _link(self._proc / "self" / "ns" / "net")
        networks = {ours: self._network(self._proc / "net")}
        for member, home in homes.items():
            if home and home not in networks:
                networks[home] = self._network(self._proc / str(member) / "net")
        servers = []
        for url in urls:
            target = self._target(url, networks[ours])
            if isinstance(target, str):
                servers.append(ServerProcesses(url=url, unknown=target))
                continue
            called = {home: _called(target, networks[home], is_ours=home == ours) for home in networks}
            holders = {
                member
                for member in members
                if not (held[member] or frozenset()).isdisjoint(called.get(homes[member], frozenset()))
            }
            found = frozenset(pid for pid, chain in chains.items() if not holders.isdisjoint(chain))
            why = (
                None if found else _why(url, any(called.values()), any(one is None for one in held.values()))
            )
            servers.append(ServerProcesses(url=url, pids=found, unknown=why))
        return tuple(servers)

    def _chain(self, pid: int) -> tuple[int, ...]:
        """A process and who started it, and so on; without the machine's first, which may hold sockets for others."""
        chain: list[int] = []
        while pid > _INIT and pid not in chain:
            # The name stands in brackets and may hold anything, brackets too.
            _, bracket, rest = _text(self._proc / str(pid) / "stat").rpartition(")")
            if not bracket:
                # It has ended.
                break
            chain.append(pid)
            pid = int(rest.split()[1])
        return tuple(chain)

    def _sockets_of(self, pid: int) -> frozenset[str] | None:
        """The sockets that a process holds; None when they may not be seen."""
        try:
            return frozenset(_link(Path(entry.path)) for entry in os.scandir(self._proc / str(pid) / "fd"))
        except PermissionError:
            return None
        except OSError:
            return frozenset()

    def _target(self, url: str, ours: _Network) -> _Target | str:
        """What a URL calls, or why that is not known."""
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS[parts.scheme]
        if host == "localhost" or host.endswith(".localhost"):
            each = {address: _answering(ours, port, address) for address in _LOOPBACKS}
            answering = [address for address, sockets in each.items() if sockets]
            if len(set(map(each.get, answering))) > 1:
                return f"two sockets, maybe of two servers, listen at {host}:{port}; write 127.0.0.1 or [::1] in its url"
            return _Target(port, answering[0] if answering else _LOOPBACKS[0], is_ours=True)
        address = _address(host)
        if address is not None:
            return _Target(port, address, is_ours=address.is_loopback)
        if host.lower() == _text(self._proc / "sys" / "kernel" / "hostname").strip().lower():
            return _Target(port, None, is_ours=True)
        return f"{host} is not known to be this machine; write its address in digits where it is"

    def _network(self, folder: Path) -> _Network:
        listeners = []
        for name in ("tcp", "tcp6"):
            for line in _text(folder / name).splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == _LISTENS:
                    address, port = fields[1].split(":")
                    listeners.append(_Listener(_unhex(address), int(port, 16), f"socket:[{fields[9]}]"))
        addresses: set[Address] = set()
        last = ""
        for line in _text(folder / "fib_trie").splitlines():
            words = line.split()
            if words[-2:] == ["host", "LOCAL"]:
                addresses.add(IPv4Address(last))
            last = words[-1] if words else ""
        for line in _text(folder / "if_inet6").splitlines():
            addresses.add(IPv6Address(bytes.fromhex(line.split()[0])))
        return _Network(tuple(listeners), frozenset(addresses))


def _called(target: _Target, network: _Network, *, is_ours: bool) -> frozenset[str]:
    """The sockets that answer in one network."""
    address = target.address
    if target.is_ours and not is_ours:
        return frozenset()
    if address is None:
        # Only who listens at all addresses is surely called by a name.
        return _at(network, target.port, IPv4Address(0)) | _at(network, target.port, IPv6Address(0))
    if address.is_loopback or address in network.addresses:
        return _answering(network, target.port, address)
    return frozenset()


def _answering(network: _Network, port: int, address: Address) -> frozenset[str]:
    """Who answers at an address: who listens there, else at all of its kind, else at all of both kinds."""
    for wanted in (address, type(address)(0), IPv6Address(0)):
        found = _at(network, port, wanted)
        if found:
            return found
    return frozenset()


def _at(network: _Network, port: int, address: Address) -> frozenset[str]:
    return frozenset(one.socket for one in network.listeners if (one.port, one.address) == (port, address))


def _why(url: str, is_called: bool, is_hidden: bool) -> str:  # noqa: FBT001  two facts, called once
    place = urlsplit(url).netloc
    if is_hidden:
        return (
            "who started the processes on the GPUs may not be seen; run kvheadroom as the servers' user, or as root "
            "(CAP_SYS_PTRACE)"
        )
    if is_called:
        return f"whoever listens at {place} started none of the processes that the driver lists on GPUs of this machine"
    return f"nothing listens at {place} in the network of kvheadroom or of a process on a GPU of this machine"


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


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
