"""Which processes are the server at an address: by a `/proc` made up, one recorded, and this machine's own."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvheadroom.capacity.gpus import ServerProcesses
from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE, ProcessTree
from tests.doubles.proc_folder import ESTABLISHED, ProcFolder, unpack

RECORDINGS = Path(__file__).parents[1] / "recordings"
HERE = "http://127.0.0.1:8000"


@pytest.fixture
def proc(tmp_path: Path) -> ProcFolder:
    """A shell, a server of four processes that it started, and a neighbour."""
    folder = ProcFolder(tmp_path)
    folder.listen("0.0.0.0", 8000, 501)
    folder.listen("127.0.0.1", 9000, 900)
    folder.process(1, 0, name="systemd")
    folder.process(50, 1, name="bash")
    folder.process(100, 50, 501, 7, name="vllm")
    folder.process(101, 100, name="VLLM::EngineCor")
    folder.process(102, 101, name="a) S 1 (b")
    folder.process(103, 101)
    folder.process(200, 50, 900)
    return folder


def found(proc: ProcFolder, url: str = HERE) -> ServerProcesses:
    (server,) = ProcessTree(proc.write()).find((url,))
    assert server.url == url
    return server


def test_a_server_is_who_listens_and_all_that_it_started(proc: ProcFolder) -> None:
    assert found(proc).pids == {100, 101, 102, 103}
    assert found(proc).unknown is None


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:8000",
        "https://127.0.0.1:8000/prefix",
        "http://127.9.9.9:8000",
        "http://10.20.0.7:8000",
        "http://gpu-node-7:8000",
        "http://GPU-Node-7:8000",
        "http://[::ffff:127.0.0.1]:8000",
    ],
)
def test_every_way_to_call_this_machine_finds_who_listens_at_all_of_its_addresses(
    proc: ProcFolder, url: str
) -> None:
    assert found(proc, url).pids == {100, 101, 102, 103}


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("::", HERE),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("::ffff:127.0.0.1", HERE),
        ("::1", "http://localhost:8000"),
    ],
)
def test_a_server_that_listens_by_ipv6_is_found(proc: ProcFolder, address: str, url: str) -> None:
    proc.sockets[0] = (address, 8000, 501, "0A")
    assert found(proc, url).pids == {100, 101, 102, 103}


def test_who_listens_at_the_very_address_is_called_before_who_listens_at_all(proc: ProcFolder) -> None:
    proc.listen("10.20.0.7", 8000, 900)
    assert found(proc, "http://10.20.0.7:8000").pids == {200}
    assert found(proc).pids == {100, 101, 102, 103}
    # The name may be any of the addresses.
    assert found(proc, "http://gpu-node-7:8000").pids == {100, 101, 102, 103}


def test_the_port_of_a_url_without_one_is_that_of_its_scheme(proc: ProcFolder) -> None:
    proc.listen("127.0.0.1", 443, 900)
    assert found(proc, "https://127.0.0.1").pids == {200}


def test_several_processes_that_share_a_socket_are_one_server(proc: ProcFolder) -> None:
    # vLLM's API servers are started with the socket that their parent opened.
    proc.process(104, 100, 501, name="VLLM::ApiServer")
    proc.process(105, 104)
    assert found(proc).pids == {100, 101, 102, 103, 104, 105}


def test_a_socket_that_systemd_opened_for_the_server_does_not_make_the_machine_one_server(
    proc: ProcFolder,
) -> None:
    proc.process(1, 0, 501, name="systemd")
    assert found(proc).pids == {100, 101, 102, 103}


def test_a_connection_is_no_listener(proc: ProcFolder) -> None:
    proc.listen("127.0.0.1", 8005, 900, state=ESTABLISHED)
    assert found(proc, "http://127.0.0.1:8005").pids == set()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:8001", "nothing listens at 127.0.0.1:8001 in kvheadroom's network"),
        ("http://127.0.0.1", "nothing listens at 127.0.0.1:80 in kvheadroom's network"),
        ("http://10.20.0.7:9000", "nothing listens at 10.20.0.7:9000"),
        ("http://10.20.0.8:8000", "10.20.0.8 is no address of this machine"),
        ("http://[fd00::8]:8000", "fd00::8 is no address of this machine"),
        ("http://gpu-node-8:8000", "gpu-node-8 is not known to be this machine; write its address in digits"),
        ("http://gpu-node-7:9000", "nothing listens at gpu-node-7:9000"),
    ],
)
def test_a_server_that_is_not_found_here_has_no_processes_and_the_reason_is_told(
    proc: ProcFolder, url: str, why: str
) -> None:
    server = found(proc, url)
    assert server.pids == set()
    assert server.unknown is not None
    assert server.unknown.startswith(why)


def test_two_servers_behind_localhost_are_told_apart_by_nobody(proc: ProcFolder) -> None:
    proc.sockets[0] = ("127.0.0.1", 8000, 501, "0A")
    proc.listen("::1", 8000, 900)
    server = found(proc, "http://localhost:8000")
    assert server.pids == set()
    assert (
        server.unknown
        == "two sockets, maybe of two servers, listen at localhost:8000; write 127.0.0.1 or [::1] in its url"
    )
    assert found(proc).pids == {100, 101, 102, 103}


def test_in_a_container_with_numbers_of_its_own_nothing_is_joined(proc: ProcFolder) -> None:
    proc.namespace = "pid:[4026532999]"
    server = found(proc)
    assert server.pids == set()
    assert server.unknown is not None
    assert "hostPID: true" in server.unknown


def test_a_server_whose_sockets_may_not_be_seen_is_told_with_the_way_out(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = os.scandir

    def refuse(path: Path) -> object:
        if str(path).endswith("/100/fd"):
            raise PermissionError
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    server = found(proc)
    assert server.pids == set()
    assert server.unknown is not None
    assert "run kvheadroom as the server's user, or as root" in server.unknown


def test_a_listener_of_none_of_the_processes_is_told(proc: ProcFolder) -> None:
    del proc.processes[100]
    assert (
        found(proc).unknown
        == "the process that listens at 127.0.0.1:8000 is none of those that kvheadroom can see"
    )


def test_processes_that_end_meanwhile_cost_nothing(proc: ProcFolder) -> None:
    proc.write()
    (proc.folder / "300").mkdir()
    (proc.folder / "301").mkdir()
    (proc.folder / "301" / "stat").write_text("", encoding="ascii")
    assert found(proc).pids == {100, 101, 102, 103}


def test_who_holds_a_socket_is_looked_for_again_only_when_nobody_known_does(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan, scanned = os.scandir, []

    def count(path: Path) -> object:
        scanned.append(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", count)
    proc.process(104, 100, 501)
    tree = ProcessTree(proc.write())
    assert tree.find((HERE,))[0].pids == {100, 101, 102, 103, 104}
    looks = len(scanned)
    assert looks == len(proc.processes)
    proc.process(105, 103)
    proc.write()
    assert tree.find((HERE,))[0].pids == {100, 101, 102, 103, 104, 105}
    assert len(scanned) == looks
    # The server is started anew, as another process and with another socket.
    proc.sockets[0] = ("0.0.0.0", 8000, 777, "0A")
    proc.process(300, 50, 777)
    shutil.rmtree(proc.folder / "100")
    del proc.processes[100]
    proc.write()
    assert tree.find((HERE,))[0].pids == {300}
    # And its number is given to a process that holds no such socket.
    proc.process(300, 50)
    proc.process(301, 50, 777)
    shutil.rmtree(proc.folder / "300")
    proc.write()
    assert tree.find((HERE,))[0].pids == {301}


def test_several_servers_are_found_in_one_look(proc: ProcFolder) -> None:
    urls = (HERE, "http://localhost:9000", "http://elsewhere:8000")
    servers = ProcessTree(proc.write()).find(urls)
    assert [server.url for server in servers] == list(urls)
    assert [server.pids for server in servers] == [{100, 101, 102, 103}, {200}, set()]


def test_the_processes_of_two_real_servers_are_told_apart(tmp_path: Path) -> None:
    # Two API servers, two engines with a worker each and a coordinator; and a plain server. See the recording's README.
    proc = unpack(RECORDINGS / "proc_of_two_vllm.json", tmp_path)
    several, plain = ProcessTree(proc).find(("http://127.0.0.1:56199", "http://127.0.0.1:58893"))
    assert several.pids == {10227, 10611, 10612, 10682, 10683, 10684, 10685, 11376, 11379}
    assert plain.pids == {9599, 9786, 9787, 9817}


CHILD_THAT_HAS_A_CHILD = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]) as child:
    pass
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or str(Path("/proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE,
    reason="in a container with process numbers of its own nothing is joined",
)
def test_on_this_machine_a_socket_of_ours_and_our_childrens_children_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-c", CHILD_THAT_HAS_A_CHILD], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            (server,) = ProcessTree().find((url,))
            grandchildren = (
                Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="ascii").split()
            )
            child.kill()
            for pid in grandchildren:
                os.kill(int(pid), 9)
    assert {os.getpid(), child.pid, *map(int, grandchildren)} <= server.pids
    assert len(grandchildren) == 1
    assert os.getppid() not in server.pids
