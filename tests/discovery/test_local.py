"""Servers of this machine that others name too: one server each, with the name that others gave it."""

from typing import Any

import pytest

from kvheadroom.capacity.command_line import CommandLine
from kvheadroom.capacity.local_server import LocalServer
from kvheadroom.config import LocalReplica, ReplicaConfig
from kvheadroom.discovery.local import join_local
from kvheadroom.discovery.watched import Target
from kvheadroom.sources.endpoint import Endpoint, Proxy

HERE = ("http://127.0.0.1:8000", "http://10.0.0.7:8000", "http://localhost:8000")


def local(port: int = 8000, *urls: str, pid: int = 7, unix_socket: str | None = None) -> Target:
    server = LocalServer(
        pid=pid, started_ticks=1, command_line=CommandLine(flags={"block_size": 32}), urls=frozenset(urls)
    )
    url = f"http://127.0.0.1:{port}"
    replica = LocalReplica.model_validate({"url": url, "server": server, "unix_socket": unix_socket})
    return Target(replica, Endpoint(url, unix_socket=unix_socket))


def named(url: str, **endpoint: Any) -> Target:
    replica = ReplicaConfig.model_validate({"url": url, "name": "mine", "flags": {"block_size": 64}})
    return Target(replica, Endpoint(url, **endpoint))


@pytest.mark.parametrize("url", HERE)
def test_a_server_that_the_config_names_keeps_its_name_and_is_known_by_its_process(url: str) -> None:
    found = local(8000, *HERE)
    (one,), rest = join_local([named(url)], {"process_discovery": (found,)})
    assert rest == {"process_discovery": ()}
    assert isinstance(one.replica, LocalReplica)
    assert isinstance(found.replica, LocalReplica)
    assert one.replica.server == found.replica.server
    assert (one.replica.replica, one.replica.url, one.endpoint) == ("mine", url, Endpoint(url))
    # Said or not said is what it was.
    assert one.replica.flags.model_dump(exclude_unset=True) == {"block_size": 64}
    assert one.replica.model_copy(update={"labels": {}}) == one.replica


def test_so_does_one_that_another_source_names() -> None:
    found = {"file_sd_configs[0]": (named(HERE[1]),), "process_discovery": (local(8000, *HERE),)}
    _, rest = join_local([], found)
    assert [len(targets) for targets in rest.values()] == [1, 0]
    assert isinstance(rest["file_sd_configs[0]"][0].replica, LocalReplica)


def test_a_server_at_another_address_or_behind_a_proxy_is_another_one() -> None:
    found = {"process_discovery": (local(8000, *HERE),)}
    proxied = named(HERE[0], proxy=Proxy(url="http://proxy:3128"))
    for target in (named("http://10.0.0.8:8000"), named("http://127.0.0.1:8001"), proxied):
        (one,), rest = join_local([target], found)
        assert (one, rest) == (target, found)


def test_a_unix_socket_is_the_same_server_at_the_same_path() -> None:
    found = {"process_discovery": (local(8000, *HERE, unix_socket="/run/v.sock"),)}
    (one,), rest = join_local([named("http://localhost", unix_socket="/run/v.sock")], found)
    assert isinstance(one.replica, LocalReplica)
    assert rest == {"process_discovery": ()}
    (other,), rest = join_local([named("http://127.0.0.1:8000")], found)
    assert (isinstance(other.replica, LocalReplica), rest) == (False, found)


def test_addresses_that_change_do_not_make_another_server() -> None:
    assert local(8000, *HERE).replica == local(8000, HERE[0]).replica
    assert local(8000, *HERE).replica != local(8000, *HERE, pid=8).replica
