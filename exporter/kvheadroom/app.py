"""The composition root: a Config -> sources, monitor and outputs, joined."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from kvheadroom.capacity.assessment import (
    FleetAssessment,
    ReloadStatus,
    ReplicaAssessment,
    SourceStatus,
)
from kvheadroom.capacity.facts import EngineFacts, MissingFact, ModelFiles, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.gpus import GpuReading
from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.config import Config, ConfigError, ReplicaConfig, read_small_file
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.gpu_sampler import GpuSampler
from kvheadroom.monitor.sampler import ReplicaSampler, ReplicaSources, Resolution
from kvheadroom.outputs.server import ListenAddress, start_server
from kvheadroom.sources.http import Endpoint, fetch, open_session
from kvheadroom.sources.model_files import SOURCE as MODEL_FILES
from kvheadroom.sources.model_files import ModelFilesReader
from kvheadroom.sources.nvml import NvmlSource
from kvheadroom.sources.slow_files import SlowFiles
from kvheadroom.sources.vllm_metrics import parse_page
from kvheadroom.sources.vllm_server import fetch_server_answers, is_healthy

log = logging.getLogger(__name__)

MAX_SCRAPE_SECONDS = 10.0
FACTS_SECONDS = 5.0
CHECK_FACTS_SECONDS = 30.0
MODEL_FILES_SECONDS = 10.0
CONFIG_FILES_SECONDS = 5.0
GPU_SECONDS = 5.0
"""Without persistence mode a driver takes seconds to start; its thread waits, nobody else does."""


def read_api_key(replica: ReplicaConfig) -> str | None:
    """The key of one replica, from its file.

    Raises:
        ConfigError: naming the file, never its content.
    """
    if replica.api_key_file is None:
        return None
    shown = _shown(replica.api_key_file)
    try:
        key = read_small_file(replica.api_key_file).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{replica.replica}: api_key_file {shown} cannot be read") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{replica.replica}: api_key_file {shown} holds no single-line key")
    return key


async def read_api_keys(config: Config, files: SlowFiles) -> dict[str, str | None]:
    """The key of every replica; all files are read at once, and one that hangs ends at its deadline.

    Raises:
        ConfigError: naming the file, never its content.
    """

    async def read(replica: ReplicaConfig) -> str | None:
        if replica.api_key_file is None:
            return None
        try:
            return await files.read(
                str(replica.api_key_file),
                partial(read_api_key, replica),
                timeout_seconds=CONFIG_FILES_SECONDS,
            )
        except TimeoutError as error:
            raise ConfigError(
                f"{replica.replica}: api_key_file {_shown(replica.api_key_file)}: {error} "
                "Give the key in a file on a disk that answers"
            ) from error

    keys = await asyncio.gather(*(read(replica) for replica in config.replicas))
    return {replica.replica: key for replica, key in zip(config.replicas, keys, strict=True)}


def _shown(api_key_file: Path) -> str:
    # A word without a slash may be the key itself, written in the wrong place.
    return str(api_key_file) if len(api_key_file.parts) > 1 else "(not shown)"


class Replica:
    """The sources of one configured replica, as the callables that the sampler is handed."""

    def __init__(
        self,
        config: Config,
        replica: ReplicaConfig,
        session: aiohttp.ClientSession,
        api_key: str | None = None,
        reader: ModelFilesReader | None = None,
    ) -> None:
        self._session = session
        self._endpoint = Endpoint(replica.url, api_key)
        self._timeout_seconds = min(config.scrape_interval, MAX_SCRAPE_SECONDS)
        self._model_folder = replica.model
        self._model_reader = reader or ModelFilesReader()
        self._operator = OperatorFacts(
            # What is said to be null is said: it is no longer an assumption.
            flags=replica.flags.model_dump(exclude_unset=True),
            gpu=replica.gpu,
            hbm_bytes=replica.hbm_bytes,
            weights_bytes=replica.weights_bytes,
            overhead_bytes=None if config.overhead_gb is None else round(config.overhead_gb * 1e9),
        )

    async def fetch_page(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        """Scrape `/metrics` and read it."""
        scrape = await fetch(
            self._session,
            self._endpoint,
            "/metrics",
            source="metrics",
            timeout_seconds=self._timeout_seconds,
        )
        if isinstance(scrape, SourceFailure):
            return scrape
        page = parse_page(scrape.body)
        if isinstance(page, SourceFailure):
            return await self._what_answered(page)
        return scrape, page

    async def _what_answered(self, failure: SourceFailure) -> SourceFailure:
        """A page without vLLM's metrics: another program, or a vLLM that was told to give none."""
        answers, _ = await fetch_server_answers(
            self._session, self._endpoint, timeout_seconds=self._timeout_seconds
        )
        reason, detail = failure.reason, failure.detail
        if answers.version is not None and failure.reason is FailureReason.NO_VLLM_METRICS:
            reason = FailureReason.STATS_DISABLED
            detail = (
                f"vLLM {answers.version} answers, but its page has no vllm: metric; "
                "start it without --disable-log-stats"
            )
        return SourceFailure(failure.source, reason, f"GET {self._endpoint.base_url}/metrics: {detail}")

    def as_sources(self) -> ReplicaSources:
        """What the sampler is handed."""
        return ReplicaSources(self.fetch_page, self.resolve, self.facts_unasked, self.ask_health)

    def facts_unasked(self, page: VllmPage) -> Resolution:
        """What is known while the server and the model's folder are still being asked."""
        asking = MissingFact(MODEL_FILES, "the server and the model's files are being asked", "wait a moment")
        return Resolution(self._facts(page, ServerAnswers(), None, asking), sources=())

    def _facts(
        self,
        page: VllmPage,
        answers: ServerAnswers,
        files: ModelFiles | None,
        missing: MissingFact | None,
    ) -> dict[str, EngineFacts]:
        return {
            engine.engine: resolve_facts(
                operator=self._operator,
                answers=answers,
                echoed=engine.echoed,
                model_files=files,
                model_files_missing=missing,
            )
            for engine in page.engines
        }

    async def ask_health(self) -> bool:
        """Whether `/health` answers 200."""
        return await is_healthy(self._session, self._endpoint, timeout_seconds=self._timeout_seconds)

    async def resolve(self, page: VllmPage) -> Resolution:
        """Ask the server and the model's folder for the facts of every engine on the page."""
        answers, failures = await fetch_server_answers(
            self._session, self._endpoint, timeout_seconds=FACTS_SECONDS
        )
        sources = [SourceStatus(source=name, failure=failure) for name, failure in failures.items()]
        files, missing, status = await self._model_files(answers.model_root)
        if status is not None:
            sources.append(status)
        return Resolution(self._facts(page, answers, files, missing), tuple(sources))

    async def _model_files(
        self, root: str | None
    ) -> tuple[ModelFiles | None, MissingFact | None, SourceStatus | None]:
        way_out = "set `model: /path/to/the/model` (a folder on this machine that holds its config.json)"
        assumed = ""
        if self._model_folder is not None:
            folder = self._model_folder
        elif root is None:
            why = "the server did not name its model at /v1/models"
            return None, MissingFact(MODEL_FILES, why, way_out), None
        elif not Path(root).is_absolute():
            why = f"the server names its model {root!r}, which is no folder on this machine"
            return None, MissingFact(MODEL_FILES, why, way_out), None
        else:
            folder = root
            if not _is_this_machine(self._endpoint.base_url):
                assumed = f"{root} on this machine holds the same files as on the server's"
        files = await self._model_reader.read(folder, assumed, timeout_seconds=MODEL_FILES_SECONDS)
        if isinstance(files, SourceFailure):
            return (
                None,
                MissingFact(MODEL_FILES, files.detail, way_out),
                SourceStatus(source=MODEL_FILES, failure=files),
            )
        return files, None, SourceStatus(source=MODEL_FILES, failure=None)


