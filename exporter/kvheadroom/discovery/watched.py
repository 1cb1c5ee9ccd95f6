"""The sources of servers, asked again and again; what the last good answer of each gave stays until the next."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvheadroom.access import open_endpoint
from kvheadroom.capacity.discovery import CONFIG_SOURCE, DiscoveryStatus
from kvheadroom.capacity.readings import FailureReason, SourceFailure, one_line
from kvheadroom.config import ConfigError, ReplicaConfig
from kvheadroom.discovery.source import Discovery, Found
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.slow_files import SlowFiles

log = logging.getLogger(__name__)

MAX_REPLICAS = 5000
ACCESS_FILES_SECONDS = 5.0
MOST_LINES = 5
"""Of what is left out, so many are logged at once; the page has all."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to be watched, and how it is reached."""

    replica: ReplicaConfig
    endpoint: Endpoint

    @property
    def server(self) -> tuple[str, str | None]:
        """What two names of one server have in common."""
        return self.endpoint.base_url, self.endpoint.unix_socket


@dataclass(slots=True)
class _Source:
    """One source, and what it gave last."""

    discovery: Discovery
    status: DiscoveryStatus
    anew: bool = True
    listed: tuple[ReplicaConfig, ...] | None = None
    """The list that the targets were made of, where none of it had a fault in its access."""
    targets: tuple[Target, ...] = ()
    failures: Counter[FailureReason] = field(default_factory=Counter)
    task: asyncio.Task[None] | None = None


class Discoveries:
    """All sources of servers of one config.

    Args:
        changed: called when a source was asked; with True when its servers are others than before.
    """

    def __init__(self, files: SlowFiles, changed: Callable[[bool], None]) -> None:
        self._files = files
        self._changed = changed
        self._sources: dict[str, _Source] = {}
        self._room = MAX_REPLICAS

    def set_sources(self, discoveries: Sequence[Discovery], static: int, *, start: bool) -> None:
        """Take a config's sources over; one that is as it was goes on, and all are asked at once.

        Args:
            static: replicas that the config itself names.
            start: let them run; False when they are asked by hand.
        """
        self._room = MAX_REPLICAS - static
        before, self._sources = self._sources, {}
        for discovery in discoveries:
            name = discovery.name
            old = before.get(name)
            if old is not None and old.task is not None:
                old.task.cancel()
            if old is None:
                source = _Source(discovery, DiscoveryStatus(source=name))
            elif old.discovery.settings == discovery.settings:
                source = old
            else:
                # Its servers stay until the new one has answered.
                source = _Source(discovery, old.status, targets=old.targets, failures=old.failures)
            source.anew = True
            self._sources[name] = source
            source.task = asyncio.create_task(self._run(source)) if start else None
        for name in before.keys() - self._sources.keys():
            task = before[name].task
            if task is not None:
                task.cancel()

    def targets(self) -> dict[str, tuple[Target, ...]]:
        """What each source gave last, in the order of the config."""
        return {name: source.targets for name, source in self._sources.items()}

    def statuses(self) -> tuple[DiscoveryStatus, ...]:
        """How each source answered last."""
        return tuple(source.status for source in self._sources.values())

    async def ask_all(self) -> None:
        """Ask every source once, by hand."""
        await asyncio.gather(*(self._ask(source) for source in self._sources.values()))

    async def close(self) -> None:
        """End asking."""
        tasks = [source.task for source in self._sources.values() if source.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, source: _Source) -> None:
        while True:
            try:
                await self._ask(source)
            except Exception:
                log.exception(
                    "%s: what it found could not be taken over, please report it", source.discovery.name
                )
            await asyncio.sleep(source.discovery.interval_seconds)

    async def _ask(self, source: _Source) -> None:
        """Ask once, and take over what came. Nothing is changed by an answer that a reload has overtaken."""
        name = source.discovery.name
        try:
            found = await source.discovery.find(anew=source.anew)
            faults: list[str] = []
            targets = source.targets
            if found.replicas is not None and found.replicas != source.listed:
                targets, faults = await self._open(found.replicas, source.targets)
        except Exception as error:
            log.exception("%s: asking it failed, please report it", name)
            failure = SourceFailure(name, FailureReason.INTERNAL, f"a fault of kvheadroom: {error!r}")
            found, targets, faults = Found(replicas=None, failure=failure), source.targets, []
        others = sum(len(one.targets) for one in self._sources.values() if one is not source)
        if len(targets) > self._room - others:
            detail = (
                f"{name}: {len(targets)} servers, and {MAX_REPLICAS} in all are the most that are watched"
            )
            found = Found(replicas=None, failure=SourceFailure(name, FailureReason.TOO_LARGE, detail))
            targets, faults = source.targets, []
        source.anew = False
        self._tell(source, found, targets, faults)
        changed = targets != source.targets
        source.targets = targets
        if found.replicas is not None:
            source.listed = None if faults else found.replicas
        before = source.status
        if found.failure is not None:
            source.failures[found.failure.reason] += 1
        source.status = DiscoveryStatus(
            source=name,
            targets=before.targets if found.replicas is None else len(targets),
            left_out=before.left_out if found.replicas is None else (*found.left_out, *faults),
            note=found.note,
            last_success_at=time.time() if found.failure is None else before.last_success_at,
            failure=found.failure,
            failures_total=tuple(sorted(source.failures.items())),
        )
        self._changed(changed)

    async def _open(
        self, replicas: tuple[ReplicaConfig, ...], known: tuple[Target, ...]
    ) -> tuple[tuple[Target, ...], list[str]]:
        """The endpoint of each: of one that is watched already as it is, of the others from their files.

        What servers of one source have in common, their files are read once.
        """
        before = {target.replica.replica: target for target in known}
        targets: list[Target | None] = []
        new: dict[str, list[int]] = {}
        for index, replica in enumerate(replicas):
            have = before.get(replica.replica)
            targets.append(have if have is not None and have.replica == replica else None)
            if targets[-1] is None:
                new.setdefault(replica.access_key(), []).append(index)
        faults: list[str] = []
        for alike in new.values():
            try:
                first = await open_endpoint(
                    replicas[alike[0]], self._files, timeout_seconds=ACCESS_FILES_SECONDS
                )
            except ConfigError as error:
                faults += [f"{replicas[index].replica}: its access has a fault: {error}" for index in alike]
                continue
            for index in alike:
                socket = replicas[index].unix_socket
                endpoint = replace(
                    first,
                    base_url=replicas[index].url,
                    unix_socket=None if socket is None else str(socket),
                )
                targets[index] = Target(replicas[index], endpoint)
        return tuple(target for target in targets if target is not None), faults

    def _tell(
        self, source: _Source, found: Found, targets: tuple[Target, ...], faults: Sequence[str]
    ) -> None:
        """Say what changed, once."""
        name, before = source.discovery.name, source.status
        if found.failure is not None and found.failure != before.failure:
            log.warning("%s: %s", name, one_line(found.failure.detail.removeprefix(f"{name}: ")))
        if found.replicas is not None:
            tell_left_out(name, before.left_out, (*found.left_out, *faults))
        if targets is source.targets:
            return
        old = {target.replica.replica for target in source.targets}
        now = {target.replica.replica for target in targets}
        if old != now:
            log.info("%s: %d server(s), %d new, %d gone", name, len(now), len(now - old), len(old - now))


