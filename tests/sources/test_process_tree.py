"""Which processes on GPUs belong to the server at an address: by a `/proc` made up, one recorded, and this machine's own."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvheadroom.capacity.gpus import ServerPlace, ServerProcesses
from kvheadroom.sources.process_tree import INITIAL_PID_NAMESPACE, ProcessTree
from tests.doubles.proc_folder import ESTABLISHED, OURS, ProcFolder, unpack

RECORDINGS = Path(__file__).parents[1] / "recordings"
HERE = "http://127.0.0.1:8000"
ON_GPUS = frozenset({102, 103, 200})
ITS_OWN = {102, 103}
POD = "net:[2]"


@pytest.fixture
def proc(tmp_path: Path) -> ProcFolder:
    """A server whose engine 101 has the workers 102 and 103, and a neighbour, 200."""
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


def found(proc: ProcFolder, url: str = HERE, pids: frozenset[int] = ON_GPUS) -> ServerProcesses:
    (server,) = ProcessTree(proc.write()).find((ServerPlace(url),), pids)
    assert server.place == ServerPlace(url)
    assert (server.unknown is None) == bool(server.pids)
    return server


def test_processes_that_whoever_listens_started_are_the_servers(proc: ProcFolder) -> None:
    assert found(proc).pids == ITS_OWN
    assert found(proc, "http://127.0.0.1:9000").pids == {200}


def test_a_server_that_is_on_a_gpu_itself_is_its_own(proc: ProcFolder) -> None:
    assert found(proc, pids=frozenset({100, 200})).pids == {100}


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
    assert found(proc, url).pids == ITS_OWN


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("::", HERE),
        ("::", "http://[::1]:8000"),
        ("::", "http://[fd00::7]:8000"),
        ("::", "http://gpu-node-7:8000"),
        ("::1", "http://[::1]:8000"),
        ("::ffff:127.0.0.1", HERE),
        ("::1", "http://localhost:8000"),
        ("127.0.0.1", "http://localhost:8000"),
    ],
)
def test_a_server_that_listens_at_another_kind_of_address_is_found(
    proc: ProcFolder, address: str, url: str
) -> None:
    del proc.sockets[0]
    proc.listen(address, 8000, 501)
    assert found(proc, url).pids == ITS_OWN


def test_who_listens_at_the_very_address_is_called_before_who_listens_at_all(proc: ProcFolder) -> None:
    proc.listen("10.20.0.7", 8000, 900)
    assert found(proc, "http://10.20.0.7:8000").pids == {200}
    assert found(proc).pids == ITS_OWN
    # The name may be any of the addresses.
    assert found(proc, "http://gpu-node-7:8000").pids == ITS_OWN


def test_the_port_of_a_url_without_one_is_that_of_its_scheme(proc: ProcFolder) -> None:
    proc.listen("127.0.0.1", 443, 900)
    assert found(proc, "https://127.0.0.1").pids == {200}


def test_a_server_in_a_network_of_its_own_is_found_by_its_address_there(proc: ProcFolder) -> None:
    proc.addresses[POD] = ("10.42.0.5",)
    proc.listen("0.0.0.0", 8000, 601, network=POD)
    proc.process(300, 1, 601, network=POD)
    proc.process(301, 300, network=POD)
    pids = ON_GPUS | {301}
    assert found(proc, "http://10.42.0.5:8000", pids).pids == {301}
    # The loopback that we call is ours, not the pod's.
    assert found(proc, HERE, pids).pids == ITS_OWN
    del proc.sockets[0]
    assert found(proc, HERE, pids).pids == set()
    assert found(proc, "http://gpu-node-7:8000", pids).pids == set()


def test_equal_numbers_of_sockets_in_two_networks_are_two_sockets(proc: ProcFolder) -> None:
    # The kernel's numbers of sockets begin anew after 2^32 of them.
    proc.process(300, 1, 501, network=POD)
    assert found(proc, pids=frozenset({300})).pids == set()


def test_several_processes_that_share_a_socket_are_one_server(proc: ProcFolder) -> None:
    # vLLM's API servers are started with the socket that their parent opened.
    proc.process(104, 100, 501, name="VLLM::ApiServer")
    proc.process(105, 104)
    assert found(proc, pids=frozenset({102, 105, 200})).pids == {102, 105}


def test_a_socket_that_systemd_opened_for_the_server_does_not_make_the_machine_one_server(
    proc: ProcFolder,
) -> None:
    proc.process(1, 0, 501, name="systemd")
    assert found(proc).pids == ITS_OWN


def test_a_connection_is_no_listener(proc: ProcFolder) -> None:
    proc.listen("127.0.0.1", 8005, 900, state=ESTABLISHED)
    assert found(proc, "http://127.0.0.1:8005").pids == set()


NO_ADDRESS = "it answers at a unix socket, so no address leads to its process; `process_discovery: {}` finds those of this machine"
NOTHING = "nothing listens at {} in the network of kvheadroom or of a process on a GPU of this machine"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:8001", NOTHING.format("127.0.0.1:8001")),
        ("http://127.0.0.1", NOTHING.format("127.0.0.1")),
        ("http://10.20.0.7:9000", NOTHING.format("10.20.0.7:9000")),
        ("http://10.20.0.8:8000", NOTHING.format("10.20.0.8:8000")),
        ("http://[fd00::8]:8000", NOTHING.format("[fd00::8]:8000")),
        ("http://gpu-node-7:9000", NOTHING.format("gpu-node-7:9000")),
        (
            "http://gpu-node-8:8000",
            "gpu-node-8 is not known to be this machine; write its address in digits where it is",
        ),
    ],
)
def test_a_server_that_is_not_found_here_has_no_processes_and_the_reason_is_told(
    proc: ProcFolder, url: str, why: str
) -> None:
    assert found(proc, url) == ServerProcesses(place=ServerPlace(url), unknown=why)


@pytest.mark.parametrize("pids", [frozenset({200}), frozenset[int](), frozenset({4_000_000})])
def test_a_server_without_a_process_on_a_gpu_is_told_as_such(proc: ProcFolder, pids: frozenset[int]) -> None:
    assert found(proc, pids=pids).unknown == (
        "whoever listens at 127.0.0.1:8000 started none of the processes that the driver lists on GPUs of this machine"
    )


def test_two_servers_behind_localhost_are_told_apart_by_nobody(proc: ProcFolder) -> None:
    del proc.sockets[0]
    proc.listen("127.0.0.1", 8000, 501)
    proc.listen("::1", 8000, 900)
    server = found(proc, "http://localhost:8000")
    assert server.unknown == (
        "two sockets, maybe of two servers, listen at localhost:8000; write 127.0.0.1 or [::1] in its url"
    )
    assert found(proc).pids == ITS_OWN
    assert found(proc, "http://[::1]:8000").pids == {200}


def test_in_a_container_with_numbers_of_its_own_nothing_is_joined(proc: ProcFolder) -> None:
    proc.namespace = "pid:[4026532999]"
    server = found(proc)
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
    assert server.unknown is not None
    assert "run kvheadroom as the servers' user, or as root" in server.unknown
    # What may be seen is found all the same.
    assert found(proc, "http://127.0.0.1:9000").pids == {200}


def test_processes_that_end_meanwhile_cost_nothing(proc: ProcFolder) -> None:
    proc.write()
    (proc.folder / "300").mkdir()
    (proc.folder / "301").mkdir()
    (proc.folder / "301" / "stat").write_text("", encoding="ascii")
    assert found(proc, pids=ON_GPUS | {299, 300, 301}).pids == ITS_OWN


def test_several_servers_are_found_in_one_look(proc: ProcFolder) -> None:
    urls = (HERE, "http://localhost:9000", "http://elsewhere:8000")
    servers = ProcessTree(proc.write()).find(tuple(map(ServerPlace, urls)), ON_GPUS)
    assert [server.place.url for server in servers] == list(urls)
    assert [server.pids for server in servers] == [ITS_OWN, {200}, set()]


def test_a_server_at_a_unix_socket_is_known_by_its_process_and_never_by_the_url_that_only_names_it(
    proc: ProcFolder,
) -> None:
    proc.listen("127.0.0.1", 80, 900)
    named = ServerPlace("http://localhost", "/run/vllm.sock")
    known = replace(named, process=(100, 0))
    another = replace(named, process=(100, 7))
    servers = ProcessTree(proc.write()).find((named, known, another), ON_GPUS)
    assert [server.place for server in servers] == [named, known, another]
    assert [server.pids for server in servers] == [set(), ITS_OWN, set()]
    assert [server.unknown for server in servers] == [
        NO_ADDRESS,
        None,
        "its process has ended",
    ]


def test_the_workers_of_two_real_servers_are_told_apart(tmp_path: Path) -> None:
    # Each process of a CUDA build that would be on a GPU is a worker; see the recording's README.
    proc = unpack(RECORDINGS / "proc_of_two_vllm.json", tmp_path)
    urls = ("http://127.0.0.1:59643", "http://127.0.0.1:51399")
    several, plain = ProcessTree(proc).find(tuple(map(ServerPlace, urls)), frozenset({16402, 16419, 13062}))
    assert several.pids == {16402, 16419}
    assert plain.pids == {13062}


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
def test_on_this_machine_the_child_of_a_child_of_who_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with subprocess.Popen(
            [sys.executable, "-c", CHILD_THAT_HAS_A_CHILD], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            children = (
                Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text(encoding="ascii").split()
            )
            (grandchild,) = map(int, children)
            (server,) = ProcessTree().find((ServerPlace(url),), frozenset({grandchild, os.getppid()}))
            child.kill()
            os.kill(grandchild, 9)
    assert server.pids == {grandchild}


def test_the_network_that_kvheadroom_is_in_need_not_be_the_machines(proc: ProcFolder) -> None:
    # In a container with the machine's process numbers and a network of its own, servers are called by the machine's address.
    host = "net:[3]"
    proc.sockets = [(address, port, inode, state, host) for address, port, inode, state, _ in proc.sockets]
    for pid, (parent, name, sockets, _) in list(proc.processes.items()):
        proc.process(pid, parent, *sockets, name=name, network=host)
    proc.addresses = {OURS: ("172.17.0.2",), host: ("10.20.0.7",)}
    assert found(proc, "http://10.20.0.7:8000").pids == ITS_OWN
    assert found(proc).pids == set()
