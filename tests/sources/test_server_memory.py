"""The memory of a server and of its machine, by files that the kernel would write, and by this machine's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.host_tier import HostUse
from kvheadroom.capacity.local_server import FolderTree, LocalServer
from kvheadroom.sources import server_memory
from kvheadroom.sources.process_list import list_processes
from kvheadroom.sources.server_memory import read_machine_memory, read_server_memory
from tests.doubles.proc_folder import ProcFolder, Started

KIB, GIB = 1024, 2**30
MEMINFO = "MemTotal:       1048576 kB\nMemFree:  1 kB\nMemAvailable:    524288 kB\nShmem:           7 kB\nShmemHugePages: 9 kB\n"
UNLIMITED_V1 = "9223372036854771712\n"


def status(anonymous: int, shared: int) -> str:
    return f"Name:\tx\nVmRSS:\t 99 kB\nRssAnon:\t {anonymous} kB\nRssFile:\t  5 kB\nRssShmem:\t {shared} kB\n"


class Machine:
    """A server 100, its engine 101 with workers 102 and 103, and a neighbour 200."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.folder = ProcFolder(self.proc)
        self.folder.launch(100, 1, started=Started(words=("vllm", "serve", "m"), after_ticks=7))
        self.folder.launch(101, 100, started=Started(words=("VLLM::EngineCore",)))
        self.folder.launch(102, 101, started=Started(words=("VLLM::Worker_TP0",)))
        self.folder.launch(103, 101, started=Started(words=("VLLM::Worker_TP1",)))
        self.folder.launch(200, 1, started=Started(words=("other",)))
        self.folder.write()
        for pid, shared in ((100, 1), (101, 10), (102, 100), (103, 1000), (200, 77_777)):
            self.write(f"{pid}/status", status(2, shared))
        self.write("meminfo", MEMINFO)
        self.write("100/cgroup", "0::/pods/one\n")
        self.asked: list[str] = []

    def write(self, path: str, text: str) -> None:
        (self.proc / path).write_text(text, encoding="ascii")

    def group(self, path: str, **files: str) -> None:
        (self.cgroups / path).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (self.cgroups / path / name.replace("__", ".")).write_text(text, encoding="ascii")

    def statvfs(self, path: str) -> os.statvfs_result:
        self.asked.append(path)
        return os.statvfs_result((4096, 4096, 1000, 600, 500, 0, 0, 0, 0, 255))

    def use(self, *, ticks: int = 7, folders: FolderTree | None = None) -> HostUse | None:
        server = LocalServer(
            pid=100, started_ticks=ticks, command_line=CommandLine(flags={}), folders=folders or FolderTree()
        )
        return read_server_memory(server, self.proc, self.cgroups, statvfs=self.statvfs)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_all_processes_of_the_server_and_no_other_are_added_up(machine: Machine) -> None:
    use = machine.use()
    assert use is not None
    assert (use.processes, use.processes_shared_bytes, use.processes_anonymous_bytes) == (
        4,
        1111 * KIB,
        8 * KIB,
    )
    assert (use.total_bytes, use.available_bytes, use.shared_bytes) == (GIB, GIB // 2, 7 * KIB)
    assert use.engines == 1


def test_engines_are_counted_by_their_titles(machine: Machine) -> None:
    machine.folder.launch(101, 100, started=Started(words=("VLLM::EngineCore_DP0",)))
    machine.folder.launch(110, 100, started=Started(words=("VLLM::EngineCore_DP1",)))
    machine.folder.launch(201, 200, started=Started(words=("VLLM::EngineCore_DP2",)))
    machine.folder.write()
    machine.write("110/status", status(2, 5))
    use = machine.use()
    assert use is not None
    assert (use.engines, use.processes_shared_bytes) == (2, 1116 * KIB)
    machine.folder.launch(101, 100, started=Started(words=("python3", "x")))
    machine.folder.launch(110, 100, started=Started(words=("python3", "x")))
    machine.folder.write()
    untitled = machine.use()
    assert untitled is not None
    assert untitled.engines is None


def test_a_process_that_ends_meanwhile_is_left_out(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = list_processes(machine.proc)
    shutil.rmtree(machine.proc / "102")
    monkeypatch.setattr(server_memory, "list_processes", lambda _: listing)
    use = machine.use()
    assert use is not None
    assert (use.processes, use.processes_shared_bytes) == (3, 1011 * KIB)


@pytest.mark.parametrize(
    "text", ["", "Name:\tx\n", "RssAnon:\t 2 kB\n", "RssAnon:\t -2 kB\nRssShmem:\t 1 kB\n"]
)
def test_with_a_process_that_does_not_tell_there_is_no_sum(machine: Machine, text: str) -> None:
    machine.write("102/status", text)
    use = machine.use()
    assert use is not None
    assert (use.processes, use.processes_shared_bytes, use.processes_anonymous_bytes) == (3, None, None)


def test_dev_shm_is_the_one_that_the_server_sees(machine: Machine) -> None:
    use = machine.use()
    assert use is not None
    # Free is what others than root may fill.
    assert (use.shm_total_bytes, use.shm_free_bytes) == (1000 * 4096, 500 * 4096)
    machine.use(folders=FolderTree(root="/proc/100/root"))
    assert machine.asked == ["/dev/shm", "/proc/100/root/dev/shm"]  # noqa: S108  nothing is written there
    hidden = machine.use(folders=FolderTree(hidden_because="may not be seen"))
    assert hidden is not None
    assert (hidden.shm_total_bytes, len(machine.asked)) == (None, 2)


def test_a_dev_shm_that_cannot_be_asked_or_makes_no_sense_is_not_known(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> os.statvfs_result:
        raise PermissionError(path)

    monkeypatch.setattr(machine, "statvfs", refuse)
    refused = machine.use()
    assert refused is not None
    assert refused.shm_free_bytes is None
    monkeypatch.setattr(
        machine, "statvfs", lambda _: os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    )
    empty = machine.use()
    assert empty is not None
    assert empty.shm_total_bytes is None


def test_the_tightest_limit_above_a_process_counts(machine: Machine) -> None:
    machine.group("pods/one", memory__max="max\n", memory__current="5\n")
    machine.group("pods", memory__max="4096\n", memory__current="1024\n")
    use = machine.use()
    assert use is not None
    assert (use.limit_bytes, use.limit_used_bytes) == (4096, 1024)
    machine.group("pods/one", memory__max="2048\n", memory__current="5\n")
    use = machine.use()
    assert use is not None
    assert (use.limit_bytes, use.limit_used_bytes) == (2048, 5)


def test_limits_of_version_1_are_read_where_memory_is_its(machine: Machine) -> None:
    machine.write("100/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    machine.group("memory/docker/abc", memory__limit_in_bytes="8192\n", memory__usage_in_bytes="100\n")
    machine.group("memory", memory__limit_in_bytes=UNLIMITED_V1)
    machine.group("", memory__max="1\n")
    use = machine.use()
    assert use is not None
    assert (use.limit_bytes, use.limit_used_bytes) == (8192, 100)


@pytest.mark.parametrize(
    ("groups", "limit"),
    [
        ("0::/pods/one\n", "max\n"),
        ("0::/pods/one\n", UNLIMITED_V1),
        ("0::/pods/one\n", "-1\n"),
        ("0::/pods/one\n", "many\n"),
        ("0::/pods/one\n", "9" * 30),
        ("0::/../../pods/one\n", "4096\n"),
        ("0::pods/one\n", "4096\n"),
        ("", "4096\n"),
        ("nonsense\n", "4096\n"),
    ],
)
def test_without_a_limit_that_can_be_read_none_is_told(machine: Machine, groups: str, limit: str) -> None:
    machine.write("100/cgroup", groups)
    machine.group("pods/one", memory__max=limit)
    use = machine.use()
    assert use is not None
    assert use.limit_bytes is None


def test_of_a_process_that_has_ended_or_is_another_nothing_is_told(machine: Machine) -> None:
    assert machine.use(ticks=8) is None
    (machine.proc / "100" / "stat").unlink()
    assert machine.use() is None


def test_a_machine_without_meminfo_still_tells_its_processes(machine: Machine) -> None:
    machine.write("meminfo", "MemTotal: 0 kB\nMemAvailable: 0 kB\n")
    use = machine.use()
    assert use is not None
    assert (use.total_bytes, use.shared_bytes, use.processes_shared_bytes) == (None, None, 1111 * KIB)


def test_this_machine_tells_of_itself() -> None:
    use = read_machine_memory()
    assert use.total_bytes is not None
    assert use.available_bytes is not None
    assert 0 < use.available_bytes <= use.total_bytes
    # A process of its own: below this one there may be servers of other tests.
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        one = LocalServer(pid=child.pid, started_ticks=_ticks(child.pid), command_line=CommandLine(flags={}))
        seen = read_server_memory(one)
        child.communicate(b"\n")
    assert seen is not None
    assert seen.processes == 1
    assert seen.processes_anonymous_bytes is not None
    assert seen.processes_anonymous_bytes > 2**20
    assert seen.engines is None


def test_shared_memory_that_a_process_of_a_server_really_has_is_in_the_sum() -> None:
    size = 32 * 2**20
    shares = (
        "import mmap; print('ready', flush=True); input(); "
        f"shared = mmap.mmap(-1, {size}, flags=mmap.MAP_SHARED); shared.write(b'x' * {size}); print('shared', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", shares], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        one = LocalServer(pid=child.pid, started_ticks=_ticks(child.pid), command_line=CommandLine(flags={}))
        assert child.stdout.readline() == b"ready\n"
        before = read_server_memory(one)
        child.stdin.write(b"\n")
        assert child.stdout.readline() == b"shared\n"
        during = read_server_memory(one)
        child.communicate(b"\n")
    assert before is not None
    assert during is not None
    assert before.processes_shared_bytes is not None
    assert during.processes_shared_bytes is not None
    assert before.processes == during.processes == 1
    assert 0 <= during.processes_shared_bytes - before.processes_shared_bytes - size < 2**20


def _ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