def merge(
    static: Sequence[Target], found: Mapping[str, tuple[Target, ...]]
) -> tuple[list[tuple[str, Target]], dict[str, tuple[str, ...]]]:
    """(where it comes from, replica) of all that are watched, and what is left out of each source.

    The first that has a name or an address keeps it: those of the config before those found, and the sources in
    their order.
    """
    watched = [(CONFIG_SOURCE, target) for target in static]
    names = {target.replica.replica: source for source, target in watched}
    servers = {target.server: target.replica.replica for _, target in watched}
    left_out: dict[str, tuple[str, ...]] = {}
    for source, targets in found.items():
        clashes = []
        for target in targets:
            name = target.replica.replica
            if name in names:
                clashes.append(f"{name}: a server of this name is watched already ({names[name]})")
            elif target.server in servers:
                clashes.append(f"{name}: its address is watched already, as {servers[target.server]}")
            else:
                names[name], servers[target.server] = source, name
                watched.append((source, target))
        left_out[source] = tuple(clashes)
    return watched, left_out


def tell_left_out(source: str, before: tuple[str, ...], now: tuple[str, ...]) -> None:
    """Log what is left out and was not before."""
    known = set(before)
    new = [sentence for sentence in now if sentence not in known]
    for sentence in new[:MOST_LINES]:
        log.warning("%s: left out: %s", source, one_line(sentence))
    if len(new) > MOST_LINES:
        log.warning("%s: left out: %d more; the status page has them all", source, len(new) - MOST_LINES)
