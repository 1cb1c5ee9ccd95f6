"""The networks that processes see (the kernel's `/proc/PID/net`): what listens in one, and the addresses that lead to it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from kvheadroom.sources.proc_files import link_of, text_of

Address = IPv4Address | IPv6Address

LOOPBACKS: tuple[Address, ...] = (IPv4Address("127.0.0.1"), IPv6Address("::1"))
_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket that waits for callers.

    Attributes:
        uid: of the user whose it is.
    """

    address: Address
    port: int
    socket: str
    uid: int


@dataclass(frozen=True, slots=True)
class Network:
    """One network namespace: what listens in it, and the addresses that lead to it."""

    listeners: tuple[Listener, ...]
    addresses: frozenset[Address]

    def at(self, port: int, address: Address) -> frozenset[str]:
        """The sockets that listen at this very address."""
        return frozenset(one.socket for one in self.listeners if (one.port, one.address) == (port, address))

    def answering(self, port: int, address: Address) -> frozenset[str]:
        """Who answers at an address: who listens there, else at all of its kind, else at all of both kinds."""
        for wanted in (address, type(address)(0), IPv6Address(0)):
            found = self.at(port, wanted)
            if found:
                return found
        return frozenset()


def read_network(folder: Path) -> Network:
    """The network whose files are in a folder, as `/proc/net`."""
    return Network(tuple(_listeners(folder)), frozenset(_addresses(folder)))


def sockets_of(process: Path) -> frozenset[str] | None:
    """The sockets that a process holds; None when they may not be seen."""
    try:
        return frozenset(link_of(Path(entry.path)) for entry in os.scandir(process / "fd"))
    except PermissionError:
        return None
    except OSError:
        return frozenset()


def plain_address(address: Address) -> Address:
    """An IPv4 address that is written as one of IPv6, as itself."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _listeners(folder: Path) -> Iterator[Listener]:
    for name in ("tcp", "tcp6"):
        for line in text_of(folder / name).splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS:
                address, port = fields[1].split(":")
                yield Listener(_unhex(address), int(port, 16), f"socket:[{fields[9]}]", int(fields[7]))


def _addresses(folder: Path) -> Iterator[Address]:
    last = ""
    for line in text_of(folder / "fib_trie").splitlines():
        words = line.split()
        if words[-2:] == ["host", "LOCAL"]:
            yield IPv4Address(last)
        last = words[-1] if words else ""
    for line in text_of(folder / "if_inet6").splitlines():
        yield IPv6Address(bytes.fromhex(line.split()[0]))


def _unhex(digits: str) -> Address:
    """The kernel prints each four bytes as a number of the machine's own byte order."""
    raw = bytes.fromhex(digits)
    words = (int.from_bytes(raw[at : at + 4], "big") for at in range(0, len(raw), 4))
    return plain_address(ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words)))
