"""The composition root: a Config -> sources, monitor and outputs, joined."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from kvheadroom.capacity.assessment import ReplicaAssessment, SourceStatus
from kvheadroom.capacity.facts import MissingFact, ModelFiles, OperatorFacts, resolve_facts
from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.config import Config, ConfigError, ReplicaConfig
from kvheadroom.monitor.board import Board
from kvheadroom.monitor.sampler import ReplicaSampler, Resolution
from kvheadroom.outputs.server import ListenAddress, start_server
from kvheadroom.sources.http import Endpoint, fetch, open_session
from kvheadroom.sources.model_files import SOURCE as MODEL_FILES
from kvheadroom.sources.model_files import read_model_files
from kvheadroom.sources.vllm_metrics import parse_page
from kvheadroom.sources.vllm_server import fetch_server_answers

MAX_SCRAPE_SECONDS = 10.0
MODEL_FILES_SECONDS = 10.0


def read_api_key(replica: ReplicaConfig) -> str | None:
    """The key of one replica, from its file.

    Raises:
        ConfigError: naming the file, never its content.
    """
    if replica.api_key_file is None:
        return None
    try:
        key = replica.api_key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{replica.replica}: api_key_file {replica.api_key_file} cannot be read") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{replica.replica}: api_key_file {replica.api_key_file} holds no single-line key")
    return key


class Replica:
    """The sources of one configured replica, as the two callables that the sampler is handed."""

    def __init__(self, config: Config, replica: ReplicaConfig, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._endpoint = Endpoint(replica.url, read_api_key(replica))
        self._timeout_seconds = min(config.scrape_interval, MAX_SCRAPE_SECONDS)
        self._model_folder = replica.model
        self._operator = OperatorFacts(
            flags=replica.flags.model_dump(exclude_none=True),
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
            return SourceFailure(
                page.source, page.reason, f"GET {self._endpoint.base_url}/metrics: {page.detail}"
            )
        return scrape, page

    async def resolve(self, page: VllmPage) -> Resolution:
        """Ask the server and the model's folder for the facts of every engine on the page."""
        answers, failures = await fetch_server_answers(
            self._session, self._endpoint, timeout_seconds=self._timeout_seconds
        )
        sources = [SourceStatus(source=name, failure=failure) for name, failure in failures.items()]
        files, missing, status = await self._model_files(answers.model_root)
        if status is not None:
            sources.append(status)
        return Resolution(
            facts={
                engine.engine: resolve_facts(
                    operator=self._operator,
                    answers=answers,
                    echoed=engine.echoed,
                    model_files=files,
                    model_files_missing=missing,
                )
                for engine in page.engines
            },
            sources=tuple(sources),
        )

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
        try:
            async with asyncio.timeout(MODEL_FILES_SECONDS):
                files = await asyncio.to_thread(read_model_files, folder, assumed)
        except TimeoutError:
            files = SourceFailure(
                MODEL_FILES, FailureReason.TIMEOUT, f"{folder}: not read within {MODEL_FILES_SECONDS:g} s"
            )
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


async def serve(
    config: Config, listen: ListenAddress, *, notice: str | None, announce: Callable[[str], None]
) -> None:
    """Run the daemon until SIGINT or SIGTERM.

    Args:
        notice: a sentence shown on top of every page, e.g. that this is a replay.
        announce: called with the page's address once the port is open.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(config, listen, notice=notice) as url:
        announce(url)
        await stop.wait()


@contextlib.asynccontextmanager
async def running(config: Config, listen: ListenAddress, *, notice: str | None = None) -> AsyncIterator[str]:
    """The whole daemon as a context; gives the address of its page."""
    board = Board(
        tuple(
            ReplicaAssessment(
                replica=replica.replica, url=replica.url, interval_seconds=config.scrape_interval
            )
            for replica in config.replicas
        )
    )
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        samplers = []
        for first, replica in zip(board.fleet.replicas, config.replicas, strict=True):
            source = Replica(config, replica, session)
            samplers.append(
                ReplicaSampler(first, config.session_tokens, source.fetch_page, source.resolve, board)
            )
        url = await stack.enter_async_context(start_server(listen, board, notice=notice))
        tasks = [asyncio.create_task(sampler.run()) for sampler in samplers]
        try:
            yield url
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
