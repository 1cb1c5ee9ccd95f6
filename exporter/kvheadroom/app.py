"""The composition root: what the daemon and `check` are made of, and what a reload replaces."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from kvheadroom.access import open_endpoints
from kvheadroom.capacity.fleet import FleetAssessment, ReloadStatus, ReplicaAssessment
from kvheadroom.config import Config, ConfigError, ReplicaConfig
from kvheadroom.monitor.sampler import ReplicaSampler
from kvheadroom.outputs.server import ListenAddress, start_server
from kvheadroom.sources.http import open_session
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.watch import Watch

log = logging.getLogger(__name__)

CHECK_FACTS_SECONDS = 30.0
CONFIG_FILES_SECONDS = 5.0
MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A config file that can be read again.

    Attributes:
        read: reads and validates it; blocking.
    """

    path: Path
    read: Callable[[], Config]


async def serve(
    config: Config,
    listen: ListenAddress,
    *,
    notice: str | None = None,
    with_gpus: bool = True,
    config_file: ConfigFile | None = None,
    announce: Callable[[str], None],
) -> None:
    """Run the daemon until SIGINT or SIGTERM.

    Args:
        notice: a sentence shown on top of every page, e.g. that this is a replay.
        with_gpus: read this machine's GPUs.
        config_file: read anew at SIGHUP; None when there is no file to read.
        announce: called with the page's address once the port is open.

    Raises:
        ConfigError: a file that the config names cannot be read.
        ListenError: the port cannot be opened.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    files = SlowFiles()
    endpoints = await open_endpoints(config, files, timeout_seconds=CONFIG_FILES_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        watch = Watch(await stack.enter_async_context(open_session()), files)
        stack.push_async_callback(watch.close)
        url = await stack.enter_async_context(start_server(listen, watch.board, notice=notice))
        watch.prepare(config, endpoints, start=True)
        if with_gpus:
            gpus = asyncio.create_task(watch.sample_gpus())
            stack.callback(gpus.cancel)
        if config_file is None:
            loop.add_signal_handler(signal.SIGHUP, log.info, "SIGHUP: there is no config file to read again")
        else:
            watch.board.set_reload(ReloadStatus(last_success_at=time.time()))
            asked = asyncio.Event()
            reloading = asyncio.create_task(_reload_when_asked(watch, config_file, files, asked))
            stack.callback(reloading.cancel)
            loop.add_signal_handler(signal.SIGHUP, asked.set)
        announce(url)
        await stop.wait()


async def _reload_when_asked(
    watch: Watch, config_file: ConfigFile, files: SlowFiles, asked: asyncio.Event
) -> None:
    while True:
        await asked.wait()
        # What is asked for while one is under way is one more, not many.
        asked.clear()
        await _reload(watch, config_file, files)


async def _reload(watch: Watch, config_file: ConfigFile, files: SlowFiles) -> None:
    """Take a new config over as a whole, or keep the old one and say why; the samplers go on meanwhile."""
    before = watch.board.fleet.reload
    try:
        try:
            config = await files.read(
                str(config_file.path), config_file.read, timeout_seconds=CONFIG_FILES_SECONDS
            )
        except TimeoutError as error:
            raise ConfigError(f"{config_file.path}: {error} Send SIGHUP again once it answers") from error
        endpoints = await open_endpoints(config, files, timeout_seconds=CONFIG_FILES_SECONDS)
        watch.prepare(config, endpoints, start=True)
    except Exception as error:  # noqa: BLE001  whatever it is, the config before it stays in use
        log.error("reload failed, the config before it stays in use: %s", error)  # noqa: TRY400  no fault of ours
        last = time.time() if before is None else before.last_success_at
        watch.board.set_reload(ReloadStatus(last_success_at=last, fault=str(error)))
    else:
        log.info("reloaded: %d replica(s)", len(config.replicas))
        watch.board.set_reload(ReloadStatus(last_success_at=time.time()))


async def check(config: Config) -> FleetAssessment:
    """Reach every source once and give what they said.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    fleet, _ = await look_once(config)
    return fleet


async def look_once(config: Config) -> tuple[FleetAssessment, dict[str, float | None]]:
    """As `check`, and when the process of each replica started, in unix seconds; None where its page does not tell.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    async with _watch_once(config) as watch:
        await _ask_once(watch, watch.samplers)
        return watch.board.fleet, watch.started_at()


@dataclass(frozen=True, slots=True)
class OneReplica:
    """One replica, asked once.

    Attributes:
        started_at: unix seconds; None where its page does not tell.
    """

    config: ReplicaConfig
    fleet: FleetAssessment
    started_at: float | None

    @property
    def assessment(self) -> ReplicaAssessment:
        """Of the replica itself."""
        return next(one for one in self.fleet.replicas if one.replica == self.config.replica)


async def look_at(config: Config, place: str) -> OneReplica:
    """Reach the sources of one replica once, and of no other.

    Args:
        place: its name or its URL.

    Raises:
        ConfigError: no replica of the config is called or stands so, or a file that it names cannot be read.
    """
    async with _watch_once(config) as watch:
        found = next((one for one in watch.replicas if place in (one.replica, one.url)), None)
        if found is None:
            names = ", ".join(one.replica for one in watch.replicas[:MOST_NAMED]) or "none"
            raise ConfigError(
                f"no replica of the config has this name or URL: {place[:200]}; there are {names}"
            )
        sampler = watch.sampler(found.replica)
        await _ask_once(watch, [sampler])
        return OneReplica(found, watch.board.fleet, sampler.memory.started_at)


@contextlib.asynccontextmanager
async def watch_here(config: Config) -> AsyncIterator[Watch]:
    """Watch as the daemon does, without serving anything, until the context ends.

    Raises:
        ConfigError: a file that the config names cannot be read.
    """
    files = SlowFiles()
    endpoints = await open_endpoints(config, files, timeout_seconds=CONFIG_FILES_SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        watch = Watch(await stack.enter_async_context(open_session()), files)
        stack.push_async_callback(watch.close)
        watch.prepare(config, endpoints, start=True)
        gpus = asyncio.create_task(watch.sample_gpus())
        stack.callback(gpus.cancel)
        yield watch


@contextlib.asynccontextmanager
async def _watch_once(config: Config) -> AsyncIterator[Watch]:
    async with open_session() as session:
        files = SlowFiles()
        watch = Watch(session, files)
        endpoints = await open_endpoints(config, files, timeout_seconds=CONFIG_FILES_SECONDS)
        watch.prepare(config, endpoints, start=False)
        await watch.read_calibration()
        await watch.find_replicas()
        yield watch


async def _ask_once(watch: Watch, samplers: list[ReplicaSampler]) -> None:
    gpus = asyncio.create_task(watch.sample_gpus())
    try:
        await asyncio.gather(
            *(s.tick(time.time(), wait_for_facts=CHECK_FACTS_SECONDS) for s in samplers),
            watch.read_remote_gpus(),
        )
        # At its deadline the sampler publishes a timeout, so this ends.
        await watch.gpus_read.wait()
    finally:
        gpus.cancel()
