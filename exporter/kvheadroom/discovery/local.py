"""Servers of this machine that a config or another source names too: one server each, known by its process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvheadroom.config import LocalReplica, with_server
from kvheadroom.discovery.watched import Target


def join_local(
    static: Sequence[Target], found: Mapping[str, tuple[Target, ...]]
) -> tuple[tuple[Target, ...], dict[str, tuple[Target, ...]]]:
    """(replicas of the config, those of each source).

    Who names a server keeps its name and settings, and its process tells the rest.
    """
    local = {
        place: target
        for targets in found.values()
        for target in targets
        if isinstance(target.replica, LocalReplica)
        for place in _places(target.replica)
    }
    taken: set[tuple[str, str | None]] = set()

    def joined(target: Target) -> Target:
        place = None if isinstance(target.replica, LocalReplica) else _place(target)
        here = None if place is None else local.get(place)
        if here is None or not isinstance(here.replica, LocalReplica):
            return target
        taken.add(here.server)
        return replace(target, replica=with_server(target.replica, here.replica.server))

    named = tuple(map(joined, static))
    others = {source: tuple(map(joined, targets)) for source, targets in found.items()}
    rest = {
        source: tuple(
            target
            for target, before in zip(targets, found[source], strict=True)
            if not (isinstance(before.replica, LocalReplica) and before.server in taken)
        )
        for source, targets in others.items()
    }
    return named, rest


def _places(replica: LocalReplica) -> list[tuple[str, str]]:
    if replica.unix_socket is not None:
        return [("", str(replica.unix_socket))]
    return [(url, "") for url in replica.server.urls]


def _place(target: Target) -> tuple[str, str] | None:
    """Where a target leads, as far as that can be this machine."""
    if target.endpoint.proxy is not None:
        return None
    if target.endpoint.unix_socket is not None:
        return ("", target.endpoint.unix_socket)
    return (target.endpoint.base_url, "")
