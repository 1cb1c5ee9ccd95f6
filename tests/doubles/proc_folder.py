"""A `/proc` that is not this machine's: processes, who started whom, and who listens where, as the kernel writes them."""

import json
import sys
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
OF_THE_MACHINE = "pid:[4026531836]"
OURS = "net:[1]"
LISTEN, ESTABLISHED = "0A", "01"


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

    def listen(self, address: str, port: int, inode: int, state: str = LISTEN, network: str = OURS) -> None:
        self.sockets.append((address, port, inode, state, network))

    def process(
        self, pid: int, parent: int, *sockets: int, name: str = "python3", network: str = OURS
    ) -> None:
        self.processes[pid] = (parent, name, sockets, network)

    def write(self) -> Path:
        self._link("self/ns/pid", self.namespace)
        self._text("sys/kernel/hostname", self.hostname + "\n")
        self._link("self/ns/net", OURS)
        self._network("net", OURS)
        for pid, (parent, name, sockets, network) in self.processes.items():
            self._text(f"{pid}/stat", f"{pid} ({name}) S {parent} {pid} {pid} 0 -1 4194304 0\n")
            (self.folder / str(pid) / "fd").mkdir(exist_ok=True)
            self._link(f"{pid}/ns/net", network)
            self._network(f"{pid}/net", network)
            self._link(f"{pid}/fd/0", "/dev/null")
            for descriptor, inode in enumerate(sockets, 5):
                self._link(f"{pid}/fd/{descriptor}", f"socket:[{inode}]")
        return self.folder

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
    return f"   0: {digits}:{port:04X} {'0' * len(digits)}:0000 {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"


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
