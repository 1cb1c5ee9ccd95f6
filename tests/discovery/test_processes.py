"""What the source of this machine's servers hands over, and what it tells of what it sees."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.capacity.readings import FailureReason
from kvheadroom.config import LocalReplica, ProcessDiscoveryConfig
from kvheadroom.discovery.processes import ProcessDiscovery
from kvheadroom.discovery.source import Found
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.vllm_arguments.command_line import read_command_line
from kvheadroom.sources.vllm_processes import FoundServer, ProcessScan


def server(
    line: str = "m", *, url: str = "http://127.0.0.1:8000", unix_socket: str | None = None, pid: int = 7
) -> FoundServer:
    return FoundServer(
        server=LocalServer(pid=pid, started_ticks=1, command_line=CommandLine()),
        settings=read_command_line(line.split(), is_serve=True, config=None, environment={}),
        base_url=url,
        unix_socket=unix_socket,
    )


def scan(*found: FoundServer, **more: Any) -> ProcessScan:
    plain: Mapping[str, Any] = {
        "left_out": (),
        "quiet": (),
        "engines_alone": 0,
        "processes": 90,
        "hidden": 0,
        "others_hidden": False,
        "partly_hidden": 0,
        "own_numbers": False,
    }
    return ProcessScan(found=found, **{**plain, **more})


def ask(seen: ProcessScan | Exception, **settings: Any) -> Found:
    def look() -> ProcessScan:
        if isinstance(seen, Exception):
            raise seen
        return seen

    config = ProcessDiscoveryConfig.model_validate(settings)
    return asyncio.run(ProcessDiscovery(config, SlowFiles(), look).find(anew=True))


def test_a_server_is_a_replica_with_what_the_config_says_of_all() -> None:
    found = ask(scan(server()), replica={"gpu": "H200", "labels": {"site": "a"}})
    (one,) = found.replicas or ()
    assert isinstance(one, LocalReplica)
    assert (one.replica, one.url, one.gpu, one.labels) == (
        "127.0.0.1:8000",
        "http://127.0.0.1:8000",
        "H200",
        {"site": "a"},
    )
    assert (one.server.pid, found.note, found.failure, found.left_out) == (7, None, None, ())


def test_what_servers_have_in_common_need_not_fit_each_of_them() -> None:
    common = {"tls": {"ca_file": "/ca.pem"}, "proxy_url": "http://proxy:3128"}
    socket = server(
        "m --uds /run/v.sock", url="http://localhost", unix_socket="/proc/7/root/run/v.sock", pid=9
    )
    found = ask(scan(server(), server(url="https://127.0.0.1:8443", pid=8), socket), replica=common)
    plain, tls, by_socket = found.replicas or ()
    assert (plain.tls, plain.proxy_url) == (None, "http://proxy:3128")
    assert tls.tls is not None
    assert (by_socket.replica, by_socket.proxy_url) == ("/run/v.sock", None)
    assert str(by_socket.unix_socket) == "/proc/7/root/run/v.sock"


def test_a_server_that_no_replica_can_be_is_left_out_with_the_reason() -> None:
    odd = server("m --uds /run/v.sock", url="https://localhost", unix_socket="/run/v.sock")
    found = ask(scan(odd, left_out=("vLLM server with PID 5: x\ny",)))
    assert found.replicas == ()
    assert found.left_out[0] == "vLLM server with PID 5: x\N{REPLACEMENT CHARACTER}y"
    assert found.left_out[1].startswith(
        "vLLM server with PID 7: a `unix_socket` is reached directly and without TLS"
    )


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (scan(), "No vLLM server runs among the 90 processes that can be seen here."),
        (scan(processes=1), "among the 1 process that can be seen"),
        (scan(own_numbers=True), "start it with `--pid=host` (Kubernetes: `hostPID: true`)"),
        (scan(quiet=("vLLM server with PID 7: it waits",)), "vLLM server with PID 7: it waits."),
        (scan(server(), engines_alone=1), "1 engine of vLLM runs without a server that is found here"),
        (scan(server(), engines_alone=2), "2 engines of vLLM run without"),
        (scan(server("m --api-key k")), "1 server wants an API key for /v1, which is never read out"),
    ],
)
def test_what_is_seen_is_told_in_words(seen: ProcessScan, words: str) -> None:
    assert words in (ask(seen).note or "")


def test_nothing_is_told_where_all_is_well_and_no_empty_state_beside_a_server_that_waits() -> None:
    assert ask(scan(server())).note is None
    # In one pod with the server, that is all there is to see.
    assert ask(scan(server(), own_numbers=True)).note is None
    assert ask(scan(server("m --api-key k")), replica={"api_key_file": "/k"}).note is None
    assert "No vLLM server" not in (ask(scan(quiet=("x",))).note or "")


@pytest.mark.parametrize(
    ("hidden", "words"),
    [
        ({"hidden": 1}, "the command line of 1 process may not be read; run"),
        (
            {"hidden": 3, "others_hidden": True},
            "(/proc is mounted with hidepid, or ProtectProc is set); the command",
        ),
        ({"partly_hidden": 1}, "of 1 server nothing but the command line may be read"),
        ({"partly_hidden": 2}, "of 2 servers nothing but"),
    ],
)
def test_what_may_not_be_seen_is_a_failure_beside_the_servers_that_are_found(
    hidden: dict[str, Any], words: str
) -> None:
    found = ask(scan(server(), **hidden))
    assert len(found.replicas or ()) == 1
    assert found.failure is not None
    assert found.failure.reason is FailureReason.NO_PERMISSION
    assert words in found.failure.detail
    assert found.failure.detail.endswith(
        "run kvheadroom as root or as the servers' user, or give it CAP_SYS_PTRACE"
    )


def test_a_machine_without_a_table_of_processes_is_told_and_what_was_found_stays() -> None:
    found = ask(FileNotFoundError(2, "No such file or directory"))
    assert found.replicas is None
    assert found.failure is not None
    assert found.failure.reason is FailureReason.NOT_FOUND
    assert "there is no table of processes here (No such file or directory)" in found.failure.detail
