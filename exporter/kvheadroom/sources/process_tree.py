"""The kernel's `/proc` -> which processes on GPUs belong to the vLLM server that listens at an address.

From each process on a GPU up to whoever started it, until one holds the socket that answers at the address: vLLM's workers and
engines are descendants of its API server. So only these few processes are looked at, each in the network that it sees.
"""

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from urllib.parse import urlsplit

from kvheadroom.capacity.gpus import ServerPlace, ServerProcesses
from kvheadroom.sources.networks import LOOPBACKS, Address, Network, plain_address, read_network, sockets_of
from kvheadroom.sources.proc_files import link_of, stat_fields, text_of
from kvheadroom.sources.process_list import still_runs

INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own number for the machine's processes (PROC_PID_INIT_INO). NVML tells the PIDs of these."""

_CONTAINER = (
    "kvheadroom runs in a container with process numbers of its own, while the driver tells the machine's; start it "
    "with `--pid=host` (Kubernetes: `hostPID: true`)"
)
_NO_ADDRESS = "it answers at a unix socket, so no address leads to its process; `process_discovery: {}` finds those of this machine"
_INIT = 1
_PORTS = {"http": 80, "https": 443}


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

    def find(self, places: tuple[ServerPlace, ...], pids: frozenset[int]) -> tuple[ServerProcesses, ...]:
        """For each server, those of some processes that it started, or why none is known.

        Args:
            pids: of processes on GPUs.
        """
        if link_of(self._proc / "self" / "ns" / "pid") != INITIAL_PID_NAMESPACE:
            return tuple(ServerProcesses(place=place, unknown=_CONTAINER) for place in places)
        chains = {pid: self._chain(pid) for pid in pids}
        members = {member for chain in chains.values() for member in chain}
        held = {member: sockets_of(self._proc / str(member)) for member in members}
        homes = {member: link_of(self._proc / str(member) / "ns" / "net") for member in members}
        ours = link_of(self._proc / "self" / "ns" / "net")
        networks = {ours: read_network(self._proc / "net")}
        for member, home in homes.items():
            if home and home not in networks:
                networks[home] = read_network(self._proc / str(member) / "net")
        servers = []
        for place in places:
            if place.unix_socket is not None:
                servers.append(self._at_a_socket(place, chains))
                continue
            target = self._target(place.url, networks[ours])
            if isinstance(target, str):
                servers.append(ServerProcesses(place=place, unknown=target))
                continue
            called = {home: _called(target, networks[home], is_ours=home == ours) for home in networks}
            holders = {
                member
                for member in members
                if not (held[member] or frozenset()).isdisjoint(called.get(homes[member], frozenset()))
            }
            found = frozenset(pid for pid, chain in chains.items() if not holders.isdisjoint(chain))
            is_hidden = any(one is None for one in held.values())
            why = None if found else _why(place.url, any(called.values()), is_hidden)
            servers.append(ServerProcesses(place=place, pids=found, unknown=why))
        return tuple(servers)

    def _at_a_socket(self, place: ServerPlace, chains: dict[int, tuple[int, ...]]) -> ServerProcesses:
        """Of a server that no address leads to."""
        if place.process is None:
            return ServerProcesses(place=place, unknown=_NO_ADDRESS)
        pid, started_ticks = place.process
        if not still_runs(self._proc, pid, started_ticks):
            return ServerProcesses(place=place, unknown="its process has ended")
        return ServerProcesses(
            place=place, pids=frozenset(one for one, chain in chains.items() if pid in chain)
        )

    def _chain(self, pid: int) -> tuple[int, ...]:
        """A process and who started it, and so on; without the machine's first, which may hold sockets for others."""
        chain: list[int] = []
        while pid > _INIT and pid not in chain:
            fields = stat_fields(self._proc / str(pid))
            if not fields:
                # It has ended.
                break
            chain.append(pid)
            pid = int(fields[1])
        return tuple(chain)

    def _target(self, url: str, ours: Network) -> _Target | str:
        """What a URL calls, or why that is not known."""
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS[parts.scheme]
        if host == "localhost" or host.endswith(".localhost"):
            each = {address: ours.answering(port, address) for address in LOOPBACKS}
            answering = [address for address, sockets in each.items() if sockets]
            if len(set(map(each.get, answering))) > 1:
                return f"two sockets, maybe of two servers, listen at {host}:{port}; write 127.0.0.1 or [::1] in its url"
            return _Target(port, answering[0] if answering else LOOPBACKS[0], is_ours=True)
        address = _address(host)
        if address is not None:
            return _Target(port, address, is_ours=address.is_loopback)
        if host.lower() == text_of(self._proc / "sys" / "kernel" / "hostname").strip().lower():
            return _Target(port, None, is_ours=True)
        return f"{host} is not known to be this machine; write its address in digits where it is"


def _called(target: _Target, network: Network, *, is_ours: bool) -> frozenset[str]:
    """The sockets that answer in one network."""
    address = target.address
    if target.is_ours and not is_ours:
        return frozenset()
    if address is None:
        # Only who listens at all addresses is surely called by a name.
        return network.at(target.port, IPv4Address(0)) | network.at(target.port, IPv6Address(0))
    if address.is_loopback or address in network.addresses:
        return network.answering(target.port, address)
    return frozenset()


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
        return plain_address(ip_address(host.partition("%")[0]))
    except ValueError:
        return None