def _is_this_machine(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@dataclass(frozen=True, slots=True)
class _Running:
    """One replica being sampled, and the settings that it was started with."""

    settings: object
    sampler: ReplicaSampler
    task: asyncio.Task[None] | None


def _carried_over(before: ReplicaAssessment | None, fresh: ReplicaAssessment) -> ReplicaAssessment:
    """What is known of a replica goes on with its new settings: numbers, events, counts."""
    return fresh if before is None else replace(before, interval_seconds=fresh.interval_seconds)


class Watch:
    """The samplers of one config, kept running; reloading replaces only what changed."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.board = Board(())
        self._session = session
        self._running: dict[str, _Running] = {}
        self._readers: dict[str, ModelFilesReader] = {}
        self._interval_seconds = 0.0
        self._assigned: tuple[tuple[str, str], ...] = ()
        self.gpus_read = asyncio.Event()

    def prepare(
        self, config: Config, api_keys: Mapping[str, str | None], *, start: bool
    ) -> list[ReplicaSampler]:
        """Take a config over: replicas that it leaves as they were go on without a gap.

        Args:
            api_keys: of every replica, read already: nothing here waits.
            start: let the samplers run; False for a single tick by hand.
        """
        settings = {
            replica.replica: (
                # Which GPUs serve it changes nothing in how it is sampled.
                replica.model_copy(update={"gpus": ()}),
                api_keys[replica.replica],
                config.scrape_interval,
                config.session_tokens,
                config.overhead_gb,
            )
            for replica in config.replicas
        }
        changed = {
            replica.replica: Replica(
                config,
                replica,
                self._session,
                api_keys[replica.replica],
                self._readers.setdefault(replica.replica, ModelFilesReader()),
            )
            for replica in config.replicas
            if replica.replica not in self._running
            or self._running[replica.replica].settings != settings[replica.replica]
        }
        for name in self._running.keys() - (settings.keys() - changed.keys()):
            task = self._running.pop(name).task
            if task is not None:
                task.cancel()
        known = {(replica.replica, replica.url): replica for replica in self.board.fleet.replicas}
        replicas = {
            replica.replica: _carried_over(
                known.get((replica.replica, replica.url)),
                ReplicaAssessment(
                    replica=replica.replica, url=replica.url, interval_seconds=config.scrape_interval
                ),
            )
            for replica in config.replicas
        }
        self.board.set_replicas(tuple(replicas.values()))
        for name, sources in changed.items():
            sampler = ReplicaSampler(replicas[name], config.session_tokens, sources.as_sources(), self.board)
            task = asyncio.create_task(sampler.run()) if start else None
            self._running[name] = _Running(settings[name], sampler, task)
        self._interval_seconds = config.scrape_interval
        self._assigned = tuple((gpu, replica.replica) for replica in config.replicas for gpu in replica.gpus)
        self.board.assign_gpus(self._assigned)
        return [running.sampler for running in self._running.values()]

    def publish_gpus(self, reading: GpuReading) -> None:
        """Put a reading of this machine's GPUs on the board, joined to the replicas as the config says."""
        # A reading may be as old as its deadline when it comes, and is no less current for that.
        slowest = max(self._interval_seconds, GPU_SECONDS)
        self.board.publish_gpus(reading, slowest, self._assigned)
        self.gpus_read.set()

    async def sample_gpus(self) -> None:
        """Read this machine's GPUs at every tick, until cancelled."""
        nvml = NvmlSource()
        await GpuSampler(
            nvml.read, nvml.mend, lambda: self._interval_seconds, GPU_SECONDS, self.publish_gpus
        ).run()

    async def close(self) -> None:
        """End every sampler."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
    api_keys = await read_api_keys(config, files)
    async with contextlib.AsyncExitStack() as stack:
        watch = Watch(await stack.enter_async_context(open_session()))
        stack.push_async_callback(watch.close)
        url = await stack.enter_async_context(start_server(listen, watch.board, notice=notice))
        watch.prepare(config, api_keys, start=True)
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
        watch.prepare(config, await read_api_keys(config, files), start=True)
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
    async with open_session() as session:
        watch = Watch(session)
        samplers = watch.prepare(config, await read_api_keys(config, SlowFiles()), start=False)
        gpus = asyncio.create_task(watch.sample_gpus())
        try:
            await asyncio.gather(*(s.tick(time.time(), wait_for_facts=CHECK_FACTS_SECONDS) for s in samplers))
            # At its deadline the sampler publishes a timeout, so this ends.
            await watch.gpus_read.wait()
        finally:
            gpus.cancel()
        return watch.board.fleet
