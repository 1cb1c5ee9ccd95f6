"""A `/proc` that is not this machine's: processes, who started whom, and who listens where, as the kernel writes them."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
OF_THE_MACHINE = "pid:[4026531836]"
OURS = "net:[1]"
LISTEN, ESTABLISHED = "0A", "01"
BOOTED_AT = 1_700_000_000
OUR_MOUNTS = "mnt:[1]"


@dataclass(kw_only=True)
class Started:
    """How a process was started.

    Attributes:
        words: its command line; one word is a title, padded as setproctitle leaves it.
        after_ticks: since the machine's start.
        root: where its `/` is, in mounts of its own; None for ours.
        working: its working folder, as the link shows it.
        loaded: files that it has loaded, as it sees them.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=lambda: {"HOME": "/root"})
    after_ticks: int = 100
    root: Path | None = None
    working: str = "/"
    loaded: Sequence[str | Path] = ()


@dataclass
class ProcFolder:
    """Change it, then `write`.

    Attributes:
        addresses: of each network, beside the loopback's; kvheadroom is in `net:[1]`.
    """

    folder: Path
    namespace: str = OF_THE_MACHINE
    hostname: str = "gpu-node-7"
    addresses: dict[str, tuple[str, ...]] = field(default_factory=lambda: {OURS: ("10.20.0.7", "fd00::7")})
    sockets: list[tuple[str, int, int, str, str]] = field(default_factory=list)
    processes: dict[int, tuple[int, str, tuple[int, ...], str]] = field(default_factory=dict)
    started: dict[int, Started] = field(default_factory=dict)

    def listen(self, address: str, port: int, inode: int, state: str = LISTEN, network: str = OURS) -> None:
        self.sockets.append((address, port, inode, state, network))

    def process(
        self, pid: int, parent: int, *sockets: int, name: str = "python3", network: str = OURS
    ) -> None:
        self.processes[pid] = (parent, name, sockets, network)

    def launch(self, pid: int, parent: int, *sockets: int, network: str = OURS, started: Started) -> None:
        self.process(pid, parent, *sockets, network=network)
        self.started[pid] = started

    def write(self) -> Path:
        self._link("self/ns/pid", self.namespace)
        self._text("sys/kernel/hostname", self.hostname + "\n")
        self._link("self/ns/net", OURS)
        self._network("net", OURS)
        self._text("stat", f"cpu 1 2\nbtime {BOOTED_AT}\n")
        self._link("self/ns/mnt", OUR_MOUNTS)
        self._link("self/root", "/")
        for pid, (parent, name, sockets, network) in self.processes.items():
            self._text(
                f"{pid}/stat",
                f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194304 0"
                + " 0" * 11
                + f" {self._ticks(pid)} 0\n",
            )
            self._how_started(pid)
            (self.folder / str(pid) / "fd").mkdir(exist_ok=True)
            self._link(f"{pid}/ns/net", network)
            self._network(f"{pid}/net", network)
            self._link(f"{pid}/fd/0", "/dev/null")
            for descriptor, inode in enumerate(sockets, 5):
                self._link(f"{pid}/fd/{descriptor}", f"socket:[{inode}]")
        return self.folder

    def _ticks(self, pid: int) -> int:
        return self.started[pid].after_ticks if pid in self.started else 0

    def _how_started(self, pid: int) -> None:
        started = self.started.get(pid, Started(words=("a-program", "--token", "x")))
        padding = "\0" * (40 if len(started.words) == 1 else 1)
        self._text(f"{pid}/cmdline", "\0".join(started.words) + padding)
        pairs = (f"{name}={value}" for name, value in started.environment.items())
        self._text(f"{pid}/environ", "\0".join((*pairs, "")) or "\0" * 9)
        self._link(f"{pid}/ns/mnt", OUR_MOUNTS if started.root is None else f"mnt:[{pid}]")
        self._link(f"{pid}/root", "/" if started.root is None else str(started.root))
        self._link(f"{pid}/cwd", started.working)
        rows = (f"7f0000000000-7f0000001000 r-xp 00000000 08:01 131 {path}\n" for path in started.loaded)
        self._text(f"{pid}/maps", "".join(rows) + "7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0 [stack]\n")

    def _network(self, folder: str, network: str) -> None:
        for name, version in (("tcp", 4), ("tcp6", 6)):
            rows = (
                row for row in self.sockets if row[4] == network and ip_address(row[0]).version == version
            )
            self._text(f"{folder}/{name}", HEADER + "".join(map(_row, rows)))
        own = ("127.0.0.1", "::1", *self.addresses.get(network, ()))
        trie = "".join(
            f"           |-- {address}\n              /32 host LOCAL\n"
            for address in own
            if ip_address(address).version == 4
        )
        head = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n"
        self._text(f"{folder}/fib_trie", head + trie)
        lines = (
            f"{int(ip_address(address)):032x} 02 40 20 80 eth0\n"
            for address in own
            if ip_address(address).version == 6
        )
        self._text(f"{folder}/if_inet6", "".join(lines))

    def _text(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text, encoding="ascii")

    def _link(self, path: str, target: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).unlink(missing_ok=True)
        (self.folder / path).symlink_to(target)


def _row(row: tuple[str, int, int, str, str]) -> str:
    address, port, inode, state, _ = row
    raw = ip_address(address).packed
    words = (int.from_bytes(raw[at : at + 4], sys.byteorder) for at in range(0, len(raw), 4))
    digits = "".join(f"{word:08X}" for word in words)
    return f"   0: {digits}:{port:04X} {'0' * len(digits)}:0000 {state} 00000000:00000000 00:00000000 00000000     {os.getuid()}        0 {inode} 1\n"


def unpack(capture: Path, folder: Path) -> Path:
    """Files and links of a recorded `/proc`."""
    recorded = json.loads(capture.read_text(encoding="ascii"))
    for path, text in recorded["files"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="ascii")
    for path, target in recorded["links"].items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).symlink_to(target)
    return folder
