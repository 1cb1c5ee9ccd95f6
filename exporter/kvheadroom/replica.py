"""One replica -> the sources that its sampler is handed."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from kvheadroom.capacity.facts import EngineFacts, MissingFact, OperatorFacts, ServerAnswers
from kvheadroom.capacity.facts_resolution import resolve_facts
from kvheadroom.capacity.fleet import SourceStatus
from kvheadroom.capacity.gpu_catalogue import CPU
from kvheadroom.capacity.readings import FailureReason, Scrape, SourceFailure, VllmPage
from kvheadroom.capacity.stored_model import ModelFiles
from kvheadroom.config import Config, ConfigError, LocalReplica, ReplicaConfig
from kvheadroom.monitor.host_looks import ReadHost
from kvheadroom.monitor.sampler import ReplicaSources, Resolution
from kvheadroom.sources.endpoint import Endpoint
from kvheadroom.sources.http import Session
from kvheadroom.sources.model_files import SOURCE as MODEL_FILES
from kvheadroom.sources.model_files import ModelFilesReader
from kvheadroom.sources.server_model import read_server_model
from kvheadroom.sources.vllm_pages import VllmPages
from kvheadroom.sources.vllm_server import fetch_server_answers, is_healthy

MAX_SCRAPE_SECONDS = 10.0
FACTS_SECONDS = 5.0
MODEL_FILES_SECONDS = 10.0
_WAY_OUT = "set `model: /path/to/the/model` (a folder on this machine that holds its config.json)"

TURNED_AWAY = frozenset({FailureReason.UNAUTHORIZED, FailureReason.TLS, FailureReason.BAD_ANSWER})
"""Failures after which the files of the access are read again: tokens and certificates are renewed on disk. A server
that does not take a client certificate may just close the connection."""


class Reopen(Protocol):
    """Opens the endpoint anew from its files."""

    async def __call__(self, *, timeout_seconds: float, known: Endpoint | None) -> Endpoint:
        """Raises ConfigError, naming the file that is at fault."""


FindCard = Callable[[], Awaitable[str | None]]
"""The card that a server of this machine runs on, by its name in the catalogue; None where that is not known."""


def operator_facts(config: Config, replica: ReplicaConfig) -> OperatorFacts:
    """What the operator says of a replica."""
    overhead_gb = config.overhead_gb if replica.overhead_gb is None else replica.overhead_gb
    return OperatorFacts(
        # What is said to be null is said: it is no longer an assumption.
        flags=replica.flags.model_dump(exclude_unset=True),
        gpu=replica.gpu,
        hbm_bytes=replica.hbm_bytes,
        weights_bytes=replica.weights_bytes,
        overhead_bytes=None if overhead_gb is None else round(overhead_gb * 1e9),
    )


class Replica:
    """The sources of one replica, as the callables that the sampler is handed."""

    def __init__(
        self,
        config: Config,
        replica: ReplicaConfig,
        session: Session,
        endpoint: Endpoint,
        *,
        reader: ModelFilesReader | None = None,
        reopen: Reopen | None = None,
        find_card: FindCard | None = None,
        read_host: ReadHost | None = None,
    ) -> None:
        self._session = session
        self._endpoint = endpoint
        self._reopen = reopen
        self._timeout_seconds = min(config.scrape_interval, MAX_SCRAPE_SECONDS)
        self._pages = VllmPages(session)
        self._model_folder = replica.model
        self._model_reader = reader or ModelFilesReader()
        self._local = replica.server if isinstance(replica, LocalReplica) else None
        self._find_card = find_card
        self._read_host = read_host
        self._card = CPU if self._local is not None and self._local.is_cpu_build else None
        self._operator = operator_facts(config, replica)

    async def fetch_page(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        """Scrape `/metrics` and read it."""
        return await self._let_in(self._pages.fetch)

    async def fetch_whole_page(self) -> tuple[Scrape, VllmPage] | SourceFailure:
        """Scrape all of `/metrics` and read it; for a recording, which keeps more than the wanted samples."""
        return await self._let_in(self._pages.fetch_whole)

    async def _let_in(
        self, fetch: Callable[[Endpoint, float], Awaitable[tuple[Scrape, VllmPage] | SourceFailure]]
    ) -> tuple[Scrape, VllmPage] | SourceFailure:
        """What comes; a server that turns us away is asked once more with what the files of the access hold now."""
        deadline = time.monotonic() + self._timeout_seconds
        answer = await fetch(self._endpoint, deadline)
        if isinstance(answer, SourceFailure) and answer.reason in TURNED_AWAY:
            fault = await self._open_again(deadline)
            if fault is None:
                answer = await fetch(self._endpoint, deadline)
            elif fault:
                answer = replace(answer, detail=f"{answer.detail}; and {fault}")
        return await self._what_answered(answer) if isinstance(answer, SourceFailure) else answer

    async def _open_again(self, deadline: float) -> str | None:
        """Read the files of the access again, as a server that turns us away may want newer ones.

        None when they give another endpoint, else why there is none; empty when they are as they were.
        """
        if self._reopen is None:
            return ""
        try:
            endpoint = await self._reopen(
                timeout_seconds=max(0.0, deadline - time.monotonic()), known=self._endpoint
            )
        except ConfigError as error:
            return str(error)
        if endpoint == self._endpoint:
            return ""
        self._endpoint = endpoint
        return None

    async def _what_answered(self, failure: SourceFailure) -> SourceFailure:
        """A page without vLLM's metrics: another program, or a vLLM that was told to give none."""
        if failure.reason not in (FailureReason.NOT_VLLM, FailureReason.NO_VLLM_METRICS):
            return failure
        answers, _ = await fetch_server_answers(
            self._session, self._endpoint, timeout_seconds=self._timeout_seconds
        )
        reason: FailureReason = failure.reason
        detail = failure.detail
        if answers.version is not None and failure.reason is FailureReason.NO_VLLM_METRICS:
            reason = FailureReason.STATS_DISABLED
            detail = (
                f"vLLM {answers.version} answers, but its page has no vllm: metric; "
                "start it without --disable-log-stats"
            )
        return SourceFailure(failure.source, reason, f"GET {self._endpoint.base_url}/metrics: {detail}")

    def as_sources(self) -> ReplicaSources:
        """What the sampler is handed."""
        return ReplicaSources(
            self.fetch_page, self.resolve, self.facts_unasked, self.ask_health, self._read_host
        )

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
                command_line=None if self._local is None else self._local.command_line,
                local_gpu=self._card,
            )
            for engine in page.engines
        }

    async def ask_health(self) -> bool | None:
        """Whether `/health` answers 200; None where it is not vLLM's to answer."""
        return await is_healthy(self._session, self._endpoint, timeout_seconds=self._timeout_seconds)

    async def resolve(self, page: VllmPage) -> Resolution:
        """Ask the server and the model's folder for the facts of every engine on the page."""
        if self._find_card is not None:
            self._card = await self._find_card()
        answers, failures = await self._server_answers()
        if any(failure is not None and failure.reason in TURNED_AWAY for failure in failures.values()):
            fault = await self._open_again(time.monotonic() + FACTS_SECONDS)
            if fault is None:
                answers, failures = await self._server_answers()
        sources = [SourceStatus(source=name, failure=failure) for name, failure in failures.items()]
        files, missing, status = await self._model_files(answers.model_root)
        if status is not None:
            sources.append(status)
        return Resolution(self._facts(page, answers, files, missing), tuple(sources))

    async def _server_answers(self) -> tuple[ServerAnswers, dict[str, SourceFailure | None]]:
        return await fetch_server_answers(self._session, self._endpoint, timeout_seconds=FACTS_SECONDS)

    async def _model_files(
        self, root: str | None
    ) -> tuple[ModelFiles | None, MissingFact | None, SourceStatus | None]:
        assumed = ""
        local = self._local
        if self._model_folder is not None:
            folder = self._model_folder
        elif local is not None and not local.folders.hidden_because:
            # Not by name: two servers may call different folders alike.
            return self._told(
                await self._model_reader.read_with(
                    f"the model of PID {local.pid}",
                    partial(read_server_model, root, local),
                    timeout_seconds=MODEL_FILES_SECONDS,
                )
            )
        elif root is None:
            why = "the server did not name its model at /v1/models"
            return None, MissingFact(MODEL_FILES, why, _WAY_OUT), None
        elif not Path(root).is_absolute():
            why = f"the server names its model {root!r}, which is no folder on this machine"
            return None, MissingFact(MODEL_FILES, why, _WAY_OUT), None
        else:
            folder = root
            if local is not None:
                assumed = (
                    f"{root} here holds the files that the server sees there ({local.folders.hidden_because})"
                )
            elif not _is_this_machine(self._endpoint):
                assumed = f"{root} on this machine holds the same files as on the server's"
        return self._told(await self._model_reader.read(folder, assumed, timeout_seconds=MODEL_FILES_SECONDS))

    def _told(
        self, files: ModelFiles | SourceFailure
    ) -> tuple[ModelFiles | None, MissingFact | None, SourceStatus | None]:
        if isinstance(files, SourceFailure):
            return (
                None,
                MissingFact(MODEL_FILES, files.detail, _WAY_OUT),
                SourceStatus(source=MODEL_FILES, failure=files),
            )
        return files, None, SourceStatus(source=MODEL_FILES, failure=None)


def _is_this_machine(endpoint: Endpoint) -> bool:
    if endpoint.unix_socket is not None:
        return True
    if endpoint.proxy is not None:
        # Its loopback is not ours.
        return False
    host = urlsplit(endpoint.base_url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
